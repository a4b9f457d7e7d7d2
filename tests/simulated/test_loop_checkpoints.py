"""Checkpoints of a hand-written loop: whole or not at all, as many as wanted, and what a loop goes on from."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.distributed import checkpoint as distributed_checkpoint

from hf_diloco import DiLoCoConfig, OuterLoop
from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.outer.checkpoint import complete_checkpoints
from tests.full_disk import no_file_beyond


class Loop:
    """A loop of a small model, with data that depends on the step alone."""

    def __init__(self, folder: Path, project: ProjectConfiguration | None = None) -> None:
        self.accelerator = Accelerator(cpu=True, project_config=project)
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        config = DiLoCoConfig(sync_every=4, outer_momentum=0.5)
        self.outer = OuterLoop(self.accelerator, self.model, self.optimizer, config, output_dir=folder)

    @contextlib.contextmanager
    def begun(self) -> Iterator[OuterLoop]:
        if checkpoint := self.outer.common_checkpoint():
            self.accelerator.load_state(str(checkpoint))
        with self.outer:
            yield self.outer

    def train(self, until: int) -> None:
        while self.outer.global_step < until:
            data = torch.Generator().manual_seed(self.outer.global_step)
            self.accelerator.backward(self.model(torch.randn(4, 40, generator=data)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer.step()

    def weights(self) -> torch.Tensor:
        return self.accelerator.unwrap_model(self.model).weight.detach().clone()


def steps_in(folder: Path) -> list[int]:
    return [index.global_step for _, index in complete_checkpoints(folder)]


def test_a_loop_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole")
    with whole.begun() as outer:
        assert outer.global_step == 0
        whole.train(10)
    first = Loop(tmp_path / "broken")
    with first.begun() as outer:
        first.train(6)
        assert outer.save_checkpoint() == tmp_path / "broken" / "checkpoint-6"
    again = Loop(tmp_path / "broken")
    with again.begun() as outer:
        assert (outer.global_step, outer.round) == (6, 1)
        again.train(10)
    assert torch.equal(again.weights(), whole.weights())


@pytest.mark.parametrize("rate", [0.1, 1e-6])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_a_loop_that_has_not_loaded_its_weights_is_refused(step: int, rate: float, tmp_path: Path) -> None:
    """Also in the middle of a round, and with the very weights that the run began from."""
    loop = Loop(tmp_path)
    loop.optimizer.param_groups[0]["lr"] = rate
    with loop.begun() as outer:
        loop.train(step)
        outer.save_checkpoint()
    again = Loop(tmp_path)
    checkpoint = again.outer.common_checkpoint()
    with pytest.raises(CheckpointError, match=r"with other weights than .*load the model .*accelerator\.load_state"):
        again.outer.__enter__()
    assert checkpoint is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = Loop(tmp_path)
        assert rounded.outer.common_checkpoint() == checkpoint
        rounded.accelerator.load_state(str(checkpoint))
        with torch.no_grad():
            for parameter in rounded.model.parameters():
                parameter.copy_(parameter.to(dtype))
        with rounded.outer as outer:
            assert outer.global_step == step


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        for step in (3, 6):
            loop.train(step)
            outer.save_checkpoint()
    damaged = tmp_path / "checkpoint-6" / "optimizer.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert Loop(tmp_path).outer.common_checkpoint() == tmp_path / "checkpoint-3"
    assert f"{damaged} does not hold what was written to it" in caplog.text


def test_a_checkpoint_without_the_accelerators_part_is_not_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        loop.train(1)
        outer.save_state(tmp_path / "checkpoint-1")
    assert Loop(tmp_path).outer.common_checkpoint() is None
    assert "checkpoint-1 holds outer state alone: checkpoint-1 is skipped" in caplog.text


def test_as_many_stay_as_wanted(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        for step in range(1, 6):
            loop.train(step)
            outer.save_checkpoint(limit=2 if step > 3 else None)
            assert steps_in(tmp_path) == ([1, 2, 3][:step] if step <= 3 else [step - 1, step])
        outer.save_checkpoint(limit=2)  # once more of one step, in its place
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-4", "checkpoint-5"]


def test_of_a_link_to_a_checkpoint_the_link_alone_goes(tmp_path: Path) -> None:
    """A user may have moved one to a larger disk."""
    loop, moved = Loop(tmp_path / "run"), tmp_path / "moved" / "checkpoint-1"
    with loop.begun() as outer:
        for step in range(1, 4):
            loop.train(step)
            outer.save_checkpoint(limit=2)
            if step == 1:
                shutil.move(tmp_path / "run" / "checkpoint-1", moved)
                (tmp_path / "run" / "checkpoint-1").symlink_to(moved)
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-3"]
    assert steps_in(tmp_path / "moved") == [1]


def test_the_folder_is_the_one_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the script goes meanwhile."""
    monkeypatch.chdir(tmp_path)
    loop = Loop(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with loop.begun() as outer:
        assert outer.save_checkpoint() == tmp_path / "run" / "checkpoint-0"


def test_one_that_begins_anew_is_warned_and_deletes_none_of_an_earlier_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in ((2, 5), (3, 4, 5)):
        assert "starts from scratch" not in caplog.text
        loop = Loop(tmp_path)
        with loop.outer as outer:
            for step in steps:
                loop.train(step)
                outer.save_checkpoint(limit=1 if len(steps) == 3 else None)
    assert f"this training starts from scratch, but {tmp_path / 'checkpoint-5'} of an earlier one" in caplog.text
    assert steps_in(tmp_path) == [2, 5]


def test_what_the_user_writes_in_its_place_is_part_of_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        outer.save_checkpoint(write=lambda folder: torch.save(loop.model.state_dict(), folder / "mine.pt"))
    assert not (tmp_path / "checkpoint-0" / "optimizer.bin").exists()
    (tmp_path / "checkpoint-0" / "mine.pt").unlink()
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("num_bytes", [10, 400, 900], ids=lambda size: f"no file beyond {size} bytes")
def test_a_full_disk_leaves_the_older_one(num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        loop.train(1)
        outer.save_checkpoint(limit=1)
        loop.train(2)
        with no_file_beyond(num_bytes):
            assert outer.save_checkpoint(limit=1) is None
        assert "checkpoint-2 cannot be written" in caplog.text
        assert "Meanwhile checkpoint-1 stays the newest checkpoint" in caplog.text
        assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-1"]
        outer.save_checkpoint(limit=1)
        assert steps_in(tmp_path) == [2]


def test_a_full_disk_is_met_also_where_pytorchs_distributed_checkpoint_writes(tmp_path: Path) -> None:
    """Its error is none of Python's `Exception`."""
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        state = {"model": loop.model.state_dict()}
        write = lambda folder: distributed_checkpoint.save(state, checkpoint_id=folder, no_dist=True)  # noqa: E731
        with no_file_beyond(100):
            assert outer.save_checkpoint(write=write) is None
        assert outer.save_checkpoint(write=write) == tmp_path / "checkpoint-0"


@pytest.mark.parametrize("limit", ["two", 0, -1, 1.5, True], ids=str)
def test_limits_that_are_none(limit: Any, tmp_path: Path) -> None:
    with (
        Loop(tmp_path).begun() as outer,
        pytest.raises(ConfigError, match=r"save_checkpoint\(..., limit=.*\): give a whole number from 1 on"),
    ):
        outer.save_checkpoint(limit=limit)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda outer: outer.save_checkpoint(write="a"), r"save_checkpoint\(..., write='a'\): give a function"),
        (lambda outer: outer.save_state(3), r"save_state\(folder=3\): give the folder to save into"),
        (lambda outer: outer.save_state(None), r"save_state\(folder=None\): give the folder to save into"),
        (lambda outer: outer.save_state(""), r"save_state\(folder=''\): give the folder to save into"),
    ],
)
def test_neither_folders_nor_functions(call: Callable[[OuterLoop], Any], message: str, tmp_path: Path) -> None:
    with Loop(tmp_path).begun() as outer, pytest.raises(ConfigError, match=message):
        call(outer)


def test_calls_at_the_wrong_time(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match="OuterLoop is a context manager"):
        loop.outer.save_checkpoint()
    assert loop.outer.common_checkpoint() is None  # meets the others, but does not begin
    for call in (loop.outer.step, loop.outer.should_stop, partial(loop.outer.save_state, tmp_path / "state")):
        with pytest.raises(ConfigError, match="OuterLoop is a context manager"):
            call()
    with loop.begun() as outer, pytest.raises(ConfigError, match=r"call common_checkpoint\(\) first"):
        outer.common_checkpoint()


def test_what_does_not_train_is_no_checkpoint(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with loop.begun() as outer:
        loop.train(1)
        with outer.outer_weights(), pytest.raises(ConfigError, match=r"save_checkpoint\(\) within outer_weights\(\)"):
            outer.save_checkpoint()
        with outer.outer_weights(), pytest.raises(ConfigError, match=r"save_state\(\) within outer_weights\(\)"):
            outer.save_state(tmp_path / "state")
        assert outer.save_checkpoint() == tmp_path / "checkpoint-1"


def test_an_accelerator_that_names_checkpoints_itself(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    with (
        Loop(tmp_path, project).begun() as outer,
        pytest.raises(ConfigError, match="automatic_checkpoint_naming=True: leave it out"),
    ):
        outer.save_checkpoint()
