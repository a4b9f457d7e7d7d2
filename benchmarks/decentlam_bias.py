"""What momentum costs decentralised training, and what it does not cost DecentLaM (arXiv 2104.11981): least squares.

    python benchmarks/decentlam_bias.py
    python benchmarks/decentlam_bias.py --plot bias.png --json bias.json

Eight nodes, each with 50 equations of 30 unknowns (Gaussian) and a solution of its own; full gradients at a small lr.
The optimizers of hf_diloco.methods.gossip are run, one for all nodes: its vectors are those of the nodes one behind
the other, which the graph mixes by a product with W.

limits     mean squared distance from the solution of all, relative to that solution, where a method comes to rest; as
           multiples of DSGD's. Theory for DmSGD: 1 / (1 - momentum)². "refused": the optimizer refuses the graph.
steps      until the distance is within `--margin` of its limit for the first time, from 0, on the ring.
stability  the momentum from which a method diverges: by the condition in hf_diloco.methods.topology, and by running
           nodes that only average until they grow or come together.
noise      gradients with Gaussian noise, as small batches have: the mean squared distance of DmSGD over DecentLaM's.
           With less noise, as in large batches, bias is what is left.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hf_diloco.errors import ConfigError
from hf_diloco.gossip.averages import Vectors
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.records import Record
from hf_diloco.methods.gossip import GossipOptimizer, make_optimizer
from hf_diloco.methods.topology import Topology, largest_stable_beta, make_topology
from hf_diloco.transport.base import Traffic

Array = NDArray[np.float64]

GRAPHS = ("ring", "grid", "hypercube", "symmetric-exponential")
UNSTABLE = ("exponential", "one-peer-exponential", "hypercube")
NUM_NODES = 8
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "DmSGD": ("dmsgd", {}),
    "DA-DmSGD": ("da-dmsgd", {}),
    "DecentLaM": ("decentlam", {}),
    "QG-DmSGD": ("qg-dmsgd", {}),
    "momentum consensus": ("momentum-consensus", {}),
    "with ω = 1": ("momentum-consensus", {"omega": 1.0}),
}
"""Columns: the method, and its settings besides momentum."""
SHARES = {"DecentLaM": 0.0, "momentum consensus": 0.5, "with ω = 1": 1.0}
"""The share of the momentum that is averaged, on which stability depends."""
GROWN, SHRUNK = 1e6, 1e-6  # a run that only averages has diverged, or come together
MAX_AVERAGINGS = 20_000
REST_STEPS, REST_CHANGE, MAX_STEPS = 2_000, 1e-5, 400_000  # at rest: the distance changes by less in so many steps
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class AllNodes(Neighbours):
    """All nodes of a graph at once: a vector of theirs is [num_nodes * d], node by node."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.node, self.num_nodes = topology, 0, topology.num_nodes
        self._weights = [torch.tensor(topology.weights(step)) for step in range(topology.period or 1)]

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        if topology is None:
            weights = self._weights[step % len(self._weights)]
        else:
            weights = torch.tensor(topology.weights(step))
        for vector, out in zip(vectors, outs, strict=True):
            torch.mm(weights, vector.view(self.num_nodes, -1), out=out.view(self.num_nodes, -1))
        return Traffic()

    def average(self, vector: torch.Tensor) -> Traffic:
        raise NotImplementedError("no method here averages over all nodes")

    def share(self, topic: str, record: Record) -> list[Record]:
        return [record] * self.num_nodes

    def close(self) -> None:
        pass


class Run:
    """A method at work on all nodes.

    Args:
        topology: the graph.
        column: of `METHODS`, or DSGD.
        start: float64 [nodes, d].
        lr: γ.
        beta: the momentum, where the method has one.
        unchecked: sets the momentum where the method, being made, does not see it, so that it may diverge.

    Raises:
        ConfigError: the method refuses the graph.
    """

    def __init__(
        self, topology: Topology, column: str, start: Array, lr: float, beta: float, unchecked: bool = False
    ) -> None:
        method, settings = METHODS.get(column, ("dsgd", {}))
        self._parameter = torch.nn.Parameter(torch.tensor(start).ravel())
        self._parameter.grad = torch.zeros_like(self._parameter)
        if column in METHODS:
            settings = {**settings, "momentum": 0.0 if unchecked else beta}
        self.optimizer: GossipOptimizer = make_optimizer(method, [self._parameter], AllNodes(topology), lr, **settings)
        if unchecked:
            self.optimizer.param_groups[0]["momentum"] = beta
        self._shape = start.shape

    @property
    def x(self) -> Array:
        """Of all nodes, [nodes, d]."""
        return self._parameter.detach().numpy().reshape(self._shape)

    def step(self, gradient: Array | None = None) -> None:
        """One step of all nodes, with their gradients, or none."""
        assert self._parameter.grad is not None
        if gradient is not None:
            self._parameter.grad.copy_(torch.from_numpy(gradient).view(-1))
        self.optimizer.step()


@dataclass(frozen=True)
class Problem:
    """f_i(x) = ½ x·H_i x - c_i·x.

    Attributes:
        hessians: H_i, float64 [nodes, d, d].
        c: float64 [nodes, d].
        solution: where the mean of all f_i is least, [d].
    """

    hessians: Array
    c: Array
    solution: Array

    @classmethod
    def make(cls, seed: int) -> Problem:
        """50 equations of 30 unknowns a node."""
        rng = np.random.default_rng(seed)
        a = rng.standard_normal((NUM_NODES, 50, 30))
        hessians = a.transpose(0, 2, 1) @ a
        c = np.einsum("nij,nj->ni", hessians, rng.standard_normal((NUM_NODES, 30)))
        return cls(hessians, c, np.linalg.solve(hessians.sum(0), c.sum(0)))

    def gradient(self, x: Array) -> Array:
        """Of all nodes, [nodes, d]."""
        gradient: Array = np.matmul(self.hessians, x[..., None])[..., 0] - self.c
        return gradient

    def distance(self, x: Array) -> float:
        """mean_i |x_i - x*|² / |x*|²."""
        return float(((x - self.solution) ** 2).sum(1).mean() / (self.solution**2).sum())


def limit(problem: Problem, topology: Topology, column: str, lr: float, beta: float) -> float | None:
    """The distance where a method comes to rest, from 0; None if it refuses the graph."""
    try:
        run = Run(topology, column, np.zeros_like(problem.c), lr, beta)
    except ConfigError:
        return None
    distance = problem.distance(run.x)
    for number in range(1, MAX_STEPS + 1):
        run.step(problem.gradient(run.x))
        if number % REST_STEPS == 0:
            before, distance = distance, problem.distance(run.x)
            if abs(distance - before) <= REST_CHANGE * distance:
                return distance
    raise RuntimeError(f"{column} on {topology.name} with momentum {beta} does not come to rest: {distance}")


def steps_to_floor(
    problem: Problem, topology: Topology, column: str, lr: float, beta: float, floor: float, margin: float
) -> tuple[int, list[float]]:
    """Steps from 0 until the distance is within `margin` of its limit, and the distance after each step."""
    run = Run(topology, column, np.zeros_like(problem.c), lr, beta)
    curve = [problem.distance(run.x)]
    while curve[-1] > (1 + margin) * floor:
        run.step(problem.gradient(run.x))
        curve.append(problem.distance(run.x))
    return len(curve) - 1, curve


def noisy_distance(
    problem: Problem, topology: Topology, column: str, lr: float, beta: float, noise: float, num_steps: int
) -> float:
    """The mean distance over the second half of a run with noise in each gradient."""
    rng = np.random.default_rng(1)
    run = Run(topology, column, np.tile(problem.solution, (NUM_NODES, 1)), lr, beta)
    total = 0.0
    for number in range(num_steps):
        run.step(problem.gradient(run.x) + noise * rng.standard_normal(problem.c.shape))
        if number >= num_steps // 2:
            total += problem.distance(run.x)
    return total / (num_steps - num_steps // 2)


def averages(topology: Topology, column: str, beta: float) -> bool:
    """Whether nodes come together by a method without gradients, from random values."""
    x = np.random.default_rng(2).standard_normal((topology.num_nodes, 4))
    run = Run(topology, column, x - x.mean(0), 1.0, beta, unchecked=True)
    for _ in range(MAX_AVERAGINGS):
        before = np.abs(run.x).max()
        run.step()
        size = max(before, np.abs(run.x).max())  # where weights change, x may be 0 while the momentum grows
        if size > GROWN or size < SHRUNK:
            return bool(size < SHRUNK)
    return bool(size < 1)


def simulated_limit(topology: Topology, column: str) -> float:
    """The momentum from which nodes no longer come together, to 0.001."""
    if averages(topology, column, 0.999):
        return 1.0
    low, high = 0.0, 0.999
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if averages(topology, column, middle) else (low, middle)
    return low


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    problem = Problem.make(args.seed)
    graphs = {graph: make_topology(graph, NUM_NODES) for graph in GRAPHS}
    results: dict[str, Any] = {
        "limits": {
            graph: {
                beta: {column: limit(problem, topology, column, args.lr, beta) for column in ("DSGD", *METHODS)}
                for beta in args.momentum
            }
            for graph, topology in graphs.items()
        }
    }
    ring, beta = graphs["ring"], max(args.momentum)
    steps, curves = {}, {}
    for column in ("DSGD", "DmSGD", "DecentLaM"):
        floor = results["limits"]["ring"][beta][column]
        steps[column], curves[column] = steps_to_floor(problem, ring, column, args.lr, beta, floor, args.margin)
    results |= {"steps": steps, "curves": curves}
    results["stability"] = {
        graph: {size: _stability(make_topology(graph, size)) for size in (4, 8, 16, 32)} for graph in UNSTABLE
    }
    results["noise"] = {
        noise: tuple(
            noisy_distance(problem, ring, column, 10 * args.lr, beta, noise, args.noisy_steps)
            for column in ("DmSGD", "DecentLaM")
        )
        for noise in NOISES
    }
    return results


def _stability(topology: Topology) -> dict[str, tuple[float, float]]:
    """The largest stable momentum of each method: by the condition, and by running it."""
    return {
        column: (largest_stable_beta(topology, omega), simulated_limit(topology, column))
        for column, omega in SHARES.items()
    }


def show(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the tables."""
    console, beta = Console(width=110), max(args.momentum)
    table = new_table(f"limits at lr {args.lr:g}", "graph", "momentum", "DSGD", "theory", *METHODS)
    for graph, rows in results["limits"].items():
        for momentum, figures in rows.items():
            ratios = [
                "refused" if figures[name] is None else f"{figures[name] / figures['DSGD']:.4g}" for name in METHODS
            ]
            theory = f"{1 / (1 - momentum) ** 2:.4g}"
            table.add_row(graph, f"{momentum:g}", f"{figures['DSGD']:.2e}", theory, *ratios)
    console.print(table)
    table = new_table(f"steps to within {args.margin:.0%} of the limit, ring, momentum {beta:g}", "method", "steps")
    for name, steps in results["steps"].items():
        table.add_row(name, f"{steps:,}")
    console.print(table)
    table = new_table("largest stable momentum", "graph", "nodes", "method", "condition", "run")
    for graph, rows in results["stability"].items():
        for size, methods in rows.items():
            for name, (condition, run) in methods.items():
                table.add_row(graph, str(size), name, f"{condition:.3f}", f"{run:.3f}")
    console.print(table)
    title = f"gradient noise, ring, lr {10 * args.lr:g}, momentum {beta:g}"
    table = new_table(title, "standard deviation", "DmSGD", "DecentLaM", "ratio")
    for noise, (one, other) in results["noise"].items():
        table.add_row(f"{noise:g}", f"{one:.2e}", f"{other:.2e}", f"{one / other:.3g}")
    console.print(table)


def new_table(title: str, *columns: str) -> Table:
    """An empty table whose first column is text."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def plot(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Draws distance over steps, limits by graph, and the gap over noise."""
    from matplotlib.figure import Figure

    beta = max(args.momentum)
    figure = Figure(figsize=(13, 4), layout="constrained")
    steps, bars, noise = figure.subplots(1, 3)
    for name, curve in results["curves"].items():
        steps.loglog(range(1, len(curve)), curve[1:], label=name)
    steps.set(xlabel="steps", ylabel="squared distance", title=f"ring, momentum {beta:g}")
    steps.legend()
    shown = [name for name in METHODS if name != "with ω = 1"]
    for number, name in enumerate(shown):
        heights = [rows[beta][name] / rows[beta]["DSGD"] for rows in results["limits"].values()]
        bars.bar(np.arange(len(GRAPHS)) + 0.16 * (number - 2), heights, 0.16, label=name)
    bars.axhline(1 / (1 - beta) ** 2, color="black", linewidth=0.8, linestyle="--")
    bars.set(yscale="log", ylim=(0.8, 20 / (1 - beta) ** 2), ylabel="limit over DSGD's", title=f"momentum {beta:g}")
    bars.set_xticks(range(len(GRAPHS)), [graph.replace("symmetric-", "symmetric\n") for graph in GRAPHS])
    bars.legend(fontsize=8, loc="upper left", ncols=2)
    gaps = {level: one / other for level, (one, other) in results["noise"].items() if level}
    noise.loglog(list(gaps), list(gaps.values()), marker="o")
    noise.set(xlabel="noise in gradients (large batches: left)", ylabel="DmSGD over DecentLaM", title="ring")
    figure.savefig(args.plot, dpi=120)


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.8, 0.9])
    parser.add_argument("--margin", type=float, default=0.01, help="of the limit, for the number of steps")
    parser.add_argument(
        "--noisy-steps", type=int, default=10_000, help="of each run with noise; its lr is 10 times --lr"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the problem")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw figures there (.png, .svg, .pdf)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(args)
    show(results, args)
    if args.plot:
        plot(results, args)
    results.pop("curves")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
