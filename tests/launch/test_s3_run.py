"""Two islands that meet in a bucket, by the real S3 protocol: with faults all the time, an outage, and an intruder."""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.chaos import ENGINES, run_file
from hf_diloco.store.objects import ObjectStore
from tests import records
from tests.processes import Process, Processes
from tests.s3 import FaultyProxy, S3Server, share_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE = 300.0  # seconds for one phase, on few and busy cores
ROUNDS, SYNC_EVERY = 24, 5
STORE_SECONDS = 4.0
FAULTY_SHARE = 0.04


class Launch:
    """A launch of both islands, and what is known of it while it runs."""

    def __init__(self, folder: Path, processes: Processes, proxy: FaultyProxy, url: str, **engine: Any) -> None:
        file = folder / "run.yaml"
        settings: dict[str, Any] = {"num_islands": 2, "max_islands": 2, "min_islands": 2, "grace": 30.0}
        settings |= {**engine, "exchange_timeout": STORE_SECONDS}
        file.write_text(yaml.safe_dump(run_file(folder, ROUNDS, SYNC_EVERY, **settings)))
        self._folder = folder / "chaos"
        environment = {**proxy.environment(), "HF_DILOCO_KEY": secrets.token_hex(16), "OMP_NUM_THREADS": 1}
        command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(file), "--rendezvous", url]
        self.process: Process = processes.spawn(command, env=environment)

    def events(self, island: int, kind: str) -> list[dict[str, Any]]:
        return records.events(self._folder / f"island-{island}", kind)

    def log(self, island: int) -> str:
        return (self._folder / f"island-{island}" / "log.txt").read_text()

    def wait(self, what: str, until: Callable[[int], bool]) -> None:
        """Until it holds for both islands."""
        deadline = time.monotonic() + PATIENCE
        while not all(until(island) for island in (0, 1)):
            assert self.process.popen.poll() is None, f"{what}: ended before\n{self.process.output}"
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:g} s\n{self.process.output}"
            time.sleep(0.05)

    def round(self, island: int) -> int:
        return max((event["round"] for event in self.events(island, "sync")), default=0)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server, share_of(FAULTY_SHARE, 500, 0.3, 503, 1.0)) as started:
        yield started


@pytest.mark.parametrize("engine", list(ENGINES))
def test_faults_an_outage_and_an_intruder(
    engine: str, tmp_path: Path, server: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    store = ObjectStore(f"{server.url}/run")
    with Processes() as processes:
        launch = Launch(tmp_path, processes, proxy, store.url, **ENGINES[engine])
        launch.wait("first rounds", lambda island: launch.round(island) >= 3)
        outage = run_through_outage(launch, server)
        forged = put_forged_offers(store, max(map(launch.round, (0, 1))) + 3)
        spoil_heartbeats_until_refused(launch, store)
        output = launch.process.wait(timeout=PATIENCE).output
        assert not processes.alive()

    assert all(proxy.troubles[trouble] for trouble in (500, 503, 0.3, 1.0)), proxy.troubles
    for island in (0, 1):
        steps = [event["step"] for event in launch.events(island, "missed") if outage[0] < event["time"] < outage[1]]
        assert len(steps) > 1, "rounds are missed while the store is away"
        assert steps[-1] - steps[0] >= SYNC_EVERY, "and training goes on"
        assert launch.round(island) > max(
            event["round"] for event in launch.events(island, "sync") if event["time"] < outage[1]
        )
    for path in forged:
        assert any(f"refused an object in the store: the record {path}" in launch.log(i) for i in (0, 1)), output
    assert_equal_hashes(launch)
    ends = [launch.events(island, "end")[-1] for island in (0, 1)]
    rounds = [end["rounds"] for end in ends]
    assert max(rounds) < ROUNDS, "steps of missed rounds are not made again"
    assert any(f"done after round {number} of the run's {ROUNDS}" in output for number in rounds), "the run says so"


def run_through_outage(launch: Launch, server: S3Server) -> tuple[float, float]:
    """No answer until both islands have missed two rounds, and then until both have synchronised; its time."""
    missed = [len(launch.events(island, "missed")) for island in (0, 1)]
    begun = time.time()
    server.pause()
    try:
        launch.wait("outage", lambda island: len(launch.events(island, "missed")) >= missed[island] + 2)
    finally:
        ended = time.time()
        server.resume()
    assert ended - begun > STORE_SECONDS
    launch.wait("return", lambda island: launch.events(island, "sync")[-1]["time"] > ended)
    return begun, ended


def put_forged_offers(store: ObjectStore, round_number: int) -> list[str]:
    """Offers of a round to come: one is noise, one was sealed by island 1, for another round."""
    replayed = next(path for path, _ in store.list("rounds/00000001/00/offers") if "offers/00001-" in path)
    sealed = store.get(replayed, 1 << 20)
    assert sealed is not None
    folder = f"rounds/{round_number:08d}/00/offers"
    forged = {f"{folder}/00001-000001-999999.json": b"\x00noise", f"{folder}/{replayed.rpartition('/')[2]}": sealed}
    for path, data in forged.items():
        store.put(path, data)
    return list(forged)


def spoil_heartbeats_until_refused(launch: Launch, store: ObjectStore) -> None:
    """Overwrites island 1's signs of life, which it overwrites in its turn, until island 0 has read one of ours."""
    path = "heartbeats/1/000001.json"
    copied = store.get("heartbeats/0/000001.json", 1 << 20)
    assert copied is not None
    data = itertools.cycle([copied, b"{}"])

    def is_refused(_: int) -> bool:
        store.put(path, next(data))
        return f"refused an object in the store: the record {path}" in launch.log(0)

    launch.wait("refusal", is_refused)


def assert_equal_hashes(launch: Launch) -> None:
    """Both islands report the same outer parameters for every round that both report.

    A fault may keep one of them from the last round.
    """
    hashes: dict[int, set[str]] = defaultdict(set)
    for island in (0, 1):
        for event in launch.events(island, "sync"):
            hashes[event["round"]].add(event["outer_hash"])
    assert all(len(found) == 1 for found in hashes.values()), hashes
    assert abs(launch.round(0) - launch.round(1)) <= 1
