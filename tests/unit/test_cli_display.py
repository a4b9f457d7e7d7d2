"""What the launcher shows, on a terminal and off it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hf_diloco.cli.display import BarDisplay, LineDisplay, describe, make_display, terminal
from hf_diloco.report.progress import Progress, read_progress

TRAINING = Progress("training", step=120, max_steps=200, round=6, loss=4.3121, tokens_per_second=1203.4)


def test_plain_lines_hold_no_control_characters_and_come_seldom() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=40), [0, 1])
    assert type(display) is LineDisplay
    with display:
        display.update(0, Progress())  # nothing known yet: no line
        for step in range(1, 120):
            display.update(0, Progress("training", step=step, max_steps=200))
        display.line(1, "a line longer than the width of the console is not broken")
        display.ended(0, "finished")
    assert out.getvalue().splitlines() == [
        "island 0 │ training, step 1/200",
        "island 1 │ a line longer than the width of the console is not broken",
        "launcher │ island 0 finished",
    ]


def test_a_script_says_what_its_islands_are_called() -> None:
    out = io.StringIO()
    display = LineDisplay(Console(file=out))
    display.line(1, "before it has said so")
    display.update(0, Progress("training", step=1, max_steps=2, noun="node"))
    display.ended(0, "finished")
    assert out.getvalue().splitlines() == [
        "island 1 │ before it has said so",
        "node 0 │ training, step 1/2",
        "launcher │ node 0 finished",
    ]


def test_plain_lines_repeat_after_a_while() -> None:
    out = io.StringIO()
    display = LineDisplay(Console(file=out), every=0.0)
    display.update(0, TRAINING)
    display.update(0, TRAINING)  # no change, no line
    display.update(0, Progress("syncing", step=120, max_steps=200))
    assert out.getvalue().count("\n") == 2


@pytest.mark.parametrize("width", [40, 80, 120])
def test_bars_fit_the_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    display = make_display(console, [0, 1])
    assert isinstance(display, BarDisplay)
    with display:
        display.update(0, TRAINING)
        display.update(0, TRAINING)  # a look that finds nothing new
        display.update(1, Progress("starting", message="loading data"))
        display.line(1, "[bold]no markup")
        display.note("hello")
        display.ended(0, "stopped, with a checkpoint")
        display.status("waiting")
    assert "island 1 │ [bold]no markup" in out.getvalue()
    last = out.getvalue().split("launcher │ island 0 stopped")[-1]
    assert "island 0" in last
    where_there_is_room = ("round 6", "1,203 tokens/s") if width > 40 else ()
    for figure in ("120/200", "loss 4.312", "stopped", "loading data", *where_there_is_room):
        assert figure in last, "cut off"


def test_brackets_in_output_are_no_markup() -> None:
    out = io.StringIO()
    display = LineDisplay(Console(file=out))
    display.line(0, "[rank0]: [bold]not bold[/bold] [/]")
    assert out.getvalue() == "island 0 │ [rank0]: [bold]not bold[/bold] [/]\n"


def test_describe() -> None:
    assert describe(TRAINING) == "training, step 120/200, round 6, loss 4.312, 1,203 tokens/s"
    assert describe(Progress("starting", message="loading data")) == "starting, loading data"
    assert describe(Progress("training", loss=1e300)) == "training, loss 1e+300", "not 300 digits"


def test_a_closed_terminal_does_not_end_the_launcher(tmp_path: Path) -> None:
    stream = (tmp_path / "out").open("w")
    console = terminal(stream)
    stream.close()
    assert stream.closed
    console.print("nobody reads this")
    assert (tmp_path / "out").read_text() == ""


def test_without_an_output_nothing_is_shown() -> None:
    terminal(None).print("nobody reads this")  # Python's sys.stdout where a shell closed it: >&-


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"step": 3}',
        '{"state": "training", "step": "many"}',
        '{"state": "training", "step": 1e999}',
        '"training"',
        "[" * 100_000,
    ],
)
def test_unreadable_progress_counts_as_not_yet_training(tmp_path: Path, text: str) -> None:
    path = tmp_path / "progress.json"
    assert read_progress(path) == Progress()
    path.write_text(text)
    assert not read_progress(path).training_has_begun


def test_progress_with_unknown_figures(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text(json.dumps({"state": "training", "step": 1, "max_steps": 9, "loss": float("nan"), "round": None}))
    assert read_progress(path) == Progress("training", step=1, max_steps=9)
