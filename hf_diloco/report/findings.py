"""What a reader of the figures must know: figures that are not of the outer model, and records that are incomplete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hf_diloco.report.read import METRICS, IslandRun, Run
from hf_diloco.report.records import Neighbour, Refused, Sync
from hf_diloco.utils.text import numbers, plural

if TYPE_CHECKING:
    from hf_diloco.report.island import IslandReport
    from hf_diloco.report.summary import RoundReport


def find_warnings(
    run: Run, islands: Sequence[IslandReport], missing: Sequence[int], rounds: Sequence[RoundReport]
) -> Iterator[str]:
    """Yields one sentence a finding, the gravest first."""
    yield from _unequal_hashes(rounds)
    for island in islands:
        yield from _not_outer(island)
    yield from _missing(missing, islands)
    for record, island in zip(run.islands, islands, strict=True):
        yield from _incomplete(record, island)
    yield from _neighbours(run)
    yield from _refused(run)
    if any(island.comes_and_goes for island in islands):
        yield from _absences(run)
    else:
        yield from _missing_rounds(run)
        yield from _left_out(run)


def _unequal_hashes(rounds: Sequence[RoundReport]) -> Iterator[str]:
    wrong = [r.round for r in rounds if r.hashes_equal is False]
    if wrong:
        yield (
            f"the islands' outer parameters DIFFER after {plural('round', len(wrong))} {numbers(wrong)}: they no "
            "longer train one model; resume from a checkpoint before that round"
        )


def _not_outer(island: IslandReport) -> Iterator[str]:
    if island.on_boundary is False:
        past = f", {island.steps_since_sync} steps past its last synchronisation" if island.steps_since_sync else ""
        yield (
            f"{island.noun} {island.island} ended off a synchronisation boundary{past}: its final weights are its "
            "own, not the outer model's"
            + ("" if _stopped_early(island) else "; let max_steps be a multiple of sync_every")
        )
    if island.inner_eval_loss is not None and island.has_outer_loop:
        yield (
            f"{island.noun} {island.island}'s last evaluation (step {island.inner_eval_step}, loss "
            f"{island.inner_eval_loss:.4f}) was of its own weights, not the outer model's"
        )
    for name, loss in (("training", island.train_loss), ("evaluation", island.eval_loss)):
        if loss is not None and not math.isfinite(loss):
            yield f"{island.noun} {island.island}'s last {name} loss is not finite ({loss}): the training diverged"


def _missing(missing: Sequence[int], islands: Sequence[IslandReport]) -> Iterator[str]:
    if missing:
        noun = next((island.noun for island in islands), "island")
        yield (
            f"no record of {plural(noun, len(missing))} {numbers(missing)} here: all figures cover "
            f"{plural(noun, len(islands))} {numbers(i.island for i in islands)} alone; copy the missing island-N "
            f"{plural('folder', len(missing))} into the run folder for the whole"
        )


def _incomplete(record: IslandRun, island: IslandReport) -> Iterator[str]:
    name = f"{island.noun} {island.island}"
    if not record.sections:
        yield f"{name} has recorded nothing in {record.folder / METRICS}: it has not begun to train, or failed before"
    elif record.start is None:
        yield f"{name}'s record holds no start: its traffic cannot be compared with per-step synchronisation"
    elif record.sections[0].start is not None and record.sections[0].start.step:
        yield f"{name}'s record begins at step {record.sections[0].start.step}: its figures cover what follows alone"
    if record.sections and not island.ended:
        yield f"{name}'s record has no end{_state(record)}: its figures go to step {island.steps}"
    if _stopped_early(island):
        yield f"{name} stopped at step {island.steps} of {island.max_steps}; start the run again to let it go on"
    if record.num_bad_lines:
        yield f"{name}'s record has {record.num_bad_lines} unreadable {plural('line', record.num_bad_lines)}, left out"


def _neighbours(run: Run) -> Iterator[str]:
    """Nodes that were lost or came back, as their neighbours saw it."""
    for island in run.islands:
        for event in island.of(Neighbour):
            yield f"node {island.island}, step {event.step}: {event.news}"


def _refused(run: Run) -> Iterator[str]:
    """Whose contributions were refused: one sentence for each two islands, with the last reason."""
    for island in run.islands:
        events = island.of(Refused)
        for name in sorted({name for event in events for name in event.islands}):
            named = [event for event in events if name in event.islands]
            steps = numbers(event.step for event in named)
            yield (
                f"island {island.island} refused what came in the name of island {name}, at "
                f"{plural('step', len(named))} {steps}: {named[-1].islands[name]}"
            )


def _stopped_early(island: IslandReport) -> bool:
    is_short = island.steps is not None and (island.max_steps or 0) > island.steps
    return island.ended and is_short and not island.run_is_over


def _state(record: IslandRun) -> str:
    """What the island last said about itself, for a record without an end."""
    state, message = record.progress.get("state"), record.progress.get("message")
    if state == "failed":
        return f" (it failed: {message})" if message else " (it failed)"
    return f" (last seen {state}; it still runs or was killed)" if isinstance(state, str) else ""


def _absences(run: Run) -> Iterator[str]:
    """Where islands come and go: the rounds that took place without one."""
    parts = {sync.round: set(sync.participants or ()) for island in run.islands for sync in island.of(Sync)}
    for island in run.islands:
        absent = [number for number, islands in sorted(parts.items()) if islands and island.island not in islands]
        if absent:
            yield (
                f"island {island.island} had no part in {plural('round', len(absent))} {numbers(absent)}: it was away "
                "or late, or its pseudo-gradient was left out; it has caught up"
            )


def _missing_rounds(run: Run) -> Iterator[str]:
    held = {island.island: {sync.round for sync in island.of(Sync)} for island in run.islands if island.sections}
    for island in run.islands:
        others = (sync for other in run.islands if other is not island for sync in other.of(Sync))
        expected = {s.round for s in others if s.participants is None or island.island in s.participants}
        lacking = expected - held.get(island.island, expected)
        if lacking:
            yield (
                f"island {island.island}'s record lacks {plural('round', len(lacking))} {numbers(lacking)}, which "
                "other islands have"
            )


def _left_out(run: Run) -> Iterator[str]:
    for island in run.islands:
        syncs = (sync for sync in island.of(Sync) if sync.participants is not None)
        rounds = [sync.round for sync in syncs if island.island not in (sync.participants or ())]
        if rounds:
            yield (
                f"island {island.island}'s pseudo-gradient was left out of {plural('round', len(rounds))} "
                f"{numbers(rounds)}: it was not finite, or had no examples behind it"
            )
