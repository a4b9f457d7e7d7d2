"""Calls on other threads: one with a timeout, several at once, or one in the background."""

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
    """Delays the exit by 0.2 s: Gloo's threads may still need the interpreter, and would abort the process."""
    atexit.register(time.sleep, 0.2)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns or raises what `call` does; raises `TimeoutError` if it takes longer than `seconds`.

    Some of Gloo's calls wait forever for a machine that has stopped without closing its connections. Such a call goes
    on in a thread that nobody waits for.
    """
    answer = _begin(call)
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return answer.result()


def ask_together(*calls: Callable[[], Any]) -> list[Any]:
    """Returns the results of the calls, in order: the first runs on this thread, each other on its own. Raises the
    error of the first call that failed, after all have ended."""
    if not calls:
        return []
    others, first = [_begin(call) for call in calls[1:]], Future[Any]()
    _answer(first, calls[0])
    answers = [first, *others]
    wait(answers)
    return [answer.result() for answer in answers]


def _begin(call: Callable[[], T]) -> Future[T]:
    """Starts a call on a daemon thread, which does not keep the process alive; returns its future."""
    answer = Future[T]()
    threading.Thread(target=_answer, args=(answer, call), name="hf-diloco-question", daemon=True).start()
    return answer


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


def call_behind(call: Callable[[], object], passing: type[Exception]) -> None:
    """Makes a call in the background; ignores errors of the type `passing`."""

    def run() -> None:
        with suppress(passing):
            call()

    threading.Thread(target=run, name="hf-diloco-behind", daemon=True).start()
