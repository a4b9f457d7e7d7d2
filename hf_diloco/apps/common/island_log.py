"""The log in an island's folder, `log.txt`, whose lock shows that the island is running."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import psutil

from hf_diloco.errors import DiLoCoError

LOG_FILE = "log.txt"


def open_log(folder: Path, name: str) -> TextIO:
    """Opens an island's log, and locks it until this process and all children that inherit it have closed it.

    Args:
        folder: of the island; created if it does not exist.
        name: what the island is called, for the error.

    Raises:
        OSError: the folder cannot be written to.
        DiLoCoError: the island is running already, perhaps as an orphan of a launcher that was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOG_FILE
    with ExitStack() as stack:
        log = stack.enter_context(path.open("a", encoding="utf-8", errors="backslashreplace"))
        try:
            fcntl.flock(log.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiLoCoError(
                f"{name} of this run is running already ({path} is held by {_describe_holders(path)}): wait for its "
                "end, end it, or choose another --name"
            ) from None
        except OSError:  # a file system without locks
            pass
        stack.pop_all()
    return log


def note_start(log: TextIO, what: str) -> None:
    """Writes a line with the time into a log; raises `OSError` if the disk is full.

    Past the buffer of `log`, which would raise the error again when it is closed.
    """
    os.write(log.fileno(), f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {what}\n".encode(errors="backslashreplace"))


def _describe_holders(path: Path) -> str:
    """Names the processes that have a file open, as far as this user and machine show them."""
    own, place = psutil.Process(), path.resolve()
    holders = [process.pid for process in psutil.process_iter() if process != own and _has_open(process, place)]
    if not holders:
        return "a simulation in this process, or a process of another user or machine"
    return f"process{'es' if holders[1:] else ''} {', '.join(map(str, holders))}"


def _has_open(process: psutil.Process, path: Path) -> bool:
    try:
        return any(Path(file.path) == path for file in process.open_files())
    except (psutil.Error, OSError):
        return False
