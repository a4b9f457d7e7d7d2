"""Which checkpoints of a node are whole.

The Trainer's checkpoint holds everything: this node's parameters, the method's vectors with the optimizer's state, and
the random generators. What is added is a record of who wrote it, with size and digest of every file, last: a
checkpoint without it, or without one of the files, is not whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.manifest import (
    FileRecord,
    check_contents,
    check_sizes,
    find_damage,
    read_record,
    record_files,
    recover_replaced,
    write_record,
)
from hf_diloco.utils.files import telling

RECORD = "gossip.json"
"""The file that is written last into a checkpoint."""
_NUM_READ = 2  # sound checkpoints, the newest first; older ones are taken for sound

logger = logging.getLogger("hf_diloco")


class GossipIndex(BaseModel):
    """The contents of `gossip.json`: whose checkpoint it is. Earlier versions wrote more, which is passed over.

    Attributes:
        life: tells the training in which it was written, the same on all nodes, from earlier ones; "" in earlier
            versions.
    """

    format: int = 1
    step: int = Field(ge=0)
    node: int
    num_nodes: int
    method: str
    life: str = ""
    files: list[FileRecord] = []


def save_index(checkpoint: Path, index: GossipIndex, ranks: IslandGroup) -> None:
    """Marks a checkpoint as whole, when all else is on the disk. Collective over the node's ranks.

    Raises:
        CheckpointError: the disk does not take it; on every rank.
    """
    whole = index.model_copy(update={"files": record_files(checkpoint, ranks, RECORD)})

    def write() -> None:
        with telling(checkpoint):
            write_record(checkpoint / RECORD, whole)

    ranks.on_leader(write)


def read_index(checkpoint: Path) -> GossipIndex:
    """The record of a checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or it lists a file that is missing or cut short.
    """
    absent = f"{checkpoint} has no {RECORD}: it was not written by a node of a graph"
    index = read_record(checkpoint / RECORD, GossipIndex, absent)
    check_sizes(checkpoint, index.files)
    return index


def check_index(checkpoint: Path, mine: GossipIndex) -> None:
    """Raises `CheckpointError` if the checkpoint is another node's, method's or graph's."""
    index = read_index(checkpoint)
    for name in ("node", "num_nodes", "method"):
        was, is_now = getattr(index, name), getattr(mine, name)
        if was != is_now:
            raise CheckpointError(
                f"{checkpoint} was written with {name} {was}, but it is {is_now} now: set it back, or start anew in "
                "another run folder"
            )


def whole_checkpoints(output_dir: Path) -> dict[int, Path]:
    """All whole checkpoints of a node, by step."""
    found = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        try:
            index = read_index(path)
        except CheckpointError:
            continue
        if (path / "trainer_state.json").is_file():
            found[index.step] = path
    return found


def find_whole(folder: Path) -> list[Path]:
    """The folders of `whole_checkpoints`."""
    return list(whole_checkpoints(folder).values())


def lives_of(checkpoints: Mapping[int, Path]) -> list[tuple[int, str]]:
    """Step and life of whole checkpoints, which are given by step."""
    return [(step, read_index(path).life) for step, path in sorted(checkpoints.items())]


def sound_checkpoints(output_dir: Path, ranks: IslandGroup) -> dict[int, Path]:
    """The whole checkpoints of a node by step, without those of the newest that are damaged, which are told.

    Collective over the node's ranks; all get the leader's.

    Args:
        output_dir: where they are.
        ranks: of the node, who share the reading.
    """

    def look() -> list[tuple[int, str]]:
        recover_replaced(output_dir, find_whole)
        return [(step, str(path)) for step, path in whole_checkpoints(output_dir).items()]

    held = {step: Path(path) for step, path in ranks.on_leader(look)}
    num_sound = 0
    for step in sorted(held, reverse=True):
        if num_sound >= _NUM_READ:
            break
        damage = find_damage(held[step], read_index(held[step]).files, ranks)
        if damage is None:
            num_sound += 1
        else:
            if ranks.is_leader:
                logger.warning("%s: %s is passed over", damage, held[step].name)
            del held[step]
    return held


def check_files(checkpoint: Path, ranks: IslandGroup) -> None:
    """Reads every file of a checkpoint. Collective over the node's ranks.

    Raises:
        CheckpointError: one is missing, or does not hold what was written to it; on every rank.
    """
    index = ranks.on_all(lambda: read_index(checkpoint))
    check_contents(checkpoint, index.files, ranks)
