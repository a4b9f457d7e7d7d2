"""Nodes as threads of one process, of which one computes at a time, as if it were alone.

Random generators and Accelerate's record of gradient accumulation belong to the process. They are put away when a node
waits for others, and brought back when it goes on. So a node in a thread draws the same numbers as one in a process of
its own, whatever the order of the turns.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState


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


class NoTurns(Turns):
    """For a node that has its process to itself."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Nothing."""
        yield

    @contextmanager
    def others(self) -> Iterator[None]:
        """Nothing."""
        yield
