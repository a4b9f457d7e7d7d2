"""The rows of a run whose nodes average with their neighbours in every step, in words."""

from __future__ import annotations

from hf_diloco.report.island import TimeSplit
from hf_diloco.report.summary import Report
from hf_diloco.utils import text

COLUMNS = ("node", "step", "train loss", "eval loss", "images/s", "sent", "compute", "exchange")


def title(report: Report) -> str:
    """One line that says what the report is of, and what it covers."""
    num = report.num_islands or len(report.covers)
    covers = f" (record of {text.plural('node', len(report.covers))} {text.numbers(report.covers)})"
    steps = f"{text.count(report.steps)} steps"
    return f"{report.name}: {num} {text.plural('node', num)}, {steps}" + (covers if report.missing_islands else "")


def overview(report: Report) -> list[tuple[str, str]]:
    """The run's figures, one a row."""
    rows = [
        ("accuracy", f"{text.share(report.eval_accuracy)}  (mean of all nodes, step {text.count(report.eval_step)})"),
        ("evaluation loss", text.loss(report.eval_loss)),
        ("images/s", text.rate(report.images_per_second)),
        ("bytes exchanged", traffic(report, "steps")),
        ("data parallel", _data_parallel(report)),
        ("time", _time(report.shares)),
        ("method", f"{report.method} on {report.topology}{_payload(report)}{_slow_momentum(report)}"),
        ("consensus", _consensus(report)),
    ]
    return [*rows, ("model", report.model)] if report.model else rows


def tiles(report: Report) -> list[tuple[str, str, str]]:
    """The figures that a reader looks for first: name, value, note."""
    shares = report.shares or TimeSplit()
    return [
        ("Accuracy", text.share(report.eval_accuracy), f"mean of all nodes, step {text.count(report.eval_step)}"),
        ("Evaluation loss", text.loss(report.eval_loss), "of the mean of all nodes"),
        ("Sent", text.size(report.bytes_sent), f"data parallel: {text.size(report.bytes_per_step_sync)}"),
        ("Images/s", text.rate(report.images_per_second), "all nodes"),
        ("Exchanging", text.share(shares.exchanging), "of the time"),
        ("Consensus", text.number(report.consensus_distance), "nodes' distance from their mean"),
    ]


def traffic(report: Report, repeated_in: str) -> str:
    """What was sent and received, and what a resume threw away."""
    if report.bytes_sent is None:
        return text.MISSING
    again = f" (and {text.size(report.bytes_repeated)} in {repeated_in} done again)" if report.bytes_repeated else ""
    return f"{text.size(report.bytes_sent)} sent, {text.size(report.bytes_received)} received{again}"


def _data_parallel(report: Report) -> str:
    if report.bytes_per_step_sync is None:
        return text.MISSING
    return f"would have sent {text.size(report.bytes_per_step_sync)}  (fp32 gradients, ring all-reduce){_why(report)}"


def _why(report: Report) -> str:
    """Where nodes have sent more than data parallelism would have, which is no defect."""
    would = report.bytes_per_step_sync
    if not would or report.bytes_sent is None or report.bytes_sent <= would:
        return ""
    return (
        f". Nodes sent {text.ratio(report.bytes_sent / would)} as much: each sends its vector to every neighbour, and "
        "waits for these alone. A graph with fewer neighbours, or a payload of fewer bits, sends less"
    )


def _payload(report: Report) -> str:
    """Unless vectors travel as they are."""
    return "" if report.payload in (None, "fp32") else f", {report.payload} payload"


def _slow_momentum(report: Report) -> str:
    """Where outer steps follow the method's."""
    if report.outer_method is None:
        return ""
    lr, momentum = text.number(report.outer_lr), text.number(report.outer_momentum)
    return f", {report.outer_method} every {text.count(report.sync_every)} steps (lr {lr}, momentum {momentum})"


def _time(shares: TimeSplit | None) -> str:
    if shares is None:
        return text.MISSING
    return f"computing {text.share(shares.computing)}, exchanging {text.share(shares.exchanging)}"


def _consensus(report: Report) -> str:
    if report.consensus_distance is None:
        return text.MISSING
    return f"relative distance from the mean: {text.number(report.consensus_distance)}"
