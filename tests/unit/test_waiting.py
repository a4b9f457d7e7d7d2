"""Who waits says for whom, in time and not too often; through everything that waits for other islands."""

from __future__ import annotations

import logging
import time

import pytest

from hf_diloco.waiting import WaitNotes, name_all


class Clock:
    """Moves only when something sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1], "island 1"),
        ([2, 1], "islands 1, 2"),
        (range(1, 33), "islands 1, 2, 3, 4, 5, 6, 7, 8 and 24 more"),
        ([], "islands unknown"),
    ],
)
def test_names_are_sorted_and_few(numbers: range | list[int], text: str) -> None:
    assert name_all(numbers) == text


def test_a_wait_is_said_after_3_s_and_every_30_s(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    wait = WaitNotes(0, clock=clock).begin(600, where="tcp://10.0.0.1:29400")
    for _ in range(700):
        clock.sleep(0.1)
        wait.look([1])
    assert caplog.messages == [
        "island 0: waiting for island 1 at tcp://10.0.0.1:29400 (3 s of 600 s)",
        "island 0: waiting for island 1 at tcp://10.0.0.1:29400 (33 s of 600 s)",
        "island 0: waiting for island 1 at tcp://10.0.0.1:29400 (63 s of 600 s)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_short_waits_are_silent_and_many_rounds_share_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    notes = WaitNotes(3, "node", clock=clock)
    for number in range(20):
        wait = notes.begin(1800, f"round {number}")
        for _ in range(4):
            clock.sleep(1)
            wait.look(lambda: {4, 5})
    assert caplog.messages == [
        "node 3: round 0: waiting for nodes 4, 5 (3 s of 1,800 s)",
        "node 3: round 8: waiting for nodes 4, 5 (3 s of 1,800 s)",
        "node 3: round 16: waiting for nodes 4, 5 (3 s of 1,800 s)",
    ]


def test_a_call_that_blocks_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    with WaitNotes(0, first=0.05).begin(float("inf"), "lane0").blocking("islands 1, 2 to connect"):
        time.sleep(0.3)
    assert caplog.messages == ["island 0: lane0: waiting for islands 1, 2 to connect (0 s)"]
