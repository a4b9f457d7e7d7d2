"""All islands, or nodes, of a run as threads of one process, with the numbers of several."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.gossip.threads import Turns
from hf_diloco.utils.files import STOP_FILE

LONGEST_WAIT = 7 * 24 * 3600.0
"""Seconds. One of them computes at a time, and the others wait for it."""

_ASK_SECONDS = 0.2
_STOPPING = "stopping: each finishes its step and writes a checkpoint (Ctrl-C: end now)"


def train_together(
    runs: Sequence[BaseRun],
    turns: Turns,
    train: Callable[[int], int],
    leave: Callable[[int], object] | None = None,
    is_command: bool = False,
) -> int:
    """Trains all islands, or nodes, one computing at a time; returns the exit code.

    Ctrl-C has each of them finish its step and write a checkpoint.

    Args:
        runs: the run as each of them has it.
        turns: whose turn it is to compute.
        train: trains one of them, by its number; returns its exit code.
        leave: tells the others that one has failed; None: they are asked to stop.
        is_command: this process does nothing else, so a second Ctrl-C ends it at once.

    Raises:
        DiLoCoError: the first that one of them met.
    """
    codes, errors = list[int](), list[BaseException]()
    all_ended = threading.Event()

    def run_one(number: int) -> None:
        try:
            with turns.mine():
                codes.append(train(number))
        except BaseException as error:
            errors.append(error)
            if leave is None:
                stop()
            else:
                leave(number)

    threads = [threading.Thread(target=run_one, args=(number,)) for number in range(len(runs))]

    def ask_until_they_end() -> None:
        """One that is just beginning has no folder yet, or takes what lies there for an older wish."""
        while not all_ended.is_set():
            for run, thread in zip(runs, threads, strict=True):
                folder = run.island_folder()
                if thread.is_alive() and folder.is_dir():
                    (folder / STOP_FILE).touch()
            all_ended.wait(_ASK_SECONDS)

    def stop() -> None:
        threading.Thread(target=ask_until_they_end, name="hf-diloco-stop", daemon=True).start()

    with _signal_handlers(stop, is_command):
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_ASK_SECONDS)  # Python sees a signal that another thread was woken for only then
        finally:
            all_ended.set()
    if errors:
        raise errors[0]
    return STOPPED if STOPPED in codes else 0


@contextmanager
def _signal_handlers(stop: Callable[[], None], is_command: bool) -> Iterator[None]:
    is_first = True

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if is_command and not is_first:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # no thread that computes would hear an exception
        is_first = False
        if is_command:
            print(_STOPPING, file=sys.stderr, flush=True)
        stop()

    is_main = threading.current_thread() is threading.main_thread()  # only there may handlers be set
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
