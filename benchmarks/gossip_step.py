"""What a decentralised method's own arithmetic costs: beside DSGD's, a training step, and copying memory.

    python benchmarks/gossip_step.py                      # all methods, one thread and two; then training steps
    python benchmarks/gossip_step.py dsgd decentlam --threads 2 --train dsgd decentlam

One node of a ring of eight, in one process. Its two neighbours' vectors lie in memory: nothing travels, and nobody is
waited for. Methods take turns, so that whatever else the machine does meets all of them; figures are medians. Where a
machine does much else, `--busy` counts the processor's time instead of the clock's, with one thread.

step         `optimizer.step()`, ms: gathers the gradients of `--tensors` tensors into one vector, then the method.
update       the method alone, ms, averaging with two neighbours included.
of DSGD      that over DSGD's.
bandwidth    GB/s of what the method's equation must read and write, which is less than what a program may do, over
             `update`; in brackets as a share of copying fp32 values from one buffer to another, in the same run. In
             vectors of d values, with y_1 and y_2 for what two neighbours sent:

             pmsgd               m g x -> m x (the all-reduce is left out)             5
             dsgd                x g -> y; y y_1 y_2 -> x                              7
             dmsgd               x g m -> y m; y y_1 y_2 -> x                          9
             da-dmsgd            x g m -> y m; y y_1 y_2 m m_1 m_2 -> x m             13
             decentlam           x g -> y; y y_1 y_2 x m -> x m                       10
             qg-dmsgd            x g m -> y; y y_1 y_2 x m -> x m                     11
             d2                  x g ψ -> φ ψ; φ φ_1 φ_2 -> x                          9
             momentum-consensus  x x_1 x_2 v v_1 v_2 g -> x v                          9
             swarm-sgd           x g m -> x m; each second step also y_1 -> published  6

average      of one vector with two neighbours, ms, in each of `--payloads`: fp32 is `mix_`, in the others differences
             to replicas are coded and decoded; one thread

training     a step of ResNet-50 (transformers, random weights), forward and backward included: batch `--batch`, 64x64,
             with `max(--threads)` threads; ms, and over DSGD's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_diloco.gossip.averages import Vectors, mix_
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.neighbours import Neighbours, Piece
from hf_diloco.gossip.published import MemoryPublished, VersionedBuffer
from hf_diloco.gossip.records import Record
from hf_diloco.methods.gossip import METHODS, GossipOptimizer, make_optimizer
from hf_diloco.methods.topology import Topology, make_topology
from hf_diloco.transport.base import Traffic

NUM_NODES = 8
VECTORS = {
    "pmsgd": 5,
    "dsgd": 7,
    "dmsgd": 9,
    "da-dmsgd": 13,
    "decentlam": 10,
    "qg-dmsgd": 11,
    "d2": 9,
    "momentum-consensus": 9,
    "swarm-sgd": 6,
}
PAYLOADS = ["fp32", "bf16", "fp16", "int8", "int4", "fp4"]
PIECES_IN_FLIGHT = 8
BASELINE = "dsgd"
Clock = Callable[[], float]
IMAGE, NUM_CLASSES = 64, 1000


class StandIn(Neighbours):
    """Node 0, whose neighbours always show the same vectors. Methods share them, as they share the machine."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.topology = make_topology("ring", NUM_NODES)
        self.node, self.num_nodes = 0, NUM_NODES
        weights = self.topology.weights()[0]
        self._others = [
            (float(weights[j]), (1e-2 * torch.randn(size)).to(device)) for j in self.topology.neighbours(0)
        ]
        self._all_versioned = [VersionedBuffer() for _ in range(NUM_NODES)]
        for versioned in self._all_versioned:
            versioned.put(self._others[0][1].view(torch.uint8))

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        for vector, out in zip(vectors, outs, strict=True):
            mix_(out, vector, self._others)
        return Traffic()

    def swap(self, pieces: Sequence[Piece]) -> Traffic:
        for slot, piece in enumerate(pieces):
            given = piece.give(slot % PIECES_IN_FLIGHT)
            piece.finish({peer: given[peer] for peer in piece.bytes_from})
        return Traffic()

    def average(self, vector: torch.Tensor) -> Traffic:
        return Traffic()

    def published(self) -> MemoryPublished:
        return _Shown(self._all_versioned, 0)

    def share(self, topic: str, record: Record) -> list[Record]:
        return [record]

    def close(self) -> None:
        pass


class _Shown(MemoryPublished):
    """A partner's model lies where the wire would have left it."""

    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        with self._all_versioned[node].newest() as payload:
            return payload, Traffic()


class Stopwatch:
    """Takes the time of each step of an optimizer, and of the method's update in it."""

    def __init__(self, optimizer: GossipOptimizer, clock: Clock) -> None:
        self.optimizer = optimizer
        self.clock = clock
        self.steps: list[float] = []
        self.updates: list[float] = []
        update: Callable[[torch.Tensor, torch.Tensor], None] = optimizer.update

        def timed(x: torch.Tensor, g: torch.Tensor) -> None:
            begin = clock()
            update(x, g)
            self.updates.append(clock() - begin)

        optimizer.update = timed  # type: ignore[method-assign]

    def step(self) -> None:
        """A step that counts."""
        begin = self.clock()
        self.optimizer.step()
        self.steps.append(self.clock() - begin)

    def forget(self) -> None:
        """What was timed so far does not count."""
        self.steps.clear()
        self.updates.clear()

    def medians(self) -> dict[str, float]:
        """Seconds of a step, as the mean of two: swarm-sgd averages at every second one."""
        return {"step": _median_of_pairs(self.steps), "update": _median_of_pairs(self.updates)}


def _median_of_pairs(seconds: list[float]) -> float:
    return statistics.median((one + other) / 2 for one, other in zip(seconds[::2], seconds[1::2], strict=True))


def measure_arithmetic(methods: list[str], args: argparse.Namespace, num_threads: int) -> dict[str, dict[str, float]]:
    """Seconds of each method, and of "copy"."""
    torch.set_num_threads(num_threads)
    clock = clock_of(args)
    size = args.values // args.tensors * args.tensors
    gradients = (1e-3 * torch.randn(size, device=args.device)).split(size // args.tensors)
    neighbours = StandIn(size, args.device)
    watches = {name: Stopwatch(_make(name, gradients, neighbours), clock) for name in methods}
    source, target, copies = torch.randn(size, device=args.device), torch.zeros(size, device=args.device), []
    for number in range(args.repeats + 1):
        for watch in watches.values():
            if number == 1:
                watch.forget()  # the first time memory is touched
            for _ in range(2):
                watch.step()
        begin = clock()
        target.copy_(source)
        copies.append(clock() - begin)
    return {
        "copy": {"update": statistics.median(copies[1:])},
        **{name: watch.medians() for name, watch in watches.items()},
    }


def measure_codes(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of an average in each payload, in turns."""
    torch.set_num_threads(1)
    clock = clock_of(args)
    vector, out, change = torch.randn(args.values), torch.empty(args.values), 1e-3 * torch.randn(args.values)
    inner = StandIn(args.values)
    nodes = {payload: with_payload(inner, payload) for payload in args.payloads}
    seconds: dict[str, list[float]] = {payload: [] for payload in nodes}
    for step in range(args.repeats + 2):  # the first exchange is exact, the second the first that is coded
        vector.add_(change)
        for payload, node in nodes.items():
            begin = clock()
            node.mix([vector], [out], step)
            seconds[payload].append(clock() - begin)
    return {payload: statistics.median(times[2:]) for payload, times in seconds.items()}


def clock_of(args: argparse.Namespace) -> Clock:
    """What time is; on an accelerator, once it has done what was asked of it."""
    if args.device != "cpu":
        return _clock_of_device
    return time.process_time if args.busy else time.perf_counter


def _clock_of_device() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _make(name: str, gradients: tuple[torch.Tensor, ...], neighbours: StandIn) -> GossipOptimizer:
    parameters = [torch.nn.Parameter(1e-2 * torch.randn_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return make_optimizer(name, parameters, neighbours, lr=1e-3)


def measure_training(methods: list[str], args: argparse.Namespace, num_threads: int) -> dict[str, float]:
    """Seconds of a training step with each method."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.set_num_threads(num_threads)
    clock = clock_of(args)
    images = torch.randn(args.batch, 3, IMAGE, IMAGE, device=args.device)
    labels = torch.randint(NUM_CLASSES, (args.batch,), device=args.device)
    runs: dict[str, tuple[Any, GossipOptimizer]] = {}
    neighbours: StandIn | None = None
    for name in methods:
        torch.manual_seed(0)
        config = ResNetConfig()
        config.num_labels = NUM_CLASSES
        model = ResNetForImageClassification(config).train().to(args.device)
        size = sum(parameter.numel() for parameter in model.parameters())
        neighbours = neighbours or StandIn(size, args.device)
        runs[name] = model, make_optimizer(name, model.parameters(), neighbours, lr=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.train_steps + 1):
        for name, (model, optimizer) in runs.items():
            begin = clock()
            model(pixel_values=images, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append(clock() - begin)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def show_arithmetic(results: dict[str, dict[str, float]], num_values: int, num_threads: int) -> None:
    """Prints the table of one number of threads."""
    num_bytes = 4 * num_values
    copying = 2 * num_bytes / results["copy"]["update"]
    title = f"{num_values:,} fp32 values, {num_threads} threads; copying: {copying / 1e9:.1f} GB/s"
    table = _new_table(title, "method", "vectors", "step", "of DSGD", "update", "of DSGD", "bandwidth")
    for name, figures in results.items():
        if name == "copy":
            continue
        speed = VECTORS[name] * num_bytes / figures["update"]
        row = [name, str(VECTORS[name])]
        for what in ("step", "update"):
            row += [f"{1e3 * figures[what]:.1f}", _over(figures[what], results.get(BASELINE, {}).get(what))]
        table.add_row(*row, f"{speed / 1e9:.1f} ({speed / copying:.2f})")
    Console(width=110).print(table)


def show_codes(results: dict[str, float], num_values: int) -> None:
    """Prints the table of averages."""
    table = _new_table(f"{num_values:,} fp32 values, two neighbours, 1 thread", "payload", "average", "of fp32")
    for payload, seconds in results.items():
        table.add_row(payload, f"{1e3 * seconds:.1f}", _over(seconds, results.get("fp32")))
    Console(width=110).print(table)


def show_training(results: dict[str, float], args: argparse.Namespace, num_threads: int) -> None:
    """Prints the table of training steps."""
    table = _new_table(
        f"ResNet-50, batch {args.batch}, {IMAGE}x{IMAGE}, {num_threads} threads", "method", "training step", "of DSGD"
    )
    for name, seconds in results.items():
        table.add_row(name, f"{1e3 * seconds:.0f}", _over(seconds, results.get(BASELINE)))
    Console(width=110).print(table)


def _over(seconds: float, baseline: float | None) -> str:
    return "" if baseline is None else f"{seconds / baseline:.3f}"


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], help="default: all")
    parser.add_argument("--values", type=int, default=25_600_000, help="d, as of ResNet-50")
    parser.add_argument("--tensors", type=int, default=160, help="that the parameters are made of")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of two steps")
    parser.add_argument("--busy", action="store_true", help="time of the processor, with one thread")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--payloads", nargs="*", default=PAYLOADS, choices=[*PAYLOADS, []])
    parser.add_argument("--train", nargs="*", default=["dsgd", "dmsgd", "decentlam"], choices=[*METHODS, []])
    parser.add_argument("--train-steps", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu", help="cuda: the figures of a GPU, without --payloads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too (seconds)")
    args = parser.parse_args()
    args.threads = [1] if args.busy else args.threads
    args.payloads = [] if args.device != "cpu" else args.payloads
    torch.manual_seed(0)
    results: dict[str, Any] = {"values": args.values, "arithmetic": {}}
    for num_threads in args.threads:
        figures = measure_arithmetic(args.methods or list(METHODS), args, num_threads)
        show_arithmetic(figures, args.values, num_threads)
        results["arithmetic"][num_threads] = figures
    if args.payloads:
        results["average"] = measure_codes(args)
        show_codes(results["average"], args.values)
    if args.train:
        results["training"] = measure_training(args.train, args, max(args.threads))
        show_training(results["training"], args, max(args.threads))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
