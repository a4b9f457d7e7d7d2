"""An island's `log.txt`: read as it grows, and reduced to the lines that a person wants to see."""

from __future__ import annotations

import re
from pathlib import Path

# Control sequences (colours, cursor movements) and other control characters that would disturb the progress bars.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")

# What the libraries say on every run and nobody needs to act on. All of it stays in log.txt.
_NOISE = re.compile(
    r"""
      ^\s*$
    | ^\{'[^{}]*'epoch':[^{}]*\}$                             # Trainer's own log: the progress bar shows it
    | Setting\ accelerator\ to\ CPU                            # DeepSpeed without a GPU
    | Setting\ ds_accelerator\ to
    | \[(INFO|WARNING)\]\s\[\w+\.py:\d+                        # DeepSpeed's logger below errors
    | ^\[rank\d+\]:\[[WI]\d{4}                                 # torch's C++ warnings
    | ^\[?[WI]\d{4}\s[\d:.]+\s                                 # torch's Python warnings
    | Warning:\s                                               # Python's warnings, and the source line below them
    | ^\s+((return|warnings\.warn|warn)\b|self\.|super\(|logger\.)
    | ^\*{10,}$
    | ^\s*\d+%\|                                               # tqdm
    | \|\s\d+/\d+\s\[                                          # tqdm
    | \[Gloo\]\ Rank
    | ^(using|Using)\ world\ size
    | ^Stage\ \d\ initialize
    | ^(MA|CA|Max_)\s
    | The\ tokenizer\ has\ new\ PAD/BOS/EOS\ tokens
    | ^Generate\ config\ GenerationConfig
    """,
    re.VERBOSE,
)
# From here on torchrun reports that processes have failed; `outcome` reads the report.
_LAUNCHER_REPORT = re.compile(r"torch/distributed/elastic/.* failed \(exitcode:")
_TRACEBACK = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[(rank|default)\d+\]:\s?")


def clean(line: str) -> str:
    """The line as text: what a terminal would show after carriage returns, without control sequences."""
    return _CONTROL.sub("", line.rstrip("\r\n").rsplit("\r", 1)[-1]).rstrip()


class LogFollower:
    """Reads the complete lines that were added to a log file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new_lines(self, unfinished: bool = False) -> list[str]:
        """New lines, cleaned. A last line without its end waits, unless `unfinished` asks for it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data if unfinished else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else []
        return [clean(line) for line in lines]


class UsefulLines:
    """Passes on what is worth showing while a run goes on: no library noise, no tracebacks, no line twice in a row.

    The error that ends an island is not lost: `outcome` finds it, and the launcher shows it at the end.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._muted = False
        self._last = ""

    def __call__(self, line: str) -> bool:
        self._muted = self._muted or bool(_LAUNCHER_REPORT.search(line))
        if self._muted:
            return False
        text = _RANK_PREFIX.sub("", line)
        if text.startswith(_TRACEBACK):
            self._in_traceback = True
            return False
        if self._in_traceback:
            self._in_traceback = text.startswith((" ", "\t")) or not text
            return False
        if _NOISE.search(line) or line == self._last:  # every rank of an island says the same
            return False
        self._last = line
        return True
