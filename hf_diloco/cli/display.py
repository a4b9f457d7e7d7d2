"""The display of a running launch: the islands' lines with coloured prefixes, and one progress bar per island.

Without a terminal (a file, a pipe, a batch job), prints a progress line every few seconds instead of bars, without
control characters.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any, Self, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hf_diloco.report.progress import Progress as IslandProgress
from hf_diloco.utils.text import rate

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
LINE_EVERY = 5.0  # seconds between two progress lines of an island, without a terminal
_WIDE = 100  # columns from which on a bar shows everything
_NARROW = 76  # columns below which there is no room for a bar, rounds and speed


class _Unbreakable:
    """A text stream that ignores write errors: a closed terminal must not keep a run from writing checkpoints."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def terminal(stream: IO[str] | None) -> Console:
    """Returns a console that survives the loss of its terminal; `stream` is None if closed before Python started."""
    return Console(file=cast("IO[str]", _Unbreakable(stream or io.StringIO())), highlight=False)


def make_display(console: Console, islands: Sequence[int], unit: str = "island") -> LineDisplay:
    """Creates progress bars on a terminal, plain lines elsewhere; `unit` is what to call an island."""
    if console.is_terminal and not console.is_dumb_terminal:
        return BarDisplay(console, islands, unit)
    return LineDisplay(console, unit=unit)


class LineDisplay:
    """Shows a launch as plain lines. A context manager, which restores the terminal at its end."""

    _soft_wrap = True

    def __init__(self, console: Console, every: float = LINE_EVERY, unit: str = "island") -> None:
        self._console = console
        self._unit = unit
        self._every = every
        self._shown: dict[int, tuple[float, IslandProgress]] = {}

    def line(self, island: int, text: str) -> None:
        self._print((f"{self._unit} {island}", _colour(island)), text)

    def note(self, text: str) -> None:
        self._print(("launcher", "bold"), text)

    def update(self, island: int, progress: IslandProgress) -> None:
        """Shows an island's progress; called several times per second."""
        self._unit = progress.noun or self._unit
        at, last = self._shown.get(island, (0.0, IslandProgress()))
        if progress == last or (time.monotonic() < at + self._every and not progress.is_ending):
            return
        self._shown[island] = (time.monotonic(), progress)
        self.line(island, describe(progress))

    def ended(self, island: int, how: str) -> None:
        """Shows how an island has ended: `finished`, `stopped, with a checkpoint`, ..."""
        self.note(f"{self._unit} {island} {how}")

    def status(self, text: str) -> None:
        """Shows what the launcher waits for, replacing the previous status. Without a terminal, does nothing."""

    def _print(self, speaker: tuple[str, str], text: str) -> None:
        line = Text.assemble(speaker, (" │ ", "dim"), text)
        self._console.print(line, soft_wrap=self._soft_wrap, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class BarDisplay(LineDisplay):
    """Progress bars below the lines."""

    _soft_wrap = False

    def __init__(self, console: Console, islands: Sequence[int], unit: str = "island") -> None:
        super().__init__(console, unit=unit)
        wide, self._is_narrow = console.width >= _WIDE, console.width < _NARROW
        bar = BarColumn(None if wide else 12, complete_style="cyan", finished_style="green")
        self._bars = Progress(
            TextColumn("[{task.fields[colour]}]{task.description}"),
            *([] if self._is_narrow else [bar]),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("[dim]{task.fields[state]}"),
            *([TimeRemainingColumn(elapsed_when_finished=True)] if wide else []),
            console=console,
            expand=wide,
        )
        self._tasks = {
            island: self._bars.add_task(
                f"{unit} {island}", total=None, colour=_colour(island), figures="", state="starting"
            )
            for island in islands
        }
        self._begun: set[int] = set()
        self._live = Live(console=console, refresh_per_second=4)
        self.status("")

    def update(self, island: int, progress: IslandProgress) -> None:
        task = self._tasks[island]
        if progress.training_has_begun and island not in self._begun:
            self._begun.add(island)
            self._bars.reset(task)  # loading and steps before a resume must not count for the remaining time
        if progress.training_has_begun:
            self._bars.update(task, total=progress.max_steps or None, completed=progress.step)
        state = progress.state if progress.training_has_begun else progress.message or progress.state
        self._unit = progress.noun or self._unit
        shown = replace(progress, round=0, tokens_per_second=None) if self._is_narrow else progress
        figures = "  ".join(_figures(shown))
        self._bars.update(task, description=f"{self._unit} {island}", figures=figures, state=state)

    def ended(self, island: int, how: str) -> None:
        super().ended(island, how)
        self._bars.update(self._tasks[island], state=how.split(",")[0])
        self._bars.stop_task(self._tasks[island])

    def status(self, text: str) -> None:
        # Keeps the line even if empty: after a full line, the terminal's ^C would break the display.
        self._live.update(Group(self._bars, Text(text, style="yellow")))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(self._bars)
        self._live.stop()


def _colour(island: int) -> str:
    return COLOURS[island % len(COLOURS)]


def _figures(progress: IslandProgress) -> list[str]:
    figures = []
    if progress.round:
        figures.append(f"round {progress.round}")
    if progress.loss is not None:
        figures.append(f"loss {progress.loss:.3f}" if abs(progress.loss) < 1e6 else f"loss {progress.loss:.3g}")
    if progress.tokens_per_second is not None:
        figures.append(f"{rate(progress.tokens_per_second)} {progress.unit}/s")
    return figures


def describe(progress: IslandProgress) -> str:
    """Returns one line: `training, step 120/200, round 6, loss 4.312, 1,203 tokens/s`."""
    total = f"/{progress.max_steps}" if progress.max_steps else ""
    steps = [f"step {progress.step}{total}"] if progress.step else []
    message = [progress.message] if progress.message not in ("", progress.state) else []
    return ", ".join([progress.state, *steps, *_figures(progress), *message])
