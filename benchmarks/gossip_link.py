"""What one step's communication costs nodes of a graph on slow links: neighbours' exchange beside an all-reduce.

    python -m benchmarks.gossip_link
    python -m benchmarks.gossip_link --link 1000,1 --link none --values 1000000 --repeats 9 --json FILE

Every node is a process with a network of its own, joined to the others by one link that carries RATE Mbit/s in each
direction; RTT milliseconds lie between any two nodes and back (`benchmarks/links.py`). `--link none` leaves the links
as they are: what then is left is the work of the processors. Nodes meet in a store at node 0's address. Each node
gives `--values` fp32 values, and is done when it holds the result, which is checked:

    ring, ...   the weighted mean with the graph's neighbours (`MeshNeighbours.mix`), a step of dsgd, dmsgd, decentlam
    average     the mean over all nodes (`MeshNeighbours.average`, by `MeshExchange`), a step of pmsgd
    all_reduce  one plain call of Gloo's

A step begins when the last node begins, and ends when the last one is done. The first of each, in which connections
are made or memory is new, does not count. All take turns, so that whatever else the machine does meets all of them.

best, median    seconds
of all_reduce   the median, over that of `all_reduce` in the same place of the table
MB sent         by one node, the most of any, as its network device counts: with headers, acknowledgements, and what
                it says to the store
vectors         payload that one node sends, in vectors of d values, by equation: of the neighbours' exchange what the
                graph says, of the others 2 (n - 1) / n
of the limit    what those vectors would take at 95.6 % of the rate (1,448 of the 1,514 bytes of a frame are payload of
                TCP), over the median

A node has one link for all its neighbours: with two it sends two vectors over it. An all-reduce sends fewer than two
however many nodes there are, but each of its 2 (n - 1) turns waits for all nodes, and for a round trip. Needs what
`benchmarks/links.py` needs. Nodes share the machine's processors, as they would not elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from benchmarks.exchange import TCP_SHARE, Link, describe_machine
from benchmarks.links import Links, enter_network
from benchmarks.others import bytes_sent
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.topology import make_topology
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.tcp_store import meet
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.waiting import WaitNotes
from tests.processes import Process, Processes
from tests.tcp_stores import below

TOPOLOGIES = ("ring", "one-peer-exponential", "symmetric-exponential")
AVERAGE, BASELINE = "average", "all_reduce"
PORT = 29400
TIMEOUT = 300.0


def parse_link(text: str) -> Link | None:
    """From RATE,RTT or none."""
    return None if text == "none" else Link.parse(text)


@dataclass
class Measurement:
    """Steps that differ in nothing but their number. A link of none has no rate, in Mbit/s, nor rtt, in ms."""

    rate: float | None
    rtt: float | None
    nodes: int
    values: int
    name: str
    vectors: float
    seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def share(self) -> float:
        """Of what TCP could do at best."""
        return 32 * self.vectors * self.values / (TCP_SHARE * (self.rate or math.inf) * 1e6) / self.median


def vectors_sent(name: str, num_nodes: int) -> float:
    """By a node in a step, by equation."""
    if name in (AVERAGE, BASELINE):
        return 2 * (num_nodes - 1) / num_nodes
    return len(make_topology(name, num_nodes).receivers(0, 0))


# One node's process


class Node:
    """Does what it is asked for in the store; all answers are dicts.

    Args:
        number: of the node, from 0.
        num_nodes: n.
        store: where nodes meet.
        orders: kept by the program that asks.
    """

    def __init__(self, number: int, num_nodes: int, store: ValueStore, orders: TCPStore) -> None:
        torch.set_num_threads(1)
        self._number = number
        self._num_nodes = num_nodes
        self._device = f"in{number}"
        address = Links.address(number)
        self._meshes = {
            name: MeshNeighbours(
                store,
                make_topology(name, num_nodes),
                number,
                address,
                Members(below(store.log, name), number, unit="node"),
                connect_timeout=TIMEOUT,
                exchange_timeout=TIMEOUT,
                name=name,
            )
            for name in TOPOLOGIES
        }
        gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(PrefixStore("bare", orders), number, num_nodes, options)

    def step(self, name: str, values: int, step: int, start: float) -> dict[str, float]:
        """Communicates at the moment `start` of the machine's clock."""
        everybody = torch.arange(self._num_nodes) + 100.0 * (step + 1)
        vector = torch.full((values,), float(everybody[self._number]))
        out = torch.zeros_like(vector)
        call = self._call(name, vector, out, step)
        time.sleep(max(0.0, start - time.monotonic()))
        before, begin = bytes_sent(self._device), time.monotonic()
        result = call()
        end, after = time.monotonic(), bytes_sent(self._device)
        expected = self._expected(name, everybody, step)
        if not torch.allclose(result, torch.full_like(result, expected)):
            raise SystemExit(f"error: {name}: {result[:3].tolist()}... instead of {expected}")
        return {"begin": begin, "end": end, "bytes": after - before}

    def _call(self, name: str, vector: torch.Tensor, out: torch.Tensor, step: int) -> Callable[[], torch.Tensor]:
        def mix() -> torch.Tensor:
            self._meshes[name].mix([vector], [out], step)
            return out

        def average() -> torch.Tensor:
            self._meshes[TOPOLOGIES[0]].average(vector)
            return vector

        def all_reduce() -> torch.Tensor:
            self._group.allreduce([vector]).wait()
            return vector

        return {AVERAGE: average, BASELINE: all_reduce}.get(name, mix)

    def _expected(self, name: str, everybody: torch.Tensor, step: int) -> float:
        if name == BASELINE:
            return float(everybody.sum())
        if name == AVERAGE:
            return float(everybody.mean())
        weights = torch.from_numpy(make_topology(name, self._num_nodes).weights(step)[self._number])
        return float(weights @ everybody.to(weights.dtype))


def run_node(
    number: int, num_nodes: int, port: int, make: Callable[[int, int, ValueStore, TCPStore], Any] = Node
) -> None:
    """Answers what `make`'s node does until the program that asks kills this process."""
    print("up", flush=True)  # from now on this process has a network of its own, which waits for its link
    while True:
        try:
            socket.create_connection((Links.host, port), timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    timeout = timedelta(seconds=TIMEOUT)
    orders = TCPStore(Links.host, port, wait_for_workers=False, timeout=timeout)
    orders.get("joined")
    rendezvous = f"tcp://{Links.address(0)}:{PORT}"
    config = GossipConfig(num_nodes=num_nodes, node=number, rendezvous=rendezvous, join_timeout=TIMEOUT)
    size, notes = {"num_nodes": num_nodes}, WaitNotes(number, "node")
    met = meet(config, Credentials(), not number, f"node {number}", size, TIMEOUT, notes)
    node = make(number, num_nodes, met.store, orders)
    orders.set(f"ready/{number}", "")
    for count in itertools.count():
        order = json.loads(orders.get(f"order/{count}"))
        orders.set(f"answer/{count}/{number}", json.dumps(node.step(**order)))


# All nodes


class Nodes:
    """Nodes on links of one kind.

    Args:
        link: what all links are like.
        num_nodes: how many.
        links: to join them to.
        processes: where they are started.
        module: the program that `run_node` is called in.
    """

    def __init__(
        self,
        link: Link | None,
        num_nodes: int,
        links: Links,
        processes: Processes,
        module: str = "benchmarks.gossip_link",
    ) -> None:
        self._links = links
        self._num_orders = 0
        self._orders = store = TCPStore(Links.host, 0, is_master=True, wait_for_workers=False)
        command = ["unshare", "--net", sys.executable, "-m", module]
        command += [f"--nodes={num_nodes}", f"--port={store.port}"]
        self._nodes: list[Process] = [
            processes.spawn([*command, f"--node={number}"], env={"OMP_NUM_THREADS": "1"})
            for number in range(num_nodes)
        ]
        for number, process in enumerate(self._nodes):
            process.wait_for("up")
            links.join(number, process.pid)
            if link:
                links.shape(number, *link)
        store.set("joined", "")  # not before: a node reaches others a moment before it reaches itself
        self._gather("ready")

    def step(self, name: str, values: int, step: int, **more: float) -> tuple[float, int]:
        """Seconds of one step, and the bytes of the node that sent most."""
        order = {"name": name, "values": values, "step": step, "start": time.monotonic() + 0.5, **more}
        self._orders.set(f"order/{self._num_orders}", json.dumps(order))
        answers = [json.loads(answer) for answer in self._gather(f"answer/{self._num_orders}")]
        self._num_orders += 1
        seconds = max(answer["end"] for answer in answers) - max(answer["begin"] for answer in answers)
        return seconds, max(answer["bytes"] for answer in answers)

    def close(self) -> None:
        """Ends the nodes and takes their links away."""
        self._links.clear()
        for process in self._nodes:
            process.kill()

    def _gather(self, topic: str) -> list[bytes]:
        keys = [f"{topic}/{number}" for number in range(len(self._nodes))]
        while not self._orders.check(keys):
            for process in self._nodes:
                if process.popen.poll() is not None:
                    raise SystemExit(f"error: a node ended:\n{process.output[-3000:]}")
            time.sleep(0.02)
        return [self._orders.get(key) for key in keys]


def measure(args: argparse.Namespace) -> Iterator[Measurement]:
    """All measurements, in the order of the table."""
    with Processes() as processes:
        links = Links(processes)
        for link in args.link:
            nodes = Nodes(link, args.nodes, links, processes)
            rate, rtt = link or (None, None)
            for values in args.values:
                rows = [
                    Measurement(rate, rtt, args.nodes, values, name, vectors_sent(name, args.nodes))
                    for name in (BASELINE, AVERAGE, *TOPOLOGIES)
                ]
                for count, row in itertools.product(range(1 + args.repeats), rows):
                    seconds, sent = nodes.step(row.name, values, count)
                    if count:
                        row.seconds.append(seconds)
                        row.bytes_sent.append(sent)
                yield from rows
            nodes.close()


def make_table(measurements: Sequence[Measurement]) -> Table:
    """One row a measurement."""
    table = Table()
    for column in ("Mbit/s, ms", "nodes", "d", "", "best", "median", "of all_reduce", "MB sent", "vectors"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    table.add_column("of the limit", justify="right")
    baseline = {(row.rate, row.rtt, row.values): row.median for row in measurements if row.name == BASELINE}
    for row in measurements:
        table.add_row(
            f"{row.rate:g}, {row.rtt:g}" if row.rate else "none",
            str(row.nodes),
            f"{row.values:,}",
            row.name,
            f"{min(row.seconds):.3f}",
            f"{row.median:.3f}",
            f"{row.median / baseline[row.rate, row.rtt, row.values]:.2f}",
            f"{statistics.median(row.bytes_sent) / 1e6:.2f}",
            f"{row.vectors:g}",
            f"{row.share:.0%}" if row.rate else "",
        )
    return table


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--link", type=parse_link, action="append", metavar="RATE,RTT", help="Mbit/s, ms; or none; repeatable"
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--values", type=int, nargs="+", default=[1_000_000, 5_000_000], help="d, fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all measurements")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node is not None:
        run_node(args.node, args.nodes, args.port)
        return
    enter_network("benchmarks.gossip_link", sys.argv[1:])
    args.link = args.link or [Link(200, 10)]
    print(describe_machine(), flush=True)
    measurements = list(measure(args))
    Console(width=119).print(make_table(measurements))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in measurements], indent=1) + "\n")


if __name__ == "__main__":
    main()
