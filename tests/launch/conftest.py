"""What tests of several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Programs that end with the test."""
    with Processes() as started:
        yield started
