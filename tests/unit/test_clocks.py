"""The clock that lets tests of many threads wait out minutes: it runs fast only while nobody has work to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hf_diloco.utils.clock import REAL
from tests.clocks import AT_ONCE, FastClock


@pytest.fixture
def clock() -> Iterator[FastClock]:
    with FastClock() as clock:
        yield clock


def test_half_a_minute_is_over_in_a_moment(clock: FastClock) -> None:
    begun, real = clock.now(), REAL.now()
    clock.sleep(30.0)
    assert clock.now() - begun == pytest.approx(30.0, abs=0.5)
    assert REAL.now() - real < 20.0


@pytest.mark.parametrize("rests", [False, True])
def test_it_runs_slowly_while_a_thread_computes(clock: FastClock, rests: bool) -> None:
    """Also one that rests whenever it lets others have Python's lock, so that nobody sees it at work."""
    begun, real = clock.now(), time.monotonic()
    while time.monotonic() < real + 0.5:
        sum(range(1000))
        if rests:
            time.sleep(0)
    assert clock.now() - begun < 0.5 * (time.monotonic() - real)


def test_threads_wake_in_the_order_of_their_times(clock: FastClock) -> None:
    woken: list[tuple[float, int]] = []

    def sleep(seconds: int) -> None:
        for _ in range(3):
            clock.sleep(seconds)
            woken.append((clock.now(), seconds))

    threads = [threading.Thread(target=sleep, args=(seconds,)) for seconds in (10, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seconds for _, seconds in woken] == [7, 10, 7, 10, 7, 10]
    assert [now for now, _ in woken] == pytest.approx([7, 10, 14, 20, 21, 30], abs=0.5)


def test_an_event_ends_a_wait_before_its_time(clock: FastClock) -> None:
    event = clock.event()
    assert not event.wait(5.0)

    def set_later() -> None:
        clock.sleep(5.0)
        event.set()

    setter = threading.Thread(target=set_later)
    begun = clock.now()
    setter.start()
    assert event.wait(1000.0)
    assert clock.now() - begun == pytest.approx(5.0, abs=0.5)
    event.clear()
    assert not event.wait(1.0)


def test_a_pools_thread_that_a_daemon_began_ends_with_the_clock() -> None:
    """Python waits for it when the process ends, though it is a daemon, too."""
    pool = ThreadPoolExecutor(1)
    sleeps: list[Future[None]] = []
    with FastClock() as clock:
        first = threading.Thread(target=lambda: sleeps.append(pool.submit(clock.sleep, 1e9)), daemon=True)
        first.start()
        first.join()
    assert isinstance(sleeps[0].exception(AT_ONCE), SystemExit)
