"""A started island: to the launcher, a tree of processes, a log, and a few files in its folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import replace

import psutil

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.apps.common.island_log import LOG_FILE, open_log
from hf_diloco.cli.guard import end_descendants
from hf_diloco.cli.log import FAILED, FINISHED, LogFollower, Outcome, UsefulLines, read_outcome, root_error
from hf_diloco.cli.plan import IslandPlan
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import WAS_STOPPED, ConfigError, IslandLostError, StopRequested
from hf_diloco.report.progress import STOPPED_EARLY, Progress, read_progress
from hf_diloco.utils.files import PROGRESS_FILE, STOP_FILE
from hf_diloco.utils.redact import redact_text

_NUM_LINES_KEPT = 500  # last lines of a log that are kept in memory
_NEXT_TRAINING_ENDED = re.compile(f"{StopRequested.__name__}|{IslandLostError.__name__}")
"""Errors of a script that starts another training after a stop: its islands then leave or cannot meet."""


class Island:
    """A started island.

    Raises:
        ConfigError: its folder cannot be written to.
        DiLoCoError: its folder belongs to an island that is running.
    """

    def __init__(self, plan: IslandPlan) -> None:
        self.number = plan.number
        self._unit = plan.unit
        self.log_path = plan.folder / LOG_FILE
        self.outcome: Outcome | None = None
        self._asked_to_stop_at: float | None = None
        self._runs_script = ENV_FOLDER in plan.environment
        self._folder = plan.folder
        self._is_useful = UsefulLines()
        self._tail: deque[str] = deque(maxlen=_NUM_LINES_KEPT)
        self._progress: tuple[tuple[int, ...], Progress] = ((), Progress())

        with open_log(plan.folder, f"{plan.unit} {plan.number}", redact_text(plan.shell_line())) as log:
            _prepare_folder(plan)
            self._follower = LogFollower(self.log_path)
            changed = {**os.environ, **plan.environment}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hf_diloco.cli.guard", *plan.command],
                stdin=subprocess.PIPE,  # never written to: it closes when the launcher ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in changed.items() if value is not None},
                start_new_session=True,  # Ctrl-C reaches only the launcher
            )
        self.pid = self._process.pid  # of its guard

    @property
    def unit(self) -> str:
        """What it is called: island or node; a script reports this when it begins to train."""
        return self.progress.noun or self._unit

    @property
    def name(self) -> str:
        return f"{self.unit} {self.number}"

    @property
    def running(self) -> bool:
        return self.outcome is None

    def new_lines(self) -> list[str]:
        """Returns the new log lines worth showing. Sets `outcome` if the island has ended."""
        code = self._process.poll()  # before reading, so that no output before the end is missed
        lines = self._follower.new_lines(unfinished=code is not None)
        self._tail.extend(lines)
        if code is not None and self.outcome is None:
            self._follower.close()
            self.outcome = self._judge(read_outcome(code, list(self._tail)))
        return list(filter(self._is_useful, lines))

    def _judge(self, outcome: Outcome) -> Outcome:
        """Returns how the island ended, given how its processes did."""
        has_stopped_early = self.progress.state == STOPPED_EARLY
        if outcome.code == FAILED and (self._has_saved_as_asked() or WAS_STOPPED in outcome.error):
            # It waited for an island that had already left, which is an error for the waiting one.
            return Outcome(STOPPED, root_error(list(self._tail), speaks_last=False).removeprefix("error: "))
        if has_stopped_early and (outcome.code == FINISHED or _NEXT_TRAINING_ENDED.search(outcome.error)):
            return Outcome(STOPPED)  # after a stop, a script usually exits with 0, too
        if outcome.has_stopped and self._runs_script and not (has_stopped_early or self._asked_to_stop_at):
            return replace(outcome, is_own_code=True, error=root_error(list(self._tail)))
        return outcome

    def _has_saved_as_asked(self) -> bool:
        if self._asked_to_stop_at is None:
            return False
        states = self._folder.glob("checkpoint-*/trainer_state.json")
        return any(state.stat().st_mtime >= self._asked_to_stop_at for state in states)

    @property
    def progress(self) -> Progress:
        """The island's progress file; parsed again only after a change."""
        path = self._folder / PROGRESS_FILE
        with suppress(OSError):
            found = path.stat()
            version = found.st_mtime_ns, found.st_ino, found.st_size  # a time alone is coarse on many file systems
            if version != self._progress[0]:
                self._progress = (version, read_progress(path))
        return self._progress[1]

    def ask_to_stop(self) -> bool:
        """Asks the island to finish the step, write a checkpoint and exit; False if its folder is not writable."""
        stop = self._folder / STOP_FILE
        try:
            stop.touch()
            self._asked_to_stop_at = stop.stat().st_mtime  # the file system's clock, as for the checkpoint
        except OSError:  # the folder is gone, or its file system full
            return False
        return True

    def terminate(self) -> None:
        """Ends the island's processes: SIGTERM, and SIGKILL a few seconds later. Does not wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self, after: float = 0.0) -> None:
        """Waits `after` seconds for the island's end, then kills its processes."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(after)
        if self._process.returncode is None:
            with suppress(psutil.NoSuchProcess):
                end_descendants(grace=0, parent=self._process.pid)
            self._process.kill()
        self._process.wait()


def _prepare_folder(plan: IslandPlan) -> None:
    try:
        for stale in (PROGRESS_FILE, STOP_FILE):  # of an earlier start
            (plan.folder / stale).unlink(missing_ok=True)
        for path, text in plan.files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{plan.folder}: {error.strerror}; give another --output") from None
