"""How long one exchange between islands takes, on links of a given rate and round-trip time.

    python -m benchmarks.exchange
    python -m benchmarks.exchange --link 1000,100 --islands 2 --payload fp32 --connections 1 4 16 --json FILE
    python -m benchmarks.exchange --link 1000,10 --payload fp32 int8 --compare-checksums
    python -m benchmarks.exchange --link 1000,10 --link 40000,0 --payload fp32 int8 --compare-sealing
    python -m benchmarks.exchange --link loopback --payload fp32 int8 --compare-sealing

Every island is a process with a network of its own, joined to the others by a link that carries RATE Mbit/s in each
direction; RTT milliseconds lie between any two islands and back (`benchmarks/links.py`). Each measurement averages
`--values` fp32 values, the same on all islands at once, after one that does not count. An exchange begins when the
last island begins, and ends when the last one holds the average. "all_reduce" is one plain call of Gloo's, in fp32.

best, median   seconds
of the limit   what the bytes that one island sends would take, at 95.6 % of the rate, over what the best exchange
               took: 1,448 of the 1,514 bytes of a frame are payload of TCP
fp32 x         how many times as fast as fp32, in the same place of the table
MB sent        by one island: the payload, without what TCP adds
connecting     seconds to set up the connections

With `--compare-checksums` each payload has a second row, "fp32, bare" and so on, for the same exchange without the
checksums that go behind its pieces. With `--compare-sealing` there are rows for the same exchange with a key: "fp32,
sealed", where each piece is encrypted and authenticated instead, and "fp32, signed", where it is only authenticated.
All take turns. A `--link` of 40000,0 is as fast as the machine is; with `loopback` islands share one network and its
loopback interface. Two columns more then say what a key costs:

slower   than with checksums: the median over all turns of the time that the exchange took, over that of the one with
         checksums in the same turn
target   at most 3 % on a link, and 15 % where a link is as fast as the machine is; and whether that is met

Needs what `benchmarks/links.py` needs. TCP's congestion control and its buffers are the machine's; the program prints
them. Islands share the machine's processors, as they would not elsewhere: with few of them codecs may set the pace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from torch.distributed import Store, TCPStore

from benchmarks.links import Links, enter_network
from benchmarks.orders import Workers, answer_orders, reach_store
from hf_diloco.store.values import ValueStore
from tests.processes import Process, Processes
from tests.tcp_stores import KeptStore, reach

BASELINE = "all_reduce"
CHECKED, BARE, SEALED, SIGNED = GUARDS = ("checksums", "bare", "sealed", "signed")
"""What protects pieces on their way."""
KEYED = (SEALED, SIGNED)
TCP_SHARE = 1448 / 1514
LINK_LIMIT, MACHINE_LIMIT = 0.03, 0.15
"""By how much a key may slow an exchange down: on links, and where these are as fast as the machine is."""
MACHINE_RATE = 40_000.0  # Mbit/s; a link of this rate or more is as fast as the machine is
LOOPBACK = "loopback"
LINK_HELP = f"Mbit/s, ms; or {LOOPBACK}; repeatable"
TIMEOUT = 600.0
_TCP = Path("/proc/sys/net/ipv4")


class Link(NamedTuple):
    """Mbit/s in each direction, and milliseconds to another island and back."""

    rate: float
    rtt: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """From RATE,RTT, or "loopback"."""
        if text == LOOPBACK:
            return cls(math.inf, 0.0)
        rate, rtt = (float(part) for part in text.split(","))
        if rate <= 0 or rtt < 0:
            raise ValueError(text)
        return cls(rate, rtt)

    @property
    def is_loopback(self) -> bool:
        """Whether islands have no networks of their own."""
        return math.isinf(self.rate)

    def __str__(self) -> str:
        return LOOPBACK if self.is_loopback else f"{self.rate:g}, {self.rtt:g}"


@dataclass
class Measurement:
    """Exchanges that differ in nothing. Rates in Mbit/s, times in seconds but for `rtt`, which is in milliseconds."""

    rate: float
    rtt: float
    islands: int
    connections: int
    payload: str
    values: int
    seconds: list[float]
    bytes_sent: int
    seconds_connecting: float
    guard: str = CHECKED

    @property
    def label(self) -> str:
        """What the table calls it."""
        return self.payload if self.guard == CHECKED else f"{self.payload}, {self.guard}"

    @property
    def best(self) -> float:
        """Seconds of the fastest."""
        return min(self.seconds)

    @property
    def share(self) -> float:
        """Of what TCP could do at best."""
        return self.bytes_sent * 8 / (TCP_SHARE * self.rate * 1e6) / self.best

    def slower(self, checked: Measurement) -> float:
        """By which share of the time with checksums; the two took turns."""
        return statistics.median(map(operator.truediv, self.seconds, checked.seconds)) - 1

    @property
    def limit(self) -> float:
        """Of `slower`, for a key."""
        return MACHINE_LIMIT if self.rate >= MACHINE_RATE else LINK_LIMIT


# One island's process


class Island:
    """Does what it is asked for in the store; all answers are dicts.

    Args:
        number: of the island.
        orders: kept by the program that asks.
        store: likewise; where islands meet.
    """

    def __init__(self, number: int, orders: Store, store: ValueStore) -> None:
        import torch

        torch.set_num_threads(1)
        self._number = number
        self._orders, self._store = orders, store
        self._generator = torch.Generator().manual_seed(number)
        self._values = torch.empty(0)
        self._meshes: dict[str, Any] = {}
        self._group: Any = None

    def open(self, name: str, islands: int, connections: int, values: int, guards: list[str]) -> dict[str, Any]:
        """Connects to the others, instead of the connections before: once with each of `guards`."""
        import torch
        from torch.distributed import PrefixStore, ProcessGroupGloo

        from hf_diloco.sealing.keys import LinkKey
        from hf_diloco.transport.base import Lane
        from hf_diloco.transport.mesh import MeshExchange

        self.close()
        address = Links.address(self._number)
        seconds = {}
        for guard in guards:
            begin = time.monotonic()
            self._meshes[guard] = mesh = MeshExchange(
                Lane(
                    self._store,
                    f"{name}-{guard}",
                    self._number,
                    islands,
                    address,
                    TIMEOUT,
                    LinkKey(b"of a benchmark", guard == SEALED) if guard in KEYED else None,
                    num_connections=connections,
                )
            )
            if guard == BARE:
                for way in ("send", "receive"):
                    setattr(mesh.links, way, partial(getattr(mesh.links, way), with_checksum=False))
            seconds[guard] = time.monotonic() - begin
        gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(PrefixStore(f"bare/{name}", self._orders), self._number, islands, options)
        self._values = torch.empty(values)
        self._refill()
        return {"seconds": seconds}

    def exchange(self, payload: str, islands: int, start: float, guard: str) -> dict[str, float]:
        """Averages at the moment `start` of the machine's clock."""
        from hf_diloco.codecs import CODECS

        time.sleep(max(0.0, start - time.monotonic()))
        begin = time.monotonic()
        if payload == BASELINE:
            self._group.allreduce([self._values]).wait()
            num_bytes = 2 * (islands - 1) * self._values.nbytes // islands
        else:
            traffic = self._meshes[guard].average(self._values, [1.0] * islands, CODECS[payload])
            num_bytes = max(traffic.bytes_sent, traffic.bytes_received)
        end = time.monotonic()
        self._refill()
        return {"begin": begin, "end": end, "bytes": num_bytes}

    def close(self) -> dict[str, float]:
        """Lets go of all connections."""
        for mesh in self._meshes.values():
            mesh.close()
        self._meshes.clear()
        self._group = None
        return {}

    def _refill(self) -> None:
        self._values.normal_(generator=self._generator)


def run_island(number: int, port: int, meeting: int) -> None:
    """Answers until the program that asks kills this process."""
    print("up", flush=True)  # from now on this process has a network of its own, which waits for its link
    orders = reach_store(Links.host, port, TIMEOUT)
    answer_orders(orders, number, Island(number, orders, reach(meeting, Links.host)))


# All islands


class Archipelago:
    """Some islands on links of one kind.

    Args:
        link: what all links are like.
        num_islands: how many.
        links: to join them to.
        processes: where they are started.
    """

    def __init__(self, link: Link, num_islands: int, links: Links, processes: Processes) -> None:
        self._rtt = link.rtt
        self._links = links
        store = TCPStore(Links.host, 0, is_master=True, wait_for_workers=False)
        own_network = [] if link.is_loopback else ["unshare", "--net"]
        command = [*own_network, sys.executable, "-m", "benchmarks.exchange", "--port", str(store.port)]
        self._meeting = KeptStore(Links.host)
        command += ["--meeting", str(self._meeting.port)]
        self._islands: list[Process] = [
            processes.spawn([*command, "--island", str(number)], env={"OMP_NUM_THREADS": "1"})
            for number in range(num_islands)
        ]
        for number, process in enumerate(self._islands):
            process.wait_for("up")
            if link.is_loopback:
                self._links.loop_back(number)
                continue
            self._links.join(number, process.pid)
            self._links.shape(number, *link)
        self._workers = Workers(store, self._islands)

    def open(self, connections: int, values: int, guards: Sequence[str]) -> dict[str, float]:
        """Connects the islands anew; returns seconds for each guard."""
        order = {"name": f"{time.monotonic_ns()}", "connections": connections, "values": values, "guards": guards}
        answers = self._workers.ask("open", islands=len(self._islands), **order)
        return {guard: max(answer["seconds"][guard] for answer in answers) for guard in guards}

    def exchange(self, payload: str, guard: str) -> tuple[float, int]:
        """Seconds of one exchange, and bytes that one island sent."""
        start = time.monotonic() + 0.3 + 2e-3 * self._rtt
        order = {"payload": payload, "start": start, "guard": guard}
        answers = self._workers.ask("exchange", islands=len(self._islands), **order)
        seconds = max(answer["end"] for answer in answers) - max(answer["begin"] for answer in answers)
        return seconds, max(answer["bytes"] for answer in answers)

    def close(self) -> None:
        """Ends the islands and takes their links away."""
        self._links.clear()
        for process in self._islands:
            process.kill()


def measure(args: argparse.Namespace) -> Iterator[Measurement]:
    """All measurements, in the order of the table."""
    with Processes() as processes:
        links = Links(processes)
        for link, num_islands in itertools.product(args.link, args.islands):
            islands = Archipelago(link, num_islands, links, processes)
            for connections in args.connections:
                connecting = islands.open(connections, args.values, args.guards)
                first = connections == args.connections[0]
                for payload in [BASELINE, *args.payload] if first else args.payload:
                    found: dict[str, list[tuple[float, int]]] = {guard: [] for guard in args.guards}
                    for number in range(args.repeats + 1):
                        for guard in args.guards[: 1 if payload == BASELINE else None]:
                            result = islands.exchange(payload, guard)
                            found[guard] += [result] if number else []
                    for guard, results in found.items():
                        if not results:
                            continue
                        seconds, sent = zip(*results, strict=True)
                        yield Measurement(
                            rate=link.rate,
                            rtt=link.rtt,
                            islands=num_islands,
                            connections=connections,
                            payload=payload,
                            values=args.values,
                            seconds=list(seconds),
                            bytes_sent=max(sent),
                            seconds_connecting=connecting[guard],
                            guard=guard,
                        )
            islands.close()


def make_table(measurements: Sequence[Measurement]) -> Table:
    """One row a measurement."""
    table = Table()
    for column in ("Mbit/s, ms", "islands", "connections", "payload", "best", "median", "of the limit", "fp32 x"):
        table.add_column(column, justify="left" if column == "payload" else "right")
    table.add_column("MB sent", justify="right")
    table.add_column("connecting", justify="right")
    has_key = any(row.guard in KEYED for row in measurements)
    for column in ("slower", "target") if has_key else ():
        table.add_column(column, justify="right")

    def place(row: Measurement) -> tuple[float, ...]:
        return row.rate, row.rtt, row.islands, row.connections

    fp32 = {place(row): row.best for row in measurements if row.label == "fp32"}
    checked = {(place(row), row.payload): row for row in measurements if row.guard == CHECKED}
    for row in measurements:
        table.add_row(
            str(Link(row.rate, row.rtt)),
            str(row.islands),
            "" if row.payload == BASELINE else str(row.connections),
            row.label,
            f"{row.best:.3f}",
            f"{statistics.median(row.seconds):.3f}",
            f"{row.share:.0%}",
            f"{fp32.get(place(row), math.nan) / row.best:.2f}",
            f"{row.bytes_sent / 1e6:.1f}",
            "" if row.payload == BASELINE else f"{row.seconds_connecting:.2f}",
            *(_judge(row, checked[place(row), row.payload]) if has_key else ()),
        )
    return table


def _judge(row: Measurement, checked: Measurement) -> tuple[str, str]:
    if row.guard not in KEYED:
        return "", ""
    slower = row.slower(checked)
    return f"{slower:+.1%}", f"{row.limit:.0%}: {'met' if slower <= row.limit else 'not met'}"


def describe_machine() -> str:
    """What TCP does here, and how many processors the islands share."""
    control, sending, receiving = (
        (_TCP / name).read_text().split()[-1] for name in ("tcp_congestion_control", "tcp_wmem", "tcp_rmem")
    )
    return f"{os.cpu_count()} processors; TCP: {control}, buffers of up to {sending} and {receiving} bytes"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=Link.parse, action="append", metavar="RATE,RTT", help=LINK_HELP)
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--connections", type=int, nargs="+", default=[1], help="between two islands")
    parser.add_argument("--payload", nargs="+", help="default: all that there are")
    parser.add_argument("--values", type=int, default=25_000_000, help="fp32 values that are averaged")
    parser.add_argument("--compare-checksums", action="store_true", help="measure without them, too")
    parser.add_argument("--compare-sealing", action="store_true", help="measure with a key, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all measurements")
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.island is not None:
        run_island(args.island, args.port, args.meeting)
        return
    from hf_diloco.codecs import CODECS

    if unknown := set(args.payload or []) - set(CODECS):
        parser.error(f"unknown payloads: {', '.join(sorted(unknown))}; there are {', '.join(CODECS)}")
    enter_network("benchmarks.exchange", sys.argv[1:])
    args.payload = args.payload or list(CODECS)
    wanted = {BARE: args.compare_checksums, SEALED: args.compare_sealing, SIGNED: args.compare_sealing}
    args.guards = [guard for guard in GUARDS if wanted.get(guard, True)]
    args.link = args.link or [Link(1000, 10), Link(200, 50)]
    print(describe_machine())
    measurements = []
    for measurement in measure(args):
        measurements.append(measurement)
        print(f"{measurement.label}: {measurement.best:.3f} s", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in measurements], indent=1) + "\n")
    Console(width=150).print(make_table(measurements))


if __name__ == "__main__":
    main()
