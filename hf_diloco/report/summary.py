"""Computes the figures of a run from its records. Pure: reads no files, guesses nothing; unknown figures are None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hf_diloco.report.island import NO_START, Figures, IslandReport, TimeSplit, means, summarise_island, total
from hf_diloco.report.progress import AT_THE_END
from hf_diloco.report.read import IslandRun, Run
from hf_diloco.report.records import End, Neighbour, Refused, Sync
from hf_diloco.utils.text import counted, name_all, plural

_SETTINGS = {
    *("num_parameters", "sync_every", "payload", "max_steps", "method", "topology", "eval_weights"),
    *("outer_method", "outer_lr", "outer_momentum"),
}
"""Fields that a report copies from a `start` event."""

_MEANS = ("eval_loss", "eval_accuracy", "consensus_distance")
_SUMS = (
    *("num_tokens", "tokens_per_second", "num_images", "images_per_second"),
    *("bytes_sent", "bytes_received", "bytes_repeated", "bytes_per_step_sync"),
)
"""Figures of the islands that are averaged or summed."""


class RoundReport(BaseModel):
    """One outer round, over the islands that have a record of it here.

    Seconds, norm and cosine are means over these islands, bytes are sums. `hashes_equal` is None if fewer than two
    islands' hashes can be compared.
    """

    model_config = ConfigDict(frozen=True)

    round: int
    step: int
    islands: tuple[int, ...]
    seconds: TimeSplit
    bytes_sent: int | None
    bytes_received: int | None
    pseudo_gradient_norm: float | None
    cosine: float | None
    outer_hash: str | None
    hashes_equal: bool | None


class Report(Figures):
    """The figures of a run. `model_dump_json()` returns its JSON form, in which unmeasured figures are null.

    Attributes:
        covers: the islands whose records are here; sums are over these only.
        num_fragments: parts of the model that are synchronised in turn, each every `sync_every` steps.
        final_weights: the islands' weights at the end: "outer" on a synchronisation boundary, otherwise "inner".
        traffic_ratio: bytes_per_step_sync / bytes_sent.
        mismatched_rounds: after which the islands' outer parameters differed; should be empty.
        num_rounds_compared: rounds for which at least two islands' hashes are here.
        named_losses: with several evaluation data sets, the outer weights' last loss on each: the mean over the
            islands that evaluated at that step.
        method, topology, eval_weights: settings of gossip nodes; None for islands with rounds.
    """

    name: str
    covers: tuple[int, ...]
    named_losses: dict[str, float]
    missing_islands: tuple[int, ...]
    num_parameters: int | None
    sync_every: int | None
    num_fragments: int
    payload: str | None
    outer_method: str | None
    outer_lr: float | None
    outer_momentum: float | None
    perplexity: float | None
    final_weights: Literal["outer", "inner"] | None
    traffic_ratio: float | None
    mismatched_rounds: tuple[int, ...]
    num_rounds_compared: int
    model: str | None
    warnings: tuple[str, ...]
    islands: tuple[IslandReport, ...]
    rounds: tuple[RoundReport, ...]
    method: str | None = None
    topology: str | None = None
    eval_weights: str | None = None

    @property
    def noun(self) -> str:
        return "island" if self.method is None else "node"

    @property
    def evaluated(self) -> str:
        """Which weights the nodes' evaluations are of, in words."""
        return "mean of the nodes' own" if self.eval_weights == "local" else "mean of all nodes"

    @property
    def size(self) -> int:
        return len(self.covers) if self.num_islands is None else self.num_islands


def summarise(run: Run, is_live: bool = False) -> Report:
    """Computes the figures of a run, over the islands whose records are in its folder.

    With `is_live`, unfinished records cause no warning, as readers also see each island's progress.
    """
    islands = tuple(summarise_island(island) for island in run.islands)
    rounds = _rounds(run)
    start = next((island.start for island in run.islands if island.start), NO_START)
    num_islands = max((i.num_islands for i in islands if i.num_islands is not None), default=None)
    missing = tuple(sorted(set(range(num_islands or 0)) - {island.island for island in islands}))
    eval_step = max((i.eval_step for i in islands if i.eval_step is not None), default=None)
    evaluated = [island for island in islands if island.eval_step == eval_step]
    means: dict[str, Any] = {name: _mean(getattr(island, name) for island in evaluated) for name in _MEANS}
    sums: dict[str, Any] = {name: total(getattr(island, name) for island in islands) for name in _SUMS}
    per_step, sent = sums["bytes_per_step_sync"], sums["bytes_sent"]
    boundaries = {island.on_boundary for island in islands}
    mismatched = tuple(r.round for r in rounds if r.hashes_equal is False)
    return Report(
        name=run.name,
        num_islands=num_islands,
        covers=tuple(island.island for island in islands),
        missing_islands=missing,
        **start.model_dump(include=_SETTINGS),
        **means,
        **sums,
        named_losses=_named_losses(run),
        num_fragments=start.num_fragments or 1,
        steps=max((i.steps for i in islands if i.steps is not None), default=None),
        num_rounds=max((r.round for r in rounds), default=0),
        eval_step=eval_step,
        perplexity=perplexity(means["eval_loss"]),
        final_weights="inner" if False in boundaries else "outer" if boundaries == {True} else None,
        traffic_ratio=per_step / sent if per_step and sent else None,
        seconds=TimeSplit.combined(i.seconds for i in islands),
        mismatched_rounds=mismatched,
        num_rounds_compared=sum(r.hashes_equal is not None for r in rounds),
        model=str(run.model) if run.model else None,
        sample=next((i.sample for i in islands if i.sample is not None), None),
        warnings=tuple(find_warnings(run, islands, missing, mismatched, is_live)),
        islands=islands,
        rounds=rounds,
    )


def perplexity(loss: float | None) -> float | None:
    """Returns exp(loss); infinity on overflow."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _rounds(run: Run) -> tuple[RoundReport, ...]:
    by_round: dict[int, dict[int, Sync]] = {}
    for island in run.islands:
        for sync in island.of(Sync):
            by_round.setdefault(sync.round, {})[island.island] = sync
    return tuple(_round(number, syncs) for number, syncs in sorted(by_round.items()))


def _round(number: int, by_island: dict[int, Sync]) -> RoundReport:
    syncs = list(by_island.values())
    hashes = [sync.outer_hash for sync in syncs if sync.outer_hash is not None]
    return RoundReport(
        round=number,
        step=max(sync.step for sync in syncs),
        islands=tuple(by_island),
        seconds=TimeSplit(
            computing=_mean(sync.seconds_computing for sync in syncs),
            waiting=_mean(sync.stalled_waiting for sync in syncs),
            exchanging=_mean(sync.stalled_exchanging for sync in syncs),
            applying=_mean(sync.seconds_applying for sync in syncs),
        ),
        bytes_sent=total(sync.bytes_sent for sync in syncs),
        bytes_received=total(sync.bytes_received for sync in syncs),
        pseudo_gradient_norm=_mean(sync.pseudo_gradient_norm for sync in syncs),
        cosine=_mean(sync.cosine for sync in syncs),
        outer_hash=hashes[0] if hashes else None,
        hashes_equal=len(set(hashes)) == 1 if len(hashes) > 1 else None,
    )


def _named_losses(run: Run) -> dict[str, float]:
    losses: dict[str, list[tuple[int, float]]] = {}
    for record in (record for island in run.islands for record in island.evaluations()):
        if record.named_loss is not None:
            losses.setdefault(record.name, []).append((record.step, record.named_loss))
    return {name: means(points)[-1][1] for name, points in losses.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean; None if a value is unknown or there are none."""
    values = list(values)
    whole = total(values)
    return None if whole is None else whole / len(values)


def find_warnings(
    run: Run,
    islands: Sequence[IslandReport],
    missing: Sequence[int],
    mismatched: Sequence[int],
    is_live: bool,
) -> Iterator[str]:
    """Yields one sentence per finding, the most severe first."""
    if mismatched:
        yield (
            f"the islands' outer parameters DIFFER after {name_all(mismatched, 'round')}: they no longer train one "
            "model; resume from a checkpoint before that round"
        )
    for record, island in zip(run.islands, islands, strict=True):
        yield from _not_outer(record, island)
    yield from _missing(missing, islands)
    for record, island in zip(run.islands, islands, strict=True):
        yield from _incomplete(record, island, is_live and _goes_on(record))
    for record in run.islands:
        yield from (f"node {record.island}, step {event.step}: {event.news}" for event in record.of(Neighbour))
    yield from _refused(run)
    if any(island.comes_and_goes for island in islands):
        yield from _absences(run, islands)
    else:
        yield from _missing_rounds(run)
        yield from _left_out(run)


def _not_outer(record: IslandRun, island: IslandReport) -> Iterator[str]:
    if island.on_boundary is False:
        steps, every = island.steps_since_sync or 0, record.start.sync_every if record.start else None
        past = f"{counted(steps, 'step')} after" if steps else "without"
        was_missed = every is not None and steps >= every
        remedy = "rounds were missed: start it again" if was_missed else "let max_steps be a multiple of sync_every"
        yield (
            f"{island.noun} {island.island} ended {past} its last synchronisation: its final weights are its "
            "own, not the outer model's" + ("" if _stopped_early(island) else f"; {remedy}")
        )
    if island.inner_eval_loss is not None and island.has_outer_loop:
        common = "the outer model's" if island.noun == "island" else "the mean of all nodes"
        yield (
            f"{island.noun} {island.island}'s last evaluation (step {island.inner_eval_step}, loss "
            f"{island.inner_eval_loss:.4f}) was of its own weights, not {common}"
        )
    for name, loss in (("training", island.train_loss), ("evaluation", island.eval_loss)):
        if loss is not None and not math.isfinite(loss):
            yield f"{island.noun} {island.island}'s last {name} loss is not finite ({loss}): the training diverged"


def _missing(missing: Sequence[int], islands: Sequence[IslandReport]) -> Iterator[str]:
    if missing:
        noun = next((island.noun for island in islands), "island")
        yield (
            f"no record of {name_all(missing, noun)} here: all figures cover "
            f"{name_all([island.island for island in islands], noun)} alone; copy the missing island-N "
            f"{plural('folder', len(missing))} into the run folder for the whole"
        )


def _incomplete(record: IslandRun, island: IslandReport, may_be_unfinished: bool) -> Iterator[str]:
    name = f"{island.noun} {island.island}"
    if not record.sections:
        if not may_be_unfinished:
            nothing = f"{name} has recorded nothing in {record.record}"
            yield f"{nothing}: it has not begun to train, or failed before"
    elif record.start is None:
        yield f"{name}'s record holds no start: its traffic cannot be compared with per-step synchronisation"
    elif record.sections[0].start is not None and record.sections[0].start.step:
        yield f"{name}'s record begins at step {record.sections[0].start.step}: its figures cover what follows alone"
    if record.sections and not island.ended and not may_be_unfinished:
        yield f"{name}'s record has no end{_state(record)}: its figures go to step {island.steps}"
    if _stopped_early(island):
        yield f"{name} stopped at step {island.steps} of {island.max_steps}; start the run again to let it go on"
    if record.num_bad_lines:
        yield f"{name}'s record has {counted(record.num_bad_lines, 'unreadable line')}, left out"


def _refused(run: Run) -> Iterator[str]:
    """Yields one sentence for each pair of islands, with the last reason."""
    for island in run.islands:
        events = island.of(Refused)
        for name in sorted({name for event in events for name in event.islands}):
            named = [event for event in events if name in event.islands]
            steps = name_all([event.step for event in named], "step")
            yield (
                f"island {island.island} refused what came in the name of island {name}, at {steps}: "
                f"{named[-1].islands[name]}"
            )


def _stopped_early(island: IslandReport) -> bool:
    is_short = island.steps is not None and (island.max_steps or 0) > island.steps
    return island.ended and is_short and not island.run_is_over


def _goes_on(record: IslandRun) -> bool:
    return record.progress.get("state", AT_THE_END[0]) not in AT_THE_END


def _state(record: IslandRun) -> str:
    state, message = record.progress.get("state"), record.progress.get("message")
    if state == "failed":
        return f" (it failed: {message})" if message else " (it failed)"
    return f" (last seen {state}; it still runs or was killed)" if isinstance(state, str) else ""


def _absences(run: Run, islands: Sequence[IslandReport]) -> Iterator[str]:
    parts = {sync.round: set(sync.participants or ()) for island in run.islands for sync in island.of(Sync)}
    for record, island in zip(run.islands, islands, strict=True):
        last = max([sync.round for sync in record.of(Sync)] + [end.rounds or 0 for end in record.of(End)], default=0)
        absent = [number for number, others in sorted(parts.items()) if others and island.island not in others]
        if missed := [number for number in absent if number <= last]:
            yield (
                f"island {island.island} had no part in {name_all(missed, 'round')}: it was away or late, or its "
                "pseudo-gradient was left out; it has caught up"
            )
        if island.ended and (later := [number for number in absent if number > last]):
            yield (
                f"island {island.island} ended before {name_all(later, 'round')}, which others took: start it again, "
                "and it takes the run's final weights"
            )


def _missing_rounds(run: Run) -> Iterator[str]:
    held = {island.island: {sync.round for sync in island.of(Sync)} for island in run.islands if island.sections}
    for island in run.islands:
        others = (sync for other in run.islands if other is not island for sync in other.of(Sync))
        expected = {s.round for s in others if s.participants is None or island.island in s.participants}
        lacking = expected - held.get(island.island, expected)
        if lacking:
            yield f"island {island.island}'s record lacks {name_all(lacking, 'round')}, which other islands have"


def _left_out(run: Run) -> Iterator[str]:
    for island in run.islands:
        syncs = (sync for sync in island.of(Sync) if sync.participants is not None)
        rounds = [sync.round for sync in syncs if island.island not in (sync.participants or ())]
        if rounds:
            yield (
                f"island {island.island}'s pseudo-gradient was left out of {name_all(rounds, 'round')}: it was not "
                "finite, or had no examples behind it"
            )
