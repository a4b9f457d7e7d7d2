"""The figures of a run, computed from its records. Pure: no file is read, nothing is guessed; unknown stays None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hf_diloco.report.findings import find_warnings
from hf_diloco.report.island import IslandReport, TimeSplit, summarise_island, total
from hf_diloco.report.read import Run
from hf_diloco.report.records import Sync


class RoundReport(BaseModel):
    """One outer round, over the islands whose record of it is here.

    Seconds, norm and cosine are means over those islands, bytes are sums.
    `hashes_equal` is None when fewer than two islands' hashes can be compared.
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


class Report(BaseModel):
    """What a run did; `model_dump_json()` is its JSON form, in which figures that were not measured are null.

    Attributes:
        num_islands: islands in the run; None when no start was recorded.
        covers: the islands whose records the figures come from; sums run over these alone.
        num_fragments: parts of the model that are synchronised in turn, each every `sync_every` steps.
        steps: optimizer steps of the furthest island.
        eval_loss: of the outer weights, mean over the islands that evaluated them at `eval_step`.
        final_weights: what the islands hold at the end: "outer" on a synchronisation boundary, otherwise "inner".
        tokens_per_second: sum over islands, over the whole training time, evaluation and saving included.
        bytes_sent: payload of the rounds that stand, measured, all ranks.
        bytes_repeated: sent in rounds that were done again after a resume; not in `bytes_sent`.
        bytes_per_step_sync: what as many steps of data-parallel training would have sent: steps x 2(M-1)/M x
            num_parameters x 4 bytes for each island (fp32 gradients, ring all-reduce, M islands).
        traffic_ratio: bytes_per_step_sync / bytes_sent.
        mismatched_rounds: rounds after which the islands' outer parameters differed; empty in a sound run.
        num_rounds_compared: rounds of which at least two islands' hashes are here.
        method, topology: of nodes that average with their neighbours; None where islands have rounds.
        eval_accuracy, consensus_distance: as of the islands, at `eval_step`.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    num_islands: int | None
    covers: tuple[int, ...]
    missing_islands: tuple[int, ...]
    num_parameters: int | None
    sync_every: int | None
    num_fragments: int
    payload: str | None
    outer_method: str | None
    outer_lr: float | None
    outer_momentum: float | None
    steps: int | None
    max_steps: int | None
    num_rounds: int
    eval_loss: float | None
    eval_step: int | None
    perplexity: float | None
    final_weights: Literal["outer", "inner"] | None
    num_tokens: int | None
    tokens_per_second: float | None
    bytes_sent: int | None
    bytes_received: int | None
    bytes_repeated: int | None
    bytes_per_step_sync: int | None
    traffic_ratio: float | None
    seconds: TimeSplit | None
    shares: TimeSplit | None
    mismatched_rounds: tuple[int, ...]
    num_rounds_compared: int
    model: str | None
    sample: str | None
    warnings: tuple[str, ...]
    islands: tuple[IslandReport, ...]
    rounds: tuple[RoundReport, ...]
    method: str | None = None
    topology: str | None = None
    eval_accuracy: float | None = None
    consensus_distance: float | None = None
    images_per_second: float | None = None


def summarise(run: Run) -> Report:
    """Computes the figures of a run, over the islands whose records are in its folder."""
    islands = tuple(summarise_island(island) for island in run.islands)
    rounds = _rounds(run)
    start = next((island.start for island in run.islands if island.start), None)
    num_islands = max((i.num_islands for i in islands if i.num_islands is not None), default=None)
    missing = tuple(sorted(set(range(num_islands or 0)) - {island.island for island in islands}))
    eval_step = max((i.eval_step for i in islands if i.eval_step is not None), default=None)
    eval_loss = _mean(i.eval_loss for i in islands if i.eval_step == eval_step)
    bytes_sent = total(i.bytes_sent for i in islands)
    per_step = total(i.bytes_per_step_sync for i in islands)
    seconds = TimeSplit.combined(i.seconds for i in islands)
    return Report(
        name=run.name,
        num_islands=num_islands,
        covers=tuple(island.island for island in islands),
        missing_islands=missing,
        num_parameters=start.num_parameters if start else None,
        sync_every=start.sync_every if start else None,
        num_fragments=(start.num_fragments if start else None) or 1,
        payload=start.payload if start else None,
        outer_method=start.outer_method if start else None,
        outer_lr=start.outer_lr if start else None,
        outer_momentum=start.outer_momentum if start else None,
        steps=max((i.steps for i in islands if i.steps is not None), default=None),
        max_steps=start.max_steps if start else None,
        num_rounds=max((r.round for r in rounds), default=0),
        eval_loss=eval_loss,
        eval_step=eval_step,
        perplexity=perplexity(eval_loss),
        final_weights=_final_weights(islands),
        num_tokens=total(i.num_tokens for i in islands),
        tokens_per_second=total(i.tokens_per_second for i in islands),
        bytes_sent=bytes_sent,
        bytes_received=total(i.bytes_received for i in islands),
        bytes_repeated=total(i.bytes_repeated for i in islands),
        bytes_per_step_sync=per_step,
        traffic_ratio=per_step / bytes_sent if per_step and bytes_sent else None,
        seconds=seconds,
        shares=seconds.shares() if seconds else None,
        mismatched_rounds=tuple(r.round for r in rounds if r.hashes_equal is False),
        num_rounds_compared=sum(r.hashes_equal is not None for r in rounds),
        model=str(run.model) if run.model else None,
        sample=next((i.sample for i in islands if i.sample is not None), None),
        warnings=tuple(find_warnings(run, islands, missing, rounds)),
        islands=islands,
        rounds=rounds,
        method=start.method if start else None,
        topology=start.topology if start else None,
        eval_accuracy=_mean(i.eval_accuracy for i in islands if i.eval_step == eval_step),
        consensus_distance=_mean(i.consensus_distance for i in islands if i.eval_step == eval_step),
        images_per_second=total(i.images_per_second for i in islands),
    )


def perplexity(loss: float | None) -> float | None:
    """exp(loss); infinite where that overflows."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _final_weights(islands: Sequence[IslandReport]) -> Literal["outer", "inner"] | None:
    states = {island.on_boundary for island in islands}
    if False in states:
        return "inner"
    return "outer" if states == {True} else None


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


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean, unless a value is missing."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
