"""Types for the lines of `metrics.jsonl`: one class per event, every measured value optional.

A value that was not recorded is None and shown as missing. A loss recorded as null was not finite, which JSON cannot
represent; it is read as NaN. Times are in seconds, traffic in bytes, both summed over the island's ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

# The upper limits keep all sums and products of these values finite; no real run comes near them.
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**18)]
NumIslands = Annotated[int, Field(ge=0, le=2**16)]  # reports list each island without a record
Rate = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
_OF_NAMED = re.compile(r"eval_.+_runtime")
Loss = Annotated[float | None, BeforeValidator(lambda value: math.nan if value is None else value)]


class Record(BaseModel):
    """Fields of every line: its optimizer step, and the time when it was written (unix seconds)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: Count
    time: Seconds | None = None


class Start(Record):
    """An island began to train, or resumed from a checkpoint of step `step`.

    Attributes:
        launched_in: the launcher's folder of the island, if the launcher started it.
        rendezvous: where the islands or nodes meet.
        round: completed rounds of the run. The island's record may have more, if the run went back since.
    """

    event: Literal["start"]
    island: Count | None = None
    num_islands: NumIslands | None = None
    num_ranks: Count | None = None
    shards: str | None = None
    num_parameters: Count | None = None
    payload: str | None = None
    sync_every: Count | None = None
    num_fragments: Count | None = None
    outer_method: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    max_steps: int | None = None
    tokens_per_step: Rate | None = None
    comes_and_goes: bool = False
    method: str | None = None
    topology: str | None = None
    examples_per_step: Rate | None = None
    has_outer_loop: bool = True
    launched_in: str | None = None
    rendezvous: str | None = None
    round: Count | None = None
    eval_weights: str | None = None

    @property
    def weights_wanted(self) -> str:
        """The weights to evaluate: "inner" (a node's own) with `eval_weights: local`, else "outer" (common ones)."""
        return "inner" if self.eval_weights == "local" else "outer"

    @property
    def images_per_step(self) -> float | None:
        """Examples per step of a gossip node, which trains on images; None for islands."""
        return None if self.method is None else self.examples_per_step


class Train(Record):
    """Values that the Trainer logged. The loss is the inner loss, on the island's own batches."""

    event: Literal["train"]
    loss: Loss = None
    bytes_sent: Count | None = Field(None, alias="onebit/bytes_sent")

    @property
    def bytes_received(self) -> int | None:
        """Bytes received; equal to those sent, as both are between the island's own ranks."""
        return self.bytes_sent


class Eval(Record):
    """An evaluation of the weights in `weights`: outer or inner.

    Attributes:
        name: the data set's name, if there are several; its loss is `named_loss`. Empty for a single data set, with
            `eval_loss`.
    """

    event: Literal["eval"]
    eval_loss: Loss = None
    name: str = ""
    named_loss: Loss = None
    eval_accuracy: float | None = None
    consensus_distance: float | None = None
    weights: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _find_name(cls, values: Any) -> Any:
        """Finds NAME in the Trainer's eval_NAME_loss; eval_NAME_runtime distinguishes NAME from a metric's name."""
        if not isinstance(values, Mapping) or "eval_loss" in values:
            return values
        names = [key[len("eval_") : -len("_runtime")] for key in values if _OF_NAMED.fullmatch(key)]
        name = next((name for name in names if f"eval_{name}_loss" in values), None)
        return values if name is None else {**values, "name": name, "named_loss": values[f"eval_{name}_loss"]}


class Sync(Record):
    """One completed round."""

    event: Literal["sync"]
    round: Annotated[int, Field(ge=1, le=10**18)]
    participants: tuple[int, ...] | None = None
    seconds_computing: Seconds | None = None
    seconds_waiting: Seconds | None = None
    seconds_exchanging: Seconds | None = None
    seconds_applying: Seconds | None = None
    bytes_sent: Count | None = None
    bytes_received: Count | None = None
    pseudo_gradient_norm: float | None = None
    cosine: float | None = None
    outer_hash: str | None = None
    fragment: Count | None = None
    seconds_hidden: Seconds | None = None

    @property
    def stalled_exchanging(self) -> float | None:
        """Seconds of exchanging during which training paused. Hidden seconds are first subtracted from waiting."""
        stalled = self._stalled()
        return None if stalled is None or self.seconds_exchanging is None else min(self.seconds_exchanging, stalled)

    @property
    def stalled_waiting(self) -> float | None:
        stalled, exchanging = self._stalled(), self.stalled_exchanging
        return None if stalled is None or exchanging is None else stalled - exchanging

    def _stalled(self) -> float | None:
        if self.seconds_waiting is None or self.seconds_exchanging is None:
            return None
        return max(0.0, self.seconds_waiting + self.seconds_exchanging - (self.seconds_hidden or 0.0))


class Mix(Record):
    """A gossip node's exchanges with its neighbours since its last `mix` event."""

    event: Literal["mix"]
    seconds_exchanging: Seconds | None = None
    seconds_hidden: Seconds | None = None
    bytes_sent: Count | None = None
    bytes_received: Count | None = None

    @property
    def stalled_exchanging(self) -> float | None:
        seconds = self.seconds_exchanging
        return None if seconds is None else max(0.0, seconds - (self.seconds_hidden or 0.0))

    def plus(self, later: Mix) -> Mix:
        """Adds two events of one step, such as the last step's and the one at the end of training."""
        names = ("seconds_exchanging", "seconds_hidden", "bytes_sent", "bytes_received")
        pairs = {name: (getattr(self, name), getattr(later, name)) for name in names}
        sums = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
        return later.model_copy(update=sums)


class Neighbour(Record):
    """A neighbour was lost, or came back."""

    event: Literal["neighbour"]
    news: str | None = None


class Refused(Record):
    """Islands whose contributions were refused since the last `refused` event, by number, with the reasons."""

    event: Literal["refused"]
    islands: dict[str, str] = Field(default_factory=dict)


class Save(Record):
    """A checkpoint of this step was written; a later section may resume from it."""

    event: Literal["save"]


class End(Record):
    """Training ended normally. Times cover the section since its `start`.

    Attributes:
        rounds: the round of the island's outer parameters.
        run_is_over: whether the run's last round is complete, which ends the run for all islands.
    """

    event: Literal["end"]
    seconds_total: Seconds | None = None
    rounds: Count | None = None
    on_boundary: bool | None = None
    steps_since_sync: Count | None = None
    run_is_over: bool = False


AnyRecord = Start | Train | Eval | Sync | Mix | Neighbour | Refused | Save | End

_ADAPTER: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="event")])


def parse_line(line: bytes) -> AnyRecord | None:
    """Reads one line of `metrics.jsonl`; returns None for an event of a later version.

    Raises `ValueError` if the line is incomplete, is not JSON, or has an invalid value.
    """
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        if error.errors(include_input=False)[0]["type"] == "union_tag_invalid":
            return None
        raise ValueError(f"not a metrics record: {error.errors(include_input=False)[0]['msg']}") from None
