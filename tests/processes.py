"""Real processes in tests: started in their own session, their output kept, none of them left behind.

In tests marked `distributed`, Python processes are forked with everything heavy imported (`tests/forks.py`).

Either to the end, an `AssertionError` with the output unless the exit code is 0:

    completed = run([sys.executable, "train_lm.py", run_file], timeout=60)

or several at once:

    with Processes() as processes:
        islands = [processes.spawn(command, env={"HF_DILOCO_ISLAND": k}) for k in range(2)]
        islands[0].wait_for(r"round 1")
        islands[1].kill()
        islands[0].wait(expect=1)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from hf_diloco.cli.devices import free_ports

ROOT = Path(__file__).resolve().parents[1]
OUTPUT_LINES_SHOWN = 150
_MARK = "HF_DILOCO_TEST_PROCESSES"  # an inherited variable that finds descendants, also those in sessions of their own

Command = Sequence[str | os.PathLike[str]]
Env = Mapping[str, object]  # None removes a variable

STARTED: list[Process] = []
"""All that the test which is running has started: tests/conftest.py shows their output when it fails."""


@dataclass(frozen=True)
class Completed:
    """A process that has ended: its exit code (-N: by signal N), stdout and stderr together, and its seconds."""

    command: str
    returncode: int
    output: str
    seconds: float


class Process:
    """A running process. Made by `Processes.spawn`."""

    def __init__(self, command: Command, env: dict[str, str], cwd: Path) -> None:
        self.command = " ".join(str(part) for part in command)
        self._start = time.monotonic()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.popen = subprocess.Popen(
            [str(part) for part in command],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        """Stdout and stderr so far."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def wait(self, timeout: float = 180, expect: int | None = 0) -> Completed:
        """Waits for the end.

        Args:
            timeout: seconds.
            expect: the exit code that it must end with; None accepts any.

        Raises:
            AssertionError: on another exit code or when it still runs; with its output.
        """
        try:
            returncode = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._failure(f"still runs after {timeout} s")) from None
        if expect is not None and returncode != expect:
            raise AssertionError(self._failure(f"exit code {returncode} instead of {expect}"))
        return Completed(self.command, returncode, self.output, time.monotonic() - self._start)

    def wait_for(self, pattern: str, timeout: float = 180) -> re.Match[str]:
        """Waits until the output holds the regular expression `pattern`.

        Raises:
            AssertionError: when it ends without, or `timeout` seconds have passed; with its output.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.popen.poll() is not None
            if match := re.search(pattern, self.output, re.MULTILINE):
                return match
            if ended or time.monotonic() > deadline:
                reason = f"ended with exit code {self.popen.returncode}" if ended else f"{timeout} s passed"
                raise AssertionError(self._failure(f"{reason} without {pattern!r}"))
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole process group, as a terminal sends it."""
        os.killpg(self.pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM to this process alone."""
        self.popen.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole process group: a machine that is lost."""
        os.killpg(self.pid, signal.SIGKILL)

    @property
    def state(self) -> str:
        code = self.popen.poll()
        return "still runs" if code is None else f"exit code {code}"

    def tail(self, num_lines: int = OUTPUT_LINES_SHOWN) -> str:
        """The last lines of the output, after a line that says how many were left out."""
        lines = self.output.splitlines()
        head = [f"... {len(lines) - num_lines} lines ..."] if len(lines) > num_lines else []
        return "\n".join([*head, *lines[-num_lines:]])

    def _failure(self, what: str) -> str:
        return f"{what}: {self.command}\n{self.tail()}"


class Processes:
    """A context that starts processes, and at its end kills all that still run, with every descendant."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._started: list[Process] = []

    def spawn(self, command: Command, *, env: Env | None = None, cwd: Path = ROOT) -> Process:
        """Starts `command` with this process' environment, changed by `env`, in a session of its own."""
        changed = {**os.environ, **(env or {}), _MARK: self._mark}
        clean = {name: str(value) for name, value in changed.items() if value is not None}
        process = Process(command, clean, cwd)
        self._started.append(process)
        STARTED.append(process)
        return process

    def alive(self) -> list[psutil.Process]:
        """The processes that still run, descendants included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def kill(self) -> None:
        """Kills everything that still runs."""
        while processes := self.alive():  # again: one may have forked meanwhile
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=10)
        for started in self._started:
            started.popen.wait()

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        self._ends_on_sigterm = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._ends_on_sigterm:  # by which a benchmark is stopped: what it has started must not outlive it
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        if self._ends_on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark
        except psutil.Error:  # ended meanwhile, or another user's
            return False


def run(
    command: Command, *, env: Env | None = None, timeout: float = 120, expect: int | None = 0, cwd: Path = ROOT
) -> Completed:
    """Runs `command` to its end; see `Process.wait`. Leaves no process behind, whatever happens."""
    with Processes() as processes:
        return processes.spawn(command, env=env, cwd=cwd).wait(timeout, expect)


def find_free_port() -> int:
    """A TCP port of this machine that nothing listens on, and that no other test is given while this session runs."""
    port = free_ports(1)[0]
    while not _claim(port):
        port = free_ports(1)[0]
    return port


def _claim(port: int) -> bool:
    """Locks a file named after the port until this process ends: other workers and sessions pass it over."""
    folder = Path(tempfile.gettempdir(), f"hf-diloco-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    file = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    return True
