"""FSDP2's master weights: the only module that knows the internals of `torch.distributed.fsdp.fully_shard`.

Under FSDP2 a parameter is a DTensor, sharded by rows over the ranks, which the optimizer trains in place: it is its
own master, also under a bf16 `MixedPrecisionPolicy`, and is read and written in place without gathering anything.

After a forward pass without a backward, as in evaluation, some modules stay *unsharded*: their parameters are whole
copies, and the next forward pass uses these copies instead of the shards. So every module is resharded before its
parameters are read, and again after they are written; otherwise the next forward pass would use stale weights.

Under HSDP, a mesh of replicas by shards, all replicas hold the same rows. Each replica reads and writes its part of
the rows, and `commit` exchanges the parts among the replicas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hf_diloco.errors import UnsupportedError
from hf_diloco.inner.base import InnerOptimizer, Segment, Shards, group_numbers, plain_name, refuse_unfrozen


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or to parts of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class Fsdp2Shards(Shards):
    """Shards of which each rank holds some rows of each parameter, or none if the parameter has few rows.

    Args:
        model: from `fully_shard`, or a model with such modules.
        optimizer: torch's, over the sharded parameters.

    Raises:
        UnsupportedError: a trainable parameter is not sharded by rows by FSDP2, with or without replicas.
    """

    is_replicated = False

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        trainable = {name: one for name, one in self._parameters().items() if one.requires_grad}
        sharded = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for parameter in module.parameters()
        }
        for name, parameter in trainable.items():
            _refuse_unreadable(name, parameter, id(parameter) in sharded)
        self.sizes = {name: parameter.numel() for name, parameter in trainable.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
        num_replicas = max(map(_num_replicas, trainable.values()), default=1)
        self.description = "FSDP2" if num_replicas == 1 else f"FSDP2 with {num_replicas} replicas"
        self.inner = _Fsdp2Optimizer(optimizer, group_numbers(optimizer, trainable))
        missing = [name for name in self.sizes if self.inner.num_groups and name not in self.inner.groups]
        if missing:
            raise UnsupportedError(
                f"no optimizer on this island trains {missing[0]}: make the optimizer after fully_shard, of "
                "model.parameters(), or freeze the parameter (requires_grad=False)"
            )

    def check_trained(self) -> None:
        refuse_unfrozen(self._parameters(), self._optimizer, self.sizes)

    def segments(self) -> list[Segment]:
        # Not cached: loading a checkpoint, or moving the model, gives a parameter another storage.
        found = []
        for name, parameter in self._exchanged().items():
            parts, mine = _parts(parameter), _replica(parameter)
            start = _first_element(parameter) + sum(part.numel() for part in parts[:mine])
            if parts[mine].numel():
                found.append(Segment(name, start, parts[mine]))
        return found

    def commit(self, names: Collection[str] | None = None) -> None:
        for name, parameter in self._exchanged().items():
            if names is None or name in names:
                _exchange_parts(parameter)

    def _exchanged(self) -> dict[str, Any]:
        """Returns the parameters that were trainable at the start."""
        return {name: one for name, one in self._parameters().items() if name in self.sizes}

    def _parameters(self) -> dict[str, Any]:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {plain_name(name): one for name, one in self._model.named_parameters()}


class _Fsdp2Optimizer(InnerOptimizer):
    """An optimizer whose buffers are DTensors, like the parameters; `state` has this rank's local tensors."""

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        return {
            _local(parameter): {name: _local(value) for name, value in state.items()}
            for parameter, state in self._optimizer.state.items()
        }

    def commit_buffer(self, name: str) -> None:
        for state in self._optimizer.state.values():
            if name in state:
                _exchange_parts(state[name])


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _num_replicas(tensor: DTensor) -> int:
    return tensor.device_mesh.size(0) if tensor.device_mesh.ndim == 2 else 1


def _replica(tensor: DTensor) -> int:
    """Returns the number of this rank's replica."""
    return tensor.device_mesh.get_local_rank(0) if _num_replicas(tensor) > 1 else 0


def _parts(tensor: DTensor) -> Sequence[torch.Tensor]:
    """Returns this rank's rows, flattened and split into one part per replica; parts may be empty."""
    return tensor.to_local().detach().view(-1).tensor_split(_num_replicas(tensor))


def _exchange_parts(tensor: DTensor) -> None:
    """Sends each replica's part to the other replicas. Collective over the island's ranks."""
    if _num_replicas(tensor) == 1:
        return
    mesh = tensor.device_mesh
    for replica, part in enumerate(_parts(tensor)):
        on_device = part.to(mesh.device_type)  # the mesh communicates there; offloaded values are in host memory
        if part.numel():
            dist.broadcast(on_device, group=mesh.get_group(0), group_src=replica)
            part.copy_(on_device)


def _first_element(parameter: DTensor) -> int:
    """Returns the index of this rank's first element in the flattened parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return int(offset[0]) * math.prod(parameter.shape[1:])


def _refuse_unreadable(name: str, parameter: torch.Tensor, is_in_fsdp_module: bool) -> None:
    if not is_in_fsdp_module or not isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"parameter {name} is trained, but not sharded by FSDP2 (it is outside the modules that fully_shard was "
            "applied to, or ignored by them): apply fully_shard to the whole model, or freeze it "
            "(requires_grad=False)"
        )
    if tuple(parameter.placements) not in ((Shard(0),), (Replicate(), Shard(0))):
        placed = ", ".join(map(str, parameter.placements))
        raise UnsupportedError(
            f"parameter {name} is placed as ({placed}), and this package reads only (Shard(dim=0)), and (Replicate(), "
            "Shard(dim=0)) of HSDP: use FSDP2 without tensor parallelism or another shard_placement_fn"
        )
    if not parameter.is_floating_point() or type(parameter.to_local().data) is not torch.Tensor:
        kind = type(parameter.to_local().data).__name__
        raise UnsupportedError(
            f"parameter {name} is quantised ({kind} of {parameter.dtype}): only floating-point parameters can be "
            "synchronised; freeze quantised ones (requires_grad=False)"
        )


def refuse_unsharded(num_ranks: int) -> None:
    """Raises `UnsupportedError` if FSDP was requested for several ranks, but Accelerate did not shard the model."""
    if num_ranks > 1 and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        raise UnsupportedError(
            "FSDP was asked for (fsdp of TrainingArguments, Accelerate's plugin, or ACCELERATE_USE_FSDP), but the "
            "model is not sharded: Accelerate leaves FSDP out on CPU without a word, and every rank would train the "
            "whole model. Leave FSDP out, or train on GPUs; on CPU a run file's `fsdp:` block turns it on, see "
            "docs/fsdp.md"
        )
