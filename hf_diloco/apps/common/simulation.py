"""All islands, or nodes, of a run as threads of one process, with the numbers of several."""

from __future__ import annotations

import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.process import STOPPED
from hf_diloco.gossip.threads import Turns
from hf_diloco.trainer.stop import STOP_FILE

LONGEST_WAIT = 7 * 24 * 3600.0
"""Seconds. One of them computes at a time, and the others wait for it."""

_ASK_SECONDS = 0.2
_STOPPING = "stopping: each finishes its step and writes a checkpoint (Ctrl-C: end now)"

R = TypeVar("R", bound=BaseRun)


class Simulation(ABC, Generic[R]):
    """Trains all islands, or nodes; one computes at a time.

    Args:
        runs: the run as each of them has it.
    """

    def __init__(self, runs: Sequence[R]) -> None:
        self._runs = runs
        self._turns = Turns()
        self._threads = [threading.Thread(target=self._run_one, args=(number,)) for number in range(len(runs))]
        self._has_ended = threading.Event()
        self._codes: list[int] = []
        self._errors: list[BaseException] = []

    def run(self, is_command: bool = False) -> int:
        """Trains; returns the exit code. Ctrl-C has each of them finish its step and write a checkpoint.

        Args:
            is_command: this process does nothing else, so a second Ctrl-C ends it at once.

        Raises:
            DiLoCoError: the first that one of them met.
        """
        with self._signal_handlers(is_command):
            for thread in self._threads:
                thread.start()
            try:
                for thread in self._threads:
                    thread.join()
            finally:
                self._has_ended.set()
        if self._errors:
            raise self._errors[0]
        return STOPPED if STOPPED in self._codes else 0

    @abstractmethod
    def _train(self, number: int) -> int:
        """Trains one of them; returns its exit code."""

    @abstractmethod
    def _leave(self, number: int) -> None:
        """Tells the others that this one has failed."""

    def _stop(self) -> None:
        """Asks all of them for a checkpoint and an end."""
        threading.Thread(target=self._ask_until_they_end, name="hf-diloco-stop", daemon=True).start()

    def _ask_until_they_end(self) -> None:
        """One that is just beginning has no folder yet, or takes what lies there for an older wish."""
        while not self._has_ended.is_set():
            for run, thread in zip(self._runs, self._threads, strict=True):
                folder = run.island_folder()
                if thread.is_alive() and folder.is_dir():
                    (folder / STOP_FILE).touch()
            self._has_ended.wait(_ASK_SECONDS)

    def _run_one(self, number: int) -> None:
        try:
            with self._turns.mine():
                self._codes.append(self._train(number))
        except BaseException as error:
            self._errors.append(error)
            self._leave(number)

    @contextmanager
    def _signal_handlers(self, is_command: bool) -> Iterator[None]:
        is_first = True

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal is_first
            if is_command and not is_first:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)  # no thread that computes would hear an exception
            if is_command:
                print(_STOPPING, file=sys.stderr, flush=True)
            is_first = False
            self._stop()

        is_main = threading.current_thread() is threading.main_thread()  # only there may handlers be set
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
