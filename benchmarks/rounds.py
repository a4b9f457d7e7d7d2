"""How many round trips a synchronisation of little data takes, and how many seconds that is between far islands.

    python -m benchmarks.rounds
    python -m benchmarks.rounds --islands 2 4 --rtt 10 100 --only "tcp://$" --json FILE
    python -m benchmarks.rounds --islands 2 --rtt 100 --only ^tcp --pause 5 --congestion cubic

Islands are processes with networks of their own (`benchmarks/links.py`) that synchronise `--values` fp32 parameters as
in `benchmarks/others.py`, on links of `--rate` Mbit/s and several round-trip times, on which the payload's own way is
next to nothing. TCP adds trips of its own: most kinds of congestion control begin slowly again after a rest of a few
trips (RFC 2861), bbr does not. In a training rounds are minutes apart; `--pause` has them so many seconds apart:

    tcp://     hf-diloco with the rendezvous at island 0; also with `connections: 4`
    elastic    the same where islands may come and go (`min_islands` below `num_islands`), and all are there
    http://    hf-diloco at a server of `hf-diloco rendezvous`, which speaks S3's protocol and is as far from each
               island as the others are; pseudo-gradients travel through it
    torchft    its `DiLoCo` in one bucket, with the lighthouse at island 0, if torchft is installed

Seconds are the best of `--repeats`, from when the last island begins to when the last one ends. "trips" counts the
round trips that follow one another: the slope of those seconds over the round-trip time, which needs no look inside
and is right whoever waits for whom. With a store a trip is a request and its answer. "rest" is what takes as long
without a link: the intercept. Trips are exact only as long as processors have time: islands share this machine's.

Needs what `benchmarks/links.py` needs. Processes are forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn
from torch.distributed import TCPStore

from benchmarks.exchange import describe_machine
from benchmarks.links import Links, enter_network
from benchmarks.others import Step, available, open_hf_diloco, open_torchft, run_island, synchronise
from tests import forks
from tests.processes import Processes

PORT = 29_450
SERVER = [sys.executable, "-m", "hf_diloco.cli", "rendezvous"]
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000
TORCHFT = "torchft DiLoCo, one bucket"
STORE = "http://"
"""It is on the bridge, half as far from each island as another island is, and so put at twice the distance."""


def open_in_store(island: int, num_islands: int, model: nn.Module) -> Step:
    """Meets the other islands at the server that the environment names."""
    url = os.environ["BENCHMARK_STORE"]
    return open_hf_diloco(island, num_islands, model, "fp32", url, min_islands=num_islands)


def open_elastic(island: int, num_islands: int, model: nn.Module) -> Step:
    """Meets the other islands at island 0. Rounds wait for all that live."""
    os.chdir(tempfile.mkdtemp())  # island 0 keeps a folder there
    return open_hf_diloco(island, num_islands, model, "fp32", min_islands=num_islands - 1, grace=60.0)


CANDIDATES: dict[str, Callable[[int, int, nn.Module], Step]] = {
    "tcp://": functools.partial(open_hf_diloco, payload="fp32"),
    "tcp://, 4 connections": functools.partial(open_hf_diloco, payload="fp32", connections=4),
    "tcp:// elastic": open_elastic,
    STORE: open_in_store,
    TORCHFT: functools.partial(open_torchft, use_bucketization=True),
}


@dataclass
class Row:
    """Synchronisations of some islands by one library; seconds of each round, by milliseconds of the round trip."""

    name: str
    islands: int
    seconds: dict[float, list[float]]

    @property
    def best(self) -> dict[float, float]:
        """Seconds."""
        return {rtt: min(many) for rtt, many in self.seconds.items()}

    @property
    def trips(self) -> tuple[float, float]:
        """Round trips that follow one another, and seconds of all else."""
        if len(self.seconds) < 2:
            return float("nan"), float("nan")
        slope, rest = statistics.linear_regression([rtt / 1e3 for rtt in self.best], list(self.best.values()))
        return slope, rest


def enter_own_network() -> None:
    """Gives this process, which has one thread, a network and a host name of its own.

    Raises:
        OSError: it must not.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK | _NEW_NAMES):
        raise OSError(ctypes.get_errno(), "unshare")


def measure(args: argparse.Namespace, names: list[str]) -> Iterator[Row]:
    """All rows, in the order of the table."""
    with Processes() as processes:
        links = Links(processes, args.congestion)
        for num_islands, name in itertools.product(args.islands, names):
            with tempfile.TemporaryDirectory() as folder:
                server = processes.spawn([*SERVER, f"{Links.host}:{PORT}", "--folder", folder])
                server.wait_for("islands meet at")
                env = {"BENCHMARK_STORE": f"http://{Links.host}:{PORT}/run"}
                yield Row(name, num_islands, dict(measure_row(args, name, num_islands, processes, links, env)))
                server.kill()
                server.wait(expect=None)


def measure_row(
    args: argparse.Namespace, name: str, num_islands: int, processes: Processes, links: Links, env: dict[str, str]
) -> Iterator[tuple[float, list[float]]]:
    """Round-trip times and seconds."""
    store = TCPStore(Links.host, 0, is_master=True, wait_for_workers=False)
    numbers = {"islands": num_islands, "port": store.port, "values": args.values}
    options = [f"--{option}={number}" for option, number in numbers.items()]
    islands = [
        processes.spawn(
            [sys.executable, "-m", "benchmarks.rounds", f"--only={name}", *options, f"--island={number}"], env=env
        )
        for number in range(num_islands)
    ]
    for number, island in enumerate(islands):
        island.wait_for("up")
        links.join(number, island.pid)
    for position, rtt in enumerate(sorted(args.rtt)):
        for number in range(num_islands):
            links.shape(number, args.rate, 2 * rtt if name == STORE else rtt)
        rounds = synchronise(islands, store, args.repeats, rtt, position * (1 + args.repeats), args.pause)
        yield rtt, [seconds for seconds, _ in rounds]
    links.clear()
    for island in islands:
        island.kill()


def make_table(rows: list[Row]) -> str:
    """Markdown."""
    rtts = sorted({rtt for row in rows for rtt in row.seconds})
    lines = [
        f"| islands | | {' | '.join(f'{rtt:g} ms' for rtt in rtts)} | trips | rest |",
        "|---" * (len(rtts) + 4) + "|",
    ]
    for row in rows:
        trips, rest = row.trips
        seconds = " | ".join(f"{row.best[rtt]:.2f}" for rtt in rtts)
        lines.append(f"| {row.islands} | {row.name} | {seconds} | {trips:.1f} | {rest:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s in each direction")
    parser.add_argument("--rtt", type=float, nargs="+", default=[10, 50, 100, 200], help="milliseconds")
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--only", nargs="*", default=[], help="run only rows whose names hold one of these patterns")
    parser.add_argument("--values", type=int, default=100_000, help="fp32 parameters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each, after which TCP begins slowly")
    parser.add_argument("--congestion", metavar="NAME", help="islands' TCP congestion control, as cubic")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all measurements")
    parser.add_argument("--layers", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.island is not None:
        enter_own_network()
        run_island(args, CANDIDATES[args.only[0]])
        return
    names = [name for name in CANDIDATES if not args.only or any(re.search(word, name) for word in args.only)]
    if not names:
        parser.error(f"no row holds {' or '.join(args.only)}; there are {', '.join(CANDIDATES)}")
    enter_network("benchmarks.rounds", sys.argv[1:])
    os.environ["OMP_NUM_THREADS"] = "1"
    forks.install(anywhere=True)
    print(describe_machine())
    rows = []
    for row in measure(args, available(names)):
        rows.append(row)
        print(make_table([row]).splitlines()[-1], file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(make_table(rows))


if __name__ == "__main__":
    main()
