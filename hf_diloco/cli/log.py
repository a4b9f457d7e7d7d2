"""An island's `log.txt`: follows it, filters lines worth showing, and determines how the island ended.

Accelerate always exits with 1, whatever its processes' exit codes, and hides their error below its own traceback. Both
launchers that it uses write the real code to the log.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from hf_diloco.apps.common.environment import STOPPED

FINISHED = 0
FAILED = 1

_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[(?:rank|default)\d+\]:\s?")

# Control sequences (colours, cursor movements) and other control characters that would disturb the progress bars.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")

# A progress bar of tqdm without a line end: a process's next output follows it on the same line.
_BAR = re.compile(r"^(?:[^\[]*\|\s*[\d.]+\w?/[\d.]+\w?|\s*\d+it)\s\[[^\]]*\](?=\S)")

# Any progress bar of tqdm, also past its total.
_ANY_BAR = r"^\s*\d+%\||\|\s\d+/\d+\s\[|^\s*\d+it\s\["

# Output of libraries in every run that needs no action. log.txt has all of it.
_NOISE = re.compile(
    _ANY_BAR
    + r"""
    | ^\s*$
    | ^\{'[^{}]*'epoch':[^{}]*\}$                             # Trainer's own log: the progress bar shows it
    | Setting\ accelerator\ to\ CPU                            # DeepSpeed without a GPU
    | Setting\ ds_accelerator\ to
    | \[(INFO|WARNING)\]\s\[\w+\.py:\d+                        # DeepSpeed's logger below errors
    | ^\[rank\d+\]:\[[WI]\d{4}                                 # torch's C++ warnings
    | ^\[?[WI]\d{4}\s[\d:.]+\s                                 # torch's Python warnings
    | Warning:\s                                               # Python's warnings, and the source line below them
    | ^\s+((return|warnings\.warn|warn)\b|self\.|super\(|logger\.)
    | ^\*{10,}$
    | \[Gloo\]\ Rank
    | ^(using|Using)\ world\ size
    | ^Stage\ \d\ initialize
    | ^(MA|CA|Max_)\s
    | The\ tokenizer\ has\ new\ PAD/BOS/EOS\ tokens
    | ^Generate\ config\ GenerationConfig
    """,
    re.VERBOSE,
)
# The start of torchrun's report on failed processes, which `read_outcome` parses.
_LAUNCHER_REPORT = re.compile(r"torch/distributed/elastic/.* failed \(exitcode:")


def clean(line: str) -> str:
    """Returns the text that a terminal would show, without control sequences and a progress bar at its beginning."""
    return _BAR.sub("", _CONTROL.sub("", line.rstrip("\r\n").rsplit("\r", 1)[-1]).rstrip())


class LogFollower:
    """Reads the complete lines that were added to a log file since the last call, also after it was moved or deleted.

    Raises `OSError` if there is no such file, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)  # as the processes that write to it keep it open
        self._offset = self._file.seek(0, os.SEEK_END)

    def new_lines(self, unfinished: bool = False) -> list[str]:
        """Returns new lines, cleaned. Keeps back a last line without line end, unless `unfinished` is true."""
        try:
            self._file.seek(self._offset)
            data = self._file.read() or b""
        except OSError:  # its disk fails: that must not end the island
            return []
        whole = data if unfinished else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else []
        return [clean(line) for line in lines]

    def close(self) -> None:
        self._file.close()


class UsefulLines:
    """Filters lines worth showing during a run: no library noise, no tracebacks, no repeated lines.

    `read_outcome` still finds the error that ended an island, and the launcher shows it at the end.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._muted = False
        self._last = ""

    def __call__(self, line: str) -> bool:
        self._muted = self._muted or bool(_LAUNCHER_REPORT.search(line))
        if self._muted:
            return False
        text = _RANK.sub("", line)
        if text.startswith(_TRACEBACK):
            self._in_traceback = True
            return False
        if self._in_traceback:
            self._in_traceback = text.startswith((" ", "\t")) or not text
            return False
        if _NOISE.search(line) or line == self._last:  # all ranks of an island print the same
            return False
        self._last = line
        return True


# How an island ended

_PROCESS_CODE = re.compile(
    r"^\s+exitcode\s*:\s*(?P<torchrun>-?\d+)\b"
    r"|CalledProcessError: .* returned non-zero exit status (?P<status>\d+)"
    r"|CalledProcessError: .* died with <Signals\.\w+: (?P<signal>\d+)>"
)
_LAUNCHER_TALK = re.compile(r"torch/distributed/elastic|accelerate/commands/launch\.py|^\W*[EW]\d{4} .*elastic")
_LAUNCHER_ERROR = re.compile(r"\b(CalledProcessError|ChildFailedError)\b")
_ERROR = re.compile(r"error: |(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b")
_IGNORED = ("Exception ignored", "--- Logging error ---")
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_NOT_OF_AN_ERROR = re.compile(f"{_ANY_BAR}|For further information visit")  # a progress bar may follow an error
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)
_MAX_LINES_BETWEEN = 40  # lines of other ranks between failures that belong together
_MAX_TEXT_LINES = 8
_NUM_TAIL_LINES = 3


@dataclass(frozen=True)
class Outcome:
    """How an island ended.

    Attributes:
        code: 0 finished, 3 stopped on request with a checkpoint, -N ended by signal N, else failed.
        error: why it failed, one or a few lines; empty without an error.
        is_own_code: whether a user's script has ended with 3 for reasons of its own, not because it was stopped.
    """

    code: int
    error: str = ""
    is_own_code: bool = False

    @property
    def has_stopped(self) -> bool:
        return self.code == STOPPED and not self.is_own_code

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
    """Returns the outcome of an island whose launcher exited with `code` after writing `lines`."""
    if code == FINISHED:
        return Outcome(FINISHED)
    if code > 128:
        code = 128 - code
    for line in lines:
        if match := _PROCESS_CODE.search(line):  # torchrun lists the first failure last, so the last match counts
            torchrun, status, number = match.group("torchrun", "status", "signal")
            code = -int(number) if number else int(torchrun or status)
    return Outcome(code, "" if code == STOPPED else root_error(lines, speaks_last=code not in _ENDED_BY_OTHERS))


def root_error(lines: list[str], speaks_last: bool = True) -> str:
    """Returns the error that ended the training processes; without one, their last few lines worth showing.

    The error is the first of the failures at the end of the log: later ones, in other ranks and in destructors, mostly
    follow from it. Keeps further lines of its text, which may name a setting. `speaks_last`: the last lines may
    explain the end, unlike those of a process that somebody else ended.
    """
    spoken = _without_launcher(lines)
    failures = _failures(spoken)
    if not failures:
        if not speaks_last:
            return ""
        return "\n".join([line for line in spoken if not _NOISE.search(line)][-_NUM_TAIL_LINES:])
    first = failures[-1]
    for failure in reversed(failures):  # ignore earlier failures that the processes survived
        if first.begin - failure.end > _MAX_LINES_BETWEEN:
            break
        first = failure
    return first.text


@dataclass(frozen=True)
class _Failure:
    """An error in a log: the numbers of its first line and of the line after its last one, and its text."""

    begin: int
    end: int
    text: str


def _failures(lines: list[str]) -> list[_Failure]:
    """Returns errors in the order in which they begin; separates the ranks' lines, which are interleaved."""
    ranks: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        match = _RANK.match(line)
        rank = match.group() if match else ""
        ranks.setdefault(rank, []).append((number, line.removeprefix(rank)))
    found = [failure for spoken in ranks.values() for failure in _failures_of_rank(spoken)]
    return sorted(found, key=lambda failure: failure.begin)


def _failures_of_rank(numbered: list[tuple[int, str]]) -> list[_Failure]:
    numbers, lines = [number for number, _ in numbered], [line for _, line in numbered]
    found: list[_Failure] = []
    place = 0
    is_ignored = is_chained = False
    while place < len(lines):
        begin, line = place, lines[place]
        place += 1
        if line.startswith(_IGNORED):
            is_ignored = True
        elif line.startswith(_CHAINED):
            is_chained = bool(found)
        elif line.startswith(_TRACEBACK) or _ERROR.match(line):
            where = ""
            if line.startswith(_TRACEBACK):
                while place < len(lines) and lines[place].startswith((" ", "\t")):
                    if lines[place].startswith("    ") and lines[place].strip(" ~^"):  # lines that underline it
                        where = lines[place].strip()
                    place += 1
                place += 1
            end = _end_of_text(lines, place)
            text = _text(lines[place - 1 : end], where)
            place = end
            if text and not is_ignored and not _LAUNCHER_ERROR.search(text):
                earlier = found.pop() if is_chained else None
                cause = f"\ncaused by: {earlier.text}" if earlier else ""
                start = earlier.begin if earlier else numbers[begin]
                found.append(_Failure(start, numbers[min(end, len(numbers)) - 1] + 1, text + cause))
            is_ignored = is_chained = False
    return found


def _end_of_text(lines: list[str], place: int) -> int:
    """Returns where the text of an error ends: its further lines are indented, or precede an indented line."""
    while place < len(lines) and lines[place].strip() and not lines[place].startswith((_TRACEBACK, *_IGNORED)):
        is_indented = lines[place].startswith((" ", "\t"))
        if not is_indented and not (place + 1 < len(lines) and lines[place + 1].startswith("  ")):
            break
        place += 1
    return place


def _text(lines: list[str], where: str) -> str:
    useful = [line for line in lines if not _NOT_OF_AN_ERROR.search(line)][:_MAX_TEXT_LINES]
    if len(useful) == 1 and where and ": " not in useful[0]:  # an assertion without a message
        return f"{useful[0]} (at: {where})"
    return "\n".join(useful)


def _without_launcher(lines: list[str]) -> list[str]:
    """Drops what Accelerate or torchrun wrote after the processes had ended."""
    for number, line in enumerate(lines):
        if _LAUNCHER_TALK.search(line):
            begin = number
            while begin and lines[begin - 1].startswith("  "):  # frames of its traceback, up to its head
                begin -= 1
            return lines[: begin - 1 if begin and lines[begin - 1].startswith(_TRACEBACK) else number]
    return lines
