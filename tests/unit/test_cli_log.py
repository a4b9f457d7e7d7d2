"""What is shown of an island's log, and what is read from it when the island has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.cli.log import FAILED, FINISHED, LogFollower, UsefulLines, clean, read_outcome, root_error

# As accelerate 1.15 and torch 2.13 write them.
TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 5, in <module>
[rank1]:     raise ValueError("bad shape")
[rank1]: ValueError: bad shape
E1120 14:14:28.290 5685 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 0
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "site-packages/accelerate/commands/launch.py", line 1423, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
hf_diloco.apps.lm FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_14:14:28
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 5689)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 5688)
  error_file: <N/A>
============================================================
"""
SIMPLE = """\
error: data.files: no file matches 'corpus/*.txt'
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "hf_diloco/apps/common/island_store.py", line 61, in <module>
    main()
  File "site-packages/accelerate/commands/launch.py", line 999, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', '-m', 'hf_diloco.apps.lm', 'run.yaml']' {how}.
"""


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (TORCHRUN.format(code=3), STOPPED),
        (TORCHRUN.format(code=1), FAILED),
        (TORCHRUN.format(code=-9), -9),
        (SIMPLE.format(how="returned non-zero exit status 3"), STOPPED),
        (SIMPLE.format(how="died with <Signals.SIGKILL: 9>"), -9),
        ("nothing that helps", FAILED),
    ],
)
def test_the_code_is_that_of_the_first_failing_process(log: str, code: int) -> None:
    outcome = read_outcome(1, log.splitlines())
    assert outcome.code == code


def test_a_code_above_128_is_a_signal() -> None:
    assert read_outcome(128 + 9, []).ending == "SIGKILL"
    assert read_outcome(-15, []).ending == "SIGTERM"
    assert read_outcome(7, []).ending == "exit code 7"
    assert read_outcome(128 + 100, []).ending == "signal 100", "it has no name"


def test_a_finished_island_has_no_error_even_with_tracebacks_in_its_log() -> None:
    outcome = read_outcome(0, TORCHRUN.format(code=1).splitlines())
    assert (outcome.code, outcome.error) == (FINISHED, "")


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (TORCHRUN.format(code=1), "ValueError: bad shape"),
        (SIMPLE.format(how="returned non-zero exit status 1"), "error: data.files: no file matches 'corpus/*.txt'"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nbye",
            "torch.OutOfMemoryError: CUDA out",
        ),
        ("a\nb\n\nc\nd", "b\nc\nd"),
        ("", ""),
    ],
)
def test_root_error(log: str, error: str) -> None:
    assert root_error(log.splitlines()).startswith(error)


# As Python 3.11 and pydantic 2.14 write them.
CHAIN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
ValueError: unknown x
"""
ASSERTION = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
    assert loss < 10
           ^^^^^^^^^
AssertionError
"""
DESTRUCTOR = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
RuntimeError: MLflowCallback requires mlflow to be installed. Run `pip install mlflow`.
Exception ignored in: <function MLflowCallback.__del__ at 0x7f>
Traceback (most recent call last):
  File "integration_utils.py", line 9, in __del__
AttributeError: 'MLflowCallback' object has no attribute '_auto_end_run'
"""
PYDANTIC = """\
Traceback (most recent call last):
  File "train.py", line 6, in <module>
pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig
stage
  Input should be less than or equal to 3 [type=less_than_equal, input_value=7, input_type=int]
    For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (CHAIN, "ValueError: unknown x\ncaused by: KeyError: 'x'"),
        (ASSERTION, "AssertionError (at: assert loss < 10)"),
        (CHAIN + "  0%|          | 0/200 [00:01<?, ?it/s]", "ValueError: unknown x\ncaused by: KeyError: 'x'"),
        (DESTRUCTOR, "RuntimeError: MLflowCallback requires mlflow to be installed. Run `pip install mlflow`."),
        (
            PYDANTIC,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\nstage\n"
            "  Input should be less than or equal to 3 [type=less_than_equal, input_value=7, input_type=int]",
        ),
        (
            CHAIN + "step\n" * 60 + DESTRUCTOR,
            "RuntimeError: MLflowCallback requires mlflow to be installed. Run `pip install mlflow`.",
        ),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(log: str, error: str) -> None:
    assert root_error(log.splitlines()) == error


def test_progress_bars_and_figures_are_no_reason_of_a_killed_process() -> None:
    lines = [
        "round 3 is missed",
        "Writing shards: 100%|###| 1/1 [00:00<00:00, 69.7it/s]",
        "{'loss': '6.5', 'epoch': '1'}",
    ]
    assert root_error(lines) == "round 3 is missed"


def test_an_earlier_warning_is_no_reason_of_a_killed_process() -> None:
    assert read_outcome(-9, ["2 outer rounds are too few"]).error == ""
    assert read_outcome(-15, ["2 outer rounds are too few"]).error == ""
    assert read_outcome(-9, ["torch.OutOfMemoryError: no memory"]).error == "torch.OutOfMemoryError: no memory"
    assert (
        read_outcome(-11, ["Fatal Python error: Segmentation fault"]).error == "Fatal Python error: Segmentation fault"
    )


def test_the_launchers_traceback_is_no_reason_of_a_killed_process() -> None:
    own, *of_launcher = SIMPLE.format(how="died with <Signals.SIGKILL: 9>").splitlines()
    assert own.startswith("error: ")
    assert root_error(["round 3 is missed", *of_launcher]) == "round 3 is missed"
    assert root_error(of_launcher) == ""


def test_noise_is_dropped_and_messages_stay() -> None:
    useful = UsefulLines()
    noise = [
        "[2026-11-20 14:17:23,610] [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU.",
        "/site-packages/torch/distributed/c10d_logger.py:83: FutureWarning: `torch.distributed.x` is deprecated.",
        "  return func(*args, **kwargs)",
        "  super().__init__(loader)",
        "[rank0]:[W1120 14:17:46.065798222 reducer.cpp:1529] Warning: find_unused_parameters=True was specified",
        "{'loss': '4.626', 'grad_norm': '3.471', 'learning_rate': '5e-05', 'epoch': '0.125'}",
        "{'train_runtime': '0.0675', 'train_samples_per_second': '59.26', 'epoch': '0.25'}",
        " 42%|####2     | 5/12 [00:01<00:01,  4.99it/s]",
        "61it [00:01, 30.60it/s]",
        "",
    ]
    assert [line for line in noise if useful(line)] == []
    messages = ["[rank0]:loss is nan", "island 0 of 2: batch of 16 sequences", "error: no such file", "{'a': 1}"]
    assert [line for line in messages if useful(line)] == messages


def test_tracebacks_are_left_to_the_end_and_doubles_shown_once() -> None:
    useful = UsefulLines()
    lines = [*TORCHRUN.format(code=1).splitlines()[:4], "saved", "saved", "done"]
    assert [line for line in lines if useful(line)] == ["saved", "done"]


def test_the_launchers_own_report_of_a_failure_is_not_shown() -> None:
    useful = UsefulLines()
    assert [line for line in ["ok", *TORCHRUN.format(code=1).splitlines()[4:]] if useful(line)] == ["ok"]


def test_clean_shows_what_a_terminal_would() -> None:
    assert clean("\x1b[31mred\x1b[0m 10%\r 100%\x07\n") == " 100%"
    bar = " 65%|██████▌   | 39/60 [00:52<00:23,  1.12s/it]"
    assert clean(f"\r{bar}\n") == bar
    for begun in (bar, "61it [00:04, 30.60it/s]"):
        assert clean(f"\r{begun}round 4 is missed\n") == "round 4 is missed"
    assert clean("\x1b[1;32mgreen\x1b[0m ┃ ok \r\n") == "green ┃ ok"


def test_a_bar_that_redraws_itself_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.touch()
    follower = LogFollower(path)
    path.write_bytes(b"10%\r50%\r100%\nnext\x0bpage\n\n")
    assert follower.new_lines() == ["100%", "nextpage", ""]
    assert follower.new_lines() == []


def test_follower_waits_for_whole_lines_and_starts_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("of an earlier start\n")
    follower = LogFollower(path)
    with path.open("ab") as log:
        log.write(b"first\nsec")
        log.flush()
        assert follower.new_lines() == ["first"]
        log.write("ond ┃\nthird".encode())
        log.flush()
        assert follower.new_lines() == ["second ┃"]
        assert follower.new_lines(unfinished=True) == ["third"]


def test_a_log_that_somebody_removes_is_followed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.touch()
    follower = LogFollower(path)
    with path.open("ab", buffering=0) as log:
        log.write(b"first\n")
        assert follower.new_lines() == ["first"]
        path.unlink()
        log.write(b"second\nthird")
        assert follower.new_lines() == ["second"]
        assert follower.new_lines(unfinished=True) == ["third"]
    follower.close()
