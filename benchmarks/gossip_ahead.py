"""What a step costs when its exchange goes on behind forward and backward, on slow links.

    python -m benchmarks.gossip_ahead
    python -m benchmarks.gossip_ahead --link 1000,1 --nodes 8 --values 5000000 --repeats 9

Nodes and links are those of `benchmarks/gossip_link.py`. Each node takes a step of DSGD, combine-then-adapt, on a
ring, with `--values` fp32 parameters. Its forward and backward pass is a sleep, as of a processor that waits for its
accelerator: as long as an exchange took by itself, in the median, or `--compute` seconds.

exchange    a step that computes nothing
after       the exchange begins in `step`, when the gradient is there
ahead       `begin_exchange` comes before the forward pass
ratio       ahead over after; at best the longer of exchange and computation over the sum of both

A step begins when the last node begins, and ends when the last one is done. The first of each does not count; both
kinds take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks.exchange import Link, describe_machine
from benchmarks.gossip_link import TIMEOUT, Nodes, parse_link, run_node
from benchmarks.links import Links, enter_network
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.gossip.dsgd import DSGD
from hf_diloco.methods.topology import make_topology
from hf_diloco.store.values import ValueStore
from tests.processes import Processes

MODULE = "benchmarks.gossip_ahead"


class Node:
    """One node's process; see `gossip_link.Node`."""

    def __init__(self, number: int, num_nodes: int, store: ValueStore, _: TCPStore) -> None:
        torch.set_num_threads(1)
        topology, address = make_topology("ring", num_nodes), Links.address(number)
        mesh = MeshNeighbours(
            store,
            topology,
            number,
            address,
            Members(store.log, number, unit="node"),
            connect_timeout=TIMEOUT,
            exchange_timeout=TIMEOUT,
        )
        self._neighbours = NodeNeighbours(mesh, topology, number, IslandGroup())
        self._optimizers: dict[int, DSGD] = {}

    def step(self, name: str, values: int, step: int, start: float, compute: float) -> dict[str, float]:
        """Takes a step at the moment `start` of the machine's clock."""
        optimizer = self._optimizer(values)
        time.sleep(max(0.0, start - time.monotonic()))
        begin = time.monotonic()
        if name == "ahead":
            optimizer.begin_exchange()
        time.sleep(compute)
        optimizer.step()
        return {"begin": begin, "end": time.monotonic(), "bytes": optimizer.traffic.bytes_sent}

    def _optimizer(self, values: int) -> DSGD:
        if values not in self._optimizers:
            parameter = torch.nn.Parameter(torch.ones(values))
            parameter.grad = torch.ones(values)
            self._optimizers[values] = DSGD([parameter], self._neighbours, 0.1, combine_first=True)
        return self._optimizers[values]


def measure(nodes: Nodes, values: int, repeats: int, compute: float | None) -> tuple[float, dict[str, list[float]]]:
    """Seconds of computation, and of the steps of each kind."""
    seconds: dict[str, list[float]] = {"exchange": [], "after": [], "ahead": []}

    def step(kind: str, count: int, compute: float) -> None:
        taken, _ = nodes.step(kind, values, count, compute=compute)
        if count:
            seconds[kind].append(taken)

    for count in range(1 + repeats):
        step("exchange", count, 0.0)
    compute = statistics.median(seconds["exchange"]) if compute is None else compute
    for count in range(1 + repeats):
        for kind in ("after", "ahead"):
            step(kind, count, compute)
    return compute, seconds


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--link", type=parse_link, default=Link(200, 10), metavar="RATE,RTT", help="Mbit/s, ms; or none"
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--values", type=int, nargs="+", default=[1_000_000, 5_000_000], help="d, fp32")
    parser.add_argument("--compute", type=float, metavar="SECONDS", help="of forward and backward")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node is not None:
        run_node(args.node, args.nodes, args.port, Node)
        return
    enter_network(MODULE, sys.argv[1:])
    print(describe_machine(), flush=True)
    table = Table()
    for column in ("d", "computation, s", "exchange, s", "after, s", "ahead, s", "ratio", "at best"):
        table.add_column(column, justify="right")
    with Processes() as processes:
        nodes = Nodes(args.link, args.nodes, Links(processes), processes, MODULE)
        for values in args.values:
            compute, seconds = measure(nodes, values, args.repeats, args.compute)
            exchange, after, ahead = (statistics.median(seconds[kind]) for kind in ("exchange", "after", "ahead"))
            best = max(compute, exchange) / (compute + exchange)
            figures = (compute, exchange, after, ahead, ahead / after, best)
            table.add_row(f"{values:,}", *(f"{figure:.2f}" for figure in figures))
        nodes.close()
    Console(width=119).print(table)


if __name__ == "__main__":
    main()
