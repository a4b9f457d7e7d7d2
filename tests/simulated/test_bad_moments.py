"""What happens between two questions of an island to the store, or while another thread is not ready yet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.codecs import Codec
from hf_diloco.membership import heartbeats
from hf_diloco.membership.heartbeats import LEASE_SECONDS, Members
from hf_diloco.transport.bucket import BucketExchange
from tests.clocks import LONG, FastClock
from tests.islands import run_islands
from tests.meetings import ENGINES, Meeting, Member
from tests.small_model import make_model, weights_of
from tests.streaming_meetings import Streams

pytestmark = pytest.mark.usefixtures("fast_clock")


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


def test_an_average_stays_as_it_is_until_it_is_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round for which training waited, though rounds go on behind the inner steps: it is sent for long."""
    monkeypatch.setattr(Meeting, "engine", ENGINES["mesh"])
    meeting = Streams(tmp_path, 2, sync_every=8, fragment_sync_delay=3)
    islands, may_go, publish = meeting.join_all(), threading.Event(), BucketExchange.publish
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def publish_late(self: BucketExchange, values: torch.Tensor, path: str, codec: Codec) -> Any:
        if "/mean-" in path:
            before = values.clone()
            assert may_go.wait(LONG)
            sent.append((before, values.clone()))
        return publish(self, values, path, codec)

    def island_main(island: int) -> None:
        for _ in range(8):
            islands[island].session.outer.count_step(1.0)
        islands[island].session.sync()  # as where others have passed over the round that was under way
        islands[island].stream(8)

    monkeypatch.setattr(BucketExchange, "publish", publish_late)
    run_islands(2, island_main)
    assert islands[0].session.outer.num_begun == 2
    may_go.set()
    run_islands(2, lambda island: islands[island].drain())
    (before, after), *_ = sent
    assert torch.equal(before, after)


def test_who_is_interrupted_while_it_waits_for_others_may_join_again_in_the_same_process(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meeting.island(0, should_stop=interrupt)
    assert meeting.island(0).session.outer.outer_hash


def test_after_all_islands_were_killed_those_that_come_back_wait_for_each_other(
    tmp_path: Path, fast_clock: FastClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others said of themselves before they were killed is in the store for ever."""
    meeting = Meeting(tmp_path, 2, min_islands=1)
    islands = run_islands(2, lambda island: meeting.island(island).train(3))
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in islands]
    for member in islands:
        member.die()
    monkeypatch.setattr(heartbeats, "_runs", lambda pid: False)  # as is seen at once on the machine where they were
    fast_clock.sleep(3 * LEASE_SECONDS)

    def come_back(island: int) -> float:
        fast_clock.sleep(4.0 * island)
        meeting.island(island, checkpoint=checkpoints[island])
        return fast_clock.now()

    begun = fast_clock.now()
    assert min(run_islands(2, come_back)) >= begun + 4.0
