"""The tables' rows in words, for the console and for the page alike."""

from __future__ import annotations

from dataclasses import dataclass

from hf_diloco.report import nodes
from hf_diloco.report.island import IslandReport, TimeSplit
from hf_diloco.report.summary import Report, RoundReport
from hf_diloco.utils import text

ISLAND_COLUMNS = (
    "island",
    "step",
    "train loss",
    "eval loss",
    "tokens/s",
    "sent",
    "compute",
    "wait",
    "exchange",
)
ROUND_COLUMNS = (
    "round",
    "step",
    "computing",
    "waiting",
    "exchanging",
    "applying",
    "sent",
    "norm",
    "cosine",
    "outer hash",
)


def island_columns(report: Report) -> tuple[str, ...]:
    """What `island_row` holds."""
    return ISLAND_COLUMNS if report.method is None else nodes.COLUMNS


def title(report: Report) -> str:
    """One line that says what the report is of, and what it covers."""
    if report.method is not None:
        return nodes.title(report)
    if report.num_islands is None:
        return f"{report.name}: {len(report.covers)} {text.plural('island', len(report.covers))}"
    islands = f"{report.num_islands} {text.plural('island', report.num_islands)}"
    rounds = f"{report.num_rounds:,} {text.plural('round', report.num_rounds)}"
    covers = f" (record of {text.plural('island', len(report.covers))} {text.numbers(report.covers)})"
    return f"{report.name}: {islands}, {rounds}" + (covers if report.missing_islands else "")


def overview(report: Report) -> list[tuple[str, str]]:
    """The run's figures, one a row."""
    if report.method is not None:
        return nodes.overview(report)
    rows = [
        ("evaluation loss", _evaluation(report)),
        ("perplexity", text.perplexity(report.perplexity)),
        ("tokens/s", _throughput(report)),
        ("bytes exchanged", nodes.traffic(report, "rounds")),
        ("per-step sync", _per_step(report)),
        ("time", _time(report.shares)),
        ("rounds", _rounds(report)),
        ("outer parameters", _hashes(report)),
    ]
    if report.model:
        rows.append(("model", report.model))
    return rows


def island_row(report: Report, island: IslandReport) -> tuple[str, ...]:
    """One island's figures, in the order of `island_columns`."""
    shares = island.shares or TimeSplit()
    is_node = report.method is not None
    waiting = () if is_node else (text.share(shares.waiting),)
    return (
        str(island.island),
        text.count(island.steps),
        text.loss(island.train_loss),
        text.loss(island.eval_loss),
        text.rate(island.images_per_second if is_node else island.tokens_per_second),
        text.size(island.bytes_sent),
        text.share(shares.computing),
        *waiting,
        text.share(shares.exchanging),
    )


def _evaluation(report: Report) -> str:
    if report.eval_loss is None:
        alone = [island for island in report.islands if not island.has_outer_loop]
        if alone and alone[0].inner_eval_loss is not None:
            return f"{text.loss(alone[0].inner_eval_loss)}  (step {text.count(alone[0].inner_eval_step)})"
        return f"{text.MISSING}  (none of the outer weights recorded)"
    same = [island for island in report.islands if island.eval_step == report.eval_step]
    mean = f", mean of {len(same)} islands" if len({island.eval_loss for island in same}) > 1 else ""
    return f"{text.loss(report.eval_loss)}  (outer weights, step {text.count(report.eval_step)}{mean})"


def _throughput(report: Report) -> str:
    if report.tokens_per_second is None:
        return text.MISSING
    num = len(report.covers)
    tokens = f", {text.short_count(report.num_tokens)} tokens" if report.num_tokens is not None else ""
    return f"{text.rate(report.tokens_per_second)}  ({num} {text.plural('island', num)}{tokens})"


def _per_step(report: Report) -> str:
    if report.bytes_per_step_sync is None:
        return text.MISSING
    less = f": {text.ratio(report.traffic_ratio)} as much" if report.traffic_ratio is not None else ""
    return f"would have sent {text.size(report.bytes_per_step_sync)}{less}  (fp32 gradients, ring all-reduce)"


def _time(shares: TimeSplit | None) -> str:
    if shares is None:
        return text.MISSING
    known = {"computing", "waiting", "exchanging"} | {n for n, v in shares.parts().items() if v >= 0.0005}
    return ", ".join(f"{name} {text.share(part)}" for name, part in shares.parts().items() if name in known)


def _rounds(report: Report) -> str:
    payload = f", {report.payload} payload" if report.payload else ""
    every = _every(report)
    return f"{report.num_rounds:,}{f' ({every})' if every else ''}{payload}"


def _every(report: Report) -> str:
    """How often there is a round, in inner steps."""
    if not report.sync_every:
        return ""
    steps = f"{report.sync_every:,} {text.plural('step', report.sync_every)}"
    return f"every {steps}" if report.num_fragments == 1 else f"{report.num_fragments} fragments, each every {steps}"


def _hashes(report: Report) -> str:
    if report.mismatched_rounds:
        bad = report.mismatched_rounds
        return f"DIFFER between islands after {text.plural('round', len(bad))} {text.numbers(bad)}"
    if not report.num_rounds_compared:
        return "not compared: no two islands' records of a round are here" if report.num_rounds else text.MISSING
    num = report.num_rounds_compared
    return f"equal on all islands after {'the' if num == 1 else f'all {num:,}'} {text.plural('round', num)}"


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top of the page."""

    name: str
    value: str
    note: str


def tiles(report: Report) -> list[Tile]:
    """The figures that a reader looks for first."""
    if report.method is not None:
        return [Tile(*tile) for tile in nodes.tiles(report)]
    shares = report.shares or TimeSplit()
    sent, would = text.size(report.bytes_sent), text.size(report.bytes_per_step_sync)
    return [
        Tile("Evaluation loss", text.loss(report.eval_loss), f"outer weights, step {text.count(report.eval_step)}"),
        Tile("Perplexity", text.perplexity(report.perplexity), "of the outer weights"),
        Tile("Less traffic", text.ratio(report.traffic_ratio), f"{sent}; per-step sync: {would}"),
        Tile("Tokens/s", text.rate(report.tokens_per_second), f"{text.short_count(report.num_tokens)} tokens"),
        Tile("Waiting", text.share(shares.waiting), f"exchanging {text.share(shares.exchanging)}"),
        Tile("Rounds", f"{report.num_rounds:,}", _every(report)),
    ]


def subtitle(report: Report) -> str:
    """What was trained, and how, in one line; what is unknown is left out."""
    noun = "island" if report.method is None else "node"
    num = report.num_islands if report.num_islands is not None else len(report.covers)
    covers = f"records of {text.plural(noun, len(report.covers))} {text.numbers(report.covers)} only"
    layouts = sorted({island.shards for island in report.islands if island.shards})
    known = [
        (num, f"{num} {text.plural(noun, num)}"),
        (report.missing_islands or None, covers),
        (report.num_parameters, f"{text.short_count(report.num_parameters)} parameters"),
        (layouts or None, " / ".join(layouts)),
        (report.steps, f"{text.count(report.steps)} {'inner ' if report.method is None else ''}steps"),
        (report.outer_method, f"method {report.outer_method}"),
        (report.outer_lr, f"outer lr {text.number(report.outer_lr)}"),
        (report.outer_momentum, f"momentum {text.number(report.outer_momentum)}"),
        (report.method, f"{report.method} on {report.topology}"),
    ]
    return " · ".join(part for value, part in known if value is not None)


@dataclass(frozen=True)
class RoundRow:
    """One round's cells in the order of `ROUND_COLUMNS`, the hash apart; `verdict` is good, bad, or empty."""

    cells: tuple[str, ...]
    hash: str
    verdict: str


def round_row(entry: RoundReport) -> RoundRow:
    """One round's figures."""
    parts = entry.seconds
    times = (parts.computing, parts.waiting, parts.exchanging, parts.applying)
    cells = (
        str(entry.round),
        text.count(entry.step),
        *(text.seconds(part) for part in times),
        text.size(entry.bytes_sent),
        text.number(entry.pseudo_gradient_norm),
        text.number(entry.cosine),
    )
    verdict = {True: "good", False: "bad", None: ""}[entry.hashes_equal]
    shown = "islands differ" if entry.hashes_equal is False else (entry.outer_hash or text.MISSING)[:12]
    return RoundRow(cells, shown, verdict)
