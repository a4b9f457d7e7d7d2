"""What tests of several files share."""

from __future__ import annotations

import pytest

from tests.equivalence.runs import Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of one file, each made once."""
    return Runs(tmp_path_factory.mktemp("runs"))
