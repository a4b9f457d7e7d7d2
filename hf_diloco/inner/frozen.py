"""Digest of the frozen weights. Islands do not exchange these, so they must be equal from the start."""

from __future__ import annotations

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hf_diloco.inner.base import plain_name

LEAST_VALUES = 1 << 12
"""Smaller parameters are skipped: at this size, the first of up to 256 ranks holds at least `NUM_FIRST` values."""

NUM_FIRST = 16


def frozen_weights(model: nn.Module) -> dict[str, str]:
    """Returns a digest of the first values of each large frozen parameter.

    On the first rank of an island it does not depend on how the island shards the parameters. Under DeepSpeed and
    FSDP2, call it after they have been sharded.

    Returns:
        The digest, keyed by the dtypes of the parameters: digests are comparable only for equal dtypes. Empty if no
        large parameter is frozen, or one is quantised or offloaded to disk.
    """
    digest, dtypes = xxhash.xxh3_128(), set()
    for name, parameter in sorted((plain_name(name), one) for name, one in model.named_parameters()):
        if parameter.requires_grad or getattr(parameter, "ds_numel", parameter.numel()) < LEAST_VALUES:
            continue
        held = _held(parameter)
        if not held.is_floating_point() or held.numel() < NUM_FIRST:
            return {}
        first = held.reshape(-1)[:NUM_FIRST].cpu().contiguous()
        digest.update(name.encode())
        digest.update(first.view(torch.uint8).numpy().data)
        dtypes.add(str(first.dtype).removeprefix("torch."))
    return {", ".join(sorted(dtypes)): digest.hexdigest()} if dtypes else {}


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter."""
    held: torch.Tensor = getattr(parameter, "ds_tensor", parameter.detach())  # ZeRO-3's part, 1-D
    return held.to_local() if isinstance(held, DTensor) else held.detach()
