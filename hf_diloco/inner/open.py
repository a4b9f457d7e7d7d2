"""Finds the master weights behind a model and its (possibly wrapped) optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_diloco.errors import UnsupportedError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.plain import PlainShards


def open_shards(model: nn.Module, optimizer: Any, num_ranks: int = 1) -> Shards:
    """Returns the view of the master weights that fits.

    Args:
        model: the raw module, not a DDP or DeepSpeed wrapper.
        optimizer: what trains it: torch's, DeepSpeed's, or Accelerate's wrapper around either.
        num_ranks: ranks of the island.

    Raises:
        UnsupportedError: when the outer loop cannot work with this pair, with the reason and the remedy.
    """
    from hf_diloco.inner.zero import is_deepspeed, open_deepspeed, refuse_split_models

    _refuse_sharded_elsewhere(model)
    refuse_split_models(model)
    inner = unwrap_optimizer(optimizer)
    if is_deepspeed(inner):
        shards = open_deepspeed(model, inner)
    else:
        shards = PlainShards(model, "DDP" if num_ranks > 1 else "plain", inner)
    if not shards.num_parameters:
        raise UnsupportedError("the model has no trainable parameter: nothing to synchronise")
    return shards


def unwrap_optimizer(optimizer: Any) -> Any:
    """Takes Accelerate's wrappers off."""
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_sharded_elsewhere(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise _sharded(f"module {name or type(module).__name__}", "FSDP")
    for name, parameter in model.named_parameters():
        if "DTensor" in (type(parameter.data).__name__, type(parameter).__name__):
            raise _sharded(f"parameter {name}", "FSDP or tensor parallelism (DTensor)")
        if parameter.is_meta:
            raise UnsupportedError(f"parameter {name} has no data (meta device): load the model before training")


def _sharded(what: str, by: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} is sharded by {by}, which is not supported yet: use DDP or DeepSpeed ZeRO inside the island"
    )
