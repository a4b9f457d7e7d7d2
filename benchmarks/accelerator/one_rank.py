"""Trains an island of a run file, as train_lm.py does; also one of a single rank under FSDP2.

For users that is refused, as one rank has nothing to shard. Here it shows that the code for it runs on a device.
"""

from __future__ import annotations

from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.lm.train import main


def allow(run: RunFile, num_ranks: int) -> None:
    """Refuses no number of ranks."""


if __name__ == "__main__":
    RunFile.check_ranks = allow  # type: ignore[method-assign]
    main()
