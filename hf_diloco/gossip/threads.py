"""Threads of a training process: nodes that compute in turn, and exchanges in the background of a node's computation.

Random generators and Accelerate's record of gradient accumulation belong to the process. `Turns` saves them when a
node waits for others, and restores them when it continues. So a node in a thread draws the same numbers as one in a
process of its own, whatever the order of the turns.
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
"""An exchange's traffic, and the times at which it began and ended."""

_Request = tuple[Future[_Outcome], Callable[[], Traffic]]


@dataclass(frozen=True)
class _Globals:
    """State of the process that other nodes change during their turns."""

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
    """A fair lock: the thread that has waited longest gets it next. `threading.Lock` is not fair: a node that never
    waits for others would keep it for hundreds of steps."""

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
                self._waiting.popleft().set()  # the lock stays taken: it passes to that thread
            else:
                self._is_taken = False


class Turns:
    """Lets one node compute at a time; nodes that want to compute take turns."""

    def __init__(self) -> None:
        self._queue = _Queue()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Encloses a node's whole run; afterwards restores the process's state."""
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
        """Lets other nodes compute while this one waits. Called within `mine`."""
        own = _Globals.take()
        self._queue.release()
        try:
            yield
        finally:
            self._queue.acquire()
            own.put_back()


class Ahead:
    """A thread that runs one exchange at a time in the background of a step's computation.

    The thread starts with the first exchange. It is a daemon, so it does not keep the process alive.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._outcome: Future[_Outcome] | None = None  # of the exchange that is in flight, or was not taken yet
        self._asked = math.inf  # when the node first waited for it
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._requests.put, None)  # ends the thread if `close` is never called

    def start(self, call: Callable[[], Traffic]) -> None:
        """Starts `call` in the thread; `take` must be called before the next start."""
        assert self._outcome is None, "an exchange is in flight"
        if self._thread is None:
            self._thread = _start_thread(self._requests)
        self._outcome, self._asked = Future(), math.inf
        self._requests.put((self._outcome, call))

    def drain(self) -> None:
        """Waits until nothing is in flight; raises nothing. The outcome is kept for `take`."""
        if self._outcome is not None:
            self._asked = min(self._asked, time.monotonic())
            self._outcome.exception()

    def take(self) -> tuple[Traffic, float]:
        """Waits for the exchange; returns its traffic, and the seconds it ran before the node began to wait for it.

        Raises:
            Exception: whatever the call raised.
        """
        assert self._outcome is not None, "no exchange has begun"
        self.drain()
        outcome, self._outcome = self._outcome, None
        traffic, begun, ended = outcome.result()
        return traffic, max(0.0, min(ended, self._asked) - begun)

    def close(self) -> None:
        """Waits until the thread has ended; drops an outcome that was not taken. End an exchange in flight before."""
        self._outcome = None
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None


def _start_thread(requests: SimpleQueue[_Request | None]) -> threading.Thread:
    """Starts a thread that computes on one core, and leaves the other cores to the step.

    Two threads that both use all cores slow each other down. PyTorch keeps the number of cores per thread, but setting
    it in one thread also changes the default of later threads; so the calling thread sets its own number again.
    """
    is_ready = threading.Event()
    thread = threading.Thread(target=_carry_out, args=(requests, is_ready), name=THREAD_NAME, daemon=True)
    thread.start()
    is_ready.wait()
    torch.set_num_threads(torch.get_num_threads())
    return thread


def _carry_out(requests: SimpleQueue[_Request | None], is_ready: threading.Event) -> None:
    torch.get_num_threads()  # a thread's first use of the number resets it to that of the process
    torch.set_num_threads(1)
    is_ready.set()
    while (request := requests.get()) is not None:
        _exchange(*request)
        del request  # or its vectors would stay in memory until the next request


def _exchange(outcome: Future[_Outcome], call: Callable[[], Traffic]) -> None:
    begun = time.monotonic()
    try:
        with torch.no_grad():
            traffic = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result((traffic, begun, time.monotonic()))
