"""Links that are cut while islands synchronise: does a round ever happen on some islands otherwise than on others?

    python -m benchmarks.cuts mesh                  # 100 cuts, about a quarter of an hour on two cores
    python -m benchmarks.cuts elastic               # about as long
    python -m benchmarks.cuts bucket --tries 40 --seed 3

Three islands, each a process in a network of its own, on links of 100 Mbit/s. One link is cut at a random moment:

    short      no packet passes for less than the deadline
    long       no packet passes for longer than the deadline
    one-way    no packet passes in one direction, for longer than the deadline
    slow       one island's link has 1 Mbit/s

mesh: between two islands that meet over tcp://; after each cut the islands start anew. bucket: between an island and
the object store; the islands go on, and the next cut comes when the island is back in a round. elastic: islands that
meet in the object store and exchange directly; the link is one between two islands, or the one to the store.

The exit code is 1 if two islands ever hold different outer parameters after the same round, an island ends with
another error than a lost island or a missed round, or one that was cut off does not come back.

Needs what `benchmarks/links.py` needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.links import Links, enter_network
from hf_diloco.utils.files import write_json
from tests.processes import Process, Processes, find_free_port
from tests.s3 import S3Server

NUM_ISLANDS = 3
KINDS = ("short", "long", "one-way", "slow")
DEADLINE = 4.0
LEASE = 4.0
SECONDS = {"short": (0.2, 1.0), "long": (6.0, 9.0), "one-way": (6.0, 9.0), "slow": (6.0, 9.0)}
RATE, SLOW_RATE = 100, 1
MESH_ROUNDS = 10
PATIENCE = 120.0


# One island's process


def run_island(settings: dict[str, Any]) -> None:
    """Takes runs from files that appear in its inbox, one after the other; prints what became of their rounds."""
    from hf_diloco.membership import heartbeats as members

    members.HEARTBEAT_SECONDS, members.LEASE_SECONDS = 0.5, LEASE
    print("up", flush=True)
    for number in itertools.count():
        order = Path(settings["inbox"]) / f"{number}.json"
        while not order.exists():
            time.sleep(0.05)
        _train(settings["island"], **json.loads(order.read_text()))


def _train(island: int, folder: str, num_rounds: int, pause: float, width: int, config: dict[str, Any]) -> None:
    import torch

    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.errors import DiLoCoError, MissedRoundError
    from hf_diloco.inner import open_shards
    from hf_diloco.inner.island import IslandGroup
    from hf_diloco.rounds.open import open_session

    torch.set_num_threads(1)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(island)
    session = None
    finished = False
    try:
        session = open_session(DiLoCoConfig(island=island, **config), IslandGroup())
        session.num_rounds = num_rounds
        session.join(open_shards(model, optimizer), Path(folder) / f"island-{island}")
        while session.outer.round < num_rounds:
            batch = torch.randn(4, width, generator=generator)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(pause)
            if session.outer.count_step():
                try:
                    report = session.sync()
                    _tell(round=report.round, hash=report.outer_hash, participants=report.participants)
                except MissedRoundError:
                    _tell(missed=session.outer.round + 1)
        finished = True
        _tell(end="finished")
    except DiLoCoError as error:
        _tell(end=type(error).__name__, text=str(error))
    finally:
        if session is not None:
            session.leave(finished)
    _tell(left=True)


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# All islands


class Island:
    """An island's process, and what it has told of its present run."""

    def __init__(self, processes: Processes, number: int, inbox: Path, environment: dict[str, str]) -> None:
        command = ["unshare", "--net", sys.executable, "-m", "benchmarks.cuts", "island"]
        command += ["--settings", json.dumps({"island": number, "inbox": str(inbox)})]
        inbox.mkdir()
        self._inbox = inbox
        self._num_runs = 0
        self.number = number
        self.process: Process = processes.spawn(command, env={"OMP_NUM_THREADS": "1", **environment})
        self._seen = 0

    def begin(self, **run: Any) -> None:
        """Starts a run."""
        self._seen = len(self._lines())
        write_json(self._inbox / f"{self._num_runs}.json", run)
        self._num_runs += 1

    def told(self) -> list[dict[str, Any]]:
        """Everything of the present run."""
        return [json.loads(line) for line in self._lines()[self._seen :] if line.startswith("{")]

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds it has completed in the present run."""
        return [event for event in self.told() if "round" in event]

    def ending(self) -> dict[str, Any] | None:
        """How its present run ended, once it has left it."""
        told = self.told()
        return next(event for event in told if "end" in event) if {"left": True} in told else None

    def _lines(self) -> list[str]:
        return [line.rstrip("\n") for line in self.process.output.splitlines(keepends=True) if line.endswith("\n")]


def wait_until(what: Any, islands: Sequence[Island], seconds: float = PATIENCE) -> None:
    """Returns once `what()` is true."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline or any(island.process.popen.poll() is not None for island in islands):
            raise SystemExit("stuck:\n" + "\n".join(island.process.output[-2000:] for island in islands))
        time.sleep(0.02)


class Tally:
    """What became of all cuts."""

    def __init__(self) -> None:
        self.cuts: Counter[str] = Counter()
        self.went_on: Counter[str] = Counter()
        self.endings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.num_splits = 0

    def compare(self, rounds: Sequence[Sequence[dict[str, Any]]]) -> int:
        """Counts the rounds after which islands differ; returns how many rounds there were."""
        hashes: dict[int, set[str]] = {}
        for of_island in rounds:
            for event in of_island:
                hashes.setdefault(event["round"], set()).add(event["hash"])
        self.num_splits += sum(len(seen) > 1 for seen in hashes.values())
        return len(hashes)

    def show(self) -> None:
        """Prints the table."""
        table = Table()
        for column in ("cut", "tries", "without a loss", "otherwise"):
            table.add_column(column, justify="left" if column in ("cut", "otherwise") else "right")
        for kind in KINDS:
            endings = ", ".join(f"{name} {count}" for name, count in sorted(self.endings[kind].items()))
            table.add_row(kind, str(self.cuts[kind]), str(self.went_on[kind]), endings)
        Console(width=110).print(table)
        print(f"split outcomes: {self.num_splits} in {self.cuts.total()} cuts")


def cut(links: Links, kind: str, island: int, peer: str, chance: random.Random) -> None:
    """Cuts a link for as long as its kind says, and heals it."""
    if kind == "slow":
        links.shape(island, SLOW_RATE)
    elif kind == "one-way":
        chance.choice([links.cut, links.cut_out])(island, peer)
    else:
        links.cut(island, peer)
        links.cut_out(island, peer)
    time.sleep(chance.uniform(*SECONDS[kind]))
    links.heal(RATE)


def try_mesh(links: Links, islands: Sequence[Island], args: argparse.Namespace, folder: Path) -> Tally:
    """Each try is a run of its own: over `tcp://` a lost island ends it."""
    chance = random.Random(args.seed)
    tally = Tally()
    for number in range(args.tries):
        kind = KINDS[number % len(KINDS)]
        port = find_free_port()
        for island in islands:
            config = {
                "rendezvous": f"tcp://{links.address(0)}:{port}",
                "bind_address": links.address(island.number),
                "num_islands": NUM_ISLANDS,
                "sync_every": 1,
                "join_timeout": 60,
                "sync_timeout": DEADLINE,
                "exchange_timeout": DEADLINE,
            }
            place = str(folder / str(number))
            island.begin(folder=place, num_rounds=MESH_ROUNDS, pause=0.0, width=1000, config=config)
        wait_until(lambda: all(island.rounds() for island in islands), islands)
        time.sleep(chance.uniform(0.0, 1.5))
        first, second = chance.sample(range(NUM_ISLANDS), 2)
        cut(links, kind, first, links.address(second), chance)
        wait_until(lambda: all(island.ending() for island in islands), islands)
        endings = [island.ending() or {} for island in islands]
        tally.cuts[kind] += 1
        tally.went_on[kind] += all(ending["end"] == "finished" for ending in endings)
        for ending in endings:
            if ending["end"] not in ("finished", "IslandLostError"):
                raise SystemExit(f"try {number} ({kind}): {ending}")
            if ending["end"] != "finished":
                tally.endings[kind][ending["end"]] += 1
        tally.compare([island.rounds() for island in islands])
        print(f"try {number}: {kind}, {[ending['end'] for ending in endings]}", file=sys.stderr, flush=True)
    return tally


def try_store(links: Links, islands: Sequence[Island], args: argparse.Namespace, folder: Path, url: str) -> Tally:
    """One run, in which island after island is cut off and comes back."""
    chance = random.Random(args.seed)
    tally = Tally()
    config = {
        "rendezvous": url,
        "num_islands": NUM_ISLANDS,
        "min_islands": 2,
        "sync_every": 4,
        "grace": 1.0,
        "join_timeout": 60,
        "sync_timeout": 30,
        "exchange_timeout": DEADLINE,
        "keep_rounds": 1000,
    }
    is_direct = args.what == "elastic"
    for island in islands:
        own = {"exchange": "mesh", "bind_address": links.address(island.number)} if is_direct else {}
        whole = {**config, **own}
        island.begin(folder=str(folder), num_rounds=1_000_000, pause=0.05, width=300, config=whole)
    wait_until(lambda: all(len(island.rounds()) > 2 for island in islands), islands)
    for number in range(args.tries):
        kind = KINDS[number % len(KINDS)]
        victim = islands[chance.randrange(NUM_ISLANDS)]
        time.sleep(chance.uniform(0.0, 1.0))
        before = len(victim.told())
        others = [links.address(island.number) for island in islands if island is not victim]
        peer = chance.choice([*others, links.host]) if is_direct else links.host
        cut(links, kind, victim.number, peer, chance)
        newest = islands[(victim.number + 1) % NUM_ISLANDS].rounds()[-1]["round"]
        wait_until(
            lambda victim=victim, newest=newest: any(
                event["round"] > newest and victim.number in event["participants"] for event in victim.rounds()
            ),
            islands,
        )
        missed = sum("missed" in event for event in victim.told()[before:])
        tally.cuts[kind] += 1
        tally.went_on[kind] += not missed
        tally.endings[kind]["rounds missed"] += missed
        for island in islands:
            if island.ending():
                raise SystemExit(f"try {number} ({kind}): island {island.number}: {island.ending()}")
        what = f"{kind}, island {victim.number} and {'the store' if peer == links.host else peer}"
        print(f"try {number}: {what}, {missed} missed, round {newest}", file=sys.stderr, flush=True)
    num_rounds = tally.compare([island.rounds() for island in islands])
    print(f"{num_rounds} rounds in one run")
    return tally


def run(args: argparse.Namespace, folder: Path, processes: Processes) -> Tally:
    """All that the command line asks for."""
    links = Links(processes)
    with S3Server(address=links.host) as server:
        islands = [
            Island(processes, number, folder / f"inbox-{number}", server.environment())
            for number in range(NUM_ISLANDS)
        ]
        for island in islands:
            island.process.wait_for("up", PATIENCE)  # from then on it has a network of its own
            links.join(island.number, island.process.pid)
            links.shape(island.number, RATE)
        if args.what == "mesh":
            return try_mesh(links, islands, args, folder)
        return try_store(links, islands, args, folder, f"{server.url}/cuts")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["mesh", "bucket", "elastic", "island"], metavar="{mesh,bucket,elastic}")
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "island":
        run_island(json.loads(args.settings))
        return
    enter_network("benchmarks.cuts", sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        tally = run(args, Path(folder), processes)
    tally.show()
    sys.exit(tally.num_splits > 0)


if __name__ == "__main__":
    main()
