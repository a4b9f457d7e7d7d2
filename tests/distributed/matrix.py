"""The findings of `tests.programs.shards_matrix`: a launch or two for each number of ranks, shared by all tests."""

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

IN_BRIEF = {
    (ranks, name)
    for ranks in (1, 2)
    for name in ("plain", "zero0 bf16 client", "zero1 bf16 json", "zero2 fp32 client", "zero3 bf16 lora")
} | {(2, "zero3 fp32 muon"), (2, "fsdp2 fp32"), (2, "fsdp2 bf16 empty shards")}
"""One of each stage and FSDP2, in fp32 and bf16, of both optimizers, and Muon. The others are slow tests."""

CELL_NAMES = [
    pytest.param(num_ranks, cell.name, marks=() if (num_ranks, cell.name) in IN_BRIEF else pytest.mark.slow)
    for num_ranks in (1, 2, 3, 4)
    for cell in CELLS
    if num_ranks in cell.ranks
]
"""(number of ranks, name of the cell) of all that is run."""


def findings(num_ranks: int, name: str) -> dict[str, Any]:
    """What was seen in one cell.

    Raises:
        AssertionError: the cell was not reached, with the output of the ranks.
    """
    found, completed = _run(num_ranks, (num_ranks, name) in IN_BRIEF)
    assert name in found, f"exit code {completed.returncode} before {name}:\n{completed.output[-6000:]}"
    return found[name]


@functools.cache
def _run(num_ranks: int, in_brief: bool) -> tuple[dict[str, dict[str, Any]], Completed]:
    here = [cell.name for cell in CELLS if num_ranks in cell.ranks]
    names = [name for name in here if ((num_ranks, name) in IN_BRIEF) == in_brief]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        completed = run(
            torchrun(num_ranks, "-m", "tests.programs.shards_matrix", result, *names),
            env={"TORCHDYNAMO_DISABLE": "1"},  # DeepSpeed would compile Muon's iteration, for minutes
            timeout=280,
            expect=None,
        )
        cells = json.loads(result.read_text()) if result.is_file() else []
    return {cell["name"]: cell for cell in cells}, completed
