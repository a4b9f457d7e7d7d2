"""What an outer method is: what an island contributes to a round, and what becomes of the average.

A method is one file here. Its class says what else follows from it: the settings that are
its own, what checkpoints and snapshots hold, what it cannot be combined with, what it wants of the inner optimizer.
No file here imports torch when it is imported: the settings are checked where there may be none.
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
"""Values handled at a time: 2 MiB a buffer, so that the few passes over a chunk run in the processor's cache."""

Buffers = Literal["zero", "keep", "average"]
"""What becomes of the inner optimizer's momentum and moments where a round begins."""

Run = tuple[int, int, int]
"""Where a run of values begins and ends in a rank's part, and which parameter group they are in."""


@dataclass(frozen=True)
class Groups:
    """The inner optimizer's parameter groups, and which values of a rank's part are in which.

    Attributes:
        count: of the groups.
        runs: of the rank's part, in order; none where there is one group.
    """

    count: int = 1
    runs: Sequence[Run] = ()


@dataclass(frozen=True)
class Chosen:
    """What a method has chosen for settings that are "auto": their values, and where these come from, in words."""

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


class MethodOptions(Block):
    """Settings that are one method's own: `options` of the outer loop's settings."""


class OuterMethod(ABC):
    """The mathematics of one outer method on one rank's part of the outer state.

    All vectors are 1-D, in host memory, and of one length: the part of the parameters that this rank owns.

    Attributes:
        name: as `method` of the settings names it.
        summary: what it is, for tables.
        paper: arXiv number of its source, as "2311.08105"; empty for none.
        defaults: of shared settings, where they are the method's own.
        Options: the settings that no other method has.
        wants_rates: whether `step` needs the inner learning rates, as the round's plan agreed on them.
        streams: whether a round may be of a part of the model, and still be under way while inner steps go on.
        pulls: whether the outer parameters pull the inner ones wherever a round begins, the first one too, and whoever
            is more than a period late is left behind there.
        anticipates: whether an island takes its own part of a round at once, and the others' one round later; see
            `eager`, of whose kind such a method is.
        chooses: the settings that may be "auto".
        feeds_back: whether what a codec leaves out of one round may be added to the next.
        parameters: the outer parameters, once there are any.
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
    """Names of the fp32 vectors that it keeps beside the outer parameters, for checkpoints and snapshots."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}  # what it keeps beside the outer parameters

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check(cls, config: DiLoCoConfig) -> None:
        """Raises ValueError if a setting does not go with the method, with its value and the remedy."""

    @classmethod
    @abstractmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> OuterMethod:
        """The method with these settings.

        Args:
            config: the outer loop's settings.
            groups: of the inner optimizer; known only where `wants_rates`.
        """

    @classmethod
    def choose(cls, config: DiLoCoConfig, num_rounds: int | None) -> Chosen:
        """Numbers for the settings that are "auto".

        Args:
            config: the outer loop's settings; checked, so that those that are "auto" may be.
            num_rounds: that the run is to have, if known.
        """
        return Chosen()

    @classmethod
    def delay(cls, config: DiLoCoConfig) -> int:
        """Inner steps that go on while a round is under way; 0: training waits for it."""
        return config.fragment_sync_delay

    @classmethod
    def kept_share(cls, config: DiLoCoConfig) -> float:
        """Share of its own weights that an island keeps where a round that was under way ends."""
        return config.fragment_update_alpha

    @property
    def numbers(self) -> Mapping[str, int]:
        """Names of the fp64 numbers that it keeps, equal on all ranks, and how many they are."""
        return {}

    def buffers(self, optimizer: str) -> Buffers:
        """What becomes of the inner optimizer's buffers where a round begins.

        Args:
            optimizer: name of its class.
        """
        return "keep"

    # A round

    def start(self, parameters: torch.Tensor) -> None:
        """Takes `parameters`, equal on all islands, as the first outer parameters."""
        self.load_state_dict({"anchor": parameters.clone()})

    def pseudo_gradient_(self, parameters: torch.Tensor) -> float:
        """Replaces an island's current `parameters` by what it contributes: outer parameters less its own.

        Returns:
            The sum of its squares; not finite exactly if some value is not, or is beyond all reason.
        """
        import torch

        square = 0.0
        for where in chunks(parameters.numel()):
            delta = torch.sub(self.parameters[where], parameters[where], out=parameters[where])
            square += float(torch.dot(delta, delta))
        return square

    @abstractmethod
    def step(self, mean: torch.Tensor, rates: Sequence[float] = ()) -> torch.Tensor:
        """Takes the outer step with the averaged contribution; returns the outer parameters (not a copy).

        Args:
            mean: this rank's part of the average.
            rates: the inner learning rate of each parameter group that the round's plan agreed on.
        """

    # What it keeps

    def kept(self, name: str) -> torch.Tensor:
        """One of `vectors` or `numbers` (not a copy)."""
        return self._state[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All outer state by name, not copied: "anchor", `vectors` in fp32, and `numbers` in fp64."""
        return {"anchor": self.parameters, **self._state}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes back what `state_dict` gave, without copying. What is missing starts at 0.

        Raises:
            CheckpointError: it holds another number of `numbers`: the inner optimizer's parameter groups differ.
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
    """Whether the method is to choose this setting."""
    return value == "auto"


def chunks(size: int) -> list[slice]:
    """Cuts a vector of `size` values into what is handled at a time."""
    return [slice(start, min(start + _CHUNK_VALUES, size)) for start in range(0, size, _CHUNK_VALUES)]


def buffer_like(values: torch.Tensor) -> torch.Tensor:
    """This thread's buffer for as many values, of undefined contents, which the next call returns again."""
    return _workspace().take("update", values.numel(), values.dtype, values.device)


@cache
def _workspace() -> Workspace:
    from hf_diloco.utils.workspace import Workspace

    return Workspace()
