"""How true `hf-diloco estimate` is: beside published figures, and beside runs on links of a given rate and delay.

    python -m benchmarks.planning table
    python -m benchmarks.planning links --rate 100 --rtt 50

table   The bit rates at which two islands compute for a share of the time, by the simulations in the paper of
        Streaming DiLoCo (arXiv 2501.18512; H=100, bf16, no latency, a grid of np.logspace(-1, 3, 50) Gbit/s), beside
        those of `hf_diloco.planning.simulator`. Two steps of that grid are a factor of 1.46.
links   Training runs of two islands, each in a network of its own (`benchmarks/overlap.py`, with its needs), beside
        what the estimate says of them. A step takes as long as it did in that run: predicted are the exchange and the
        utilisation. Seconds of an exchange are the median over all rounds, of the island that came last. Evaluated is
        at the end alone: evaluations are not in the time, and rounds under way would go on behind them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from hf_diloco.planning.simulator import Schedule, least_rate, utilisation
from hf_diloco.report.records import Sync

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
SYNC_EVERY = 100
TOLERANCE = 1.46
_GIGABIT = 1e9


class Model(NamedTuple):
    """One of the paper's: parameters, layers, fragments of 3 layers, seconds a step."""

    name: str
    num_parameters: float
    num_layers: int
    num_fragments: int
    step_seconds: float


class Method(NamedTuple):
    """One of the paper's: bits a value, whether in fragments, steps of overlap; None: data parallelism."""

    name: str
    bits: float
    streams: bool = False
    delay: int | None = 0


MODELS = (
    Model("1B", 1e9, 24, 8, 0.1),
    Model("10B", 10e9, 48, 16, 0.8),
    Model("100B", 100e9, 108, 36, 4.9),
)
METHODS = (
    Method("data-parallel", 16, delay=None),
    Method("DiLoCo", 16),
    Method("Streaming", 16, streams=True),
    Method("+ overlap of 1 step", 16, streams=True, delay=1),
    Method("+ overlap, FP4", 4, streams=True, delay=1),
)
PUBLISHED = {
    ("1B", "data-parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "Streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "+ overlap of 1 step"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "+ overlap, FP4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data-parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "DiLoCo"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "Streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "+ overlap of 1 step"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "+ overlap, FP4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data-parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "Streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "+ overlap of 1 step"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "+ overlap, FP4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""Gbit/s for each of `TARGETS`, as the paper has them (arXiv 2501.18512)."""


@dataclass(frozen=True)
class Cell:
    """One figure of the table, in Gbit/s."""

    target: float
    published: float
    simulated: float

    @property
    def factor(self) -> float:
        """How many times too large or too small."""
        return max(self.simulated / self.published, self.published / self.simulated)


def simulate(model: Model, method: Method) -> list[Cell]:
    """A row of the table. A figure that is off by more than 4 comes out as 4."""
    schedule = Schedule(by_layer=True)
    if method.delay is not None:
        fragments = model.num_fragments if method.streams else 1
        schedule = Schedule(SYNC_EVERY, fragments, method.delay, by_layer=True)
    bits = model.num_parameters * method.bits / schedule.num_fragments

    def reached(gigabits: float) -> float:
        return utilisation(model.step_seconds, schedule, bits / (gigabits * _GIGABIT), num_layers=model.num_layers)

    cells = []
    for target, published in zip(TARGETS, PUBLISHED[model.name, method.name], strict=True):
        found = least_rate(target, reached, published / 4, published * 4)
        cells.append(Cell(target, published, found or published * 4))
    return cells


def print_table() -> None:
    """Both, side by side."""
    table = Table(title="Gbit/s: published / simulated")
    for column in ("", "", *(f"{target:.0%}" for target in TARGETS), "worst factor"):
        table.add_column(column, justify="right" if column else "left")
    worst = 1.0
    for model in MODELS:
        for method in METHODS:
            cells = simulate(model, method)
            factor = max(cell.factor for cell in cells)
            worst = max(worst, factor)
            figures = [f"{cell.published:g} / {cell.simulated:.3g}" for cell in cells]
            table.add_row(f"{model.name}, {model.step_seconds:g} s", method.name, *figures, f"{factor:.2f}")
        table.add_section()
    Console(width=119).print(table)
    print(f"worst factor of all: {worst:.2f}; two steps of the published grid: {TOLERANCE}")


# Runs


@dataclass(frozen=True)
class Comparison:
    """A run and what was predicted of it: seconds of an exchange (the median, and of each), and utilisation."""

    name: str
    sync_every: int
    step_seconds: float
    exchange: float
    predicted_exchange: float
    utilisation: float
    predicted_utilisation: float
    exchanges: list[float]


def compare(args: argparse.Namespace, folder: Path) -> Iterator[Comparison]:
    """Runs, one after the other."""
    from benchmarks.overlap import Bench, Case
    from tests.processes import Processes

    streaming = {"num_fragments": 3, "fragment_update_alpha": 0.5}
    delayed = {**streaming, "fragment_sync_delay": args.delay}
    cases = [
        *(Case(f"DiLoCo, {payload}", {"payload": payload}) for payload in ("fp32", "bf16", "int8", "fp4")),
        Case("streaming, bf16", {**streaming, "payload": "bf16", "fragment_update_alpha": 0.0}),
        Case(f"delay {args.delay}, bf16", {**delayed, "payload": "bf16"}),
    ]
    with Processes() as processes:
        bench = Bench(args, folder, processes)
        for case in cases:
            if not args.only or any(word in case.name for word in args.only):
                num_steps = args.rounds * args.sync_every
                row = bench.run(case, args.sync_every, num_steps, eval_steps=num_steps)
                yield _comparison(case.name, dict(case.diloco or {}), row.islands, args, folder)


def _seconds(sync: Sync) -> float:
    """From an island's arrival to the end of the exchange."""
    return (sync.seconds_waiting or 0.0) + (sync.seconds_exchanging or 0.0)


def _comparison(
    name: str, diloco: dict[str, object], rows: Sequence[object], args: argparse.Namespace, folder: Path
) -> Comparison:
    from benchmarks.overlap import Row
    from hf_diloco.apps.lm.runfile import DiLoCoBlock
    from hf_diloco.planning.equations import Link
    from hf_diloco.planning.estimate import estimate_row, own_way
    from hf_diloco.planning.scenario import Scenario
    from hf_diloco.report.read import load_run

    islands = [row for row in rows if isinstance(row, Row)]
    run = load_run(folder / "".join(letter if letter.isalnum() else "-" for letter in name))
    syncs = [{sync.round: sync for sync in island.of(Sync)} for island in run.islands]
    last = max(sync.step for sync in syncs[0].values())
    exchanges = [
        min(_seconds(island[number]) for island in syncs) for number, sync in syncs[0].items() if sync.step < last
    ]
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    seconds = [row.seconds - row.settling for row in islands]
    stalled = [row.stalled for row in islands]
    step = (sum(seconds) - sum(stalled)) / sum(row.num_steps for row in islands)
    scenario = Scenario(
        name=name,
        num_parameters=islands[0].num_parameters,
        largest_layer=0,
        num_layers=6,
        diloco=DiLoCoBlock(num_islands=2, island=0, sync_every=args.sync_every, **diloco),
        link=Link(args.rate * 1e6, args.rtt / 1e3, restarts=control != "bbr"),
        step_seconds=step,
    )
    predicted = estimate_row(scenario, own_way(scenario))
    return Comparison(
        name=name,
        sync_every=args.sync_every,
        step_seconds=step,
        exchange=statistics.median(exchanges),
        predicted_exchange=predicted.exchange_seconds,
        utilisation=1 - sum(stalled) / sum(seconds),
        predicted_utilisation=predicted.utilisation,
        exchanges=exchanges,
    )


def print_comparisons(found: list[Comparison], args: argparse.Namespace) -> None:
    """Measured and predicted, side by side."""
    table = Table(title=f"2 islands, {args.rate:g} Mbit/s, {args.rtt:g} ms, sync_every {args.sync_every}")
    for column in ("", "s a step", "exchange, s", "predicted", "off", "utilisation", "predicted", "off"):
        table.add_column(column, justify="right" if column else "left")
    for one in found:
        table.add_row(
            one.name,
            f"{one.step_seconds:.3f}",
            f"{one.exchange:.3f}",
            f"{one.predicted_exchange:.3f}",
            f"{one.predicted_exchange / one.exchange - 1:+.0%}",
            f"{one.utilisation:.1%}",
            f"{one.predicted_utilisation:.1%}",
            f"{one.predicted_utilisation / one.utilisation - 1:+.0%}",
        )
    Console(width=110).print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "links"])
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each island's link")
    parser.add_argument("--rtt", type=float, default=50.0, help="milliseconds between the islands and back")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 32 tokens a step and island")
    parser.add_argument("--sync-every", type=int, default=24, help="steps between rounds")
    parser.add_argument("--delay", type=int, default=4, help="steps behind which the last row's rounds pass")
    parser.add_argument("--rounds", type=int, default=4, help="synchronisations of the whole model")
    parser.add_argument("--only", nargs="*", default=[], help="run only rows whose names hold one of these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all comparisons")
    args = parser.parse_args()
    if args.what == "table":
        print_table()
        return
    from benchmarks.links import enter_network

    enter_network("benchmarks.planning", sys.argv[1:])
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        for comparison in compare(args, Path(folder)):
            found.append(comparison)
            print_comparisons(found, args)
            if args.json:
                args.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
