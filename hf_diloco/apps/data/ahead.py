"""Reading ahead in a thread, so that training waits neither for the network nor for the tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Full, Queue
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_SECONDS_BETWEEN_LOOKS = 0.1


class _Ended(NamedTuple):
    """The last thing in the queue."""

    error: BaseException | None


def read_ahead(items: Iterator[T], size: int) -> Iterator[T]:
    """The same items, of which up to `size` are made before they are asked for.

    An error of `items` is raised where its item would have come. The thread ends when the returned iterator is closed
    or forgotten, or when the main thread ends.

    Args:
        items: used by the thread alone from the first request on.
        size: items to keep ready.
    """
    ready: Queue[T | _Ended] = Queue(maxsize=size)
    closed = threading.Event()

    def put(item: T | _Ended) -> bool:
        while not closed.is_set() and threading.main_thread().is_alive():
            try:
                ready.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
                return True
            except Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_Ended(None))
        except BaseException as error:
            put(_Ended(error))

    # Not a daemon: one that is killed inside the tokenizer while the interpreter ends can abort the process.
    threading.Thread(target=work, name="hf-diloco-read-ahead", daemon=False).start()
    try:
        while not isinstance(item := ready.get(), _Ended):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
