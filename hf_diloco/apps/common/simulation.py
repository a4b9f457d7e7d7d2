"""Runs all islands or nodes of a run as threads of one process, with the same results as in several processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.apps.common.island_log import open_log
from hf_diloco.apps.common.process import check_folder
from hf_diloco.errors import WAS_STOPPED, StopRequested
from hf_diloco.gossip.threads import Turns
from hf_diloco.utils.files import STOP_FILE

LONGEST_WAIT = 7 * 24 * 3600.0  # seconds: one participant computes at a time while the others wait
_ASK_SECONDS = 0.2
_STOPPING = "stopping: each finishes its step and writes a checkpoint (Ctrl-C: end now)"


def train_together(
    runs: Sequence[BaseRun],
    turns: Turns,
    train: Callable[[int], int],
    leave: Callable[[int], object] | None = None,
    is_command: bool = False,
) -> int:
    """Trains all islands or nodes, one computing at a time; returns the exit code.

    Each computes with `launch.threads` threads, as its process would. On Ctrl-C, each finishes its step and writes a
    checkpoint.

    Args:
        runs: the run of each participant.
        turns: whose turn it is to compute.
        train: trains the participant with this number; returns its exit code.
        leave: tells the others that this participant has failed; if None, they are asked to stop.
        is_command: whether this process does nothing else, so that a second Ctrl-C ends it at once.

    Raises:
        ConfigError: the run folder cannot be written to, or holds an earlier run.
        DiLoCoError: the run is running already; or the first failure of a participant.
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
        """Creates stop files until all threads end: a starting participant deletes old ones."""
        while not all_ended.is_set():
            for run, thread in zip(runs, threads, strict=True):
                folder = run.island_folder()
                if thread.is_alive() and folder.is_dir():
                    with suppress(OSError):  # the disk is full: asks again, and meanwhile the others
                        (folder / STOP_FILE).touch()
            all_ended.wait(_ASK_SECONDS)

    def stop() -> None:
        threading.Thread(target=ask_until_they_end, name="hf-diloco-stop", daemon=True).start()

    with _locked(runs), _signal_handlers(stop, is_command), _threads_of(runs[0]):
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_ASK_SECONDS)  # Python handles signals only when the main thread wakes
        finally:
            all_ended.set()
    if failures := [error for error in errors if not _is_of_a_stop(error)]:
        raise failures[0]
    return STOPPED if errors or STOPPED in codes else 0


def _is_of_a_stop(error: BaseException) -> bool:
    """Whether a participant was asked to stop before it could train, or met another one that was."""
    return isinstance(error, StopRequested) or WAS_STOPPED in str(error)


@contextmanager
def _locked(runs: Sequence[BaseRun]) -> Iterator[None]:
    """Keeps other simulations and launches from writing to the same folders."""
    with ExitStack() as stack:
        for run in runs:
            check_folder(run)
            start = f"simulated by process {os.getpid()}, which shows its output"
            stack.enter_context(open_log(run.island_folder(), f"{run.unit} {run.meeting.island}", start))
        yield


@contextmanager
def _threads_of(run: BaseRun) -> Iterator[None]:
    """Threads that begin inside compute with as many threads as the run says."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(run.launch.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _signal_handlers(stop: Callable[[], None], is_command: bool) -> Iterator[None]:
    is_first = True

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if is_command and not is_first:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # an exception would not reach the computing threads
        is_first = False
        if is_command:
            print(_STOPPING, file=sys.stderr, flush=True)
        stop()

    is_main = threading.current_thread() is threading.main_thread()  # handlers can only be set there
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
