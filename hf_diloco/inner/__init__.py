"""Access to the fp32 master weights, and the partition of the outer state over an island's ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.inner.base import PlainShards, Shards
from hf_diloco.inner.frozen import frozen_weights


def open_shards(model: nn.Module, optimizer: Any, num_ranks: int = 1) -> Shards:
    """Returns a view of the master weights of a model and its (possibly wrapped) optimizer.

    Args:
        model: the raw module, not a DDP or DeepSpeed wrapper.
        optimizer: the model's optimizer: torch's, DeepSpeed's, or Accelerate's wrapper around either.

    Raises:
        UnsupportedError: the outer loop does not support this pair; the message gives the reason and the remedy.
    """
    from hf_diloco.inner.fsdp2 import Fsdp2Shards, is_fsdp2, refuse_unsharded
    from hf_diloco.inner.zero import is_deepspeed, open_deepspeed, refuse_left_out, refuse_split_models

    is_sharded = is_fsdp2(model)
    _refuse_unreadable(model, is_sharded)
    refuse_split_models(model)
    inner = unwrap_optimizer(optimizer)
    shards: Shards
    if is_sharded:
        shards = Fsdp2Shards(model, inner)
    elif is_deepspeed(inner):
        shards = open_deepspeed(model, inner)
    else:
        refuse_unsharded(num_ranks)
        refuse_left_out(num_ranks)
        shards = PlainShards(model, "DDP" if num_ranks > 1 else "plain", inner)
    if not shards.num_parameters:
        raise UnsupportedError("the model has no trainable parameter: nothing to synchronise")
    shards.frozen = frozen_weights(model)
    return shards


def unwrap_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside Accelerate's wrappers."""
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_foreign_optimizer(model: nn.Module, optimizer: Any, remedy: str) -> None:
    """Raises `ConfigError` with the remedy if the (possibly wrapped) optimizer has none of the model's parameters."""
    inner = unwrap_optimizer(optimizer)
    if type(inner).__module__.startswith("deepspeed."):  # its groups hold the masters
        return
    mine = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    trained = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    if mine and not mine & trained:
        kind = type(model).__name__
        raise ConfigError(f"optimizer trains none of the parameters of model, a {kind}: {remedy}")


def _refuse_unreadable(model: nn.Module, is_fsdp2: bool) -> None:
    for name, module in model.named_modules():
        if "FullyShardedDataParallel" in {kind.__name__ for kind in type(module).__mro__}:
            raise UnsupportedError(
                f"module {name or type(module).__name__} is sharded by FSDP1, which flattens parameters in a way that "
                "this package does not read: use FSDP2 (fsdp_version: 2, fully_shard), DDP or DeepSpeed ZeRO inside "
                "the island"
            )
    for name, parameter in model.named_parameters():
        if not is_fsdp2 and "DTensor" in (type(parameter.data).__name__, type(parameter).__name__):
            raise UnsupportedError(
                f"parameter {name} is sharded by tensor parallelism (a DTensor outside FSDP2's modules), which is not "
                "supported yet: use FSDP2, DDP or DeepSpeed ZeRO inside the island"
            )
        if parameter.is_meta:
            raise UnsupportedError(f"parameter {name} has no data (meta device): load the model before training")
        if parameter.requires_grad and parameter.dtype == torch.float64:
            raise UnsupportedError(
                f"parameter {name} is float64, and islands keep and exchange float32: every round would round it; "
                "make it float32 before training (model.float()), or freeze it (requires_grad=False)"
            )
