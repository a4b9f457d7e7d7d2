"""A wish to end: how it is told, and that all ranks of an island heed it at one step."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.stop import StopFlag
from tests.distributed.torchrun import torchrun
from tests.processes import run


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    one = StopFlag()
    one.install(IslandGroup())
    yield one
    one.uninstall()


def test_nobody_asked(flag: StopFlag) -> None:
    assert not flag.is_requested()
    assert not flag.agreed()


def test_a_call_from_any_thread(flag: StopFlag) -> None:
    thread = threading.Thread(target=flag.request)
    thread.start()
    thread.join()
    assert flag.is_requested()
    assert flag.agreed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish(flag: StopFlag, number: signal.Signals) -> None:
    signal.raise_signal(number)
    assert flag.agreed()


def test_a_second_ctrl_c_is_obeyed_at_once(flag: StopFlag) -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back() -> None:
    seen: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        flag = StopFlag()
        flag.install(IslandGroup())
        flag.uninstall()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert seen == [signal.SIGTERM]
    assert not flag.is_requested()


def test_a_function_that_raised_is_over() -> None:
    """Nobody uninstalls; a second installation, then, is not in the way of the first handlers."""
    seen: list[int] = []
    flag = StopFlag()

    def train() -> None:
        flag.install(IslandGroup(), during=train)
        signal.raise_signal(signal.SIGTERM)
        assert flag.agreed()
        assert not seen
        raise RuntimeError("out of memory")

    def handler(number: int, frame: object) -> None:
        seen.append(number)

    old = signal.signal(signal.SIGTERM, handler)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                train()
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, old)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    flag = StopFlag()
    thread = threading.Thread(target=lambda: flag.install(IslandGroup()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    flag.uninstall()


def test_a_file_asks_as_well(tmp_path: Path) -> None:
    flag = StopFlag(tmp_path / "stop")
    flag.install(IslandGroup())
    try:
        assert not flag.agreed()
        (tmp_path / "stop").touch()
        assert flag.agreed()
        signal.raise_signal(signal.SIGINT)  # the first: a wish, though the file asked before
    finally:
        flag.uninstall()


def test_a_rank_that_waits_long_for_the_others_says_what_may_be_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_diloco.trainer.stop.QUIET", timedelta(milliseconds=50))
    store, is_told = dist.HashStore(), threading.Event()

    def rank(number: int) -> StopFlag:
        island, flag = IslandGroup(), StopFlag()
        island.size, island.rank = 2, number
        island.group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=30))
        flag.install(island)
        return flag

    def come_late() -> None:
        late = rank(1)
        late.request()
        is_told.wait(20)
        late.agreed()

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_told.set()

    notice = Notice(logging.WARNING)
    logging.getLogger("hf_diloco").addHandler(notice)
    other = threading.Thread(target=come_late)
    other.start()
    flag = rank(0)
    try:
        flag.agreed()
        assert flag.agreed(), "what the other rank said counts, however late"
        assert "rank 0 has waited" in caplog.text
        assert "call it on all ranks" in caplog.text
    finally:
        other.join()
        flag.uninstall(waits=False)
        logging.getLogger("hf_diloco").removeHandler(notice)


@pytest.mark.distributed
def test_all_ranks_stop_at_one_step() -> None:
    output = run(torchrun(2, "-m", "tests.programs.mesh_stop", "1", "5"), timeout=60).output
    stops = re.findall(r"rank (\d) stopped at step (\d+)", output)
    assert sorted(rank for rank, _ in stops) == ["0", "1"]
    assert {step for _, step in stops} <= {"5", "6"}
    assert len({step for _, step in stops}) == 1
