"""Which step ends a round, counted step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hf_diloco.config import DiLoCoConfig
from hf_diloco.schedule import count_rounds, steps_before


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
    for step in range(1, num_steps + 1):
        steps = [one + 1 for one in steps]
        while steps[rounds % num_fragments] >= steps_before(config, rounds + 1):
            steps[rounds % num_fragments] = 0
            rounds += 1
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
