"""Compares several runs in one table and on one page: loss against tokens, time and bytes."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.errors import ConfigError
from hf_diloco.report.figures import (
    MAX_POINTS,
    LegendEntry,
    Plot,
    Points,
    colour,
    columns,
    cumulative,
    draw,
    evaluation_points,
    need_plots,
    thinned,
)
from hf_diloco.report.html import fill, write_page
from hf_diloco.report.island import exchanges, means, seen_until, total
from hf_diloco.report.read import IslandRun, Run, load_run
from hf_diloco.report.records import Train
from hf_diloco.report.summary import Report, summarise
from hf_diloco.utils import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("run", "method", "islands", "steps", "eval loss", "tokens", "time", "tokens/s", "sent", "waiting")
WIDE = 10  # if the runs' traffic differs by more than this factor, its axis is logarithmic


@dataclass(frozen=True)
class Candidate:
    """One of the compared runs."""

    name: str
    run: Run
    report: Report

    @property
    def unit(self) -> str:
        return "tokens" if self.report.method is None else "images"

    @cached_property
    def evaluations(self) -> Points:
        """Evaluation loss of the outer weights by step: the mean over the islands that evaluated at that step."""
        return evaluation_points(self.run)

    @cached_property
    def training(self) -> Points:
        """Training loss by step: the mean over the islands."""
        return means((record.step, record.loss) for island in self.run.islands for record in island.of(Train))

    def as_dict(self) -> dict[str, Any]:
        """Returns the run's report as JSON data, with the run's unique name and the slowest island's training time."""
        return {**json.loads(self.report.model_dump_json()), "name": self.name, "seconds_training": self.seconds}

    @property
    def num_seen(self) -> int | None:
        return self.report.num_tokens if self.unit == "tokens" else self.report.num_images

    @property
    def seconds(self) -> float | None:
        """Training time of the slowest island."""
        return self.at_time(float(self.report.steps or 0))

    def at_seen(self, step: float) -> float | None:
        """Returns the tokens or images that all islands have trained on up to `step`, each at most its own steps."""
        per_step = "tokens_per_step" if self.unit == "tokens" else "examples_per_step"
        return total(seen_until(island, per_step, step) for island in self.run.islands)

    def at_time(self, step: float) -> float | None:
        """Returns the seconds of training until the slowest island reached `step`."""
        reached = [
            clock[found - 1][1] for clock in self._clocks if (found := bisect_right(clock, (step, float("inf"))))
        ]
        return max(reached, default=None)

    def at_bytes(self, step: float) -> float | None:
        """Returns the bytes that all islands have sent up to `step`; None if some of them are unknown."""
        if self._sent is None:
            return None
        found = bisect_right(self._sent, (step, float("inf")))
        return self._sent[found - 1][1] if found else 0.0

    @cached_property
    def _clocks(self) -> list[list[tuple[float, float]]]:
        return [_clock(island) for island in self.run.islands]

    @cached_property
    def _sent(self) -> list[tuple[float, float]] | None:
        found = [(one.step, one.bytes_sent) for island in self.run.islands for one in exchanges(island)]
        return cumulative(sorted(found, key=lambda one: one[0]))


def load_candidates(folders: Sequence[Path]) -> list[Candidate]:
    """Reads the runs; if names repeat, uses the folders as names.

    Raises `ConfigError` if a folder is not a run folder or is given twice, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ConfigError("compare needs two run folders or more, as in runs/first runs/second")
    real = [folder.resolve() for folder in folders]
    twice = next((folder for folder in real if real.count(folder) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice: name each run once")
    runs = [load_run(folder) for folder in folders]
    names = [run.name for run in runs]
    unique = names if len(set(names)) == len(names) else [os.path.relpath(folder) for folder in folders]
    return [Candidate(name, run, summarise(run)) for name, run in zip(unique, runs, strict=True)]


def row(found: Candidate) -> tuple[str, ...]:
    """Returns one run's figures, in the order of `COLUMNS`."""
    report = found.report
    nodes = f"{report.method} on {report.topology}" if report.method else None
    unit = "" if found.unit == "tokens" else " images"
    rate = report.tokens_per_second if found.unit == "tokens" else report.images_per_second
    return (
        found.name,
        nodes or report.outer_method or text.MISSING,
        str(report.size),
        text.count(report.steps),
        text.loss(report.eval_loss),
        text.short_count(found.num_seen) + unit,
        text.seconds(found.seconds),
        text.rate(rate) + unit,
        text.size(report.bytes_sent),
        text.share(report.shares.waiting if report.shares and not nodes else None),
    )


def write_comparison(found: Sequence[Candidate], path: Path) -> Path:
    """Writes the page; see `write_page`."""
    need_plots()
    names = [entry.name for entry in found]
    warnings = [f"{entry.name}: {warning}" for entry in found for warning in entry.report.warnings]
    rows = [row(entry) for entry in found]
    page = fill("compare.html.j2", names=names, columns=COLUMNS, rows=rows, plots=plots(found), warnings=warnings)
    return write_page(page, path)


def plots(found: Sequence[Candidate]) -> list[Plot]:
    """Returns plots of loss against tokens or images, against time, and against traffic."""
    unit = "images" if all(entry.unit == "images" for entry in found) else "tokens"
    seen = [entry for entry in found if entry.unit == unit]
    return [
        _plot(f"Loss by {unit}", found, seen, Candidate.at_seen, lambda value: text.short_count(value)),
        _plot("Loss by time", found, found, Candidate.at_time, lambda value: text.seconds(round(value))),
        _plot("Loss by bytes sent", found, found, Candidate.at_bytes, lambda value: text.size(value)),
    ]


def _plot(
    title: str,
    everything: Sequence[Candidate],
    used: Sequence[Candidate],
    at: Callable[[Candidate, float], float | None],
    shown: Callable[[float], str],
) -> Plot:
    lines = [(everything.index(e), e.name, _moved(e, e.training, at), _moved(e, e.evaluations, at)) for e in used]
    drawn = [line for line in lines if line[2] or line[3]]
    if not drawn:
        return Plot(title, "No loss was recorded that could be drawn so.", None)
    ends = [max(x for x, _ in [*training, *evaluations]) for _, _, training, evaluations in drawn]
    is_log = at is Candidate.at_bytes and min(ends) > 0 and max(ends) > WIDE * min(ends)

    def paint(axes: Axes) -> None:
        for number, _, training, evaluations in drawn:
            axes.plot(*columns(thinned(training, MAX_POINTS)), color=colour(number), linewidth=0.8, alpha=0.45)
            axes.plot(*columns(evaluations), "-o", color=colour(number), markersize=3.5, linewidth=1.6)
        if is_log:
            axes.set_xscale("log")
        else:
            axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: shown(value))
        axes.set(xlabel=title.partition(" by ")[2], ylabel="loss (nats)")

    legend = tuple(LegendEntry(name, colour(number), "dot") for number, name, _, _ in drawn)
    left_out = [entry.name for entry in everything if entry.name not in {name for _, name, _, _ in drawn}]
    caption = "Dots: evaluation of the outer weights. Thin lines: training, mean of the islands."
    caption += f" Not recorded: {', '.join(left_out)}." if left_out else ""
    return Plot(title, caption, draw(title.rpartition(" ")[2], paint), legend)


def _moved(
    found: Candidate, points: Points, at: Callable[[Candidate, float], float | None]
) -> list[tuple[float, float]]:
    """Converts points by step to another x axis; drops points without a known x."""
    moved = [(at(found, step), loss) for step, loss in points]
    return [(x, loss) for x, loss in moved if x is not None]


def _clock(island: IslandRun) -> list[tuple[float, float]]:
    """Returns the seconds of training by step, without pauses between starts and steps that a resume discarded."""
    points: list[tuple[float, float]] = []
    for section in island.sections:
        start = section.start
        if start is None or start.time is None:
            continue
        points = [point for point in points if point[0] <= start.step]
        before = points[-1][1] if points else 0.0
        times = [(float(r.step), before + r.time - start.time) for r in section.records if r.time is not None]
        points += sorted(times)
    return points
