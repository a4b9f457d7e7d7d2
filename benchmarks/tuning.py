"""Settings that are tuned on a grid, by runs that are kept: a program that was stopped goes on where it stood."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Values = Mapping[str, float]
"""Of the settings that are tuned, by name."""
Grid = Mapping[str, Sequence[float]]
"""The values of each that are tried, ascending."""


class Record:
    """Runs that have ended, and what came of them, in a file of JSON lines.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        pairs = [json.loads(line) for line in lines]
        self._outcomes = {_key(what): outcome for what, outcome in pairs}
        self._path = path

    def get(self, what: dict[str, Any], execute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The outcome of a run, carried out now or earlier.

        Args:
            what: all that decides the outcome, of JSON.
            execute: carries it out.
        """
        key = _key(what)
        if key not in self._outcomes:
            self._outcomes[key] = outcome = execute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([what, outcome]) + "\n")
        return self._outcomes[key]


def _key(what: dict[str, Any]) -> str:
    return json.dumps(what, sort_keys=True)


def climb(grid: Grid, start: Values, loss_of: Callable[[dict[str, float]], float]) -> tuple[dict[str, float], int]:
    """Goes to a neighbour on the grid for as long as that is better.

    Neighbours differ by one place in one setting or, where none of these is better, in two: a larger inner rate may
    need a smaller outer one.

    Args:
        grid: the values that are tried.
        start: one value of each setting.
        loss_of: what is to be small; asked once for each point.

    Returns:
        The best point, none of whose neighbours is better, and how many were tried.
    """
    losses: dict[tuple[float, ...], float] = {}

    def loss(values: dict[str, float]) -> float:
        point = tuple(values[name] for name in start)
        if point not in losses:
            losses[point] = loss_of(values)
        return losses[point]

    best = dict(start)
    left = list(_moves(list(grid)))
    while left:
        near = _moved(best, left.pop(0), grid)
        if near is not None and loss(near) < loss(best):
            best, left = near, list(_moves(list(grid)))
    return best, len(losses)


def _moves(names: list[str]) -> Iterator[dict[str, int]]:
    """By how many places each setting moves: one setting first, then two."""
    for chosen in [*itertools.combinations(names, 1), *itertools.combinations(names, 2)]:
        for places in itertools.product((1, -1), repeat=len(chosen)):
            yield dict(zip(chosen, places, strict=True))


def _moved(values: dict[str, float], move: dict[str, int], grid: Grid) -> dict[str, float] | None:
    """The neighbour there, unless the grid ends before."""
    places = {name: grid[name].index(values[name]) + step for name, step in move.items()}
    if any(not 0 <= place < len(grid[name]) for name, place in places.items()):
        return None
    return {**values, **{name: grid[name][place] for name, place in places.items()}}


def describe(best: Values, grid: Grid) -> str:
    """The best values; * behind one at the edge of what was tried."""
    edges = {name: (values[0], values[-1]) if len(values) > 1 else () for name, values in grid.items()}
    return ", ".join(f"{name} {value:g}{'*' if value in edges.get(name, ()) else ''}" for name, value in best.items())


def spread(values: Sequence[float], form: str = "{:.4f}") -> str:
    """Mean and standard deviation; nothing else where a value is not finite."""
    if not all(map(math.isfinite, values)):
        return "not finite"
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean
