"""Calls on threads of their own: one that must not take too long, several at once, or one that nobody waits for."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def outlive_gloo() -> None:
    """Its threads may still want the interpreter while it shuts down, which aborts the process."""
    atexit.register(time.sleep, 0.2)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what `call` returns, or raises what it raises, unless it takes longer.

    Some of Gloo's wait for ever for a machine that has stopped without closing its connections. The call goes on in a
    thread that nobody waits for.

    Raises:
        TimeoutError: there is no answer after `seconds`.
    """
    answer = _begin(call)
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return answer.result()


def ask_together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, in their order: the first is made on this thread, and each other on one of its own.

    Raises:
        BaseException: what the first of those that failed raised, after all have ended.
    """
    if not calls:
        return []
    others, first = [_begin(call) for call in calls[1:]], Future[Any]()
    _answer(first, calls[0])
    answers = [first, *others]
    wait(answers)
    return [answer.result() for answer in answers]


def _begin(call: Callable[[], T]) -> Future[T]:
    """The answer of a call that is made on a thread which does not keep the process."""
    answer = Future[T]()
    threading.Thread(target=_answer, args=(answer, call), name="hf-diloco-question", daemon=True).start()
    return answer


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


def call_behind(call: Callable[[], object], passing: type[Exception]) -> None:
    """Makes a call that nobody waits for, and whose failure nobody needs to hear of, if it is of a kind."""

    def run() -> None:
        with suppress(passing):
            call()

    threading.Thread(target=run, name="hf-diloco-behind", daemon=True).start()
