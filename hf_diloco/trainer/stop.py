"""A request to stop training early, which all ranks of an island follow after the same step."""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.progress import launchers_folder
from hf_diloco.utils.files import STOP_FILE

logger = logging.getLogger("hf_diloco")

QUIET = timedelta(seconds=30)
"""How long a rank waits for the other ranks' flags before it logs a warning."""


def launchers_stop_file() -> Path | None:
    """Returns the file with which `hf-diloco launch -- COMMAND` asks this island to stop; None without a launcher."""
    folder = launchers_folder()
    return folder and folder / STOP_FILE


class StopFlag:
    """Set by SIGTERM, SIGINT, `request` or a file; `agreed` turns true on all ranks of the island at the same step.

    Signals reach the ranks at different times, but only a common step can be checkpointed. So the ranks all-reduce
    their flags once per step, in the background of the next step: the answer is one step old and costs no time.

    Args:
        file: a file whose existence also requests a stop, even while the island waits for others.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._requested = threading.Event()
        self._island: IslandGroup | None = None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._old_handlers: dict[int, Any] = {}
        self._during: CodeType | None = None

    def request(self, *_: Any) -> None:
        """Requests a stop."""
        self._requested.set()

    def is_requested(self) -> bool:
        """Whether this rank was asked to stop, or the file exists."""
        return self._requested.is_set() or (self._file is not None and self._file.exists())

    def agreed(self) -> bool:
        """Whether to stop now. Call it once per step on every rank."""
        assert self._island is not None
        if self._island.size == 1:
            return self.is_requested()
        stop = False
        if self._pending is not None:
            work, flag = self._pending
            _await(work, self._island.rank)
            stop = bool(flag.item())
        flag = torch.tensor([int(self.is_requested())])
        self._pending = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._island.group, async_op=True), flag)
        return stop

    def install(self, island: IslandGroup, during: Callable[..., Any] | None = None) -> None:
        """Makes SIGTERM and SIGINT request a stop; a second SIGINT raises `KeyboardInterrupt`.

        Args:
            island: the ranks that agree.
            during: the currently running function that the stop ends. Once it has returned or raised, signals have
                their previous effect again, even if nobody calls `uninstall`.
        """
        self._island = island
        if threading.current_thread() is threading.main_thread():
            code = getattr(during, "__code__", None)
            self._during = code if _is_running(code, inspect.currentframe()) else None
            for number in (signal.SIGTERM, signal.SIGINT):
                old = signal.signal(number, self._on_signal)
                if old != self._on_signal:  # equal if the last training raised
                    self._old_handlers[number] = old

    def uninstall(self, waits: bool = True) -> None:
        """Restores the old signal handlers, ends the exchange of flags, and clears the request.

        Args:
            waits: whether to wait for the other ranks; they may never arrive if this rank has failed.
        """
        self._put_back_handlers()
        if self._pending is not None and waits:
            self._pending[0].wait()
        self._pending = None
        self._requested.clear()

    def _put_back_handlers(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._during is not None and not _is_running(self._during, frame):
            self._put_back_handlers()
            signal.raise_signal(number)
            return
        if number == signal.SIGINT and self._requested.is_set():
            raise KeyboardInterrupt
        before = getattr(self._old_handlers.get(number), "__self__", None)
        if isinstance(before, StopFlag):  # a script may have several loops at a time
            before.request()
        self.request()


def _await(work: Any, rank: int) -> None:
    """Waits for an all-reduce; warns after `QUIET`, as a rank may never call it."""
    try:
        work.wait(QUIET)
    except RuntimeError:
        if not work.is_completed():
            logger.warning(
                "rank %d has waited %.0f s for other ranks to say whether they were asked to stop: they are late, or "
                "the loop calls should_stop() on some ranks only, which hangs: call it on all ranks, after each step",
                rank,
                QUIET.total_seconds(),
            )
        work.wait()  # raises a failure again


def _is_running(code: CodeType | None, frame: FrameType | None) -> bool:
    """Whether `frame` or one of its callers is running `code`."""
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
