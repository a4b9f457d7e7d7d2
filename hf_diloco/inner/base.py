"""One rank's part of what an island trains: the fp32 master weights, seen as named pieces, and their optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from hf_diloco.errors import UnsupportedError

_PACKAGES = ("torch", "deepspeed", "hf_diloco")
_KNOWN = ("SGD", "Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam", "MuonAdamW", "MuonWithAuxAdam")
"""Optimizers that begin anew with buffers and a count of steps that are 0."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and `torch.compile` put into the names of parameters."""


class InnerOptimizer:
    """The optimizer inside an island, as an outer method sees it: learning rates, parameter groups, buffers.

    Args:
        optimizer: torch's, below DeepSpeed's; None where there is none to look at.
        groups: the parameter group that each trainable parameter is in, by name.

    Attributes:
        kind: name of its class.
        groups: as above.
        rates: the learning rate of each parameter group at the last step; before the first, at present.
    """

    def __init__(self, optimizer: Any = None, groups: Mapping[str, int] | None = None) -> None:
        self.kind = type(optimizer).__name__
        self.groups = groups or {}
        self._optimizer = optimizer
        self._param_groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
        self.rates = [float(group.get("lr") or 0.0) for group in self._param_groups]
        self._undampened: set[torch.Tensor] = set()  # what SGD takes a first gradient of in its next step

    @property
    def num_groups(self) -> int:
        """How many parameter groups there are."""
        return len(self.rates)

    def watch(self) -> None:
        """From now on `rates` are those of the last step.

        Schedulers change them right after a step, before or after anybody else is told of it.

        Raises:
            UnsupportedError: the optimizer is none of torch's, or chooses its own rates, as Adafactor may.
        """
        has_rates = all(group.get("lr") is not None for group in self._param_groups)
        if not (isinstance(self._optimizer, torch.optim.Optimizer) and has_rates):
            raise UnsupportedError(
                f"the learning rates of {self.kind} cannot be seen, and this method of the outer loop needs them: use "
                "a torch.optim optimizer with a learning rate, or method=diloco"
            )

        self._optimizer.register_step_pre_hook(lambda *_: self._begin_step())
        self._note_rates()

    def check_buffers(self, wanted: str) -> None:
        """Raises `UnsupportedError` if nothing else than keeping the buffers is possible, and it is wanted."""
        if wanted == "keep":
            return
        if type(self._optimizer).__module__.partition(".")[0] not in _PACKAGES or self.kind not in _KNOWN:
            raise UnsupportedError(
                f"options.inner_buffers={wanted}: the buffers of {self.kind} are not known (those of "
                f"{', '.join(_KNOWN)} are): set it to keep"
            )
        if wanted == "average" and self.kind == "MuonWithAuxAdam":
            raise UnsupportedError(
                "options.inner_buffers=average: the momentum of DeepSpeed's Muon lies otherwise than the master "
                "weights, which this package cannot average: set it to keep or zero"
            )

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """What it keeps for each tensor that it trains."""
        state: Mapping[torch.Tensor, dict[str, Any]] = self._optimizer.state
        return state

    @property
    def buffers(self) -> list[str]:
        """Names of its momentum or moments in `state`; not every tensor has each."""
        if self.kind == "SGD":
            return ["momentum_buffer"] if any(group["momentum"] for group in self._param_groups) else []
        if self.kind == "MuonAdamW":
            return ["momentum_buffer", "exp_avg", "exp_avg_sq"]
        variant = ["max_exp_avg_sq"] if any(group.get("amsgrad") for group in self._param_groups) else []
        return ["exp_avg", "exp_avg_sq", *variant]

    def commit_buffer(self, name: str) -> None:
        """Makes all copies of a buffer agree after it was written. Collective over the island's ranks under HSDP."""

    def zero_buffers(self) -> None:
        """Has the optimizer go on as if it had taken no step yet: momentum, moments, and the count for their bias.

        Call it again where a checkpoint of such a moment was loaded.
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
        """SGD dampens all gradients but the first, which it tells by a momentum that is not there.

        It goes only now: a sharded checkpoint without it could not be loaded.
        """
        self._note_rates()
        stepped = {one for group in self._optimizer.param_groups for one in group["params"]} & self._undampened
        self._undampened -= stepped
        for tensor in stepped:
            self._optimizer.state[tensor].pop("momentum_buffer", None)

    def _note_rates(self) -> None:
        """Takes the rates of the groups that a step is of: ZeRO-1 and ZeRO-2 show one at a time."""
        present = self._optimizer.param_groups
        if len(present) == self.num_groups:
            self._param_groups = list(present)
        for number, group in enumerate(self._param_groups):
            if any(group is one for one in present):
                self.rates[number] = float(group["lr"])


def group_numbers(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The parameter group of `optimizer`, if it has any, that each of these parameters is in, by name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        names[id(parameter)]: number
        for number, group in enumerate(getattr(optimizer, "param_groups", []))
        for parameter in group["params"]
        if id(parameter) in names
    }


def plain_name(name: str) -> str:
    """A parameter's name in the model as it was before anything was wrapped around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def refuse_unfrozen(parameters: Mapping[str, torch.Tensor], optimizer: Any, exchanged: Collection[str]) -> None:
    """Raises `UnsupportedError` if `optimizer` trains one of these parameters, by name, that is not exchanged."""
    others = {name: one for name, one in parameters.items() if one.requires_grad and name not in exchanged}
    if names := list(group_numbers(optimizer, others)):
        raise UnsupportedError(
            f"parameter {names[0]} has been unfrozen since training began ({len(names)} in all), and islands do not "
            "exchange it: unfreeze on all islands before training begins, or in a new training, by another call of "
            "train() or in another OuterLoop"
        )


@dataclass(frozen=True)
class Segment:
    """A run of elements of one parameter whose master values this rank holds.

    Attributes:
        name: the parameter's name in the unwrapped model (`named_parameters`; tied weights by their first name).
        start: index of the first element in the flattened parameter.
        values: 1-D view into the master storage; writing it writes the master. Any float dtype, any device.
    """

    name: str
    start: int
    values: torch.Tensor

    @property
    def numel(self) -> int:
        return self.values.numel()


class Shards(ABC):
    """Where an island's master weights are. Reading them needs no communication.

    Attributes:
        description: in words, for logs, as "ZeRO-2".
        is_replicated: every rank holds all parameters (DDP, ZeRO-0), instead of a part of its own (ZeRO-1/2/3, FSDP2).
        sizes: element count of each trainable parameter by name, in the model's order. This order, unpadded, is the
            *canonical index space* in which islands with different shards understand each other.
        shapes: of the same parameters, for whoever reads a checkpoint without the model.
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
        """This rank's segments, always in the same order. Over an island's ranks they cover every element: once if
        sharded, once a rank if replicated."""

    @abstractmethod
    def commit(self, names: Collection[str] | None = None) -> None:
        """Makes the working copies of the model agree with the masters after these were written.

        Collective over the island's ranks under ZeRO-1/2/3 and HSDP.

        Args:
            names: of the parameters that were written, equal on all ranks; None: all. DeepSpeed commits all anyway.
        """

    def check_trained(self) -> None:  # noqa: B027 - DeepSpeed trains only what it has been given at first
        """Raises `UnsupportedError` if the optimizer trains another parameter by now than those of `sizes`."""

    @property
    def num_parameters(self) -> int:
        """Trainable elements of the whole model."""
        return sum(self.sizes.values())

    @property
    def is_on_cuda(self) -> bool:
        """Whether this rank's masters are on a CUDA device."""
        return any(segment.values.device.type == "cuda" for segment in self.segments())

    @property
    def digest(self) -> str:
        """Of the trainable parameters' names and sizes."""
        listing = "\n".join(f"{name} {size}" for name, size in self.sizes.items())
        return xxhash.xxh3_128_hexdigest(listing.encode())

    def offsets(self) -> dict[str, int]:
        """Where each parameter begins in the canonical index space."""
        offsets, position = {}, 0
        for name, size in self.sizes.items():
            offsets[name] = position
            position += size
        return offsets

    def intervals(self) -> list[tuple[int, int]]:
        """(first canonical index, length) of each of this rank's segments."""
        offsets = self.offsets()
        return [(offsets[segment.name] + segment.start, segment.numel) for segment in self.segments()]


class PlainShards(Shards):
    """Parameters that are their own masters: plain PyTorch, DDP, and DeepSpeed's ZeRO-0 in fp32. All on every rank.

    Those in 16 bits (a model loaded in bf16) are read and written through a cast; the outer state is fp32.
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
        """Nothing to do: the parameter is the master."""


class BufferShards(Shards):
    """The optimizer's momentum or one of its moments, such as "exp_avg"; writing it writes the optimizer's state.

    Wherever an optimizer keeps its masters, in one tensor a parameter, a partition or a sub-group, its state has a
    tensor of the same shape: a segment of the masters lies in one as it lies in the other.

    Args:
        shards: the masters.
        name: of the buffer in the optimizer's state.
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
    """The part of a buffer that belongs to a part of the masters; zeros of nobody where no step has made any."""
    for begin, num_bytes, buffer in held:
        place = values.data_ptr() - begin
        if 0 <= place < num_bytes:
            return buffer.narrow(0, place // values.element_size(), values.numel())
    return torch.zeros_like(values, dtype=torch.float32)
