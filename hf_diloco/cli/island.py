"""One island as the launcher sees it: a tree of processes, a log, and a few files in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hf_diloco.cli.guard import end_descendants
from hf_diloco.cli.log import FAILED, STOPPED, LogFollower, Outcome, read_outcome
from hf_diloco.errors import DiLoCoError
from hf_diloco.report.progress import Progress, read_progress
from hf_diloco.utils.redact import redact_text

_NUM_LINES_KEPT = 500  # of the log's end, in memory


@dataclass(frozen=True)
class IslandPlan:
    """How one island is started.

    Attributes:
        number: the island's number in the run.
        folder: its folder in the run folder.
        command: program and arguments.
        environment: changes to the launcher's environment; None removes a variable.
        files: files that are written before the start, by path.
    """

    number: int
    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    files: Mapping[Path, str]

    def shell_line(self) -> str:
        """The command with its environment, to be pasted into a shell."""
        changes = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items() if value is not None]
        return " ".join([*changes, shlex.join(self.command)])


class Island:
    """A started island.

    Raises:
        DiLoCoError: when its folder already belongs to a running island.
    """

    def __init__(self, plan: IslandPlan) -> None:
        self.number = plan.number
        self.log_path = plan.folder / "log.txt"
        self.outcome: Outcome | None = None
        self._asked_to_stop_at: float | None = None
        self._folder = plan.folder
        self._tail: deque[str] = deque(maxlen=_NUM_LINES_KEPT)
        self._progress: tuple[int, Progress] = (0, Progress())

        plan.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("a") as log:
            self._lock(log.fileno())
            for stale in ("progress.json", "stop"):  # of an earlier start
                (plan.folder / stale).unlink(missing_ok=True)
            for path, text in plan.files.items():
                path.write_text(text)
            print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {redact_text(plan.shell_line())}", file=log, flush=True)
            self._follower = LogFollower(self.log_path)
            changed = {**os.environ, **plan.environment}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hf_diloco.cli.guard", *plan.command],
                stdin=subprocess.PIPE,  # never written to: it closes when the launcher ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in changed.items() if value is not None},
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )

    def _lock(self, file: int) -> None:
        """Holds the island's log as long as any of its processes has it open, orphans of a lost launcher included."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiLoCoError(
                f"island {self.number} of this run is running already (its processes hold {self.log_path}): "
                "wait for its end, or choose another --name"
            ) from None
        except OSError:  # a file system without locks
            pass

    @property
    def running(self) -> bool:
        return self.outcome is None

    def new_lines(self) -> list[str]:
        """What it wrote to its log since the last call. Notices its end, after which `outcome` is set."""
        code = self._process.poll()  # before reading, so that nothing said before the end is missed
        lines = self._follower.new_lines(unfinished=code is not None)
        self._tail.extend(lines)
        if code is not None and self.outcome is None:
            self.outcome = read_outcome(code, list(self._tail))
            if self.outcome.code == FAILED and self._has_saved_as_asked():
                # It met an island that had left already, which is an error to the one that waits.
                self.outcome = Outcome(STOPPED, self.outcome.error.removeprefix("error: "))
        return lines

    def _has_saved_as_asked(self) -> bool:
        if self._asked_to_stop_at is None:
            return False
        states = self._folder.glob("checkpoint-*/trainer_state.json")
        return any(state.stat().st_mtime >= self._asked_to_stop_at for state in states)

    @property
    def progress(self) -> Progress:
        """Its own account of where it stands; parsed again only after a change."""
        path = self._folder / "progress.json"
        with contextlib.suppress(OSError):
            changed = path.stat().st_mtime_ns
            if changed != self._progress[0]:
                self._progress = (changed, read_progress(path))
        return self._progress[1]

    def ask_to_stop(self) -> None:
        """Asks it to finish the step, write a checkpoint and end."""
        stop = self._folder / "stop"
        stop.touch()
        self._asked_to_stop_at = stop.stat().st_mtime  # by the clock of the file system, as the checkpoint's

    def terminate(self) -> None:
        """Ends its processes: SIGTERM, and SIGKILL a few seconds later. Does not wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self, after: float = 0.0) -> None:
        """Waits `after` seconds for its end, then ends its processes at once."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(after)
        if self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                end_descendants(grace=0, parent=self._process.pid)
            self._process.kill()
        self._process.wait()
