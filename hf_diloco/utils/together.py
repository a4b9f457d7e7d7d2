"""Several questions to somebody far away, asked at the same time: all answers take as long as the slowest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def ask_together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, in their order: the first is made on this thread, and each other on one of its own.

    Raises:
        BaseException: what the first of those that failed raised, after all have ended.
    """
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException | None] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:  # raised below
            errors[place] = error

    threads = [
        threading.Thread(target=run, args=(place,), name="hf-diloco-question", daemon=True)
        for place in range(1, len(calls))
    ]
    for thread in threads:
        thread.start()
    if calls:
        run(0)
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results
