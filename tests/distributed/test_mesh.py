"""Exchanges and sessions between real processes on the loopback device: what they compute, and what ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.codecs import CODECS
from hf_diloco.transport.base import BURST_SECONDS
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import CHUNK_VALUES
from tests.clocks import AT_ONCE, LONG
from tests.islands import run_islands
from tests.processes import Process, Processes
from tests.programs.mesh_island import make_values
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.distributed

PROGRAMS = Path(__file__).parents[1] / "programs"
LOOP_VALUES = 16 << 20  # 64 MiB: long enough for a signal to come in the middle


@pytest.fixture
def store() -> KeptStore:
    return KeptStore()


def spawn(processes: Processes, program: str, **settings: Any) -> Process:
    return processes.spawn([sys.executable, PROGRAMS / f"{program}.py", json.dumps(settings)], env={"PYTHONPATH": "."})


# What comes out

SMALL_CHUNK = 100


Case = tuple[str, int, list[float], int]  # payload, size, weights and values a chunk
Result = tuple[torch.Tensor, int, int, float]  # the average, bytes sent and received, seconds


def make_cases(num_islands: int) -> list[Case]:
    """All kinds of sizes."""
    equal, unequal = [1.0] * num_islands, [3.0, 1.0, 0.25, 1e5][:num_islands]
    sizes = [0, 1, num_islands - 1, 7]
    small = [*sizes, SMALL_CHUNK - 1, SMALL_CHUNK, SMALL_CHUNK + 1, 10 * SMALL_CHUNK, 33 * SMALL_CHUNK + 5]
    large = [*sizes, CHUNK_VALUES - 1, CHUNK_VALUES + 1]
    return [
        (payload, size, weights, chunk)
        for payload in ("fp32", "bf16", "fp16")
        for weights in (equal, unequal)
        for chunk, chosen in ((SMALL_CHUNK, small), (CHUNK_VALUES, large))
        for size in chosen
    ]


def average_in_processes(
    store: KeptStore, folder: Path, num_islands: int, cases: Sequence[Case], **settings: Any
) -> list[list[Result]]:
    """For each island, what comes of the cases."""
    with Processes() as processes:
        started = [
            spawn(
                processes,
                "mesh_island",
                store=store.port,
                island=island,
                num_islands=num_islands,
                timeout=60,
                cases=cases,
                result=str(folder / f"{island}.pt"),
                **settings,
            )
            for island in range(num_islands)
        ]
        for process in started:
            process.wait()
    return [torch.load(folder / f"{island}.pt") for island in range(num_islands)]


def average_in_threads(num_islands: int, cases: Sequence[Case]) -> list[torch.Tensor]:
    """The average of each case."""
    network = MemoryNetwork(num_islands)

    def run(island: int) -> list[torch.Tensor]:
        exchange = network.lane("0", island)
        results = []
        for case, (payload, size, weights, _) in enumerate(cases):
            values = make_values(case, island, size)
            exchange.average(values, weights, CODECS[payload])
            results.append(values)
        return results

    return run_islands(num_islands, run)[0]


@pytest.mark.parametrize("num_islands", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_mesh_of_processes_computes_what_threads_compute(num_islands: int, store: KeptStore, tmp_path: Path) -> None:
    cases = make_cases(num_islands)
    expected = average_in_threads(num_islands, cases)
    totals = [0] * len(cases)
    for island, results in enumerate(average_in_processes(store, tmp_path, num_islands, cases)):
        for case, (values, sent, received, _) in enumerate(results):
            assert torch.equal(values, expected[case]), (island, cases[case])
            assert sent == received
            totals[case] += sent
    for (payload, size, _, _), total in zip(cases, totals, strict=True):
        num_bytes = CODECS[payload].num_bytes(size)
        assert total == 2 * (num_islands - 1) * num_bytes, "2 (n-1)/n of the payload, for each of n islands"


@pytest.mark.parametrize(("num_islands", "num_connections", "key"), [(2, 4, ""), (3, 3, "key")])
def test_more_connections_change_nothing_that_comes_out(
    num_islands: int, num_connections: int, key: str, store: KeptStore, tmp_path: Path
) -> None:
    """Large enough for every connection to carry several parts of each chunk, and too small for that."""
    weights = [3.0, 1.0, 0.25][:num_islands]
    sizes = [(CHUNK_VALUES, size) for size in (1, 7, 100_001, 3 * CHUNK_VALUES + 1)]
    cases: list[Case] = [(payload, size, weights, chunk) for payload in ("fp32", "bf16") for chunk, size in sizes]
    expected = average_in_threads(num_islands, cases)
    settings = {"num_connections": num_connections, "key": key}
    for results in average_in_processes(store, tmp_path, num_islands, cases, **settings):
        for case, (values, *_) in enumerate(results):
            assert torch.equal(values, expected[case]), cases[case]


@pytest.mark.parametrize(("num_islands", "num_connections"), [(2, 4), (3, 1)])
def test_a_rate_limit_is_kept_and_changes_nothing_else(
    num_islands: int, num_connections: int, store: KeptStore, tmp_path: Path
) -> None:
    bytes_per_second, size = 4e6, 1_500_000
    cases: list[Case] = [("fp32", size, [1.0] * num_islands, CHUNK_VALUES)] * 2
    expected = average_in_threads(num_islands, cases)
    settings = {"rate_limit": bytes_per_second, "num_connections": num_connections}
    for results in average_in_processes(store, tmp_path, num_islands, cases, **settings):
        for case, (values, sent, _, seconds) in enumerate(results):
            assert torch.equal(values, expected[case])
            least = sent / bytes_per_second - BURST_SECONDS
            assert least <= seconds < 2 * least + AT_ONCE


# What ends it


def start_loop(
    processes: Processes, store: KeptStore, num_islands: int, timeout: float, num_connections: int = 1
) -> list[Process]:
    islands = [
        spawn(
            processes,
            "mesh_island",
            store=store.port,
            island=island,
            num_islands=num_islands,
            timeout=timeout,
            loop=LOOP_VALUES,
            num_connections=num_connections,
        )
        for island in range(num_islands)
    ]
    for process in islands:
        process.wait_for("exchange 1$")
    return islands


def read_loss(process: Process) -> dict[str, Any]:
    line = process.wait().output.splitlines()[-1]
    loss: dict[str, Any] = json.loads(line)
    return loss


def losses_of(victim: int, islands: list[Process]) -> list[dict[str, Any]]:
    """What all others say, who name it."""
    losses = [read_loss(process) for island, process in enumerate(islands) if island != victim]
    assert all(loss["lost"] == [victim] for loss in losses), losses
    return losses


@pytest.mark.parametrize(("num_islands", "victim", "num_connections"), [(3, 1, 1), (4, 3, 1), (3, 0, 3)])
def test_a_killed_island_is_named_by_all_others_within_seconds(
    num_islands: int, victim: int, num_connections: int, store: KeptStore
) -> None:
    with Processes() as processes:
        islands = start_loop(processes, store, num_islands, 300, num_connections)
        islands[victim].kill()
        killed = time.monotonic()
        for loss in losses_of(victim, islands):
            assert f"island {victim} was lost" in loss["text"]
            assert "start all islands again" in loss["text"]
        assert time.monotonic() - killed < LONG


@pytest.mark.parametrize(("num_islands", "victim", "num_connections"), [(2, 0, 1), (3, 1, 1), (3, 1, 4)])
def test_an_island_that_dies_in_the_middle_of_a_transfer_is_named_within_seconds(
    num_islands: int, victim: int, num_connections: int, store: KeptStore
) -> None:
    """Gloo does not wake a transfer that is half through when its connection breaks."""
    with Processes() as processes:
        islands = start_loop(processes, store, num_islands, 300, num_connections)
        os.kill(islands[victim].pid, signal.SIGSTOP)
        time.sleep(1)  # the others fill the buffers between them and go no further
        islands[victim].kill()
        killed = time.monotonic()
        losses_of(victim, islands)
        assert time.monotonic() - killed < LONG


@pytest.mark.parametrize(("num_islands", "victim", "num_connections"), [(2, 1, 1), (3, 0, 1), (2, 0, 4)])
def test_a_stopped_island_is_named_by_all_others_at_the_deadline(
    num_islands: int, victim: int, num_connections: int, store: KeptStore
) -> None:
    with Processes() as processes:
        # 8 s is also what they have to connect in, and for each exchange.
        islands = start_loop(processes, store, num_islands, 8, num_connections)
        os.kill(islands[victim].pid, signal.SIGSTOP)
        assert all(7.5 < loss["seconds"] < AT_ONCE for loss in losses_of(victim, islands))
        os.kill(islands[victim].pid, signal.SIGCONT)
        assert read_loss(islands[victim])["seconds"] < LONG


# Sessions


def session_settings(port: int, tmp_path: Path, num_islands: int, island: int, **config: Any) -> dict[str, Any]:
    whole = {
        "num_islands": num_islands,
        "island": island,
        "rendezvous": f"tcp://127.0.0.1:{port}",
        "sync_every": 2,
        "join_timeout": 120,
        "sync_timeout": 30,
        "exchange_timeout": 30,
        **config,
    }
    return {"config": whole, "folder": str(tmp_path / f"island-{island}"), "steps": 6}


def test_a_second_process_with_the_number_of_an_island_is_refused(free_port: int, tmp_path: Path) -> None:
    whole = {"steps": 10_000, "pause": 0.05}  # the run goes on while the second one starts, however late
    with Processes() as processes:
        spawn(processes, "mesh_session", **{**session_settings(free_port, tmp_path, 2, 0), **whole})
        others = [
            spawn(processes, "mesh_session", **{**session_settings(free_port, tmp_path / str(copy), 2, 1), **whole})
            for copy in range(2)
        ]
        refused = first_to_end(others)
        assert refused.wait(expect=1)
        assert "DuplicateIslandError: another process has already joined this run as island 1" in refused.output
        assert "give every island its own number" in refused.output
        (joined,) = (process for process in others if process is not refused)
        joined.wait_for("round 2")


def first_to_end(processes: Sequence[Process]) -> Process:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for process in processes:
            if process.popen.poll() is not None:
                return process
        time.sleep(0.05)
    raise AssertionError("all still run after 180 s")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_run_that_loses_an_island_ends_with_its_name(victim: int, free_port: int, tmp_path: Path) -> None:
    with Processes() as processes:
        settings = [session_settings(free_port, tmp_path, 3, island) for island in range(3)]
        islands = [spawn(processes, "mesh_session", **{**one, "steps": 10_000, "pause": 0.05}) for one in settings]
        for process in islands:
            process.wait_for("round 2 ")
        islands[victim].kill()
        killed = time.monotonic()
        for island, process in enumerate(islands):
            if island != victim:
                output = process.wait(expect=1).output
                assert re.search(r"^IslandLostError: ", output, re.MULTILINE)
                assert re.search(rf"island {victim} ", output.splitlines()[-1]), output
                assert "start all islands again" in output.lower()
        assert time.monotonic() - killed < LONG


@pytest.mark.parametrize("moment", ["steps", "vote"])
def test_a_dead_island_is_noticed_by_those_who_wait(moment: str, free_port: int, tmp_path: Path) -> None:
    """Before a round and before its vote nothing is being transferred that could fail."""
    with Processes() as processes:
        timeouts = {"sync_timeout": 600, "exchange_timeout": 600}
        settings = [session_settings(free_port, tmp_path, 3, island, **timeouts) for island in range(3)]
        settings[1]["die_in"] = moment
        islands = [spawn(processes, "mesh_session", **one) for one in settings]
        islands[1].wait(expect=9)
        died = time.monotonic()
        for island in (0, 2):
            output = islands[island].wait(expect=1).output
            last = output.splitlines()[-1]
            assert last.startswith("IslandLostError: ")
            assert re.search(r"islands? \[?1\b", last), last
            assert "waiting for island 1 at" not in output, "when they leave, they know that it is gone"
        assert time.monotonic() - died < LONG


def test_a_rendezvous_that_hangs_is_given_up(free_port: int, tmp_path: Path) -> None:
    """A machine that has stopped closes no connection, and torch's store waits for it for ever."""
    with Processes() as processes:
        settings = [session_settings(free_port, tmp_path, 2, island) for island in range(2)]
        more = {"steps": 10_000, "pause": 0.05, "answer_seconds": 5}
        islands = [spawn(processes, "mesh_session", **{**one, **more}) for one in settings]
        for process in islands:
            process.wait_for("round 2 ")
        os.kill(islands[0].pid, signal.SIGSTOP)
        output = islands[1].wait(expect=1).output
    assert "IslandLostError: " in output
    assert "island 0" in output.splitlines()[-1]
