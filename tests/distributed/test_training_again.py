"""Islands of fixed membership, and nodes, that train again in the same processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_diloco import DiLoCoConfig
from hf_diloco.errors import RendezvousError, StopRequested
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.open import open_session
from hf_diloco.rounds.session import BaseSession
from hf_diloco.store.values import ValueStore
from tests.clocks import AT_ONCE, LONG
from tests.distributed.torchrun import torchrun
from tests.islands import run_islands
from tests.processes import Processes
from tests.programs.trainer_island import make_model

pytestmark = pytest.mark.distributed

PROGRAMS = Path(__file__).parents[1] / "programs"


def train_again(program: str, folder: Path, port: int, kind: str, until: str) -> list[str]:
    """Two processes of a program, the first of which goes on once the other has printed `until` and waits for it."""
    with Processes() as processes:
        both = [
            processes.spawn(
                [
                    sys.executable,
                    PROGRAMS / program,
                    str(number),
                    f"tcp://127.0.0.1:{port}",
                    folder / str(number),
                    kind,
                ]
            )
            for number in range(2)
        ]
        both[1].wait_for(rf"^{until}$(?s:.)*waiting for (island|node) 0")  # which keeps the last store still
        (folder / "go").touch()
        return [process.wait().output for process in both]


@pytest.mark.parametrize("callbacks", ["same", "new"])
def test_all_islands_train_again_after_an_error_and_after_a_stop(
    tmp_path: Path, free_port: int, callbacks: str
) -> None:
    for output in train_again("trains_again.py", tmp_path, free_port, callbacks, "stopped"):
        assert "ended by of the user's own" in output
        assert "trained to the end" in output


@pytest.mark.parametrize("first", ["finished", "refused", "failed"])
def test_nodes_train_again_with_another_callback(tmp_path: Path, free_port: int, first: str) -> None:
    for output in train_again("gossip_again.py", tmp_path, free_port, first, "first ended"):
        assert "trained to the end" in output


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_node_whose_training_failed_keeps_nobody_waiting_and_returns(
    num_ranks: int, tmp_path: Path, free_port: int
) -> None:
    """Its process lives on, so its connections would too."""
    program, rendezvous = PROGRAMS / "gossip_fails.py", f"tcp://127.0.0.1:{free_port}"
    with Processes() as processes:
        nodes = [
            processes.spawn(
                [
                    *(torchrun(num_ranks) if node == 1 and num_ranks > 1 else [sys.executable]),
                    program,
                    str(node),
                    rendezvous,
                    tmp_path / str(node),
                ]
            )
            for node in range(3)
        ]
        nodes[1].wait_for("ended by an error ended the last training with this GossipCallback")
        for neighbour in (nodes[0], nodes[2]):
            neighbour.wait_for(r"node 1 was lost \(its connection broke\)")
        (tmp_path / "go").touch()
        outputs = [node.wait().output for node in nodes]
    assert "ended by of the user's own" in outputs[1]
    assert "node 1 is back: it goes on from the mean of its neighbours" in outputs[1]
    for output in outputs:
        assert "ended with the others" in output


class Island:
    """An island that trains once and again, and whose waits can be seen and stopped."""

    def __init__(self, island: int, folder: Path, port: int, **settings: Any) -> None:
        rendezvous = f"tcp://127.0.0.1:{port}"
        self._config = DiLoCoConfig(island=island, num_islands=2, rendezvous=rendezvous, sync_every=1, **settings)
        self._folder = folder / str(island)
        self._model = make_model(lora=False, tied=True, seed=1)
        self.session: BaseSession | None = None
        self.waits, self.should_stop = threading.Event(), False

    def open(self, **settings: Any) -> BaseSession:
        self.waits.clear()
        config = self._config.model_copy(update=settings)
        self.session = open_session(config, IslandGroup(), self._is_stopping, self.session, self._folder)
        return self.session

    def train(self, finishes: bool) -> str:
        return self.train_in(self.open(), finishes)

    def train_in(self, session: BaseSession, finishes: bool) -> str:
        session.join(open_shards(self._model, None), self._folder)
        session.outer.count_step(1.0)
        session.sync()
        session.leave(finished=finishes)
        return str(session.outer.outer_hash)

    def _is_stopping(self) -> bool:
        self.waits.set()
        return self.should_stop


def test_an_island_that_is_back_first_waits_for_island_0(tmp_path: Path, free_port: int) -> None:
    islands = [Island(number, tmp_path, free_port, join_timeout=LONG) for number in range(2)]
    run_islands(2, lambda number: islands[number].train(finishes=False))
    islands[1].waits.clear()

    def island_main(number: int) -> str:
        if number == 0:
            assert islands[1].waits.wait(LONG)
        return islands[number].train(finishes=True)

    assert len(set(run_islands(2, island_main))) == 1


def test_a_wait_for_island_0_ends_by_a_stop_or_in_time_and_can_be_taken_up_again(
    tmp_path: Path, free_port: int
) -> None:
    islands = [Island(number, tmp_path, free_port, join_timeout=LONG) for number in range(2)]
    run_islands(2, lambda number: islands[number].train(finishes=False))
    islands[1].should_stop = True
    with pytest.raises(StopRequested):
        islands[1].open()
    islands[1].should_stop = False
    with pytest.raises(RendezvousError, match="island 0 has not begun another training at tcp://"):
        islands[1].open(join_timeout=1.0)
    assert len(set(run_islands(2, lambda number: islands[number].train(finishes=True)))) == 1


def test_an_island_that_bids_farewell_does_not_wait_at_the_store_of_the_next_training(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    islands = [Island(number, tmp_path, free_port, join_timeout=AT_ONCE) for number in range(2)]
    find_all, has_begun, late = ValueStore.find_all, threading.Event(), threading.local()

    def find_late(self: ValueStore, keys: Sequence[str]) -> dict[str, bytes]:
        if "done/0" in keys and getattr(late, "island", 0) == 1:
            assert has_begun.wait(LONG)
        return find_all(self, keys)

    monkeypatch.setattr(ValueStore, "find_all", find_late)

    def island_main(number: int) -> str:
        late.island = number
        islands[number].train(finishes=True)
        session = islands[number].open()
        has_begun.set()  # by island 0: the other one is still in its first training
        return islands[number].train_in(session, finishes=True)

    assert len(set(run_islands(2, island_main))) == 1
