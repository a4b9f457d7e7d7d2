"""One rank of an island whose inner optimizer's moments become their mean over two islands, in layout after layout.

    torchrun ... -m tests.programs.buffers_island '{"island": 0, "folder": ..., "rounds": [[CELL, RENDEZVOUS], ...]}'

Rank 0 writes, for each round, the moments before and after it, whole, to FOLDER/ISLAND.pt.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner import open_shards
from hf_diloco.inner.base import BufferShards, Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.fixed import FixedSession
from tests.programs.shards_engines import VOCABULARY, make_engine
from tests.programs.shards_reference import whole
from tests.programs.shards_table import CELLS

STEPS = 2
Moments = dict[str, torch.Tensor]


def run_round(cell_name: str, config: DiLoCoConfig, island: IslandGroup, folder: Path) -> tuple[Moments, Moments]:
    """Trains for one round; returns the moments before its end and after. Island 1 weighs thrice as much."""
    engine = make_engine(next(cell for cell in CELLS if cell.name == cell_name), island.size)
    shards = open_shards(engine.module, engine.optimizer, island.size)
    session = FixedSession(config, island)
    session.join(shards, folder)
    generator = torch.Generator().manual_seed(10 * config.island + island.rank)
    for _ in range(STEPS):
        engine.step([torch.randint(VOCABULARY, (2, 9), generator=generator)])
        session.outer.add_weight(1.0 + 2 * config.island)
        session.outer.count_step()
    before = moments_of(shards)
    session.sync()
    after = moments_of(shards)
    session.leave(finished=True)
    engine.close()
    return before, after


def moments_of(shards: Shards) -> Moments:
    return {name: whole(BufferShards(shards, name)) for name in shards.inner.buffers}


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    atexit.register(time.sleep, 0.2)  # Gloo's threads may abort an interpreter that shuts down
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    Accelerator(cpu=True)  # its wrapper around DeepSpeed's optimizers asks for it
    island, number = IslandGroup(timeout=120), settings["island"]
    folder = Path(settings["folder"])
    results = []
    for cell_name, rendezvous in settings["rounds"]:
        config = DiLoCoConfig(
            island=number,
            num_islands=2,
            rendezvous=rendezvous,
            method="slowmo",
            sync_every=STEPS,
            weight_by="examples",
            options={"inner_buffers": "average"},
            join_timeout=120,
        )
        results.append(run_round(cell_name, config, island, folder / str(number)))
    if island.is_leader:
        torch.save(results, folder / f"{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
