"""Calls on threads of their own: one that must not take too long, several at once, or one that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what `call` returns, or raises what it raises, unless it takes longer.

    Some of Gloo's wait for ever for a machine that has stopped without closing its connections. The call goes on in a
    thread that nobody waits for.

    Raises:
        TimeoutError: there is no answer after `seconds`.
    """
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not answers:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return answers[0]


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


def call_behind(call: Callable[[], object], passing: type[Exception]) -> None:
    """Makes a call that nobody waits for, and whose failure nobody needs to hear of, if it is of a kind."""

    def run() -> None:
        with suppress(passing):
            call()

    threading.Thread(target=run, name="hf-diloco-behind", daemon=True).start()
