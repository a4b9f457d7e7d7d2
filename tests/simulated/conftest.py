"""What tests of several files share: time that passes fast, and islands that do not outlive their test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.clocks import FastClock

if TYPE_CHECKING:
    from tests.tcp_stores import KeptStore


@pytest.fixture
def store() -> KeptStore:
    """Where nodes find each other, unless a file has another one."""
    from tests.tcp_stores import KeptStore

    return KeptStore()


@pytest.fixture(autouse=True)
def no_survivors() -> Iterator[None]:
    """Islands that meet in a store give no sign of life after the test."""
    yield
    from tests.meetings import bury

    bury()


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FastClock]:
    """Islands that meet in a store wait and live by it, with the package's own leases; none outlives the test."""
    from tests.meetings import Meeting, bury

    with FastClock() as clock:
        monkeypatch.setattr(Meeting, "clock", clock)
        yield clock
        bury()


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Islands live by real time, as programs beside them do, but faster."""
    from hf_diloco.membership import heartbeats as members

    monkeypatch.setattr(members, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(members, "LEASE_SECONDS", 3.0)  # a busy machine has slow moments


@pytest.fixture
def quick_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that leave islands alone on purpose."""
    from hf_diloco.rounds import fixed

    monkeypatch.setitem(fixed.FAREWELL_SECONDS, "early", 0.2)
