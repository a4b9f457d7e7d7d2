"""The log in an island's folder, `log.txt`, whose lock shows that the island is running."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import psutil

from hf_diloco.errors import ConfigError, DiLoCoError

LOG_FILE = "log.txt"


def open_log(folder: Path, name: str, start: str) -> TextIO:
    """Opens an island's log and notes the start; locks it until this process and all heirs of it have closed it.

    Creates the folder if necessary; `name` is what errors call the island.

    Raises:
        ConfigError: the folder cannot be written to.
        DiLoCoError: the island is running already, perhaps as an orphan of a launcher that was killed.
    """
    path, line = folder / LOG_FILE, f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {start}\n"
    try:
        with ExitStack() as stack:
            folder.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", encoding="utf-8", errors="backslashreplace"))
            _lock(log, name)
            # Past the log's buffer: if the disk is full, closing the log would raise the error again.
            os.write(log.fileno(), line.encode(errors="backslashreplace"))
            stack.pop_all()
        return log
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; give another --output") from None


def _lock(log: TextIO, name: str) -> None:
    try:
        fcntl.flock(log.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DiLoCoError(
            f"{name} of this run is running already ({log.name} is held by {_describe_holders(Path(log.name))}): wait "
            "for its end, end it, or choose another --name"
        ) from None
    except OSError:  # a file system without locks
        pass


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
