"""The outer parameters, shown in the model of an island of two ranks, of which one fails meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.torchrun import torchrun
from tests.processes import run


@pytest.mark.distributed
def test_an_error_on_one_rank_is_told_before_the_others_are_waited_for(tmp_path: Path) -> None:
    run(torchrun(2, "-m", "tests.programs.fails_within", tmp_path / "log.txt"), timeout=120)
