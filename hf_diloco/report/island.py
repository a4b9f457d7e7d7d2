"""The figures of one island, computed from its record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, computed_field

from hf_diloco.report.read import IslandRun, Section
from hf_diloco.report.records import End, Eval, Mix, Start, Sync, Train

BYTES_PER_GRADIENT = 4  # fp32
NO_START = Start(event="start", step=0)  # where none was recorded, and so nothing is known
# What a report takes from records as it is.
_OF_START = {"num_islands", "num_ranks", "shards", "max_steps", "comes_and_goes", "has_outer_loop"}
_OF_END = {"on_boundary", "steps_since_sync", "run_is_over"}
_OF_EVALUATION = {"eval_loss", "eval_accuracy", "consensus_distance"}
_Number = TypeVar("_Number", int, float)


class TimeSplit(BaseModel):
    """Where time went: seconds, or shares of their sum.

    Attributes:
        computing: everything between rounds: inner steps, and evaluations and checkpoints if there were any.
        waiting: for the other islands to arrive at the synchronisation, as long as training stood still for it.
        exchanging: moving pseudo-gradients, as long as training stood still for it.
        applying: reading and writing the master weights, and the outer step.
    """

    model_config = ConfigDict(frozen=True)

    computing: float | None = None
    waiting: float | None = None
    exchanging: float | None = None
    applying: float | None = None

    def parts(self) -> dict[str, float]:
        """The parts that are known."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def shares(self) -> TimeSplit | None:
        """Each part over their sum; None when one of the three main parts is unknown or no time passed."""
        whole = sum(self.parts().values())
        if None in (self.computing, self.waiting, self.exchanging) or whole <= 0:
            return None
        return TimeSplit(**{name: value / whole for name, value in self.parts().items()})

    @classmethod
    def combined(cls, splits: Iterable[TimeSplit | None]) -> TimeSplit | None:
        """Part by part; a part that one of them lacks is unknown in the sum."""
        known = [split for split in splits if split is not None]
        parts = {name: total(getattr(split, name) for split in known) for name in cls.model_fields}
        return cls(**parts) if known else None


class Figures(BaseModel):
    """What is measured of an island and of a run alike; None is what was not recorded.

    Attributes:
        steps: optimizer steps; of a run, those of the furthest island.
        num_rounds: rounds that stand.
        eval_loss: of the outer weights at `eval_step`, or with `eval_weights: local` of a node's own; of a run the
            mean over the islands that evaluated them there.
        eval_accuracy: likewise, in runs of image classifiers.
        consensus_distance: how far all nodes were from their mean then.
        tokens_per_second: over the whole training time, evaluation and saving included; of a run the sum over islands.
        bytes_sent: payload of the rounds that stand, measured, all ranks.
        bytes_repeated: sent in rounds that were done again after a resume; not in `bytes_sent`.
        bytes_per_step_sync: what as many steps of data-parallel training would have sent: steps x 2(M-1)/M x
            num_parameters x 4 bytes for each island (fp32 gradients, ring all-reduce, M islands).
    """

    model_config = ConfigDict(frozen=True)

    num_islands: int | None = None
    steps: int | None = None
    max_steps: int | None = None
    num_rounds: int
    eval_loss: float | None = None
    eval_step: int | None = None
    eval_accuracy: float | None = None
    consensus_distance: float | None = None
    num_tokens: int | None = None
    tokens_per_second: float | None = None
    num_images: int | None = None
    images_per_second: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    bytes_repeated: int | None = None
    bytes_per_step_sync: int | None = None
    seconds: TimeSplit | None = None
    sample: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shares(self) -> TimeSplit | None:
        """See `TimeSplit.shares`."""
        return self.seconds.shares() if self.seconds else None


class IslandReport(Figures):
    """What one island did.

    Attributes:
        ended: whether its last section ended in order; False while it runs or when it was killed.
        inner_eval_loss: a last evaluation that was taken off a boundary, thus of this island's own weights.
        on_boundary: whether its final weights are the outer ones.
        num_sections: times it started or resumed.
        run_is_over: the run's last round is complete, however many steps this island took.
        comes_and_goes: it may miss rounds, and catches up.
        noun: what it is called: a node where it averages with its neighbours.
    """

    island: int
    num_ranks: int | None
    shards: str | None
    ended: bool
    train_loss: float | None
    inner_eval_loss: float | None
    inner_eval_step: int | None
    on_boundary: bool | None = None
    steps_since_sync: int | None = None
    num_sections: int
    run_is_over: bool = False
    comes_and_goes: bool
    has_outer_loop: bool
    noun: Literal["island", "node"] = "island"


def summarise_island(island: IslandRun) -> IslandReport:
    """Computes the figures of one island over all its sections."""
    start, syncs = island.start or NO_START, exchanges(island)
    end = island.sections[-1].of(End)[-1:] if island.sections else []
    steps = island.last_step
    first = island.sections[0].start if island.sections else None  # it may be a resume, the earlier part left behind
    num_steps = None if first is None or steps is None else sum(_steps_of_sections(island))
    outer, inner = _last_evaluations(island)
    nothing = 0 if island.sections else None  # no round was recorded, so no byte was exchanged
    bytes_sent = total(sync.bytes_sent for sync in syncs) if syncs else nothing
    everything = exchanged(island, "bytes_sent")
    train_losses = [record.loss for record in island.of(Train) if record.loss is not None]
    sample = island.summary.get("sample")
    return IslandReport(
        island=island.island,
        **start.model_dump(include=_OF_START),
        **(end[0].model_dump(include=_OF_END) if end else {}),
        **(outer.model_dump(include=_OF_EVALUATION) if outer else {}),
        ended=bool(end),
        steps=steps,
        num_rounds=len(island.of(Sync)),
        train_loss=train_losses[-1] if train_losses else None,
        eval_step=outer.step if outer else None,
        inner_eval_loss=inner.eval_loss if inner else None,
        inner_eval_step=inner.step if inner else None,
        num_tokens=_seen(island, "tokens_per_step"),
        tokens_per_second=_per_second(island.sections, "tokens_per_step"),
        num_images=_seen(island, "images_per_step"),
        images_per_second=_per_second([one for one in island.sections if one.start], "images_per_step"),
        bytes_sent=bytes_sent,
        bytes_received=total(sync.bytes_received for sync in syncs) if syncs else nothing,
        bytes_repeated=None if everything is None or bytes_sent is None else everything - bytes_sent,
        bytes_per_step_sync=_bytes_per_step_sync(start, num_steps),
        seconds=TimeSplit.combined(_section_seconds(section) for section in island.sections),
        num_sections=len(island.sections),
        sample=sample if isinstance(sample, str) else None,
        noun="node" if start.method is not None else "island",
    )


def exchanges(records: IslandRun | Section) -> list[Sync | Mix | Train]:
    """What says how much was exchanged: between islands, or, where there is no outer loop, between ranks in 1 bit."""
    between: list[Sync | Mix | Train] = [*records.of(Sync), *records.of(Mix)]
    starts = records.of(Start)
    if any(not start.has_outer_loop for start in starts):
        between += [train for train in records.of(Train) if train.bytes_sent is not None]
    return between


def exchanged(island: IslandRun, kind: Literal["bytes_sent", "bytes_received"]) -> int | None:
    """All bytes of an island. What a resume threw away counts too, so that the figure never falls."""
    return total([0, *(getattr(one, kind) for section in island.sections for one in exchanges(section))])


def total(values: Iterable[_Number | None]) -> _Number | None:
    """The sum; None when a value is missing, or there is none: a part is not the whole."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


def _bytes_per_step_sync(start: Start, num_steps: int | None) -> int | None:
    if num_steps is None or start.num_parameters is None or not start.num_islands:
        return None
    # exact in integers but for the last division: counts may pass 2**53
    gradients = num_steps * 2 * (start.num_islands - 1) * start.num_parameters
    return gradients * BYTES_PER_GRADIENT // start.num_islands


def _last_evaluations(island: IslandRun) -> tuple[Eval | None, Eval | None]:
    """The last evaluation of the weights that were wanted, and a later one of the inner weights if there is any."""
    evaluations = [record for record in island.of(Eval) if record.eval_loss is not None]
    outer = next((record for record in reversed(island.evaluations()) if record.eval_loss is not None), None)
    latest = evaluations[-1] if evaluations else None
    if latest is None or latest.weights != "inner" or (outer is not None and outer.step == latest.step):
        return outer, None
    return outer, latest


def _seen(island: IslandRun, per_step: str) -> int | None:
    """Tokens, or images, of the steps that stand."""
    seen = seen_until(island, per_step)
    return None if seen is None else round(seen)


def seen_until(island: IslandRun, per_step: str, step: float = math.inf) -> float | None:
    """Tokens, or images, of an island's steps up to this one, as far as they are on record.

    Each start counts at its own batch, which other ranks may have changed.

    Args:
        per_step: what `Start` calls the number of them in a step.
        step: the last that counts, if the record goes so far.
    """
    numbers: list[float | None] = [getattr(section.start, per_step, None) for section in island.sections]
    steps = _steps_of_sections(island, step)
    return total(None if number is None else taken * number for number, taken in zip(numbers, steps, strict=True))


def _steps_of_sections(island: IslandRun, step: float = math.inf) -> list[int]:
    """How many steps of each section stand, of those up to `step`: until where a later one resumes.

    A node that returns to the others begins behind steps that it has not taken, and a script may resume from another
    run's checkpoint.
    """
    steps: list[int] = []
    step = min(step, island.last_step or 0)
    for section in reversed(island.sections):
        begun = section.start.step if section.start else 0
        last = max(record.step for record in section.records)
        steps.insert(0, max(0, int(min(step, last)) - begun))
        step = min(step, begun)
    return steps


def _per_second(sections: Sequence[Section], per_step: str) -> float | None:
    """All tokens or images trained on, repeated steps too, over all time spent, evaluation and saving included.

    `per_step` is what `Start` calls the number of them in a step.
    """
    seen = total(_section_seen(section, per_step) for section in sections)
    seconds = total(_section_elapsed(section) for section in sections)
    return None if seen is None or not seconds else seen / seconds


def _section_seen(section: Section, per_step: str) -> float | None:
    start = section.start
    number: float | None = getattr(start, per_step, None)
    if start is None or number is None:
        return None
    return (max(record.step for record in section.records) - start.step) * number


def _section_elapsed(section: Section) -> float | None:
    """Seconds of training: measured by the island, or for a killed one between its first and last line."""
    end = section.of(End)
    if end and end[-1].seconds_total is not None:
        return end[-1].seconds_total
    times = [record.time for record in section.records if record.time is not None]
    return max(times) - min(times) if times else None


def _section_seconds(section: Section) -> TimeSplit | None:
    """What the rounds took, and as computing the rest of the time; a killed section is followed to its last round."""
    syncs, end = section.of(Sync), section.of(End)
    if section.start is not None and section.start.method is not None:
        return _mixing_seconds(section)
    if not syncs and not end:
        return None
    waiting = _spent(sync.stalled_waiting for sync in syncs)
    exchanging = _spent(sync.stalled_exchanging for sync in syncs)
    applying = _spent(sync.seconds_applying for sync in syncs)
    computing = _spent(sync.seconds_computing for sync in syncs)
    whole = end[-1].seconds_total if end else None
    if whole is not None and waiting is not None and exchanging is not None:
        computing = max(0.0, whole - waiting - exchanging - (applying or 0.0))
    return TimeSplit(computing=computing, waiting=waiting, exchanging=exchanging, applying=applying)


def _mixing_seconds(section: Section) -> TimeSplit | None:
    """Time of a node that exchanges in every step; waiting for others counts as exchanging."""
    whole, exchanging = _section_elapsed(section), _spent(mix.stalled_exchanging for mix in section.of(Mix))
    if whole is None or exchanging is None:
        return None
    return TimeSplit(computing=max(0.0, whole - exchanging), waiting=0.0, exchanging=exchanging)


def _spent(seconds: Iterable[float | None]) -> float | None:
    """The sum, which is nothing for no rounds, and unknown when one is."""
    return total([0.0, *seconds])
