"""The page's figures of a run whose nodes average with their neighbours: accuracy, traffic, agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_diloco.report.figures import (
    MAX_POINTS,
    LegendEntry,
    Plot,
    Points,
    columns,
    cumulative,
    evaluations,
    loss_plot,
    thinned,
)
from hf_diloco.report.read import Run
from hf_diloco.report.records import Mix
from hf_diloco.report.summary import Report
from hf_diloco.report.svg import colour, css_colour, draw
from hf_diloco.utils import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plots(run: Run, report: Report) -> list[Plot]:
    """All figures, in the page's order."""
    return [loss_plot(run, report), accuracy_plot(run), consensus_plot(run), traffic_plot(run, report)]


def accuracy_plot(run: Run) -> Plot:
    """Accuracy of the mean of all nodes."""
    points = evaluations(run, "outer", "eval_accuracy")
    if not points:
        return Plot("Accuracy", "No accuracy was recorded.", None)
    return Plot("Accuracy", "Of the mean of all nodes.", draw("accuracy", _line(points, "accuracy")))


def consensus_plot(run: Run) -> Plot:
    """How far the nodes are from their mean."""
    points = [(step, value) for step, value in evaluations(run, "outer", "consensus_distance") if value > 0]
    if not points:
        return Plot("Consensus", "The nodes' distance from their mean was not recorded.", None)
    caption = "The nodes' distance from their mean, relative to its length. Logarithmic scale."
    return Plot("Consensus", caption, draw("consensus", _line(points, "distance", is_log=True)))


def traffic_plot(run: Run, report: Report) -> Plot:
    """Bytes that all nodes on record have sent so far, beside what data parallelism would have."""
    by_step: dict[int, list[int | None]] = {}
    for island in run.islands:
        for mix in island.of(Mix):
            by_step.setdefault(mix.step, []).append(mix.bytes_sent)
    sums = [(step, None if None in sent else sum(filter(None, sent))) for step, sent in sorted(by_step.items())]
    sent = cumulative(sums)
    per_step, steps = report.bytes_per_step_sync, report.steps
    if not sent or not sent[-1][1]:
        return Plot("Traffic between nodes", "No exchanged bytes were recorded.", None)

    def paint(axes: Axes) -> None:
        if per_step and steps:
            axes.plot([0, steps], [0, per_step], color=colour(1), linestyle="--")
        axes.plot(*columns(thinned([(0.0, 0.0), *sent], MAX_POINTS)), color=colour(0), linewidth=1.8)
        axes.yaxis.set_major_formatter(lambda value, _: text.size(value))
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="step", ylabel="bytes sent, cumulative")

    legend = [LegendEntry(f"sent: {text.size(sent[-1][1])}", css_colour(colour(0)))]
    if per_step:
        legend.append(LegendEntry(f"data parallelism: {text.size(per_step)}", css_colour(colour(1)), "dashed"))
    caption = (
        "Measured payload of all nodes on record. The comparison is a ring all-reduce of fp32 gradients; a node sends "
        "its vector to every neighbour, and waits for these alone."
    )
    return Plot("Traffic between nodes", caption, draw("traffic", paint), tuple(legend))


def _line(points: Points, label: str, is_log: bool = False) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        axes.plot(*columns(points), "-o", color=colour(0), markersize=3, linewidth=1.6)
        if is_log:
            axes.set_yscale("log")
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="step", ylabel=label)

    return paint
