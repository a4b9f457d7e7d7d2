"""DeepSpeed's master weights: the only module that knows DeepSpeed's internals.

DeepSpeed keeps the fp32 masters in flat tensors of its optimizer, of which each rank has a part under ZeRO-1/2/3.
Here they are read and written in place, without gathering anything; `commit` then runs the same steps as the end of
DeepSpeed's own optimizer step. (DeepSpeed's public setters leave the forward pass stale until the next step, and that
step undoes writes to the model's parameters.)

Checked against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from torch import nn

from hf_diloco.errors import UnsupportedError
from hf_diloco.inner.base import InnerOptimizer, PlainShards, Segment, Shards, plain_name

logger = logging.getLogger("hf_diloco")

TESTED_VERSIONS = ("0.19.8", "0.20")
"""From the first version up to, not including, the second. With Gloo, 0.19.7 reads ZeRO-3 parameters too early."""


def is_deepspeed(optimizer: Any) -> bool:
    """Whether the (unwrapped) optimizer was made by DeepSpeed."""
    return type(optimizer).__module__.startswith("deepspeed.")


def open_deepspeed(model: nn.Module, optimizer: Any) -> Shards:
    """Returns the master weights of a DeepSpeed optimizer; raises `UnsupportedError` if their layout is unknown."""
    _warn_if_untested()
    _refuse_unreachable_masters(optimizer)
    # By exact type: subclasses in DeepSpeed (ZenFlow, SuperOffload) update their masters at other times.
    known = LAYOUTS.get(type(optimizer).__name__)
    if known is not None:
        _check_muon(optimizer)
        return known(model, optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):  # ZeRO-0 in fp32: DeepSpeed's optimizer steps the parameters
        return PlainShards(model, "ZeRO-0", optimizer)
    raise UnsupportedError(
        f"DeepSpeed's {type(optimizer).__name__} keeps its master weights in a way that this package does not know; "
        "use ZeRO stage 0, 1, 2 or 3 with AdamW or another torch optimizer"
    )


def refuse_left_out(num_ranks: int) -> None:
    """Raises `UnsupportedError` if DeepSpeed was requested for several ranks, but Accelerate left it out."""
    requested = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true")
    in_use = PartialState._shared_state.get("distributed_type") is DistributedType.DEEPSPEED
    if num_ranks > 1 and requested and not in_use:
        raise UnsupportedError(
            "DeepSpeed was asked for (deepspeed of TrainingArguments, Accelerate's plugin, or "
            "ACCELERATE_USE_DEEPSPEED), but the model trains without it: Accelerator(cpu=True) and ACCELERATE_USE_CPU "
            "leave it out without a word. Unset ACCELERATE_USE_CPU; in a loop of your own call "
            "accelerate.PartialState(cpu=True), then Accelerator() without cpu"
        )


class _DeepSpeedShards(Shards):
    """Base class of the DeepSpeed layouts: names, sizes, and the optimizer."""

    is_replicated = False

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._names: dict[Any, str] = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        trained = {name: parameter for parameter, name in self._names.items() if parameter.requires_grad}
        self.sizes = {name: int(getattr(one, "ds_numel", one.numel())) for name, one in trained.items()}
        self.shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in trained.items()}
        numbered = {self._names[parameter]: number for number, group in self._groups() for parameter in group}
        self.inner = InnerOptimizer(optimizer.optimizer, numbered)

    @abstractmethod
    def _groups(self) -> Iterable[tuple[int, Sequence[torch.Tensor]]]:
        """Returns (group number, parameters) of each parameter group; a group may come in several pieces."""


class Zero12Shards(_DeepSpeedShards):
    """ZeRO-1 and ZeRO-2: each parameter group is flattened, padded, and cut into one partition per rank."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.description = "ZeRO-2" if optimizer.partition_gradients else "ZeRO-1"

    def _groups(self) -> Iterable[tuple[int, Sequence[torch.Tensor]]]:
        return enumerate(self._optimizer.bit16_groups)

    def segments(self) -> list[Segment]:
        optimizer = self._optimizer
        found = []
        for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
            size = optimizer.partition_size[group]
            low = dist.get_rank(group=optimizer.real_dp_process_group[group]) * size
            # Not DeepSpeed's own mapping (`_hp_mapping`): it is wrong when round_robin_gradients is on.
            parameters = optimizer.round_robin_bit16_groups[group]
            offsets = optimizer.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                begin, end = max(low, offset), min(low + size, offset + parameter.numel())
                if begin < end:
                    values = master.data.narrow(0, begin - low, end - begin)
                    found.append(Segment(self._names[parameter], begin - offset, values))
        return found

    def commit(self, names: Collection[str] | None = None) -> None:
        self._optimizer.update_lp_params()


class BF16OptimizerShards(_DeepSpeedShards):
    """ZeRO-1 in bf16 with fp32 gradient accumulation, which DeepSpeed runs in its `BF16_Optimizer`."""

    description = "ZeRO-1 (BF16_Optimizer)"

    def _groups(self) -> Iterable[tuple[int, Sequence[torch.Tensor]]]:
        return enumerate(self._optimizer.bf16_groups)

    def segments(self) -> list[Segment]:
        found = []
        for parameter, name in self._names.items():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                found.append(Segment(name, mapping.lp_fragment_address.start, mapping.hp_fragment.data))
        return found

    def commit(self, names: Collection[str] | None = None) -> None:
        self._optimizer.update_lp_params()


class Zero3Shards(_DeepSpeedShards):
    """ZeRO-3: every parameter is cut into one part per rank, and the parts are flattened into sub-groups."""

    description = "ZeRO-3"

    def _groups(self) -> Iterable[tuple[int, Sequence[torch.Tensor]]]:
        numbers = self._optimizer.sub_group_to_group_id
        return ((numbers[piece], group) for piece, group in enumerate(self._optimizer.fp16_groups))

    def segments(self) -> list[Segment]:
        optimizer = self._optimizer
        found = []
        for parameter, name in self._names.items():
            where = optimizer.grad_position.get(optimizer.get_param_id(parameter)) if name in self.sizes else None
            if where is None:  # frozen, or not handed to the optimizer
                continue
            group, offset, part = where
            start = optimizer._get_param_partition_rank(parameter) * part
            real = max(0, min(part, parameter.ds_numel - start))  # the last ranks' parts are padded
            if real:
                master = optimizer.fp32_partitioned_groups_flat[group].data
                found.append(Segment(name, start, master.narrow(0, offset, real)))
        return found

    def commit(self, names: Collection[str] | None = None) -> None:
        optimizer = self._optimizer
        optimizer._partition_all_parameters()  # releases parameters that are currently gathered
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:  # small parameters that stay gathered: gather them again
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()


class FusedStage0Shards(_DeepSpeedShards):
    """ZeRO-0 in 16 bits with a fused optimizer: flat fp32 copies of all parameters on every rank."""

    is_replicated = True
    description = "ZeRO-0"

    def _groups(self) -> Iterable[tuple[int, Sequence[torch.Tensor]]]:
        return enumerate(self._optimizer.fp16_groups)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for parameters, flat in zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups_flat, strict=True):
            masters = flat.data.split([parameter.numel() for parameter in parameters])
            pairs += list(zip(parameters, masters, strict=True))
        return pairs

    def segments(self) -> list[Segment]:
        return [Segment(self._names[parameter], 0, master.view(-1)) for parameter, master in self._pairs()]

    def commit(self, names: Collection[str] | None = None) -> None:
        for parameter, master in self._pairs():
            parameter.data.copy_(master.view_as(parameter))


class UnfusedStage0Shards(FusedStage0Shards):
    """ZeRO-0 in 16 bits with another optimizer: one fp32 copy per parameter."""

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (parameter, master.data)
            for parameters, masters in zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
            for parameter, master in zip(parameters, masters, strict=True)
        ]


def _warn_if_untested() -> None:
    import deepspeed
    from packaging.version import Version

    low, high = (Version(version) for version in TESTED_VERSIONS)
    installed = Version(deepspeed.__version__)
    if not low <= Version(installed.base_version) < high:
        warnings.warn(
            f"DeepSpeed {installed} is outside the range that hf_diloco was tested with ({low} up to {high}): it "
            "reads DeepSpeed's internals, so compare a short run with and without the outer loop first",
            stacklevel=2,
        )


def refuse_split_models(model: nn.Module) -> None:
    """Raises `UnsupportedError` if DeepSpeed gives the ranks different parameters under the same name."""
    if "PipelineModule" in {kind.__name__ for kind in type(model).__mro__}:
        raise UnsupportedError(
            "the ranks of a DeepSpeed PipelineModule hold different layers, which this package cannot read yet: use "
            "ZeRO inside the island"
        )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "ds_is_replaced_module", False) or getattr(parameter, "tensor_model_parallel", False):
            raise UnsupportedError(
                f"parameter {name} is tensor-parallel (AutoTP), which this package cannot read yet: use ZeRO inside "
                "the island"
            )
        if not getattr(parameter, "allreduce", True):
            raise UnsupportedError(
                f"parameter {name} belongs to a DeepSpeed MoE layer, which spreads experts over the ranks; this "
                "package cannot read them yet: use a model without deepspeed.moe"
            )


def _refuse_unreachable_masters(optimizer: Any) -> None:
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UnsupportedError(
            "DeepSpeed keeps the master weights on NVMe (offload_optimizer/offload_param device nvme), out of reach "
            "between steps: use device cpu"
        )
    if getattr(optimizer, "zenflow", False):
        raise UnsupportedError(
            "ZenFlow updates the master weights while training goes on, so that they are never all of one step: "
            "remove the block zenflow from the DeepSpeed configuration"
        )


def _check_muon(optimizer: Any) -> None:
    """Refuses a Muon that would get flattened matrices; warns if DeepSpeed clips its own Muon."""
    inner = type(optimizer.optimizer).__name__
    if inner in ("Muon", "MuonAdamW"):
        raise UnsupportedError(
            f"{inner} needs whole matrices, which DeepSpeed flattens: leave it out, and name DeepSpeed's own Muon in "
            'its configuration: "optimizer": {"type": "Muon", ...}'
        )
    clip = float(getattr(optimizer, "clip_grad", 0.0) or 0.0)
    if inner == "MuonWithAuxAdam" and clip:
        logger.warning(
            "gradient_clipping=%g: DeepSpeed clips what Muon has made of the gradients, whose norm is large however "
            "small they are, so every step shrinks: set max_grad_norm to 0, and gradient_clipping (1 where it is left "
            'out) to "auto" or 0',
            clip,
        )


LAYOUTS: dict[str, Callable[[nn.Module, Any], Shards]] = {
    "DeepSpeedZeroOptimizer": Zero12Shards,
    "DeepSpeedZeroOptimizer_Stage3": Zero3Shards,
    "BF16_Optimizer": BF16OptimizerShards,
    "FP16_Optimizer": FusedStage0Shards,
    "FP16_UnfusedOptimizer": UnfusedStage0Shards,
}
"""Shards by the class name of DeepSpeed's optimizer."""
