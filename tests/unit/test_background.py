"""Rounds behind the inner steps: what becomes of them where one fails."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ExchangeError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.background import Background
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution
from tests.clocks import LONG


def test_rounds_behind_one_that_failed_are_not_carried_out_and_give_back_their_steps(tmp_path: Path) -> None:
    """They would come before it: every round has its number, and starts from what the one before has made."""
    config = DiLoCoConfig(sync_every=4, num_fragments=2, fragment_patterns=["0", "1"], fragment_sync_delay=3)
    session = FixedSession(config, IslandGroup())
    session.join(open_shards(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), None), tmp_path)
    outer, carried, both_begun = session.outer, list[int](), threading.Event()

    def carry_out(own: Contribution) -> SyncReport:
        carried.append(own.number)
        both_begun.wait(LONG)
        raise ExchangeError("the link is cut")

    background = Background(outer, carry_out)
    for _ in range(2):
        for _ in range(2):
            outer.count_step()
        assert outer.is_due
        background.begin_due_round()
    both_begun.set()
    reports, failure = background.drain()
    assert (reports, str(failure)) == ([], "the link is cut")
    assert carried == [1]
    assert (outer.num_begun, [fragment.steps for fragment in outer.fragments]) == (0, [4, 4])
    background.close()
    session.leave(finished=True)
