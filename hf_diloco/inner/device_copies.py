"""Copies between host memory and the masters' devices, at bus speed and on a stream of their own.

On a CUDA device a plain `copy_` of each tensor would synchronise once per tensor, and go through the driver's staging
buffers. Here all copies of one call are queued on a side stream, after the work that the training has queued so far,
and the host waits once, for the last copy. Page-locked host memory needs no staging.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import cache

import torch

logger = logging.getLogger("hf_diloco")

LEAST_LOCKED_BYTES = 1 << 20
"""Smaller vectors are not locked: they may share a page with other data, and would gain nothing."""


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies each source into its target, of the same number of elements, and waits for all copies.

    The copies run after all work queued on the training's stream before this call; work queued later sees them.

    Args:
        pairs: targets, each with its source, of any dtype and device; no copy reads another's target.
    """
    devices = {one.device for pair in pairs for one in pair if one.device.type == "cuda"}
    streams = [_side_stream(device) for device in devices]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    for target, source in pairs:
        if target.device.type == "cuda" or source.device.type == "cuda":
            with torch.cuda.stream(_side_stream(target.device if target.device.type == "cuda" else source.device)):
                target.copy_(source, non_blocking=True)
        else:
            target.copy_(source)
    for stream in streams:
        stream.synchronize()


def page_lock(vector: torch.Tensor) -> torch.Tensor:
    """Locks the pages of a host vector for its lifetime, so that a CUDA device can access them directly.

    Locks in place, because PyTorch allocates page-locked memory in powers of two, up to twice the requested size. If
    the system locks no more pages, the vector stays unlocked, and copies are slower.

    Args:
        vector: on the host, contiguous; the caller must keep it alive for as long as its views are used.

    Returns:
        `vector`.
    """
    if vector.nbytes < LEAST_LOCKED_BYTES or vector.is_pinned():
        return vector
    address = vector.data_ptr()
    code = int(torch.cuda.cudart().cudaHostRegister(address, vector.nbytes, 0))
    if code:
        _tell_once(code)
        return vector
    weakref.finalize(vector, _unlock, address).atexit = False  # at exit the process frees all its memory
    return vector


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _tell_once(code: int) -> None:
    """Logs a failed lock once, and clears CUDA's last error, which the next kernel would report otherwise."""
    logger.warning(
        "the system locks no more pages of host memory (CUDA error %d; see ulimit -l): copies to and from the "
        "device take longer",
        code,
    )
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        logger.debug("forgotten: %s", error)
