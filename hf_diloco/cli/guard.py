"""Runs one island's command, and ends all its processes when the command or the launcher has ended.

    python -m hf_diloco.cli.guard COMMAND ARGUMENT...

If Accelerate's and torch's launchers are killed, they leave the training processes behind, in sessions of their own,
which no signal to a process group reaches. The guard runs between the launchers: orphans of the island become its
children (on Linux), so it finds all of them. It ends them

- when COMMAND ends, for any reason;
- when its standard input closes: the launcher holds the other end, and has died, even by SIGKILL;
- on SIGTERM, which the launcher sends when it stops waiting.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable

import psutil

from hf_diloco.utils.listening import raise_file_limit

TERMINATE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL if the launcher ends the island
ORPHAN_GRACE = 30.0  # otherwise: SIGTERM asks the trainer for a checkpoint, which takes time
_POLL = 0.1  # seconds


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_descendants(grace: float, parent: int | None = None) -> None:
    """Sends SIGTERM to all processes below `parent` (default: this one), and SIGKILL to those left after `grace` s."""
    deadline = time.monotonic() + grace
    signalled: set[psutil.Process] = set()
    while running := _descendants(parent):  # repeat: a dying process may still start another
        late = time.monotonic() > deadline
        for process in running:
            if late or process not in signalled:
                with contextlib.suppress(psutil.Error):
                    process.kill() if late else process.terminate()
        signalled.update(running)
        time.sleep(_POLL)
        if time.monotonic() > deadline + 10:  # unkillable: stuck in the kernel (a dead disk or device)
            return


def terminate_orphans(guards: Collection[int]) -> None:
    """Sends SIGTERM to the processes of killed guards.

    This process has adopted those; what is below one of `guards`, which live, is left alone.
    """
    found = _descendants(None)
    guarded = {process.pid for guard in guards for process in _descendants(guard)}
    for process in found:
        if process.pid not in guarded and process.pid not in guards:
            with contextlib.suppress(psutil.Error):
                process.terminate()


def _descendants(parent: int | None) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(filter(_is_running, psutil.Process(parent).children(recursive=True)))
    return []


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(command: Iterable[str] | None = None) -> int:
    """Runs `command` (default: the command line); returns its exit code, 128 + N when signal N ended it."""
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_end.append(number))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # the launcher decides what these mean
        signal.signal(ignored, lambda number, frame: None)  # not SIG_IGN, which the command would inherit
    adopt_orphans()
    raise_file_limit()
    child = subprocess.Popen(list(sys.argv[1:] if command is None else command), stdin=subprocess.DEVNULL)
    launcher_lost = False
    while child.poll() is None and not asked_to_end and not launcher_lost:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL)
        launcher_lost = bool(readable) and not os.read(sys.stdin.fileno(), 1)
    end_descendants(TERMINATE_GRACE if asked_to_end else ORPHAN_GRACE)
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
