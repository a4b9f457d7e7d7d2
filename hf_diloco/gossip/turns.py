"""Nodes as threads of one process, of which one computes at a time, as if it were alone.

Random generators and Accelerate's record of gradient accumulation belong to the process. They are put away when a node
waits for others, and brought back when it goes on. So a node in a thread draws the same numbers as one in a process of
its own, whatever the order of the turns.
"""

from __future__ import annotations

import random
import threading
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


class Turns:
    """One node computes at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """The whole of a node's run; leaves the process's state as it was."""
        with self._lock:
            before = _Globals.take()
            GradientState._shared_state.clear()
            try:
                yield
            finally:
                before.put_back()

    @contextmanager
    def others(self) -> Iterator[None]:
        """While this node waits. Called within `mine`."""
        own = _Globals.take()
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
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
