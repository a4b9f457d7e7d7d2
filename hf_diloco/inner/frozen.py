"""What tells the frozen weights of one island from another's: nobody exchanges them, so they must be equal."""

from __future__ import annotations

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hf_diloco.inner.base import plain_name

LEAST_VALUES = 1 << 12
"""Smaller parameters are not looked at: of these, the first of up to 256 ranks holds `NUM_FIRST` values or more."""

NUM_FIRST = 16


def frozen_weights(model: nn.Module) -> dict[str, str]:
    """A digest of the first values of each large frozen parameter.

    On the first rank of an island it is the same however the island shards them.

    Args:
        model: the raw module; under DeepSpeed and FSDP2, once its parameters are sharded.

    Returns:
        It by the dtypes in which the parameters are, with which alone it can be compared; empty if nothing large is
        frozen, or part of it is quantised or lies on a disk.
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
    """What this rank holds of a parameter."""
    held: torch.Tensor = getattr(parameter, "ds_tensor", parameter.detach())  # ZeRO-3's part, in one dimension
    return held.to_local() if isinstance(held, DTensor) else held.detach()
