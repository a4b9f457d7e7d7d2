"""A limit for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

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
