"""Records that nodes leave for each other while they go on."""

from __future__ import annotations

import threading
import time

import pytest

from hf_diloco.gossip.mesh.store import Board
from hf_diloco.gossip.records import Record
from hf_diloco.store.values import ValueStore
from tests.clocks import LONG

PUTTING = "hf-diloco-put"


class PausingLock:
    """Holds up the first thread that puts, when it has put all that there was."""

    def __init__(self) -> None:
        self.has_paused, self.go_on = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._exits: list[threading.Thread] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        thread = threading.current_thread()
        if thread.name == PUTTING and (not self._exits or thread is self._exits[0]):
            self._exits.append(thread)
            if len(self._exits) == 2:
                self.has_paused.set()
                self.go_on.wait(LONG)


class SlowBoard(Board):
    """The store takes its time for the second record."""

    def __init__(self) -> None:
        super().__init__(ValueStore.in_memory(), "test")
        self.is_asked, self.answers = threading.Event(), threading.Event()

    def put(self, key: str, record: Record) -> None:
        if record["number"] == 2 and not self.is_asked.is_set():
            self.is_asked.set()
            self.answers.wait(LONG)
        super().put(key, record)


class FaultyBoard(Board):
    """The client of the store fails once for each key in `fails`, in a way that no caller expects."""

    def __init__(self) -> None:
        super().__init__(ValueStore.in_memory(), "test")
        self.fails = {"averaged/1"}
        self.is_asked, self.answers = threading.Event(), threading.Event()

    def put(self, key: str, record: Record) -> None:
        self.is_asked.set()
        self.answers.wait(LONG)
        if key in self.fails:
            self.fails.remove(key)
            raise RuntimeError("the client's pool is closed")
        super().put(key, record)


def await_puts() -> None:
    for thread in threading.enumerate():
        if thread.name == PUTTING:
            thread.join(LONG)


def test_a_record_that_cannot_be_written_holds_up_no_other() -> None:
    board = FaultyBoard()
    board.put_later("averaged/0", {"number": 1})
    assert board.is_asked.wait(LONG)
    board.put_later("averaged/1", {"number": 1})
    board.put_later("averaged/2", {"number": object()})  # no JSON
    board.put_later("averaged/3", {"number": 1})
    board.answers.set()
    await_puts()
    board.put_later("averaged/1", {"number": 2})
    await_puts()
    assert board.who_has({node: f"averaged/{node}" for node in range(4)}) == {0, 1, 3}


def test_a_record_for_which_no_thread_can_be_started_keeps_no_later_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(ValueStore.in_memory(), "test")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        board.put_later("averaged/0", {"number": 1})
    board.put_later("averaged/1", {"number": 1})
    await_puts()
    assert board.who_has({node: f"averaged/{node}" for node in range(2)}) == {0, 1}


def test_of_records_that_nobody_waits_for_the_last_one_stays() -> None:
    board, lock = SlowBoard(), PausingLock()
    board._putting = lock  # type: ignore[assignment]
    board.put_later("averaged/0", {"number": 1})
    assert lock.has_paused.wait(LONG)
    board.put_later("averaged/0", {"number": 2})
    assert board.is_asked.wait(LONG)
    lock.go_on.set()
    board.put_later("averaged/0", {"number": 3})
    time.sleep(0.2)  # whoever does not wait for the second one has put the third by now
    board.answers.set()
    await_puts()
    assert board.read("averaged/0") == {"number": 3}
