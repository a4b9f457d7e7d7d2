"""A disk that takes no more: training goes on, the older checkpoint stays, and the next save tries again.

The limit on the size of a file stands for the disk's end: it stops Python, torch's C++ and safetensors' Rust alike.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_diloco import DiLoCoCallback
from hf_diloco.apps.common.process import _Output
from hf_diloco.apps.lm.plain import PlainCallback
from hf_diloco.apps.lm.runfile import DiLoCoBlock
from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.checkpoint import OuterPart, complete_checkpoints, read_index, save_outer
from hf_diloco.trainer.frames import move_before_trackers
from hf_diloco.trainer.progress import Progress
from hf_diloco.trainer.record import Record
from hf_diloco.utils.files import is_write_failure, write_whole
from tests.full_disk import no_file_beyond
from tests.outer_state import make_index
from tests.trainers import make_saving_trainer, weights_of

FULL_AT = 4


class FullDisk(TrainerCallback):
    """The disk takes no longer files than given for a step, from its beginning to that of the next."""

    def __init__(self, longest: Mapping[int, int]) -> None:
        self._longest = longest
        self._stack = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stack.close()
        if state.global_step + 1 in self._longest:
            self._stack.enter_context(no_file_beyond(self._longest[state.global_step + 1]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stack.close()


class Notes(TrainerCallback):
    """Writes a file into every checkpoint that is there, before the callback that completes it; or fails to."""

    def __init__(self, text: str) -> None:
        self._text = text

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        move_before_trackers(self)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if checkpoint.is_dir():
            (checkpoint / "notes.txt").write_text(self._text)


def train(folder: Path, *callbacks: TrainerCallback, resume: Path | None = None, **arguments: Any) -> Trainer:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = make_saving_trainer(folder, callbacks[0], *callbacks[1:], logging_steps=1, **arguments)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer = train(folder, DiLoCoCallback(sync_every=3))
    return folder, weights_of(trainer)


def sizes(folder: Path) -> list[int]:
    return sorted({path.stat().st_size for path in (folder / "checkpoint-6").rglob("*") if path.is_file()})


def steps(folder: Path) -> list[int]:
    return [index.global_step for _, index in complete_checkpoints(folder)]


def test_a_disk_that_is_full_at_any_file_costs_one_checkpoint(
    undisturbed: tuple[Path, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With room for every file that is shorter than another: each kind of writer fails once before all others.

    100 bytes are missing: PyTorch 2.9 does not tell when the last 22 of a file, the end of an archive, are lost.
    """
    longest = {2 * number + 2: size - 100 for number, size in enumerate(sizes(undisturbed[0]))}
    last = max(longest) + 1
    settings: dict[str, Any] = {"max_steps": last, "save_steps": 1, "lr_scheduler_type": "constant"}
    expected = train(tmp_path / "whole", DiLoCoCallback(sync_every=3), **{**settings, "save_strategy": "no"})
    trainer = train(tmp_path / "run", DiLoCoCallback(sync_every=3), FullDisk(longest), **settings)
    assert torch.equal(weights_of(trainer), weights_of(expected))
    assert steps(tmp_path / "run") == list(range(1, last + 1, 2))
    for step in longest:
        assert not (tmp_path / "run" / f"checkpoint-{step}").exists(), "what was left of it is gone"
        reason = r"cannot be written \(.*(File too large|the disk does not take it).*Meanwhile"
        assert re.search(rf"checkpoint-{step} {reason} checkpoint-{step - 1} stays", caplog.text)


def test_with_one_checkpoint_allowed_the_older_one_stays(tmp_path: Path) -> None:
    train(tmp_path, DiLoCoCallback(sync_every=3), FullDisk({6: 20_000}), save_total_limit=1)
    assert steps(tmp_path) == [4]
    callback = DiLoCoCallback(sync_every=3)
    trainer = train(tmp_path, callback, resume=callback.common_checkpoint(tmp_path), save_total_limit=1)
    assert steps(tmp_path) == [6]
    assert trainer.args.save_total_limit == 1


def test_the_checkpoint_of_a_step_is_not_lost_to_one_that_fails(tmp_path: Path) -> None:
    """A run that goes on from step 2 cannot write step 4 again; other callbacks do not change the one that stays."""
    train(tmp_path, DiLoCoCallback(sync_every=3), Notes("the first time"))
    train(
        tmp_path,
        DiLoCoCallback(sync_every=3),
        FullDisk({FULL_AT: 20_000}),
        Notes("again"),
        resume=tmp_path / "checkpoint-2",
    )
    assert steps(tmp_path) == [2, 4, 6]
    assert (tmp_path / "checkpoint-4" / "notes.txt").read_text() == "the first time"
    assert not list(tmp_path.glob("replaced-*"))


def test_a_plain_run_goes_on_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = PlainCallback(DiLoCoBlock(enabled=False), 16, tmp_path / "stop")
    train(tmp_path, callback, FullDisk({FULL_AT: 20_000}))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    assert "checkpoint-4 cannot be written" in caplog.text


def test_an_error_that_is_none_of_the_disk_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    trainer = make_saving_trainer(tmp_path, DiLoCoCallback(sync_every=3))
    monkeypatch.setattr(trainer, "_save_rng_state", fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        trainer.train()


def test_the_trainer_is_what_it_was(tmp_path: Path) -> None:
    trainer = make_saving_trainer(tmp_path, DiLoCoCallback(sync_every=3), save_total_limit=5)
    before = trainer._save_checkpoint
    trainer.train()
    assert trainer._save_checkpoint == before
    assert trainer.args.save_total_limit == 5


# Outer state that a loop of one's own writes


def test_a_loop_is_told_and_its_older_state_stays(tmp_path: Path) -> None:
    index = make_index(5000)

    def save(value: float) -> None:
        part = OuterPart({"anchor": torch.full((5000,), value)}, [(0, 5000)])
        save_outer(tmp_path, IslandGroup(), [part], index, is_last=False)

    save(1.0)
    with no_file_beyond(10_000), pytest.raises(CheckpointError, match=r"cannot be written .*File too large"):
        save(2.0)
    assert read_index(tmp_path).files[0].num_bytes > 20_000
    assert sorted(path.name for path in (tmp_path / "diloco").iterdir()) == ["outer.json", "rank-00000.safetensors"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), True),
        (Exception("No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 320 vs 214"), True),
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (RuntimeError("CUDA out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_are_the_disks(error: BaseException, expected: bool) -> None:
    assert is_write_failure(error) is expected


# Files that tell how far a run is


def test_metrics_wait_until_the_disk_takes_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = Record(tmp_path)
    writer.write("train", 1, loss=1.0)
    with no_file_beyond(path.stat().st_size + 10):  # part of a line still fits
        writer.write("train", 2, loss=2.0)
        writer.write("train", 3, loss=3.0)
    assert caplog.text.count("cannot be written (File too large): training goes on") == 1
    writer.write("train", 4, loss=4.0)
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_metrics_begin_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    Record(tmp_path / "file").write("train", 1)
    assert "training goes on" in caplog.text


def test_progress_warns_once_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(tmp_path, 10)
    progress.update(state="training")
    with no_file_beyond(3):
        progress.update(state="syncing")
        progress.update(state="saving")
    assert caplog.text.count("progress.json cannot be written (File too large") == 1
    assert json.loads((tmp_path / "progress.json").read_text())["state"] == "training"
    progress.update(state="done")
    assert json.loads((tmp_path / "progress.json").read_text())["state"] == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"], "no half of a file is left"


def test_a_file_that_is_replaced_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with no_file_beyond(2), pytest.raises(OSError, match="File too large"):
        write_whole(path, "new one")
    assert path.read_text() == "old"


def test_two_containers_replace_a_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes may have the same number; one of the islands ended with "run.json cannot be made"."""
    path, replace, replaced = tmp_path / "run.json", os.replace, list[str]()

    def replace_late(temporary: Path, target: Path) -> None:
        if not replaced:
            replaced.append("")
            write_whole(path, "the other's")
            replaced[0] = path.read_text()
        replace(temporary, target)

    monkeypatch.setattr(os, "replace", replace_late)
    write_whole(path, "one's")
    assert (replaced, path.read_text()) == (["the other's"], "one's")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_output_that_a_disk_does_not_take_is_dropped(code: int) -> None:
    """A file system is made read-only when it meets an error: the next line of the log ended training."""

    class Failing(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(code, os.strerror(code))

    class Output(_Output, Failing):
        pass

    with Output(os.devnull, "w") as output:
        assert output.write(b"line") == 4


@pytest.fixture(autouse=True)
def records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hf_diloco")
