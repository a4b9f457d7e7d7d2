"""The limit to how fast bytes leave, on a clock that the tests wind."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, strategies as st

from hf_diloco.transport.base import BURST_SECONDS, RateLimit
from hf_diloco.utils.clock import REAL
from tests.clocks import StillClock


def limit_on(clock: StillClock, bytes_per_second: float | None) -> RateLimit:
    return RateLimit(bytes_per_second, clock)


def test_no_limit_never_waits() -> None:
    clock = StillClock()
    limit = limit_on(clock, None)
    limit.take(1 << 60)
    assert clock.time == 100.0
    assert limit.seconds(1 << 60) == 0.0


@pytest.mark.parametrize("bytes_per_second", [0, -1, float("nan")])
def test_a_limit_is_more_than_nothing(bytes_per_second: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_second"):
        RateLimit(bytes_per_second)


def test_bytes_take_their_time_but_for_a_burst() -> None:
    clock = StillClock()
    limit = limit_on(clock, 100.0)
    limit.take(10)
    assert clock.time == 100.0, "a burst goes at once"
    limit.take(100)
    assert clock.time == pytest.approx(101.0)
    limit.take(50)
    assert clock.time == pytest.approx(101.5)


def test_a_pause_saves_up_one_burst_and_no_more() -> None:
    clock = StillClock()
    limit = limit_on(clock, 100.0)
    limit.take(100)
    clock.time += 3600.0
    begin = clock.time
    for _ in range(20):
        limit.take(10)
    assert clock.time - begin == pytest.approx(2.0 - BURST_SECONDS)


def test_bytes_go_only_when_they_are_paid_for() -> None:
    clock = StillClock()
    limit_on(clock, 100.0).take(1000)
    assert clock.time == pytest.approx(100.0 + 10.0 - BURST_SECONDS)


@given(
    rate=st.floats(1e3, 1e10),
    steps=st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0, 5.0)), min_size=1, max_size=30),
)
def test_no_stretch_of_time_lets_more_through_than_the_limit_and_one_burst(
    rate: float, steps: list[tuple[int, float]]
) -> None:
    clock = StillClock()
    limit = limit_on(clock, rate)
    gone: list[tuple[float, int]] = []
    for num_bytes, pause in steps:
        limit.take(num_bytes)
        gone.append((clock.time, num_bytes))
        clock.time += pause
    for first, (begin, _) in enumerate(gone):
        total = 0
        for end, num_bytes in gone[first + 1 :]:  # what went at `begin` had been waited for before
            total += num_bytes
            assert total <= (end - begin + BURST_SECONDS) * rate * (1 + 1e-6) + 1e-6 * rate


@given(rate=st.floats(1e3, 1e10), num_bytes=st.integers(0, 1 << 40))
def test_the_seconds_foretold_are_those_that_it_takes(rate: float, num_bytes: int) -> None:
    clock = StillClock()
    limit = limit_on(clock, rate)
    foretold = limit.seconds(num_bytes)
    limit.take(num_bytes)
    assert clock.time - 100.0 == pytest.approx(foretold, abs=1e-6)


def test_threads_share_a_limit() -> None:
    """On the machine's own clock: the sum of what all take keeps to it."""
    limit = RateLimit(1e6)

    def take() -> None:
        for _ in range(10):
            limit.take(10_000)

    threads = [threading.Thread(target=take) for _ in range(4)]
    begin = REAL.now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert REAL.now() - begin >= limit.seconds(400_000)
