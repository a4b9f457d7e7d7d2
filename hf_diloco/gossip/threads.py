"""The threads of a process that trains: nodes that take turns in it, and the exchange behind a node's computation.

Random generators and Accelerate's record of gradient accumulation belong to the process. They are put away when a node
waits for others, and brought back when it goes on. So a node in a thread draws the same numbers as one in a process of
its own, whatever the order of the turns.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState

from hf_diloco.transport.base import Traffic

THREAD_NAME = "hf-diloco-ahead"

_Outcome = tuple[Traffic, float, float]
"""What an exchange moved, and when it began and ended."""

_Request = tuple[Future[_Outcome], Callable[[], Traffic]]


@dataclass(frozen=True)
class _Globals:
    """What a node finds changed when others had their turns."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor]
    gradients: dict[str, Any]

    @classmethod
    def take(cls) -> _Globals:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        gradients = dict(GradientState._shared_state)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices, gradients)

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        GradientState._shared_state.clear()
        GradientState._shared_state.update(self.gradients)


class _Queue:
    """A lock that whoever has waited longest gets next. `threading.Lock` goes to who asks at the right moment: a node
    that never waits for others would keep it for hundreds of steps."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    def acquire(self) -> None:
        mine = threading.Event()
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return
            self._waiting.append(mine)
        mine.wait()

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()  # it stays taken
            else:
                self._is_taken = False


class Turns:
    """One node computes at a time: in turn, where all would."""

    def __init__(self) -> None:
        self._queue = _Queue()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """The whole of a node's run; leaves the process's state as it was."""
        self._queue.acquire()
        before = _Globals.take()
        GradientState._shared_state.clear()
        try:
            yield
        finally:
            before.put_back()
            self._queue.release()

    @contextmanager
    def others(self) -> Iterator[None]:
        """While this node waits. Called within `mine`."""
        own = _Globals.take()
        self._queue.release()
        try:
            yield
        finally:
            self._queue.acquire()
            own.put_back()


class Ahead:
    """A thread that carries out one exchange at a time, behind a step's computation, which asks for what came of it.

    The thread begins with the first exchange. It does not keep the process alive.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._outcome: Future[_Outcome] | None = None  # of the exchange that is under way, or is not taken yet
        self._asked = math.inf  # when somebody first waited for it
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._requests.put, None)  # for who forgets to close

    def start(self, call: Callable[[], Traffic]) -> None:
        """Has `call` carried out; `take` comes before the next start."""
        assert self._outcome is None, "an exchange is under way"
        if self._thread is None:
            self._thread = _start_thread(self._requests)
        self._outcome, self._asked = Future(), math.inf
        self._requests.put((self._outcome, call))

    def settle(self) -> None:
        """Returns when nothing is under way; raises nothing. What came of it stays to be taken."""
        if self._outcome is not None:
            self._asked = min(self._asked, time.monotonic())
            self._outcome.exception()

    def take(self) -> tuple[Traffic, float]:
        """Waits for the exchange that was started; returns what it moved, and its seconds before anybody waited.

        Raises:
            Exception: what the call has raised.
        """
        assert self._outcome is not None, "no exchange has begun"
        self.settle()
        outcome, self._outcome = self._outcome, None
        traffic, begun, ended = outcome.result()
        return traffic, max(0.0, min(ended, self._asked) - begun)

    def close(self) -> None:
        """Returns when the thread has ended, and forgets what is not taken. Call what ends its exchange before."""
        self._outcome = None
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None


def _start_thread(requests: SimpleQueue[_Request | None]) -> threading.Thread:
    """The thread computes on one core, and leaves the others to the step.

    Two threads that both use all cores slow each other down. The number belongs to a thread, but who sets it also
    sets that of threads to come; so this thread sets its own again.
    """
    is_ready = threading.Event()
    thread = threading.Thread(target=_carry_out, args=(requests, is_ready), name=THREAD_NAME, daemon=True)
    thread.start()
    is_ready.wait()
    torch.set_num_threads(torch.get_num_threads())
    return thread


def _carry_out(requests: SimpleQueue[_Request | None], is_ready: threading.Event) -> None:
    torch.get_num_threads()  # a thread's first use of the number sets it to that of the process
    torch.set_num_threads(1)
    is_ready.set()
    while (request := requests.get()) is not None:
        _exchange(*request)
        del request  # or its vectors would stay until the next


def _exchange(outcome: Future[_Outcome], call: Callable[[], Traffic]) -> None:
    begun = time.monotonic()
    try:
        with torch.no_grad():
            traffic = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result((traffic, begun, time.monotonic()))
