"""The report as text, for the console and the page, of islands with rounds or of nodes on a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_diloco.report.island import IslandReport, TimeSplit
from hf_diloco.report.summary import Report, RoundReport
from hf_diloco.utils import text

if TYPE_CHECKING:
    from rich.console import Console

ISLAND_COLUMNS = ("island", "step", "train loss", "eval loss", "tokens/s", "sent", "compute", "wait", "exchange")
NODE_COLUMNS = ("node", "step", "train loss", "eval loss", "images/s", "sent", "compute", "exchange")
ROUND_COLUMNS = (
    *("round", "step", "computing", "waiting", "exchanging", "applying"),
    *("sent", "norm", "cosine", "outer hash"),
)


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints the run's figures, a row per island, and the warnings; to standard output by default."""
    from hf_diloco.utils.tables import empty_table, fact_table, output, plain, print_figures, warning

    heading = plain(title(report))
    heading.stylize("bold")
    sample = [("it writes", " ".join(report.sample.split()))] if report.sample else []
    islands = empty_table(name.replace(" ", "\n") for name in island_columns(report))
    for island in report.islands:
        islands.add_row(*map(plain, island_row(report, island)))
    console = console or output()
    console.print(heading, end="\n\n")
    console.print(fact_table(overview(report) + sample))
    console.print()
    print_figures(console, islands)
    console.print()
    for message in report.warnings:
        console.print(warning(message))


def title(report: Report) -> str:
    """Returns one line with the run's name, its size, and which islands the report covers."""
    done = ""
    if report.method is not None:
        done = f", {text.count(report.steps)} steps"
    elif report.num_islands is not None:
        done = f", {text.counted(report.num_rounds, 'round')}"
    covers = f" (record of {text.name_all(report.covers, report.noun)})" if report.missing_islands else ""
    return f"{report.name}: {text.counted(report.size, report.noun)}{done}{covers}"


def subtitle(report: Report) -> str:
    """Returns one line about the model and the method; unknown parts are left out."""
    layouts = sorted({island.shards for island in report.islands if island.shards})
    known = [
        (report.size, text.counted(report.size, report.noun)),
        (report.missing_islands or None, f"records of {text.name_all(report.covers, report.noun)} only"),
        (report.num_parameters, f"{text.short_count(report.num_parameters)} parameters"),
        (layouts or None, " / ".join(layouts)),
        (report.steps, f"{text.count(report.steps)} {'inner ' if report.method is None else ''}steps"),
        (report.outer_method, f"method {report.outer_method}"),
        (report.outer_lr, f"outer lr {text.number(report.outer_lr)}"),
        (report.outer_momentum, f"momentum {text.number(report.outer_momentum)}"),
        (report.method, f"{report.method} on {report.topology}"),
    ]
    return " · ".join(part for value, part in known if value is not None)


def overview(report: Report) -> list[tuple[str, str]]:
    """Returns the run's figures, one per row."""
    step, distance = text.count(report.eval_step), report.consensus_distance
    if report.method is not None:
        consensus = text.MISSING if distance is None else f"relative distance from the mean: {text.number(distance)}"
        of_what = "" if report.eval_step is None else f"  ({report.evaluated}, step {step})"
        accuracy, loss = report.eval_accuracy, text.loss(report.eval_loss)
        rows = [
            *([] if accuracy is None else [("accuracy", f"{text.share(accuracy)}{of_what}")]),
            *_losses(report, loss if accuracy is not None else f"{loss}{of_what}"),
            ("images/s", text.rate(report.images_per_second)),
            ("bytes exchanged", _traffic(report, "steps")),
            ("data parallel", _per_step(report)),
            ("time", _time(report)),
            ("method", _method(report)),
            ("consensus", consensus),
        ]
    else:
        every, payload = _every(report), f", {report.payload} payload" if report.payload else ""
        rows = [
            *_losses(report, _evaluation(report)),
            ("perplexity", text.perplexity(report.perplexity)),
            ("tokens/s", _throughput(report)),
            ("bytes exchanged", _traffic(report, "rounds")),
            ("per-step sync", _per_step(report)),
            ("time", _time(report)),
            ("rounds", f"{report.num_rounds:,}{f' ({every})' if every else ''}{payload}"),
            ("outer parameters", _hashes(report)),
        ]
    return [*rows, ("model", report.model)] if report.model else rows


def _losses(report: Report, loss: str) -> list[tuple[str, str]]:
    """Returns the evaluation loss, or with several data sets the loss on each."""
    named = [(f"evaluation loss, {name}", text.loss(value)) for name, value in report.named_losses.items()]
    return named if named and report.eval_loss is None else [("evaluation loss", loss), *named]


def _evaluation(report: Report) -> str:
    if report.eval_loss is None:
        alone = [island for island in report.islands if not island.has_outer_loop]
        if alone and alone[0].inner_eval_loss is not None:
            return f"{text.loss(alone[0].inner_eval_loss)}  (step {text.count(alone[0].inner_eval_step)})"
        return f"{text.MISSING}  (no eval_loss of the outer weights recorded)"
    same = [island for island in report.islands if island.eval_step == report.eval_step]
    mean = f", mean of {len(same)} islands" if len({island.eval_loss for island in same}) > 1 else ""
    return f"{text.loss(report.eval_loss)}  (outer weights, step {text.count(report.eval_step)}{mean})"


def _throughput(report: Report) -> str:
    if report.tokens_per_second is None:
        return text.MISSING
    tokens = f", {text.short_count(report.num_tokens)} tokens" if report.num_tokens is not None else ""
    return f"{text.rate(report.tokens_per_second)}  ({text.counted(len(report.covers), 'island')}{tokens})"


def _traffic(report: Report, repeated_in: str) -> str:
    if report.bytes_sent is None:
        return text.MISSING
    again = f" (and {text.size(report.bytes_repeated)} in {repeated_in} done again)" if report.bytes_repeated else ""
    return f"{text.size(report.bytes_sent)} sent, {text.size(report.bytes_received)} received{again}"


def _per_step(report: Report) -> str:
    """Returns what data parallelism would have sent. Gossip nodes may send more, which is not a defect."""
    would, sent = report.bytes_per_step_sync, report.bytes_sent
    if would is None:
        return text.MISSING
    less = more = ""
    if report.method is None:
        less = f": {text.ratio(report.traffic_ratio)} as much" if report.traffic_ratio is not None else ""
    elif would and sent is not None and sent > would:
        more = (
            f". Nodes sent {text.ratio(sent / would)} as much: each sends its vector to every neighbour, and waits "
            "for these alone. A graph with fewer neighbours, or a payload of fewer bits, sends less"
        )
    return f"would have sent {text.size(would)}{less}  (fp32 gradients, ring all-reduce){more}"


def _time(report: Report) -> str:
    if report.shares is None:
        return text.MISSING
    parts = report.shares.parts()
    main = ("computing", "exchanging") if report.method else ("computing", "waiting", "exchanging")
    return ", ".join(f"{name} {text.share(part)}" for name, part in parts.items() if name in main or part >= 0.0005)


def _every(report: Report) -> str:
    if not report.sync_every:
        return ""
    steps = text.counted(report.sync_every, "step")
    return f"every {steps}" if report.num_fragments == 1 else f"{report.num_fragments} fragments, each every {steps}"


def _hashes(report: Report) -> str:
    if report.mismatched_rounds:
        return f"DIFFER between islands after {text.name_all(report.mismatched_rounds, 'round')}"
    if not report.num_rounds_compared:
        return "not compared: no two islands' records of a round are here" if report.num_rounds else text.MISSING
    num = report.num_rounds_compared
    return f"equal on all islands after {'the' if num == 1 else f'all {num:,}'} {text.plural('round', num)}"


def _method(report: Report) -> str:
    """Returns the gossip method and its graph, the payload unless it is fp32, and the outer steps if any."""
    payload = "" if report.payload in (None, "fp32") else f", {report.payload} payload"
    outer = ""
    if report.outer_method is not None:
        lr, momentum = text.number(report.outer_lr), text.number(report.outer_momentum)
        outer = f", {report.outer_method} every {text.count(report.sync_every)} steps (lr {lr}, momentum {momentum})"
    return f"{report.method} on {report.topology}{payload}{outer}"


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page."""

    name: str
    value: str
    note: str


def tiles(report: Report) -> list[Tile]:
    """Returns the most important figures, for the top of the page."""
    shares = report.shares or TimeSplit()
    loss, step = text.loss(report.eval_loss), text.count(report.eval_step)
    sent, would = text.size(report.bytes_sent), text.size(report.bytes_per_step_sync)
    if report.method is not None:
        return [
            Tile("Accuracy", text.share(report.eval_accuracy), f"{report.evaluated}, step {step}"),
            Tile("Evaluation loss", loss, report.evaluated),
            Tile("Sent", sent, f"data parallel: {would}"),
            Tile("Images/s", text.rate(report.images_per_second), "all nodes"),
            Tile("Exchanging", text.share(shares.exchanging), "of the time"),
            Tile("Consensus", text.number(report.consensus_distance), "nodes' distance from their mean"),
        ]
    tokens = "not counted" if report.num_tokens is None else f"{text.short_count(report.num_tokens)} tokens"
    return [
        Tile("Evaluation loss", loss, f"outer weights, step {step}"),
        Tile("Perplexity", text.perplexity(report.perplexity), "of the outer weights"),
        Tile("Less traffic", text.ratio(report.traffic_ratio), f"{sent}; per-step sync: {would}"),
        Tile("Tokens/s", text.rate(report.tokens_per_second), tokens),
        Tile("Waiting", text.share(shares.waiting), f"exchanging {text.share(shares.exchanging)}"),
        Tile("Rounds", f"{report.num_rounds:,}", _every(report)),
    ]


def island_columns(report: Report) -> tuple[str, ...]:
    """Returns the column names of `island_row`."""
    return ISLAND_COLUMNS if report.method is None else NODE_COLUMNS


def island_row(report: Report, island: IslandReport) -> tuple[str, ...]:
    """Returns one island's figures, in the order of `island_columns`."""
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


@dataclass(frozen=True)
class RoundRow:
    """One round's cells in the order of `ROUND_COLUMNS`, without the hash; `verdict` is good, bad, or empty."""

    cells: tuple[str, ...]
    hash: str
    verdict: str


def round_row(entry: RoundReport) -> RoundRow:
    """Returns one round's figures."""
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
