"""Figures as text, the table on the console, and that importing the report is cheap."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_diloco.report import load_run, print_report, summarise
from hf_diloco.utils import text
from tests.report_runs import (
    end,
    evaluation,
    start,
    sync,
    train,
    whole_record,
    write_island,
    write_run,
)


def printed(folder: Path, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(summarise(load_run(folder)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def flat(output: str) -> str:
    return " ".join(output.split())


def test_the_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / "model").mkdir()
    output = flat(printed(folder, width=200))
    for expected in (
        "demo: 2 islands, 2 rounds",
        "evaluation loss 2.0794 (outer weights, step 4)",
        "perplexity 8 ",
        "tokens/s 80 (2 islands, 800 tokens)",
        "bytes exchanged 16.0 kB sent, 16.0 kB received",
        "per-step sync would have sent 32.0 kB: 2.0x as much",
        "computing 75.0 %, waiting 10.0 %, exchanging 10.0 %, applying 5.0 %",
        "rounds 2 (every 2 steps), fp32 payload",
        "outer parameters equal on all islands after all 2 rounds",
        f"model {folder / 'model'}",
        "0 4 2.5000 2.0794 40 8.00 kB 65.0 % 20.0 % 10.0 %",
        "1 4 3.5000 2.0794 40 8.00 kB 85.0 % 0.0 % 10.0 %",
    ):
        assert expected in output
    assert "warning" not in output


def test_a_narrow_terminal_breaks_lines_and_leaves_no_figure_out(tmp_path: Path) -> None:
    output = printed(write_run(tmp_path / "demo"), width=40)
    assert "…" not in output
    assert "1 4 3.5000 2.0794 40 8.00 kB 85.0 % 0.0 % 10.0 %" in flat(output)


def test_rounds_of_fragments(tmp_path: Path) -> None:
    folder = tmp_path / "streaming"
    for island in range(2):
        first, *others = whole_record(island)
        write_island(folder, island, [{**first, "num_fragments": 2}, *others])
    assert "rounds 2 (2 fragments, each every 2 steps), fp32 payload" in flat(printed(folder, width=200))


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    large = {"num_parameters": 10**10, "tokens_per_step": 10**8, "max_steps": 400_000}
    records = [start(**large), train(399_999, 11.5), sync(1, 400_000, bytes_sent=123 * 10**11), end(400_000, 2.6e7)]
    for island in (0, 1):
        write_island(tmp_path, island, [*records, evaluation(400_000, 11.5)])
    output = printed(tmp_path, width=80)
    assert "1,538,462  12.3 TB" in output  # 4e13 tokens in 2.6e7 s
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_what_is_missing_is_a_dash(tmp_path: Path) -> None:
    output = flat(printed(write_island(tmp_path, 0, [{"event": "start", "step": 0}]).parent, width=200))
    assert "evaluation loss — (no eval_loss of the outer weights recorded)" in output
    assert "perplexity — tokens/s — bytes exchanged 0 B sent, 0 B received per-step sync — time — " in output
    assert "0 0 — — — 0 B — — —" in output
    start = {"event": "start", "step": 0, "method": "dsgd", "topology": "ring"}
    output = flat(printed(write_island(tmp_path / "nodes", 0, [start]).parent, width=200))
    assert "data parallel — time — method dsgd on ring consensus —" in output


def test_nodes_that_evaluate_their_own_weights(tmp_path: Path) -> None:
    own: dict[str, Any] = {"method": "dsgd", "topology": "ring", "eval_weights": "local", "num_islands": 2}
    for node, loss in enumerate((2.0, 3.0)):
        evaluated = {**evaluation(4, loss, weights="inner"), "eval_accuracy": loss / 10}
        write_island(tmp_path, node, [start(node, **own), evaluated, end()])
    output = flat(printed(tmp_path))
    assert "accuracy 25.0 % (mean of the nodes' own, step 4) evaluation loss 2.5000" in output
    assert "of its own weights" not in output


def test_a_run_without_an_outer_loop(tmp_path: Path) -> None:
    first, *others = whole_record(0)
    records = [
        {**first, "has_outer_loop": False},
        *(one | {"weights": "inner"} for one in others if one["event"] != "sync"),
    ]
    output = flat(printed(write_island(tmp_path, 0, records).parent, width=200))
    assert "evaluation loss 2.0794 (step 4)" in output


def test_one_island_of_two(tmp_path: Path) -> None:
    output = flat(printed(write_island(tmp_path / "demo", 1, whole_record(1)).parent))
    assert "demo: 2 islands, 2 rounds (record of island 1)" in output
    assert "not compared: no two islands' records of a round are here" in output
    assert "warning: no record of island 0 here" in output


def test_text_of_others_is_no_markup(tmp_path: Path) -> None:
    folder = write_island(tmp_path / "[bold]x", 0, whole_record())
    (folder / "summary.json").write_text('{"sample": "a list[int] of [red]"}')
    output = printed(folder.parent)
    assert "[bold]x: 2 islands" in output
    assert "a list[int] of [red]" in output


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "—"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_600, "1.00 MB"),
        (99_960_000, "100 MB"),
        (2.26e9, "2.26 GB"),
        (5e21, "5,000 EB"),
    ],
)
def test_sizes(value: float | None, expected: str) -> None:
    assert text.size(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "—"),
        (0.0123, "0.0123 s"),
        (59.4, "59.4 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3600, "1 h 0 min"),
        (18_725, "5 h 12 min"),
    ],
)
def test_durations(value: float | None, expected: str) -> None:
    assert text.seconds(value) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([3], "3"),
        ([2, 1], "1, 2"),
        ([1, 2, 3, 7, 9, 10, 11, 12], "1-3, 7, 9-12"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, ..."),
    ],
)
def test_sets_of_numbers(values: list[int], expected: str) -> None:
    assert text.numbers(values) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(12_815.4, "12,815"), (9.6, "10"), (9.4, "9.4"), (0.571, "0.57"), (0.0, "0"), (None, "—")],
)
def test_rate(value: float | None, expected: str) -> None:
    assert text.rate(value) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [("two\n  lines", "two lines"), ("", "ValueError"), ("x" * 1000, "x" * 400 + "...")],
)
def test_what_a_library_says_is_one_line(said: str, expected: str) -> None:
    assert text.one_line(ValueError(said)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "—"), (2.07944, "2.0794"), (-1.0, "-1.0000"), (1.7e308, "1.7e+308"), (float("nan"), "nan")],
)
def test_losses(value: float | None, expected: str) -> None:
    assert text.loss(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "—"), (8.0, "8"), (26.6299, "26.63"), (4096.2, "4,096"), (1e9, "1.00e+09"), (float("inf"), "inf")],
)
def test_perplexities(value: float | None, expected: str) -> None:
    assert text.perplexity(value) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, "—"), (20.0, "20.0x"), (0.5, "0.5x"), (1234.5, "1,234x")])
def test_ratios(value: float | None, expected: str) -> None:
    assert text.ratio(value) == expected


def loaded_after(statement: str) -> set[str]:
    heavy = "matplotlib jinja2 rich numpy torch transformers datasets deepspeed"
    code = f"import sys; {statement}; print(*(n for n in '{heavy}'.split() if n in sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(completed.stdout.split())


def test_importing_the_report_loads_nothing_heavy() -> None:
    assert loaded_after("import hf_diloco.report") == set()
    assert loaded_after("from hf_diloco.report import load_run, summarise, print_report, write_html") == set()


def test_the_table_needs_no_plots(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    statement = f"import hf_diloco.report as r; r.print_report(r.summarise(r.load_run({str(folder)!r})))"
    code = f"{statement}; import sys; assert not {{'matplotlib', 'jinja2', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
