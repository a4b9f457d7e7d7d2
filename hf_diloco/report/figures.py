"""The page's figures: loss, traffic, time, and agreement of the islands.

Matplotlib draws them as inline SVG, whose colours follow the page's light or dark theme: figures are drawn in unique
placeholder colours, each of which is replaced by a CSS variable of the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_diloco.report.island import means, total
from hf_diloco.report.read import Run
from hf_diloco.report.records import Mix, Train
from hf_diloco.report.summary import Report
from hf_diloco.utils import text
from hf_diloco.utils.extras import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 800  # points of a line; if there are more, neighbours are averaged
MAX_BARS = 100  # bars of a chart, likewise
MAX_ROUND_LINES = 60
LARGEST = 1e18  # larger numbers are no valid count, rate or loss

SIZE = (5.2, 3.3)  # inches: small, so that the text stays readable on a phone
NUM_COLOURS = 8

INK, MUTED, GRID = "#010101", "#010102", "#010103"
_PLACEHOLDERS = {INK: "ink", MUTED: "muted", GRID: "grid"} | {f"#0201{i:02x}": f"c{i}" for i in range(NUM_COLOURS)}

_SETTINGS: Any = {
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],  # comes with Matplotlib; replaced by the page's font
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 9,
}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class LegendEntry:
    """One line of a figure's legend; `mark` is the CSS class of its swatch: line, dashed, dot, ring or box."""

    label: str
    placeholder: str
    mark: str = "line"

    @property
    def colour(self) -> str:
        return f"var(--{_PLACEHOLDERS[self.placeholder]})"


@dataclass(frozen=True)
class Plot:
    """A figure of the page. `svg` is None if there is nothing to draw; `caption` then says what was not recorded."""

    title: str
    caption: str
    svg: str | None
    legend: tuple[LegendEntry, ...] = ()


def plots(run: Run, report: Report) -> list[Plot]:
    """Returns all figures in the page's order, for a run with rounds or with gossip nodes."""
    if report.method is not None:
        accuracies = evaluation_points(run, "eval_accuracy")
        whose, nothing = f"{report.evaluated.capitalize()}.", "No accuracy was recorded."
        accuracy = _line("Accuracy", accuracies, "accuracy", whose, nothing)
        return [loss_plot(run, report), accuracy, _consensus_plot(run), node_traffic_plot(run, report)]
    return [loss_plot(run, report), traffic_plot(report), time_plot(report), agreement_plot(report)]


def loss_plot(run: Run, report: Report) -> Plot:
    """Plots the training loss of each island, the evaluation loss of the outer weights, and the ends of rounds."""
    title = "Loss"
    losses = {island.island: means((r.step, r.loss) for r in island.of(Train)) for island in run.islands}
    train = {island: points for island, points in losses.items() if points}
    outer, inner = evaluation_points(run), evaluation_points(run, wanted=False)
    if not train and not outer and not inner:
        return Plot(title, "No loss was recorded.", None)

    def paint(axes: Axes) -> None:
        if len(report.rounds) <= MAX_ROUND_LINES:
            for entry in report.rounds:
                axes.axvline(entry.step, color=MUTED, linewidth=0.5, alpha=0.35)
        for number, points in train.items():
            axes.plot(*columns(thinned(points, MAX_POINTS)), color=colour(number), linewidth=1.1, alpha=0.85)
        if inner:
            axes.plot(*columns(inner), "o", color=INK, markersize=3.5, markerfacecolor="none")
        if outer:
            axes.plot(*columns(outer), "-o", color=INK, markersize=3.5, linewidth=1.6)
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="inner step", ylabel="loss (nats)" if report.method else "loss (nats per token)")

    weights = report.evaluated if report.method else "outer weights"
    legend = [LegendEntry(f"training, {report.noun} {number}", colour(number)) for number in train]
    if len(train) > NUM_COLOURS:
        legend = [LegendEntry(f"training, each of {len(train)} {report.noun}s", colour(next(iter(train))))]
    legend += [LegendEntry(f"evaluation, {weights}", INK, "dot")] if outer else []
    legend += [LegendEntry("evaluation, inner weights", INK, "ring")] if inner else []
    rounds = "Vertical lines mark the end of each round." if 0 < len(report.rounds) <= MAX_ROUND_LINES else ""
    longest = max((len(points) for points in train.values()), default=0)
    group = -(-longest // MAX_POINTS)
    mean = f" Each point of training is the mean of {group} records." if group > 1 else ""
    return Plot(title, (rounds + mean).strip(), draw("loss", paint), tuple(legend))


def traffic_plot(report: Report) -> Plot:
    """Plots the bytes sent so far, compared with synchronising at every step."""
    title = "Traffic between islands"
    sent = cumulative((entry.step, entry.bytes_sent) for entry in report.rounds)
    per_step, steps = report.bytes_per_step_sync, report.steps
    if report.num_islands == 1:
        return Plot(title, "A single island has nothing to exchange.", None)
    if not sent or not sent[-1][1]:
        return Plot(title, "No exchanged bytes were recorded.", None)

    def paint(axes: Axes) -> None:
        if per_step and steps:
            line = [1 + (steps - 1) * point / 199 for point in range(200)]
            axes.plot(line, [per_step * step / steps for step in line], color=colour(1), linestyle="--")
        axes.step(*columns(thinned(sent, MAX_POINTS)), where="post", color=colour(0), linewidth=1.8)
        if len(sent) <= MAX_ROUND_LINES:
            axes.plot(*columns(sent), "o", color=colour(0), markersize=3)
        few_decades = max(per_step or 0, sent[-1][1]) < 100 * max(sent[0][1], 1)
        axes.set_yscale("log", subs=(2, 5) if few_decades else ())
        axes.yaxis.set_major_formatter(lambda value, _: text.size(value))
        axes.yaxis.set_minor_formatter(lambda value, _: text.size(value))
        axes.tick_params(axis="y", which="minor", labelsize=9)
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="inner step", ylabel="bytes sent, cumulative")

    legend = [LegendEntry(f"sent: {text.size(sent[-1][1])}", colour(0))]
    if per_step:
        label = f"every step synchronised: {text.size(per_step)}"
        legend.append(LegendEntry(label, colour(1), "dashed"))
    caption = "Logarithmic scale. Measured payload, summed over the islands on record."
    compared = " The comparison is a ring all-reduce of fp32 gradients at every step." if per_step else ""
    return Plot(title, caption + compared, draw("traffic", paint), tuple(legend))


def time_plot(report: Report) -> Plot:
    """Plots how the time of each round was spent."""
    title = "Time of each round"
    names = ("computing", "waiting", "exchanging", "applying")
    parts = {name: [(r.round, getattr(r.seconds, name)) for r in report.rounds] for name in names}
    known = {name: [p for p in points if p[1] is not None] for name, points in parts.items()}
    known = {name: points for name, points in known.items() if points and len(points) == len(report.rounds)}
    if not known:
        return Plot(title, "No times were recorded.", None)

    def paint(axes: Axes) -> None:
        bottom: list[float] = []
        for name, points in known.items():
            rounds, heights = columns(thinned(points, MAX_BARS))
            bottom = bottom or [0.0] * len(rounds)
            width = 0.8 * (rounds[1] - rounds[0] if len(rounds) > 1 else 1)
            axes.bar(rounds, heights, width, bottom, color=colour(names.index(name)), linewidth=0)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="round", ylabel="seconds")

    shares = report.shares.parts() if report.shares else {}
    labels = {name: f"{name} {text.share(shares[name])}" if name in shares else name for name in known}
    legend = [LegendEntry(label, colour(names.index(name)), "box") for name, label in labels.items()]
    caption = "Mean over the islands on record; shares are of all training time." if report.shares else ""
    if len(report.rounds) > MAX_BARS:
        caption += f" Each bar is the mean of {-(-len(report.rounds) // MAX_BARS)} rounds."
    return Plot(title, caption, draw("time", paint), tuple(legend))


def agreement_plot(report: Report) -> Plot:
    """Plots the cosine between an island's pseudo-gradient and the others' average, and the pseudo-gradient's norm."""
    title = "Pseudo-gradients"
    cosine = [(r.round, r.cosine) for r in report.rounds if r.cosine is not None]
    norm = [(r.round, r.pseudo_gradient_norm) for r in report.rounds if r.pseudo_gradient_norm is not None]
    if not cosine and not norm:
        return Plot(title, "No pseudo-gradients were recorded.", None)
    series = [(norm, 0, "norm")] * bool(norm) + [(cosine, 2, "cosine to the other islands' average")] * bool(cosine)

    def paint(axes: Axes) -> None:
        axes.grid(visible=False, axis="x")
        for index, (points, number, label) in enumerate(series):
            side = axes.twinx() if index else axes
            side.plot(*columns(thinned(points, MAX_POINTS)), "-o", color=colour(number), markersize=2.5)
            side.set_ylabel(label, color=colour(number))
            side.spines["right"].set_visible(bool(index))
            side.set_ylim(*((0, None) if points is norm else (max(-1.03, min(0, *(y for _, y in points))), 1.03)))
            if index:
                side.grid(visible=False)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("round")

    legend = tuple(LegendEntry(label, colour(number), "dot") for _, number, label in series)
    meaning = " Cosine 1: they would move the same way; 0: unrelated." if cosine else ""
    caption = "Mean over the islands on record." + meaning
    return Plot(title, caption, draw("agreement", paint), legend)


def _consensus_plot(run: Run) -> Plot:
    points = [(step, value) for step, value in evaluation_points(run, "consensus_distance") if value > 0]
    caption = "The nodes' distance from their mean, relative to its length. Logarithmic scale."
    nothing = "The nodes' distance from their mean was not recorded."
    return _line("Consensus", points, "distance", caption, nothing, is_log=True)


def _line(title: str, points: Points, label: str, caption: str, nothing: str, is_log: bool = False) -> Plot:
    """Plots a single line by step; `nothing` is the caption if there are no points."""
    if not points:
        return Plot(title, nothing, None)

    def paint(axes: Axes) -> None:
        axes.plot(*columns(points), "-o", color=colour(0), markersize=3, linewidth=1.6)
        if is_log:
            axes.set_yscale("log")
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="step", ylabel=label)

    return Plot(title, caption, draw(title.lower(), paint))


def node_traffic_plot(run: Run, report: Report) -> Plot:
    """Plots the bytes that all recorded nodes have sent so far, compared with data parallelism."""
    by_step: dict[int, list[int | None]] = {}
    for island in run.islands:
        for mix in island.of(Mix):
            by_step.setdefault(mix.step, []).append(mix.bytes_sent)
    sent = cumulative((step, total(sent)) for step, sent in sorted(by_step.items()))
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

    legend = [LegendEntry(f"sent: {text.size(sent[-1][1])}", colour(0))]
    if per_step:
        legend.append(LegendEntry(f"data parallelism: {text.size(per_step)}", colour(1), "dashed"))
    caption = (
        "Measured payload of all nodes on record. The comparison is a ring all-reduce of fp32 gradients; a node sends "
        "its vector to every neighbour, and waits for these alone."
    )
    return Plot("Traffic between nodes", caption, draw("traffic", paint), tuple(legend))


def evaluation_points(run: Run, name: str = "eval_loss", wanted: bool = True) -> list[tuple[float, float]]:
    """Returns an evaluation metric by step: the mean over the islands that evaluated at that step.

    For `wanted` see `IslandRun.evaluations`.
    """
    records = [record for island in run.islands for record in island.evaluations(wanted)]
    return means((record.step, getattr(record, name)) for record in records)


def cumulative(increments: Iterable[tuple[int, int | None]]) -> list[tuple[float, float]] | None:
    """Returns cumulative sums; None if an increment is unknown, as all later sums would be wrong."""
    points, reached = [], 0
    for step, value in increments:
        if value is None:
            return None
        reached += value
        points.append((float(step), float(reached)))
    return points


def thinned(points: Points, limit: int) -> Points:
    """Returns at most `limit` points, each the mean of neighbouring points."""
    if len(points) <= limit:
        return points
    group = -(-len(points) // limit)
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def columns(points: Points) -> tuple[list[float], list[float]]:
    """Returns all x and all y; NaN (a gap) for a y too large for an axis, as after a divergence."""
    return [x for x, _ in points], [y if abs(y) <= LARGEST else math.nan for _, y in points]


def need_plots() -> None:
    """Raises `ConfigError` if Matplotlib, which draws the plots, is not installed."""
    need("a page with plots", "matplotlib")


def colour(index: int) -> str:
    """Returns the placeholder of the page's colour number `index`; colours repeat after `NUM_COLOURS`."""
    return f"#0201{index % NUM_COLOURS:02x}"


def draw(name: str, paint: Callable[[Axes], None]) -> str:
    """Returns an `<svg>` element of what `paint` draws on its axes; `name` makes its ids unique in the page."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS), mpl.rc_context({"svg.hashsalt": name}):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = buffer.getvalue()
        return _themed(text[text.index("<svg") :], name)


def _themed(svg: str, name: str) -> str:
    """Replaces placeholders by CSS variables, removes the size, and makes ids unique in the page."""
    for placeholder, variable in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    svg = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=href="#)', f"{name}-", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} aria-hidden="true">{rest}'
