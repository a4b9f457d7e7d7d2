"""One rank's part of the fp32 master weights, as named segments, and their optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_diloco.errors import UnsupportedError

_PACKAGES = ("torch", "deepspeed", "hf_diloco")
_KNOWN = ("SGD", "Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam", "MuonAdamW", "MuonWithAuxAdam")
"""Optimizers that restart correctly when their buffers and step count are set to 0."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of parameter names that activation checkpointing and `torch.compile` insert."""


class InnerOptimizer:
    """The optimizer inside an island, as an outer method sees it: learning rates, parameter groups, buffers.

    Args:
        optimizer: the torch optimizer, also the one inside DeepSpeed's; None if there is none to read.
        groups: number of each trainable parameter's parameter group, by name.

    Attributes:
        kind: name of its class.
        rates: the learning rate of each parameter group at the last step; before the first step, the current one.
    """

    def __init__(self, optimizer: Any = None, groups: Mapping[str, int] | None = None) -> None:
        self.kind = type(optimizer).__name__
        self.groups = groups or {}
        self._optimizer = optimizer
        self._param_groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
        self.rates = [_rate_of(group) for group in self._param_groups]
        self._watching: RemovableHandle | None = None
        self._undampened: set[torch.Tensor] = set()  # whose next gradient SGD must not dampen

    @property
    def num_groups(self) -> int:
        """Number of parameter groups."""
        return len(self.rates)

    def watch(self) -> None:
        """Starts to record the rates of each step in `rates`.

        Reading them later is unreliable: schedulers change the rates right after a step, before or after callbacks
        run.

        Raises:
            UnsupportedError: the optimizer is not a torch optimizer, or chooses its own rates, as Adafactor may.
        """
        has_rates = all(group.get("lr") is not None for group in self._param_groups)
        if not (isinstance(self._optimizer, torch.optim.Optimizer) and has_rates):
            raise UnsupportedError(
                f"the learning rates of {self.kind} cannot be seen, and this method of the outer loop needs them: use "
                "a torch.optim optimizer with a learning rate, or method=diloco"
            )

        self._watching = self._optimizer.register_step_pre_hook(lambda *_: self._begin_step())
        self._note_rates()

    def unwatch(self) -> None:
        """Ends `watch`, unless the next step still has to begin SGD's momentum anew."""
        if self._watching is not None and not self._undampened:
            self._watching.remove()

    def check_buffers(self, wanted: str) -> None:
        """Raises `UnsupportedError` if `wanted` is not "keep" and the optimizer only supports that."""
        if wanted == "keep":
            return
        if type(self._optimizer).__module__.partition(".")[0] not in _PACKAGES or self.kind not in _KNOWN:
            raise UnsupportedError(
                f"options.inner_buffers={wanted}: the buffers of {self.kind} are not known (those of "
                f"{', '.join(_KNOWN)} are): set it to keep"
            )
        if wanted == "average" and self.kind == "MuonWithAuxAdam":
            raise UnsupportedError(
                "options.inner_buffers=average: the momentum of DeepSpeed's Muon is laid out differently from the "
                "master weights, which this package cannot average: set it to keep or zero"
            )

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's state for each tensor that it trains."""
        state: Mapping[torch.Tensor, dict[str, Any]] = self._optimizer.state
        return state

    @property
    def buffers(self) -> list[str]:
        """Names of the momentum or moments in `state`; a tensor may lack some of them."""
        if self.kind == "SGD":
            return ["momentum_buffer"] if any(group["momentum"] for group in self._param_groups) else []
        if self.kind == "MuonAdamW":
            return ["momentum_buffer", "exp_avg", "exp_avg_sq"]
        variant = ["max_exp_avg_sq"] if any(group.get("amsgrad") for group in self._param_groups) else []
        return ["exp_avg", "exp_avg_sq", *variant]

    def commit_buffer(self, name: str) -> None:
        """Makes all replicas of a buffer equal after a write. Collective over the island's ranks under HSDP."""

    def zero_buffers(self) -> None:
        """Resets momentum, moments and the step count for bias correction, as if the optimizer had taken no step yet.

        Call it again after loading a checkpoint that was written between this call and the next step.
        """
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif name == "step":
                    state[name] = 0
        for group in self._optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        if any(group.get("dampening") for group in self._optimizer.param_groups):
            self._undampened.update(self._optimizer.state)

    def _begin_step(self) -> None:
        """Deletes zeroed momentum that SGD would dampen the next gradient for.

        SGD dampens all gradients but the first, which it recognises by missing momentum. `zero_buffers` keeps the
        buffer until this step, because a sharded checkpoint without it cannot be loaded.
        """
        self._note_rates()
        stepped = {one for group in self._optimizer.param_groups for one in group["params"]} & self._undampened
        self._undampened -= stepped
        for tensor in stepped:
            self._optimizer.state[tensor].pop("momentum_buffer", None)

    def _note_rates(self) -> None:
        """Records the rates of the groups in this step: ZeRO-1 and ZeRO-2 step one group at a time."""
        present = self._optimizer.param_groups
        if len(present) == self.num_groups:
            self._param_groups = list(present)
        for number, group in enumerate(self._param_groups):
            if any(group is one for one in present):
                self.rates[number] = _rate_of(group)


def _rate_of(group: Mapping[str, Any]) -> float:
    """Returns a group's learning rate, 0 if there is none; schedules that end at 0 may end a rounding error below."""
    return max(0.0, float(group.get("lr") or 0.0))


def group_numbers(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the number of each parameter's group in `optimizer`, by name, without parameters that are in none."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        names[id(parameter)]: number
        for number, group in enumerate(getattr(optimizer, "param_groups", []))
        for parameter in group["params"]
        if id(parameter) in names
    }


def plain_name(name: str) -> str:
    """Returns a parameter's name in the model without wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def refuse_unfrozen(parameters: Mapping[str, torch.Tensor], optimizer: Any, exchanged: Collection[str]) -> None:
    """Raises `UnsupportedError` if `optimizer` trains one of `parameters` that is not in `exchanged`."""
    others = {name: one for name, one in parameters.items() if one.requires_grad and name not in exchanged}
    if names := list(group_numbers(optimizer, others)):
        raise UnsupportedError(
            f"parameter {names[0]} has been unfrozen since training began ({len(names)} in all), and islands do not "
            "exchange it: unfreeze on all islands before training begins, or in a new training, by another call of "
            "train() or in another OuterLoop"
        )


@dataclass(frozen=True)
class Segment:
    """A contiguous run of one parameter's elements whose master values are on this rank.

    Attributes:
        name: the parameter's name in the unwrapped model (`named_parameters`; tied weights by their first name).
        start: index of the first element in the flattened parameter.
        values: 1-D view into the master storage; writes go to the master. Any float dtype, any device.
    """

    name: str
    start: int
    values: torch.Tensor

    @property
    def numel(self) -> int:
        return self.values.numel()


class Shards(ABC):
    """This rank's view of an island's master weights. Reading them needs no communication.

    Attributes:
        description: name for logs, such as "ZeRO-2".
        is_replicated: every rank holds all parameters (DDP, ZeRO-0), instead of a part of its own (ZeRO-1/2/3, FSDP2).
        sizes: element count of each trainable parameter by name, in the model's order. This order, unpadded, is the
            *canonical index space*, which islands with different shards share.
        shapes: of the same parameters, for reading a checkpoint without the model.
        inner: the optimizer that trains the masters.
        frozen: see `inner.frozen`.
    """

    description: str
    is_replicated: bool
    sizes: Mapping[str, int]
    shapes: Mapping[str, Sequence[int]] = {}
    inner: InnerOptimizer = InnerOptimizer()
    frozen: Mapping[str, str] = {}

    @abstractmethod
    def segments(self) -> list[Segment]:
        """Returns this rank's segments, always in the same order. Over an island's ranks they cover every element:
        once if sharded, once per rank if replicated."""

    @abstractmethod
    def commit(self, names: Collection[str] | None = None) -> None:
        """Copies the masters to the model's working copies after a write to the masters.

        Collective over the island's ranks under ZeRO-1/2/3 and HSDP.

        Args:
            names: of the written parameters, equal on all ranks; None: all. DeepSpeed always commits all.
        """

    def check_trained(self) -> None:  # noqa: B027 - DeepSpeed trains only its initial parameters
        """Raises `UnsupportedError` if the optimizer now trains a parameter that is not in `sizes`."""

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements of the whole model."""
        return sum(self.sizes.values())

    @property
    def is_on_cuda(self) -> bool:
        """Whether this rank's masters are on a CUDA device."""
        return any(segment.values.device.type == "cuda" for segment in self.segments())

    @property
    def digest(self) -> str:
        """Digest of the trainable parameters' names and sizes."""
        listing = "\n".join(f"{name} {size}" for name, size in self.sizes.items())
        return xxhash.xxh3_128_hexdigest(listing.encode())

    def offsets(self) -> dict[str, int]:
        """Returns the start of each parameter in the canonical index space."""
        offsets, position = {}, 0
        for name, size in self.sizes.items():
            offsets[name] = position
            position += size
        return offsets

    def intervals(self) -> list[tuple[int, int]]:
        """Returns (first canonical index, length) of each of this rank's segments."""
        offsets = self.offsets()
        return [(offsets[segment.name] + segment.start, segment.numel) for segment in self.segments()]


class PlainShards(Shards):
    """Parameters that are their own masters, all on every rank: plain PyTorch, DDP, and DeepSpeed's ZeRO-0 in fp32.

    16-bit parameters (a model loaded in bf16) are cast on read and write; the outer state is fp32.
    """

    is_replicated = True

    def __init__(self, model: nn.Module, description: str = "DDP", optimizer: Any = None) -> None:
        self.description = description
        self._model, self._optimizer = model, optimizer
        self._parameters = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self._parameters.items():
            if not parameter.is_contiguous():
                raise UnsupportedError(
                    f"parameter {name} is not contiguous in memory: call .contiguous() on it before training"
                )
            if not parameter.is_floating_point():
                raise UnsupportedError(
                    f"parameter {name} has type {parameter.dtype}: only floating-point parameters can be "
                    "synchronised; freeze quantised ones (requires_grad=False)"
                )
        self.sizes = {name: p.numel() for name, p in self._parameters.items()}
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self.inner = InnerOptimizer(optimizer, group_numbers(optimizer, self._parameters))

    def check_trained(self) -> None:
        now = {plain_name(name): p for name, p in self._model.named_parameters()}
        refuse_unfrozen(now, self._optimizer, self.sizes)
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter:
                raise UnsupportedError(
                    f"parameter {name} is gone since training began, or another has taken its place, as by "
                    "load_state_dict(assign=True): change the model before training begins, or between two trainings"
                )

    def segments(self) -> list[Segment]:
        return [Segment(name, 0, parameter.data.view(-1)) for name, parameter in self._parameters.items()]

    def commit(self, names: Collection[str] | None = None) -> None:
        """No-op: the parameter is the master."""


class BufferShards(Shards):
    """One of the optimizer's buffers, such as "exp_avg", seen as shards; writes go to the optimizer's state.

    For every tensor of masters, be it a parameter, a partition or a sub-group, the optimizer's state has a tensor of
    the same shape. So a segment has the same offset in both.
    """

    def __init__(self, shards: Shards, name: str) -> None:
        self.description = shards.description
        self.is_replicated = shards.is_replicated
        self.sizes = shards.sizes
        self.inner = shards.inner
        self._shards = shards
        self._name = name

    def segments(self) -> list[Segment]:
        held = [
            (master.data_ptr(), master.numel() * master.element_size(), state[self._name].view(-1))
            for master, state in self.inner.state.items()
            if self._name in state
        ]
        return [Segment(one.name, one.start, _beside(one.values, held)) for one in self._shards.segments()]

    def commit(self, names: Collection[str] | None = None) -> None:
        self.inner.commit_buffer(self._name)


def _beside(values: torch.Tensor, held: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """Returns the part of a buffer that belongs to a part of the masters; new zeros if no step has created it yet."""
    for begin, num_bytes, buffer in held:
        place = values.data_ptr() - begin
        if 0 <= place < num_bytes:
            return buffer.narrow(0, place // values.element_size(), values.numel())
    return torch.zeros_like(values, dtype=torch.float32)
