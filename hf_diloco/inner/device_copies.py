"""Copies between host memory and where the masters are: at the speed of the bus, and beside nothing else's stream.

On a CUDA device a plain `copy_` of each tensor would wait for the device once a tensor, and pass through memory that
the driver stages. Here all copies of one call are queued on a stream of their own, behind what the training has queued
so far, and the host waits once, for the last of them. Host memory that is page-locked is reached without staging.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import cache

import torch

logger = logging.getLogger("hf_diloco")

LEAST_LOCKED_BYTES = 1 << 20
"""Smaller vectors may share a page with something else, and gain nothing."""


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies each source into its target of as many elements; when it returns, all have arrived.

    What is queued on the training's stream before comes first; what is queued later sees the copies.

    Args:
        pairs: targets, each with its source; of any dtypes and devices, and none reads what another writes.
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
    """Locks the pages of a host vector for as long as it lives, so that a CUDA device reaches them by itself.

    In place: PyTorch's own page-locked memory comes in powers of two, up to twice of what was asked for. Where the
    system locks no more pages, the vector stays as it is, and copies are slower.

    Args:
        vector: on the host, contiguous; to be kept by the caller for as long as its views are used.

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
    weakref.finalize(vector, _unlock, address).atexit = False  # the process's memory goes as a whole
    return vector


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _tell_once(code: int) -> None:
    """Says so, and has CUDA forget the error, which the next kernel would be blamed for."""
    logger.warning(
        "the system locks no more pages of host memory (CUDA error %d; see ulimit -l): copies to and from the "
        "device take longer",
        code,
    )
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        logger.debug("forgotten: %s", error)
