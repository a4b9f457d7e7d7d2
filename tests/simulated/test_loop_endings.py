"""How a hand-written loop ends: by an error, an interrupt or a wish, on its own or while others are waited for."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco import DiLoCoConfig
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.report.progress import read_progress
from hf_diloco.rounds.open import open_session
from hf_diloco.utils.files import STOP_FILE
from tests.distributed.torchrun import torchrun
from tests.islands import Beside, interrupted_after
from tests.loops import make_loop
from tests.processes import run


def test_one_loop_follows_another_whose_goodbye_was_interrupted(free_port: int, tmp_path: Path) -> None:
    """As in a notebook: its port is free."""
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 1}
    is_interrupted = threading.Event()

    def other() -> None:
        for says_goodbye in (False, True):
            session = open_session(DiLoCoConfig(island=1, **common), IslandGroup())
            session.join(open_shards(torch.nn.Linear(3, 1), None), tmp_path / "1")
            session.outer.count_step()
            session.sync()
            if says_goodbye:
                session.leave(finished=True)
            else:
                assert is_interrupted.wait(60)
                session.close()

    def train() -> None:
        outer, _ = make_loop(tmp_path / "0", island=0, **common)
        with interrupted_after(60), outer:
            assert outer.step()
            signal.setitimer(signal.ITIMER_REAL, 0.3)

    with Beside(other) as failures:
        with pytest.raises(KeyboardInterrupt):
            train()
        is_interrupted.set()
        again, _ = make_loop(tmp_path / "0", island=0, **common)
        with again:
            assert again.step()
    assert not failures


def elastic(folder: Path) -> dict[str, Any]:
    """Settings of an island that may be alone."""
    return {"num_islands": 2, "min_islands": 1, "rendezvous": f"file://{folder}/store", "join_timeout": 0.3}


def test_who_is_interrupted_while_it_leaves_its_last_steps_gives_no_more_signs_of_life(tmp_path: Path) -> None:
    config = DiLoCoConfig(island=0, rate_limit=0.04, **elastic(tmp_path))  # 2 seconds for 10 kB
    session = open_session(config, IslandGroup())
    session.join(open_shards(torch.nn.Linear(50, 50), None), tmp_path / "0")
    session.outer.count_step()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.3):
        session.leave(finished=False)
    assert session.has_left
    assert session.members is not None
    assert session.members.standing.phase == "left"


def test_what_an_error_has_left_in_the_model_is_not_offered(tmp_path: Path) -> None:
    def train() -> None:
        outer, _ = make_loop(tmp_path / "0", island=0, sync_every=2, **elastic(tmp_path))
        with outer:
            outer.step()
            assert outer.step()
            outer.step()
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    rounds = {path.name for path in (tmp_path / "store" / "rounds").iterdir()}
    assert rounds == {"00000001"}


def test_the_launcher_sees_that_a_loop_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        outer, _ = make_loop(tmp_path / "0", sync_every=2)
        with outer:
            assert not outer.should_stop()
            assert read_progress(tmp_path / "progress.json").can_save
            raise RuntimeError("out of memory")

    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError):
        train()
    assert signal.getsignal(signal.SIGTERM) == before
    progress = read_progress(tmp_path / "progress.json")
    assert (progress.state, progress.message) == ("failed", "out of memory")


def test_the_launcher_sees_whether_islands_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the script knows its settings: the launcher stopped all other islands when one failed."""
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    for place in (None, f"file://{tmp_path}/store"):
        outer, _ = make_loop(tmp_path / "0", sync_every=2, rendezvous=place)
        with outer:
            assert read_progress(tmp_path / "progress.json").survives_losses == (place is not None)


def test_the_launcher_sees_the_first_of_two_loops_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a GAN. Whichever is asked, the script can stop."""

    def shown() -> tuple[int, bool, str]:
        progress = read_progress(tmp_path / "progress.json")
        return progress.max_steps, progress.can_stop, progress.state

    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    first, _ = make_loop(tmp_path / "0", sync_every=2, num_steps=4)
    second, _ = make_loop(tmp_path / "1", sync_every=2, num_steps=2)
    with first:
        with second:
            assert shown() == (4, False, "training")
            assert not second.should_stop()
            for _ in range(2):
                first.step()
                second.step()
                assert shown() == (4, True, "training")
        assert shown() == (4, True, "training")
    assert shown() == (4, True, "done")
    third, _ = make_loop(tmp_path / "2", sync_every=2, num_steps=6)
    with third:
        assert shown() == (6, False, "training")


def test_a_signal_is_a_wish_to_all_loops_that_ask(tmp_path: Path) -> None:
    first, _ = make_loop(tmp_path / "0", sync_every=2)
    second, _ = make_loop(tmp_path / "1", sync_every=2)
    before = signal.getsignal(signal.SIGTERM)
    with first, second:
        assert not first.should_stop()
        assert not second.should_stop()
        signal.raise_signal(signal.SIGTERM)
        assert (first.should_stop(), second.should_stop()) == (True, True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_loop_that_is_to_stop_while_its_last_round_waits_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    place: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}"}
    config: dict[str, Any] = {"sync_every": 4, "fragment_sync_delay": 1, **place}
    has_ended = threading.Event()

    def other() -> None:
        session = open_session(DiLoCoConfig(island=1, **config), IslandGroup())
        session.join(open_shards(torch.nn.Linear(3, 1), None), tmp_path / "1")
        assert has_ended.wait(60)
        session.leave(finished=False)

    with Beside(other) as failures:
        outer, _ = make_loop(tmp_path / "0", island=0, **config)
        with outer:
            outer.step()
            assert not outer.should_stop()
            (tmp_path / STOP_FILE).touch()
        assert outer.stopped
        assert outer._session is not None
        assert not outer._session.has_finished
        has_ended.set()
    assert not failures


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_the_island(rank: int, tmp_path: Path) -> None:
    """Though the others wait for this rank, in a reduction or for its answer."""
    program = torchrun(2, "-m", "tests.programs.own_loop", str(tmp_path), "100", "--asks", f"--fails-on={rank}")
    ended = run(program, timeout=60, expect=1)
    assert "OSError: no space left for the log" in ended.output


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_a_collective_write_is_named_on_the_others(rank: int, tmp_path: Path) -> None:
    """They wait for it within `write`, and PyTorch tells them only that a connection broke."""
    program = torchrun(2, "-m", "tests.programs.own_loop", str(tmp_path), "4", f"--fails-to-write={rank}")
    output = run(program, timeout=60, expect=1).output
    told = (
        rf"CheckpointError: .*checkpoint-3 is not whole: rank {rank} failed to write it \(KeyError: 'no such tensor'\)"
    )
    assert re.search(told, output), output
