"""Which step ends a round, counted step by step, and the learning rate of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, strategies as st

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.outer.schedule import count_rounds, step_of, steps_before
from hf_diloco.utils.lr_schedule import move_schedule


@given(
    sync_every=st.integers(1, 12),
    num_fragments=st.integers(1, 5),
    delay=st.integers(0, 3),
    num_steps=st.integers(0, 40),
)
def test_rounds_are_those_of_a_run_counted_step_by_step(
    sync_every: int, num_fragments: int, delay: int, num_steps: int
) -> None:
    num_fragments, delay = min(num_fragments, sync_every), min(delay, sync_every - 1)
    config = DiLoCoConfig(sync_every=sync_every, num_fragments=num_fragments, fragment_sync_delay=delay)
    steps = [0] * num_fragments
    rounds = 0
    assert step_of(config, rounds) == 0
    for step in range(1, num_steps + 1):
        steps = [one + 1 for one in steps]
        while steps[rounds % num_fragments] >= steps_before(config, rounds + 1):
            steps[rounds % num_fragments] = 0
            rounds += 1
            assert step_of(config, rounds) == step
        while step == num_steps and config.is_streaming and steps[rounds % num_fragments]:
            steps[rounds % num_fragments] = 0
            rounds += 1
    assert count_rounds(config, num_steps) == rounds


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({"sync_every": 10}, 4),  # five steps are in no round
        ({"sync_every": 10, "fragment_sync_delay": 1}, 5),  # a last round takes them in
        ({"sync_every": 10, "num_fragments": 2}, 9 + 1),  # steps 5, 10, ... 45, and fragment 1 once more
        ({"sync_every": 50, "num_fragments": 2}, 1 + 2),
    ],
)
def test_rounds_of_45_steps(settings: dict[str, Any], rounds: int) -> None:
    assert count_rounds(DiLoCoConfig(**settings), 45) == rounds


def test_a_schedule_that_is_moved_goes_on_as_one_that_was_stepped() -> None:
    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 3.0}]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    (optimizer, stepped), (other, moved) = make(), make()
    for _ in range(7):
        optimizer.step()
        stepped.step()
    assert move_schedule(moved, 7)
    for _ in range(3):
        assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
        assert moved.get_last_lr() == stepped.get_last_lr()
        for optim, schedule in ((optimizer, stepped), (other, moved)):
            optim.step()
            schedule.step()


def test_a_schedule_is_moved_through_what_accelerate_makes_of_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert move_schedule(Accelerator(cpu=True).prepare_scheduler(schedule), 2)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_schedule_that_depends_on_what_was_measured_is_left_alone() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert not move_schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 7)
    assert optimizer.param_groups[0]["lr"] == 1.0
