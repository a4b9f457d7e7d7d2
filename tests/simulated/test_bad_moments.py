"""What happens between two questions of an island to the store, or while another thread is not ready yet."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from hf_diloco.membership.heartbeats import Members
from tests.clocks import LONG, FastClock
from tests.islands import run_islands
from tests.meetings import Meeting, Member
from tests.small_model import make_model, weights_of


def test_a_run_starts_from_the_weights_of_who_began_it_though_others_are_faster(
    tmp_path: Path, fast_clock: FastClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Island 0 has written the run's first record, and island 1 looks before it gives a sign of life."""
    meeting, has_begun, enter = Meeting(tmp_path, 2), threading.Event(), Members.enter

    def enter_late(self: Members, may_return: bool = True) -> int:
        if self.island == 0:
            has_begun.set()
            fast_clock.sleep(3.0)
        return enter(self, may_return)

    def island_main(island: int) -> Member:
        assert island == 0 or has_begun.wait(LONG)
        return meeting.island(island, seed=island)

    monkeypatch.setattr(Members, "enter", enter_late)
    for member in run_islands(2, island_main):
        assert torch.equal(member.weights, weights_of(make_model(0)))
