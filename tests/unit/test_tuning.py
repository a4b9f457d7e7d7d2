"""Tuning of benchmarks: the best point of a grid is found by few runs, and a run that has ended is not made again."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.tuning import Record, climb, describe, spread

GRID = {"rate": [0.1, 0.2, 0.4, 0.8], "momentum": [0.0, 0.3, 0.6, 0.9]}


def test_a_climb_ends_where_no_neighbour_is_better() -> None:
    asked: list[dict[str, float]] = []

    def loss(values: dict[str, float]) -> float:
        asked.append(values)
        return (values["rate"] - 0.4) ** 2 + (values["momentum"] - values["rate"]) ** 2

    best, num_tried = climb(GRID, {"rate": 0.1, "momentum": 0.9}, loss)
    assert best == {"rate": 0.4, "momentum": 0.3}
    assert num_tried == len(asked) == len({tuple(values.items()) for values in asked}) < 16


def test_a_climb_leaves_what_diverges() -> None:
    best, _ = climb(GRID, {"rate": 0.8, "momentum": 0.0}, lambda one: math.inf if one["rate"] > 0.2 else -one["rate"])
    assert best["rate"] == 0.8, "from where nothing is finite, nothing is better"
    best, _ = climb(GRID, {"rate": 0.1, "momentum": 0.0}, lambda one: math.inf if one["rate"] > 0.2 else -one["rate"])
    assert best["rate"] == 0.2


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "record.jsonl"
    made: list[int] = []

    def get(seed: int) -> dict[str, float]:
        def run() -> dict[str, float]:
            made.append(seed)
            return {"loss": math.inf if seed else 0.5}

        return Record(path).get({"seed": seed, "rate": 0.1}, run)

    first, again = [get(0), get(1)], [get(0), get(1)]
    assert made == [0, 1]
    assert first == again


def test_what_a_table_says() -> None:
    assert describe({"rate": 0.1, "momentum": 0.3}, GRID) == "rate 0.1*, momentum 0.3"
    assert spread([1.0, 2.0, 3.0]) == "2.0000 ± 1.0000"
    assert spread([1.0, math.inf]) == "not finite"
