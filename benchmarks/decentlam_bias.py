"""What momentum costs decentralised training, and what it does not cost DecentLaM (arXiv 2104.11981): least squares.

    python benchmarks/decentlam_bias.py
    python benchmarks/decentlam_bias.py --plot bias.png --json bias.json

Eight nodes, each with 50 equations of 30 unknowns (Gaussian) and a solution of its own; full gradients at a small lr.
All nodes are computed at once, as matrices, from the methods' equations.

limits     mean squared distance from the solution of all, relative to that solution, in the limit; as multiples of
           DSGD's. Solved for, from the equations where nothing moves. Theory for DmSGD: 1 / (1 - momentum)².
run        the same distance after `--run-steps` steps from 0, over DSGD's limit: what the methods themselves end with.
steps      until the distance is within `--margin` of its limit for the first time, from 0, on the ring.
stability  the momentum from which DecentLaM diverges on directed graphs: by the condition in hf_diloco.gossip.topology
           and by running nodes that only average until they grow or come together.
noise      gradients with Gaussian noise, as small batches have: the mean squared distance of DmSGD over DecentLaM's.
           With less noise, as in large batches, bias is what is left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hf_diloco.gossip.topology import Topology, largest_stable_beta, make_topology

Array = NDArray[np.float64]
Step = Callable[[Array, Array, Array, Array, float, float], tuple[Array, Array]]

GRAPHS = ("ring", "grid", "hypercube", "symmetric-exponential")
DIRECTED = ("exponential", "one-peer-exponential")
NUM_NODES = 8
METHODS = ("DmSGD", "DA-DmSGD", "DecentLaM", "QG-DmSGD", "momentum consensus", "D²")
GROWN, SHRUNK = 1e6, 1e-6  # a run that only averages has diverged, or come together
MAX_AVERAGINGS = 20_000
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


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

    def limit(self, weights: Array, adapt: Array, lr: float) -> float:
        """The distance of the x that solves x = weights x - lr adapt gradient(x); both matrices [nodes, nodes]."""
        n, d = self.c.shape
        left = np.kron(np.eye(n) - weights, np.eye(d))
        left += lr * np.einsum("nm,mij->nimj", adapt, self.hessians).reshape(n * d, n * d)
        return self.distance(np.linalg.solve(left, lr * (adapt @ self.c).ravel()).reshape(n, d))


def limits(problem: Problem, weights: Array, lr: float, beta: float) -> dict[str, float]:
    """Each method's limit."""
    eye = np.eye(NUM_NODES)
    plain = problem.limit(weights, weights, lr)
    return {
        "DSGD": plain,
        "DmSGD": problem.limit(weights, weights, lr / (1 - beta)),
        "DA-DmSGD": problem.limit(weights, weights @ np.linalg.inv(eye - beta * weights), lr),
        "DecentLaM": plain,  # m = 0 in the limit: the same equation
        "QG-DmSGD": plain,
        "momentum consensus": problem.limit(weights, eye, lr),
        "D²": 0.0,
    }


def dsgd(x: Array, m: Array, g: Array, weights: Array, lr: float, beta: float) -> tuple[Array, Array]:
    """A step of all nodes; returns parameters and momentum."""
    return weights @ (x - lr * g), m


def dmsgd(x: Array, m: Array, g: Array, weights: Array, lr: float, beta: float) -> tuple[Array, Array]:
    """As `dsgd`."""
    m = beta * m + g
    return weights @ (x - lr * m), m


def decentlam(x: Array, m: Array, g: Array, weights: Array, lr: float, beta: float) -> tuple[Array, Array]:
    """As `dsgd`."""
    m = beta * m + (x - weights @ (x - lr * g)) / lr
    return x - lr * m, m


def qg_dmsgd(x: Array, m: Array, g: Array, weights: Array, lr: float, beta: float) -> tuple[Array, Array]:
    """As `dsgd`."""
    new = weights @ (x - lr * (beta * m + g))
    return new, beta * m + (1 - beta) * (x - new) / lr


def run_to(problem: Problem, step: Step, weights: Array, lr: float, beta: float, num_steps: int) -> float:
    """The distance after so many steps from 0."""
    x = m = np.zeros_like(problem.c)
    for _ in range(num_steps):
        x, m = step(x, m, problem.gradient(x), weights, lr, beta)
    return problem.distance(x)


def steps_to_floor(
    problem: Problem, step: Step, weights: Array, lr: float, beta: float, limit: float, margin: float
) -> tuple[int, list[float]]:
    """Steps from 0 until the distance is within `margin` of its limit, and the distance after each step."""
    x = m = np.zeros_like(problem.c)
    curve = [problem.distance(x)]
    while curve[-1] > (1 + margin) * limit:
        x, m = step(x, m, problem.gradient(x), weights, lr, beta)
        curve.append(problem.distance(x))
    return len(curve) - 1, curve


def noisy_distance(
    problem: Problem, step: Step, weights: Array, lr: float, beta: float, noise: float, num_steps: int
) -> float:
    """The mean distance over the second half of a run with noise in each gradient."""
    rng = np.random.default_rng(1)
    x, m = np.tile(problem.solution, (NUM_NODES, 1)), np.zeros_like(problem.c)
    total = 0.0
    for number in range(num_steps):
        g = problem.gradient(x) + noise * rng.standard_normal(x.shape)
        x, m = step(x, m, g, weights, lr, beta)
        if number >= num_steps // 2:
            total += problem.distance(x)
    return total / (num_steps - num_steps // 2)


def averages(topology: Topology, beta: float) -> bool:
    """Whether nodes come together by DecentLaM without gradients, x⁺ = W x + β (x - x⁻), run from random values."""
    x = np.random.default_rng(2).standard_normal((topology.num_nodes, 4))
    x -= x.mean(0)
    before = x
    for step in range(MAX_AVERAGINGS):
        x, before = topology.weights(step) @ x + beta * (x - before), x
        size = np.abs(x).max()
        if size > GROWN or size < SHRUNK:
            return bool(size < SHRUNK)
    return bool(size < 1)


def simulated_limit(topology: Topology) -> float:
    """The momentum from which nodes no longer come together, to 0.001."""
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if averages(topology, middle) else (low, middle)
    return low


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    problem = Problem.make(args.seed)
    weights = {graph: make_topology(graph, NUM_NODES).weights(0) for graph in GRAPHS}
    results: dict[str, Any] = {
        "limits": {
            graph: {beta: limits(problem, weights[graph], args.lr, beta) for beta in args.momentum} for graph in GRAPHS
        }
    }
    ring, beta = weights["ring"], max(args.momentum)
    results["run"] = {
        graph: {
            name: run_to(problem, method, weights[graph], args.lr, beta, args.run_steps)
            / results["limits"][graph][beta]["DSGD"]
            for name, method in (("DmSGD", dmsgd), ("DecentLaM", decentlam), ("QG-DmSGD", qg_dmsgd))
        }
        for graph in GRAPHS
    }
    steps, curves = {}, {}
    for name, method in (("DSGD", dsgd), ("DmSGD", dmsgd), ("DecentLaM", decentlam)):
        limit = limits(problem, ring, args.lr, beta)[name]
        steps[name], curves[name] = steps_to_floor(problem, method, ring, args.lr, beta, limit, args.margin)
    results |= {"steps": steps, "curves": curves}
    results["stability"] = {
        graph: {
            size: (largest_stable_beta(make_topology(graph, size)), simulated_limit(make_topology(graph, size)))
            for size in (4, 8, 16, 32)
        }
        for graph in DIRECTED
    }
    results["noise"] = {
        noise: tuple(
            noisy_distance(problem, method, ring, 10 * args.lr, beta, noise, args.noisy_steps)
            for method in (dmsgd, decentlam)
        )
        for noise in NOISES
    }
    return results


def show(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the tables."""
    console, beta = Console(width=110), max(args.momentum)
    table = new_table(f"limits at lr {args.lr:g}", "graph", "momentum", "DSGD", "theory", *METHODS)
    for graph, rows in results["limits"].items():
        for momentum, figures in rows.items():
            ratios = [f"{figures[name] / figures['DSGD']:.4g}" for name in METHODS]
            theory = f"{1 / (1 - momentum) ** 2:.4g}"
            table.add_row(graph, f"{momentum:g}", f"{figures['DSGD']:.2e}", theory, *ratios)
    console.print(table)
    table = new_table(f"after {args.run_steps:,} steps, momentum {beta:g}", "graph", "DmSGD", "DecentLaM", "QG-DmSGD")
    for graph, row in results["run"].items():
        table.add_row(graph, *(f"{ratio:.6g}" for ratio in row.values()))
    console.print(table)
    table = new_table(f"steps to within {args.margin:.0%} of the limit, ring, momentum {beta:g}", "method", "steps")
    for name, steps in results["steps"].items():
        table.add_row(name, f"{steps:,}")
    console.print(table)
    table = new_table("largest stable momentum of DecentLaM", "graph", "nodes", "condition", "run")
    for graph, rows in results["stability"].items():
        for size, (condition, run) in rows.items():
            table.add_row(graph, str(size), f"{condition:.3f}", f"{run:.3f}")
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
    shown = METHODS[:-1]
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
    parser.add_argument("--run-steps", type=int, default=12_000, help="of the runs to the limit")
    parser.add_argument(
        "--noisy-steps", type=int, default=10_000, help="of each run with noise; its lr is 10 times --lr"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the problem")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw figures there (.png, .svg, .pdf)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    results = measure(args)
    show(results, args)
    if args.plot:
        plot(results, args)
    results.pop("curves")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
