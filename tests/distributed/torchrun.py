"""Starting several ranks of one island with torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.processes import find_free_port


def torchrun(num_ranks: int, *program: str | Path) -> list[str]:
    """The command that runs a script, or `-m` a module, on `num_ranks` ranks of this machine."""
    where = ["--nproc_per_node", str(num_ranks), "--master_addr", "127.0.0.1", "--master_port", str(find_free_port())]
    return [sys.executable, "-m", "torch.distributed.run", *where, *map(str, program)]
