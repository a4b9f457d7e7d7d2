"""How an island ended, from its exit code and its log: the code of its first failing process, and the error's text.

Accelerate ends with 1 whatever its processes ended with and buries their error under its own traceback; both launchers
that it uses write down the real code.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

FINISHED = 0
FAILED = 1
STOPPED = 3  # stopped on request, with a checkpoint to continue from

_PROCESS_CODE = re.compile(
    r"^\s+exitcode\s*:\s*(?P<torchrun>-?\d+)\b"
    r"|CalledProcessError: .* returned non-zero exit status (?P<status>\d+)"
    r"|CalledProcessError: .* died with <Signals\.\w+: (?P<signal>\d+)>"
)
_LAUNCHER_TALK = re.compile(r"torch/distributed/elastic|accelerate/commands/launch\.py|^\W*[EW]\d{4} .*elastic")
_LAUNCHER_ERROR = re.compile(r"\b(CalledProcessError|ChildFailedError)\b")
_ERROR = re.compile(
    r"^(?:\[\w+\]:\s?)?(?P<text>error: .*|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*)$"
)
_NUM_TAIL_LINES = 3


@dataclass(frozen=True)
class Outcome:
    """An island's end.

    Attributes:
        code: 0 finished, 3 stopped on request with a checkpoint, -N ended by signal N, else failed.
        error: what it said last, one line or a few; empty when there was no error.
    """

    code: int
    error: str = ""

    @property
    def failed(self) -> bool:
        return self.code not in (FINISHED, STOPPED)

    @property
    def ending(self) -> str:
        """`exit code 1` or `SIGKILL`."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def read_outcome(code: int, lines: list[str]) -> Outcome:
    """The outcome of an island whose launcher ended with `code` after writing `lines`."""
    if code == FINISHED:
        return Outcome(FINISHED)
    if code > 128:
        code = 128 - code
    for line in lines:
        if match := _PROCESS_CODE.search(line):  # torchrun lists the first failure last, so the last match counts
            torchrun, status, number = match.group("torchrun", "status", "signal")
            code = -int(number) if number else int(torchrun or status)
    return Outcome(code, "" if code == STOPPED else last_error(lines))


def last_error(lines: list[str]) -> str:
    """The error that the training processes ended with; without one, their last few lines."""
    spoken = _without_launcher(lines)
    for line in reversed(spoken):
        if (match := _ERROR.match(line)) and not _LAUNCHER_ERROR.search(line):
            return match["text"]
    return "\n".join([line for line in spoken if line.strip()][-_NUM_TAIL_LINES:])


def _without_launcher(lines: list[str]) -> list[str]:
    """Drops the part that accelerate or torchrun wrote after the processes had ended."""
    for number, line in enumerate(lines):
        if _LAUNCHER_TALK.search(line):
            before = lines[:number]
            while before and (before[-1].startswith(("Traceback", "  File")) or not before[-1].strip()):
                before.pop()
            return before
    return lines
