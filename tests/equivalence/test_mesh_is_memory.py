"""Training over real connections gives the bits that training in threads gives."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_diloco.store.values import ValueStore
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.open import MemoryTransport
from tests.processes import ROOT, Processes, find_free_port
from tests.programs.session_island import settings, train

pytestmark = pytest.mark.distributed


def in_threads(num_islands: int, payload: str) -> list[list[str]]:
    network, store = MemoryNetwork(num_islands), ValueStore.in_memory()
    with ThreadPoolExecutor(num_islands) as pool:
        futures = [
            pool.submit(
                train,
                settings(island, num_islands, "tcp://unused:1", payload),
                MemoryTransport(network, store, island),
            )
            for island in range(num_islands)
        ]
        return [future.result(timeout=60) for future in futures]


def in_processes(num_islands: int, payload: str) -> list[list[str]]:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    program: list[str | Path] = [sys.executable, ROOT / "tests" / "programs" / "session_island.py"]
    with Processes() as processes:
        islands = [
            processes.spawn(
                [*program, str(island), str(num_islands), rendezvous, payload],
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
            )
            for island in range(num_islands)
        ]
        outputs = [island.wait(timeout=120).output for island in islands]
    return [json.loads(re.search(r"^hashes (.*)$", output, re.MULTILINE)[1]) for output in outputs]  # type: ignore[index]


@pytest.mark.parametrize(("num_islands", "payload"), [(2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "fp16")])
def test_mesh_is_memory(num_islands: int, payload: str) -> None:
    """Bit for bit: with two islands as designed, and with more because sums run in the islands' order everywhere."""
    threads, processes = in_threads(num_islands, payload), in_processes(num_islands, payload)
    assert len(set(threads[0])) == 5  # the start and four rounds, each of which changed something
    assert all(hashes == threads[0] for hashes in [*threads, *processes])
