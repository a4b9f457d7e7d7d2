"""The findings of `tests.programs.shards_matrix`: one launch for each number of ranks, shared by all tests."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.torchrun import torchrun
from tests.processes import Completed, run
from tests.programs.shards_table import CELLS

CELL_NAMES = [
    pytest.param(num_ranks, cell.name, marks=pytest.mark.slow if num_ranks == 3 else ())
    for num_ranks in (1, 2, 3)
    for cell in CELLS
    if num_ranks in cell.ranks
]
"""(number of ranks, name of the cell) of all that is run."""


def findings(num_ranks: int, name: str) -> dict[str, Any]:
    """What was seen in one cell.

    Raises:
        AssertionError: the cell was not reached, with the output of the ranks.
    """
    found, completed = _run(num_ranks)
    assert name in found, f"exit code {completed.returncode} before {name}:\n{completed.output[-6000:]}"
    return found[name]


@functools.cache
def _run(num_ranks: int) -> tuple[dict[str, dict[str, Any]], Completed]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        completed = run(torchrun(num_ranks, "-m", "tests.programs.shards_matrix", result), timeout=280, expect=None)
        cells = json.loads(result.read_text()) if result.is_file() else []
    return {cell["name"]: cell for cell in cells}, completed
