"""What is said at the end of a launch that did not finish."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.cli.launch import Result
from hf_diloco.cli.log import Outcome
from hf_diloco.cli.plan import LaunchOptions, load_options
from hf_diloco.cli.run import print_ending
from hf_diloco.report.progress import Progress


@dataclass
class EndedIsland:
    number: int
    outcome: Outcome
    log_path: Path = field(default=Path("log.txt"))
    progress: Progress = field(default_factory=Progress)

    @property
    def name(self) -> str:
        return f"island {self.number}"


@pytest.fixture
def options(tmp_path: Path) -> LaunchOptions:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"training: {{max_steps: 3}}\noutput: {tmp_path}\ndiloco: {{num_islands: 3}}\n")
    return LaunchOptions(run_file)


@pytest.fixture
def run(options: LaunchOptions) -> BaseRun:
    return load_options(options)


def ending(
    run: BaseRun, options: LaunchOptions, *outcomes: Outcome, step: int = 0, **result: Any
) -> tuple[int, str, str]:
    progress = Progress("failed", step)
    islands = [EndedIsland(number, outcome, progress=progress) for number, outcome in enumerate(outcomes)]
    ended = Result(cast("Any", islands), **result)
    out, err = (Console(file=io.StringIO(), width=60) for _ in range(2))
    print_ending(ended, run, options, out, err)
    return ended.exit_code, cast("io.StringIO", out.file).getvalue(), cast("io.StringIO", err.file).getvalue()


def test_what_was_killed_is_named_first_and_equal_reasons_once(run: BaseRun, options: LaunchOptions) -> None:
    lost = Outcome(1, "error: island 1 was lost")
    code, out, err = ending(run, options, lost, Outcome(-9, "step 4"), lost, failed=[0, 2, 1], ended={1})
    assert code == 1
    assert out == ""
    killed, why, *others = [line for line in err.splitlines() if "log: " not in line]
    assert killed == "error: island 1 failed (SIGKILL): step 4"
    assert "want of memory" in why
    assert others == [
        "error: island 0 then failed (exit code 1): island 1 was lost",
        "error: island 2 then failed (exit code 1): island 1 was lost",
    ]
    oom = Outcome(1, "torch.OutOfMemoryError: CUDA out of memory")
    assert "error: island 2 failed for the same reason" in ending(run, options, Outcome(0), oom, oom, failed=[1, 2])[2]


def test_a_stopped_run_says_how_to_go_on(run: BaseRun, options: LaunchOptions) -> None:
    stopped = [Outcome(3)] * 3
    assert ending(run, options, *stopped)[:2] == (
        3,
        "there is no checkpoint yet: the same command starts from the beginning\n",
    )
    (run.island_folder(0) / "checkpoint-2").mkdir(parents=True)
    code, out, _ = ending(run, options, *stopped)
    assert (code, out) == (3, f"to continue from the last checkpoint: hf-diloco launch {options.run_file}\n")


@pytest.mark.parametrize("step", [0, 2])
def test_what_failed_before_training_is_not_to_be_continued(run: BaseRun, options: LaunchOptions, step: int) -> None:
    (run.island_folder(0) / "checkpoint-2").mkdir(parents=True)
    wrong = [Outcome(1, "error: unknown setting")] * 3
    _, out, _ = ending(run, options, *wrong, failed=[0, 1, 2], step=step)
    assert ("to continue from the last checkpoint" in out) == (step > 0)


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143), (None, 1)])
def test_the_exit_code_of_a_run_that_was_ended(
    run: BaseRun, options: LaunchOptions, number: int | None, code: int
) -> None:
    assert ending(run, options, Outcome(-15), Outcome(3), Outcome(0), ended={0}, signal=number)[0] == code
