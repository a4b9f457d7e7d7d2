"""One rank of an island that is asked to stop: rank RANK of the world by a signal to itself, at step STEP.

Prints "rank R stopped at step S".
"""

from __future__ import annotations

import signal
import sys
import time

import torch.distributed as dist

from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.stop import StopFlag


def main() -> None:
    asked_rank, asked_step = map(int, sys.argv[1:])
    dist.init_process_group("gloo")
    island = IslandGroup()
    flag = StopFlag()
    flag.install(island)
    step = 0
    while not flag.agreed():
        step += 1
        time.sleep(0.01 * island.rank)
        if (island.rank, step) == (asked_rank, asked_step):
            signal.raise_signal(signal.SIGTERM)
        assert step < 100
    flag.uninstall()
    print(f"rank {island.rank} stopped at step {step}", flush=True)
    dist.barrier()
    time.sleep(0.2)


if __name__ == "__main__":
    main()
