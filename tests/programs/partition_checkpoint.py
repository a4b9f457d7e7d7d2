"""One of three processes that form islands of 1, 2 and 3 ranks, one after another, and resume from each other's state.

torchrun --nproc_per_node 3 ... -m tests.programs.partition_checkpoint FOLDER

Every island takes two rounds, saves, and takes a third. Whoever resumes from what it saved must reach the same
parameters in the third round, to the last bit: they depend on all of anchor and momentum. FOLDER/result.json lists
what failed. With `die` as a further argument rank 1 of two is killed while it saves for the second time.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.saved_state import save_state
from hf_diloco.rounds.fixed import FixedSession
from tests.programs.shards_pieces import Cut, ListShards, make_shards

SIZES = {"embedding": 403, "weight": 331, "bias": 1, "head": 262}
ISLANDS: list[tuple[int, Cut]] = [(1, "whole"), (2, "flat"), (2, "whole"), (3, "each"), (3, "flat"), (3, "whole")]
CONFIG = DiLoCoConfig(sync_every=2, outer_lr=0.7, outer_momentum=0.9)
_world_numbers = count()


@contextmanager
def world(num_ranks: int) -> Iterator[IslandGroup | None]:
    """An island of the first `num_ranks` processes; None in the others."""
    rank = int(os.environ["RANK"])
    meeting = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"world{next(_world_numbers)}", meeting)
    if rank >= num_ranks:
        yield None
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
        yield IslandGroup(timeout=60)
        dist.destroy_process_group()
    store.add("left", 1)  # nobody reads what others have not written yet
    while store.add("left", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def values(number: int) -> torch.Tensor:
    return torch.randn(sum(SIZES.values()), generator=torch.Generator().manual_seed(number))


def start(
    island: IslandGroup, cut: Cut, masters: torch.Tensor, saved: Path | None = None
) -> tuple[FixedSession, ListShards]:
    shards = make_shards(SIZES, island.size, island.rank, cut)
    shards.write(masters)
    session = FixedSession(CONFIG, island)
    session.join(shards, Path("island"), checkpoint=saved)
    return session, shards


def take_round(session: FixedSession, shards: ListShards, number: int) -> None:
    """Inner steps that lead to `values(number)`, and a round."""
    shards.write(values(number))
    while not session.outer.count_step(weight=3.0):
        pass
    session.sync()


def save(island: IslandGroup, cut: Cut, folder: Path) -> torch.Tensor:
    """Two rounds, one more step, a checkpoint, and the rest of the third round; returns this rank's masters then."""
    session, shards = start(island, cut, values(0))
    for number in (1, 2):
        take_round(session, shards, number)
    session.outer.count_step(weight=3.0)
    shards.write(values(9))
    save_state(session.outer, folder, global_step=5, data={})
    shards.write(values(3))
    session.outer.count_step(weight=3.0)
    session.sync()
    return shards.read()


def resume(island: IslandGroup, cut: Cut, folder: Path, expected: torch.Tensor) -> list[str]:
    session, shards = start(island, cut, values(9), folder)
    failed = []
    if (session.outer.round, session.outer.steps, session.outer.current.weight) != (2, 1, 3.0):
        failed.append(f"stands at {session.outer.round}, {session.outer.steps}, {session.outer.current.weight}")
    shards.write(values(3))
    session.outer.count_step(weight=3.0)
    session.sync()
    found = shards.read()
    mine = ~found.isnan()
    if not torch.equal(found[mine], expected[mine]):
        failed.append(f"differs by {float((found - expected)[mine].abs().max()):.2g}")
    return failed


def check_spoilt(island: IslandGroup, folder: Path) -> list[str]:
    """A file that only one rank reads is spoilt: all ranks raise, and none waits for the others."""
    if island.is_leader:
        path = folder / "diloco" / "rank-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    island.barrier()
    try:
        start(island, "flat", values(0), folder)
    except CheckpointError as error:
        text = str(error)
        return [] if "rank-00001.safetensors does not hold what was written" in text else [text]
    return ["a spoilt file was read"]


def check_everything(folder: Path) -> list[str]:
    failed = []
    for size, cut in ISLANDS:
        with world(size) as island:
            if island:
                torch.save(save(island, cut, folder / f"{size}-{cut}"), folder / f"{size}-{cut}" / f"{island.rank}.pt")
    parts = [[torch.load(path) for path in (folder / f"{size}-{cut}").glob("?.pt")] for size, cut in ISLANDS]
    expected = parts[0][0]
    for (size, cut), held in zip(ISLANDS, parts, strict=True):
        whole = torch.stack(held).nan_to_num(nan=-torch.inf).amax(0)
        if len(held) != size or not torch.equal(whole, expected):
            failed.append(f"{size}-{cut} computes otherwise without any resuming")
    for size, cut in ISLANDS:
        with world(size) as island:
            for saved_size, saved_cut in ISLANDS:
                if island is None:
                    continue
                problems = resume(island, cut, folder / f"{saved_size}-{saved_cut}", expected)
                failed += [f"{size}-{cut} from {saved_size}-{saved_cut}: {problem}" for problem in problems]
    with world(2) as island:
        if island:
            failed += check_spoilt(island, folder / "2-flat")
    with world(3) as island:
        assert island
        return [f"rank {rank}: {text}" for rank, texts in enumerate(island.gather(failed)) for text in texts]


def die_while_saving(folder: Path) -> None:
    with world(2) as island:
        assert island
        session, shards = start(island, "flat", values(0))
        take_round(session, shards, 1)
        save_state(session.outer, folder / "checkpoint-2", global_step=2, data={})
        take_round(session, shards, 2)
        if not island.is_leader:
            os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        save_state(session.outer, folder / "checkpoint-4", global_step=4, data={})


def main() -> None:
    torch.set_num_threads(1)
    atexit.register(time.sleep, 0.2)
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["die"]:
        die_while_saving(folder)
        return
    failed = check_everything(folder)
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    main()
