"""The figures of one island, computed from its record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, computed_field

from hf_diloco.report.read import IslandRun, Section
from hf_diloco.report.records import Eval, Mix, Start, Sync, Train

BYTES_PER_GRADIENT = 4  # fp32
NO_START = Start(event="start", step=0)  # stands for a missing start: everything is unknown
# Fields that a report copies from records.
_OF_START = {"num_islands", "num_ranks", "shards", "max_steps", "comes_and_goes", "has_outer_loop"}
_OF_END = {"on_boundary", "steps_since_sync", "run_is_over"}
_OF_EVALUATION = {"eval_loss", "eval_accuracy", "consensus_distance"}
_Number = TypeVar("_Number", int, float)


class TimeSplit(BaseModel):
    """How training time was spent, in seconds or as shares of their sum.

    Attributes:
        computing: everything between rounds: inner steps, evaluations and checkpoints.
        waiting: for other islands to arrive at a round, as far as training paused.
        exchanging: pseudo-gradients, as far as training paused.
        applying: reading and writing the master weights, and the outer step.
    """

    model_config = ConfigDict(frozen=True)

    computing: float | None = None
    waiting: float | None = None
    exchanging: float | None = None
    applying: float | None = None

    def parts(self) -> dict[str, float]:
        """Returns the known parts by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def shares(self) -> TimeSplit | None:
        """Returns each part divided by the sum; None if one of the three main parts is unknown or no time passed."""
        whole = sum(self.parts().values())
        if None in (self.computing, self.waiting, self.exchanging) or whole <= 0:
            return None
        return TimeSplit(**{name: value / whole for name, value in self.parts().items()})

    @classmethod
    def combined(cls, splits: Iterable[TimeSplit | None]) -> TimeSplit | None:
        """Adds splits part by part; a part that is unknown in one of them is unknown in the sum."""
        known = [split for split in splits if split is not None]
        parts = {name: total(getattr(split, name) for split in known) for name in cls.model_fields}
        return cls(**parts) if known else None


class Figures(BaseModel):
    """Figures of an island or of a run; None if not recorded.

    Attributes:
        steps: optimizer steps; in a run, those of the furthest island.
        num_rounds: rounds, without those that a resume discarded.
        eval_loss: loss of the outer weights at `eval_step`, or with `eval_weights: local` of a node's own weights; in
            a run, the mean over the islands that evaluated at that step.
        eval_accuracy: likewise, in runs of image classifiers.
        consensus_distance: distance of all nodes from their mean at `eval_step`.
        tokens_per_second: over the whole training time with evaluation and saving; in a run, summed over islands.
        bytes_sent: measured payload of all ranks, without rounds that a resume discarded.
        bytes_repeated: bytes sent in rounds that a resume discarded; not in `bytes_sent`.
        bytes_per_step_sync: what data-parallel training would have sent in the same steps: steps x 2(M-1)/M x
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
        return self.seconds.shares() if self.seconds else None


class IslandReport(Figures):
    """The figures of one island.

    Attributes:
        ended: whether its last section ended normally; False while it runs, or if it was killed.
        inner_eval_loss: the loss of the last evaluation, if that was of this island's own weights.
        on_boundary: whether its final weights are the outer ones.
        num_sections: how often it started or resumed.
        run_is_over: whether the run's last round is complete, regardless of this island's steps.
        comes_and_goes: whether it may miss rounds and catch up.
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
    start, steps = island.start or NO_START, island.last_step
    end = island.sections[-1].end if island.sections else None
    first = island.sections[0].start if island.sections else None  # may be a resume whose earlier record is missing
    num_steps = None if first is None or steps is None else sum(_steps_of_sections(island))
    outer, inner = _last_evaluations(island)
    syncs = exchanges(island)
    bytes_sent = total([0, *(sync.bytes_sent for sync in syncs)]) if island.sections else None
    everything = exchanged(island, "bytes_sent")
    train_losses = [record.loss for record in island.of(Train) if record.loss is not None]
    sample = island.summary.get("sample")
    return IslandReport(
        island=island.island,
        **start.model_dump(include=_OF_START),
        **(end.model_dump(include=_OF_END) if end else {}),
        **(outer.model_dump(include=_OF_EVALUATION) if outer else {}),
        ended=end is not None,
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
        bytes_received=total([0, *(sync.bytes_received for sync in syncs)]) if island.sections else None,
        bytes_repeated=None if everything is None or bytes_sent is None else everything - bytes_sent,
        bytes_per_step_sync=_bytes_per_step_sync(start, num_steps),
        seconds=TimeSplit.combined(_section_seconds(section) for section in island.sections),
        num_sections=len(island.sections),
        sample=sample if isinstance(sample, str) else None,
        noun="node" if start.method is not None else "island",
    )


def exchanges(records: IslandRun | Section) -> list[Sync | Mix | Train]:
    """Returns the records with traffic: between islands or nodes, and without an outer loop of 1-bit optimizers."""
    between: list[Sync | Mix | Train] = [*records.of(Sync), *records.of(Mix)]
    starts = records.of(Start)
    if any(not start.has_outer_loop for start in starts):
        between += [train for train in records.of(Train) if train.bytes_sent is not None]
    return between


def exchanged(island: IslandRun, kind: Literal["bytes_sent", "bytes_received"]) -> int | None:
    """Returns all bytes of an island, including what a resume discarded, so that the figure never falls."""
    return total([0, *(getattr(one, kind) for section in island.sections for one in exchanges(section))])


def total(values: Iterable[_Number | None]) -> _Number | None:
    """Returns the sum; None if a value is unknown or there are no values."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


def means(values: Iterable[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """Returns the mean of the known values at each step."""
    by_step: dict[int, list[float]] = {}
    for step, value in values:
        if value is not None:
            by_step.setdefault(step, []).append(value)
    return [(float(step), sum(known) / len(known)) for step, known in sorted(by_step.items())]


def _bytes_per_step_sync(start: Start, num_steps: int | None) -> int | None:
    if num_steps is None or start.num_parameters is None or not start.num_islands:
        return None
    # integer arithmetic, exact except for the last division: counts may exceed 2**53
    gradients = num_steps * 2 * (start.num_islands - 1) * start.num_parameters
    return gradients * BYTES_PER_GRADIENT // start.num_islands


def _last_evaluations(island: IslandRun) -> tuple[Eval | None, Eval | None]:
    """Returns the last evaluation of the wanted weights, and the last of all if it is later and of inner weights."""
    evaluations = [record for record in island.of(Eval) if record.eval_loss is not None]
    outer = next((record for record in reversed(island.evaluations()) if record.eval_loss is not None), None)
    latest = evaluations[-1] if evaluations else None
    if latest is None or latest.weights != "inner" or (outer is not None and outer.step == latest.step):
        return outer, None
    return outer, latest


def _seen(island: IslandRun, per_step: str) -> int | None:
    seen = seen_until(island, per_step)
    return None if seen is None else round(seen)


def seen_until(island: IslandRun, per_step: str, step: float = math.inf) -> float | None:
    """Returns the tokens or images of an island's recorded steps up to `step`.

    `per_step` is the field of `Start` with the number per step: the number of ranks may change between sections.
    """
    numbers: list[float | None] = [getattr(section.start, per_step, None) for section in island.sections]
    steps = _steps_of_sections(island, step)
    return total(None if number is None else taken * number for number, taken in zip(numbers, steps, strict=True))


def _steps_of_sections(island: IslandRun, step: float = math.inf) -> list[int]:
    """Returns how many steps up to `step` count in each section: those before the step where a later one resumes.

    A section may begin after steps that the record lacks: a node that rejoins starts at the others' step, and a script
    may resume from another run's checkpoint.
    """
    steps: list[int] = []
    step = min(step, island.last_step or 0)
    for section in reversed(island.sections):
        begun = section.start.step if section.start else 0
        steps.insert(0, max(0, int(min(step, section.last_step)) - begun))
        step = min(step, begun)
    return steps


def _per_second(sections: Sequence[Section], per_step: str) -> float | None:
    """Returns tokens or images per second, including repeated steps, and the time of evaluation and saving."""
    seen = total(_section_seen(section, per_step) for section in sections)
    seconds = total(_section_elapsed(section) for section in sections)
    return None if seen is None or not seconds else seen / seconds


def _section_seen(section: Section, per_step: str) -> float | None:
    start = section.start
    number: float | None = getattr(start, per_step, None)
    if start is None or number is None:
        return None
    return (section.last_step - start.step) * number


def _section_elapsed(section: Section) -> float | None:
    """Returns the seconds of training: as the island measured, or if killed, from its first to its last line."""
    if section.end and section.end.seconds_total is not None:
        return section.end.seconds_total
    times = [record.time for record in section.records if record.time is not None]
    return max(times) - min(times) if times else None


def _section_seconds(section: Section) -> TimeSplit | None:
    """Returns the time of the rounds, and the rest as computing; for a killed section, up to its last round."""
    syncs, end = section.of(Sync), section.end
    if section.start is not None and section.start.method is not None:
        return _mixing_seconds(section)
    if not syncs and not end:
        return None
    waiting = _spent(sync.stalled_waiting for sync in syncs)
    exchanging = _spent(sync.stalled_exchanging for sync in syncs)
    applying = _spent(sync.seconds_applying for sync in syncs)
    computing = _spent(sync.seconds_computing for sync in syncs)
    whole = end.seconds_total if end else None
    if whole is not None and waiting is not None and exchanging is not None:
        computing = max(0.0, whole - waiting - exchanging - (applying or 0.0))
    return TimeSplit(computing=computing, waiting=waiting, exchanging=exchanging, applying=applying)


def _mixing_seconds(section: Section) -> TimeSplit | None:
    """Returns the time of a node that exchanges in every step; waiting counts as exchanging."""
    whole, exchanging = _section_elapsed(section), _spent(mix.stalled_exchanging for mix in section.of(Mix))
    if whole is None or exchanging is None:
        return None
    return TimeSplit(computing=max(0.0, whole - exchanging), waiting=0.0, exchanging=exchanging)


def _spent(seconds: Iterable[float | None]) -> float | None:
    return total([0.0, *seconds])
