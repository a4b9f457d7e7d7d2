"""The interface of an outer method: an island's contribution to a round, and the outer step with the average.

Each method is one file in this folder. Its class also defines the method's own settings, the vectors in checkpoints
and snapshots, the settings that it cannot be combined with, and its requirements for the inner optimizer. No file here
imports torch at import time, as settings are also checked on machines without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_diloco.errors import CheckpointError
from hf_diloco.utils.settings import Block

if TYPE_CHECKING:
    import torch

    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.utils.workspace import Workspace

_CHUNK_VALUES = 1 << 19
"""Values per chunk: 2 MiB a buffer, so that the few passes over a chunk run in the processor's cache."""

Buffers = Literal["zero", "keep", "average"]
"""What happens to the inner optimizer's momentum and moments when a round begins."""

Run = tuple[int, int, int]
"""A run of values in a rank's part that share a parameter group: start, end, and the group's index."""


@dataclass(frozen=True)
class Groups:
    """The number of the inner optimizer's parameter groups, and the runs of a rank's part in each, in order.

    There are no runs if there is one group.
    """

    count: int = 1
    runs: Sequence[Run] = ()


@dataclass(frozen=True)
class Chosen:
    """The values that a method has chosen for settings that are "auto", and their source, in words."""

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


class MethodOptions(Block):
    """Settings that only one method has: `options` in the outer loop's settings."""


class OuterMethod(ABC):
    """The mathematics of one outer method on one rank's part of the outer state.

    All vectors are 1-D, in host memory, and of one length: the part of the parameters that this rank owns.

    Attributes:
        name: the method's name in the setting `method`.
        summary: a short description, for tables.
        paper: arXiv number of the method's source, such as "2311.08105"; empty for none.
        defaults: this method's defaults of shared settings.
        Options: the settings that no other method has.
        wants_rates: whether `step` needs the inner learning rates that the round's plan records.
        streams: whether a round may synchronise a part of the model only, in the background of inner steps.
        pulls: whether the outer parameters pull the inner ones at the start of every round, including the first. A
            round then leaves out islands that are more than a period late.
        anticipates: whether an island applies its own contribution at once, and the others' one round later. Such a
            method must derive from `eager.Eager`.
        chooses: the settings that may be "auto".
        feeds_back: whether error feedback may add the codec's error of one round to the next.
        parameters: the outer parameters; unset before `start` or `load_state_dict`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    defaults: ClassVar[Mapping[str, Any]] = {}
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    wants_rates: ClassVar[bool] = False
    chooses: ClassVar[Sequence[str]] = ()
    streams: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    anticipates: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False

    parameters: torch.Tensor
    vectors: Sequence[str] = ()
    """Names of the state's fp32 vectors, besides the outer parameters, for checkpoints and snapshots."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}  # besides the outer parameters

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check(cls, config: DiLoCoConfig) -> None:
        """Raises ValueError if a setting conflicts with the method; the message has its value and the remedy."""

    @classmethod
    @abstractmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> OuterMethod:
        """Makes the method with these settings; the inner optimizer's `groups` are known only if `wants_rates`."""

    @classmethod
    def choose(cls, config: DiLoCoConfig, num_rounds: int | None) -> Chosen:
        """Chooses values for the settings that are "auto"; `num_rounds` of the run is None if unknown."""
        return Chosen()

    @classmethod
    def delay(cls, config: DiLoCoConfig) -> int:
        """The number of inner steps taken while a round is in flight; 0: training waits for the round."""
        return config.fragment_sync_delay

    @classmethod
    def kept_share(cls, config: DiLoCoConfig) -> float:
        """The share of its own weights that an island keeps when it installs a round that was in flight."""
        return config.fragment_update_alpha

    @property
    def numbers(self) -> Mapping[str, int]:
        """Names and lengths of the fp64 arrays in the method's state; their values are equal on all ranks."""
        return {}

    def buffers(self, optimizer: str) -> Buffers:
        """What happens to the buffers of an inner optimizer of the class `optimizer` when a round begins."""
        return "keep"

    # A round

    def start(self, parameters: torch.Tensor) -> None:
        """Sets the initial outer parameters to a copy of `parameters`, which are equal on all islands."""
        self.load_state_dict({"anchor": parameters.clone()})

    def pseudo_gradient_(self, parameters: torch.Tensor) -> float:
        """Replaces an island's current `parameters` in place by its pseudo-gradient: outer parameters minus its own.

        Returns its sum of squares, which is not finite if and only if a value is not finite, or too large to square.
        """
        import torch

        square = 0.0
        for where in chunks(parameters.numel()):
            delta = torch.sub(self.parameters[where], parameters[where], out=parameters[where])
            square += float(torch.dot(delta, delta))
        return square

    @abstractmethod
    def step(self, mean: torch.Tensor, rates: Sequence[float] = ()) -> torch.Tensor:
        """Takes the outer step with the average; returns the outer parameters (not a copy).

        Args:
            mean: this rank's part of the average.
            rates: the inner learning rate of each parameter group, from the round's plan.
        """

    # State

    def kept(self, name: str) -> torch.Tensor:
        """One of `vectors` or `numbers` (not a copy)."""
        return self._state[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The outer state by name, not copied: "anchor", `vectors` in fp32, and `numbers` in fp64."""
        return {"anchor": self.parameters, **self._state}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores a state of `state_dict`, without copying. Missing entries start at 0.

        Raises:
            CheckpointError: `numbers` differ in length, as the inner optimizer has other parameter groups.
        """
        self.parameters = anchor = state["anchor"]
        self._state = {}
        for name in self.vectors:
            self._state[name] = state[name] if name in state else anchor.new_zeros(anchor.numel())
        for name, count in self.numbers.items():
            held = state[name] if name in state else anchor.new_zeros(count).double()
            if held.numel() != count:
                raise CheckpointError(
                    f"the outer state holds {name} of {held.numel()} parameter groups, and the inner optimizer has "
                    f"{count}: resume with the same parameter groups"
                )
            self._state[name] = held


def is_auto(value: object) -> bool:
    """Whether a setting has the value "auto"."""
    return value == "auto"


def chunks(size: int) -> list[slice]:
    """Cuts a vector of `size` values into chunks that fit the processor's cache."""
    return [slice(start, min(start + _CHUNK_VALUES, size)) for start in range(0, size, _CHUNK_VALUES)]


def sgd_(
    parameters: torch.Tensor,
    delta: torch.Tensor,
    lr: float,
    velocity: torch.Tensor | None,
    momentum: float,
    nesterov: bool = False,
) -> None:
    """Takes a step of `torch.optim.SGD` in place, with the gradient `delta`; `velocity` is None without momentum.

    Uses only plain multiplications and additions: islands must agree to the last bit.
    """
    import torch

    update = buffer_like(delta)
    if velocity is None:
        torch.mul(delta, lr, out=update)
    else:
        velocity.mul_(momentum).add_(delta)
        if nesterov:
            torch.mul(velocity, momentum, out=update).add_(delta).mul_(lr)
        else:
            torch.mul(velocity, lr, out=update)
    parameters.sub_(update)


def buffer_like(values: torch.Tensor) -> torch.Tensor:
    """Returns this thread's buffer of the size of `values`, with undefined contents; the next call reuses it."""
    return _workspace().take("update", values.numel(), values.dtype, values.device)


@cache
def _workspace() -> Workspace:
    from hf_diloco.utils.workspace import Workspace

    return Workspace()
