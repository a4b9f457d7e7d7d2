"""Records that nodes leave for each other while they go on."""

from __future__ import annotations

import threading
import time

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
    for thread in threading.enumerate():
        if thread.name == PUTTING:
            thread.join(LONG)
    assert board.read("averaged/0") == {"number": 3}
