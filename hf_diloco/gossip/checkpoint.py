"""Checkpoints of nodes: which are complete, from which all nodes resume, and how nodes without one enter.

The Trainer's checkpoint holds the whole state: this node's parameters, the method's vectors with the optimizer's
state, and the random generators. After all other files, the node writes a record with its number and the size and
digest of each file. A checkpoint that lacks the record, or one of the files, is incomplete.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from pydantic import BaseModel, Field

from hf_diloco.errors import CheckpointError, IslandLostError, PayloadError
from hf_diloco.gossip.averages import mean_of_holders
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.records import Record
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.manifest import (
    FileRecord,
    check_sizes,
    find_damage,
    read_record,
    record_files,
    recover_replaced,
    write_record,
)
from hf_diloco.utils.files import read_json, telling, write_json
from hf_diloco.utils.text import name_all

RECORD = "gossip.json"
"""Name of the record, the last file that is written into a checkpoint."""
TRAINER_STATE = "trainer_state.json"
_NUM_READ = 2  # newest intact checkpoints whose contents are verified; older ones are assumed to be intact

logger = logging.getLogger("hf_diloco")


class GossipIndex(BaseModel):
    """The contents of `gossip.json`. `life` identifies the start of the run, the same on all nodes, that wrote it.

    `step` is the node's. The Trainer's own state has the step up to which the node has read its data, which is less on
    one that has entered: from that step the Trainer finds its place in the data.
    """

    format: int = 1
    step: int = Field(ge=0)
    node: int
    num_nodes: int
    method: str
    life: str = ""
    files: list[FileRecord] = []


def save_index(checkpoint: Path, index: GossipIndex, ranks: IslandGroup, behind: int = 0) -> None:
    """Marks a checkpoint as complete, after all other files are written. Collective over the node's ranks.

    Args:
        behind: steps by which this node is behind `index.step` in its data.

    Raises `CheckpointError`, on every rank, if the record cannot be written.
    """

    def write_place_in_data() -> None:
        with telling(checkpoint):
            state = checkpoint / TRAINER_STATE
            if not (found := read_json(state)):
                raise CheckpointError(f"{state}, which was just written, cannot be read: is the disk sound?")
            write_json(state, {**found, "global_step": index.step - behind})

    if behind:
        ranks.on_leader(write_place_in_data)
    whole = index.model_copy(update={"files": record_files(checkpoint, ranks, RECORD)})

    def write() -> None:
        with telling(checkpoint):
            write_record(checkpoint / RECORD, whole)

    ranks.on_leader(write)


def read_index(checkpoint: Path) -> GossipIndex:
    """Reads the record of a checkpoint.

    Raises `CheckpointError` if it is absent or unreadable, or lists a file that is missing or truncated.
    """
    absent = f"{checkpoint} has no {RECORD}: it was not written by a node of a graph"
    index = read_record(checkpoint / RECORD, GossipIndex, absent)
    check_sizes(checkpoint, index.files)
    return index


def check_index(checkpoint: Path, mine: GossipIndex, ranks: IslandGroup) -> int:
    """Returns the step of a checkpoint. Collective over the node's ranks.

    Raises `CheckpointError`, on every rank, if the checkpoint is another node's, method's or graph's.
    """
    index = ranks.on_all(lambda: read_index(checkpoint))
    for name in ("node", "num_nodes", "method"):
        was, is_now = getattr(index, name), getattr(mine, name)
        if was != is_now:
            raise CheckpointError(
                f"{checkpoint} was written with {name} {was}, but it is {is_now} now: set it back, or start anew in "
                "another run folder"
            )
    return index.step


def whole_checkpoints(output_dir: Path) -> dict[int, Path]:
    """All complete checkpoints of a node, by step."""
    found = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        try:
            index = read_index(path)
        except CheckpointError:
            continue
        if (path / TRAINER_STATE).is_file():
            found[index.step] = path
    return found


def find_whole(folder: Path) -> list[Path]:
    """The folders of `whole_checkpoints`."""
    return list(whole_checkpoints(folder).values())


def sound_checkpoints(output_dir: Path, ranks: IslandGroup) -> dict[int, Path]:
    """The complete checkpoints of a node, by step; warns of damaged ones among the newest, and leaves them out.

    Collective over the node's ranks, which share the reading; all get the leader's list.

    Raises `CheckpointError`, on every rank, if one cannot read a record that the leader reads.
    """

    def look() -> list[tuple[int, str]]:
        recover_replaced(output_dir, find_whole)
        return [(step, str(path)) for step, path in whole_checkpoints(output_dir).items()]

    held = {step: Path(path) for step, path in ranks.on_leader(look)}
    num_sound = 0
    for step in sorted(held, reverse=True):
        if num_sound >= _NUM_READ:
            break
        damage = find_damage(held[step], files_of, ranks)
        if damage is None:
            num_sound += 1
        else:
            if ranks.is_leader:
                logger.warning("%s: %s is skipped", damage, held[step].name)
            del held[step]
    return held


def files_of(checkpoint: Path) -> list[FileRecord]:
    """Returns the files that a checkpoint's record lists; raises as `read_index`."""
    return read_index(checkpoint).files


# The checkpoint from which all nodes resume

Held: TypeAlias = tuple[int, str]
"""Step and life of a checkpoint that a node holds."""


def lives_of(checkpoints: Mapping[int, Path], ranks: IslandGroup) -> list[Held]:
    """Step and life of each of these complete checkpoints, as the leader reads them. Collective over the ranks."""
    held = ranks.on_leader(lambda: [(step, read_index(path).life) for step, path in sorted(checkpoints.items())])
    return [(step, life) for step, life in held]


def read_held(record: Record, node: int) -> list[Held]:
    """Returns the checkpoints that a node's record lists; raises `PayloadError` if it is invalid."""
    try:
        return [(int(step), str(life)) for step, life in record["held"]]
    except (KeyError, TypeError, ValueError):
        raise PayloadError(
            f"node {node} publishes its checkpoints in another format ({record}): give all nodes the same version, "
            "and the rendezvous a port of its own"
        ) from None


@dataclass(frozen=True)
class Resumption:
    """The point from which all nodes resume.

    Attributes:
        step: optimizer steps taken before it.
        holders: nodes that load their own checkpoint.
        late: all other nodes, which start with the holders' mean.
    """

    step: int
    holders: tuple[int, ...]
    late: tuple[int, ...]

    def describe(self, held: Sequence[Collection[Held]]) -> str:
        """Describes who resumes and who enters, for the log; `held` are the complete checkpoints of each node."""
        which = name_all(self.late, "node")
        return (
            f"{which} {'lacks' if len(self.late) == 1 else 'lack'} the checkpoint of step {self.step}, from which "
            f"{name_all(self.holders, 'node')} {'goes' if len(self.holders) == 1 else 'go'} on ({_listing(held)}): "
            f"{which} {'enters' if len(self.late) == 1 else 'enter'} with their mean, and without momentum"
        )


def choose_step(held: Sequence[Collection[Held]]) -> Resumption | None:
    """Chooses the newest checkpoint that a majority of nodes holds; if there is none, the newest of any node.

    Checkpoints of one step and different lives differ: after the first was written, all nodes resumed from an earlier
    step.

    Args:
        held: complete checkpoints of each node, in the order of the nodes.
    """
    num_holders = Counter(state for of_node in held for state in of_node)
    if not num_holders:
        return None
    by_majority = [state for state, number in num_holders.items() if 2 * number > len(held)]
    state = max(by_majority or num_holders, key=lambda state: (state[0], num_holders[state], state[1]))
    return _resumption(state[0], [state in of_node for of_node in held])


def choose_own(held: Sequence[Collection[Held]]) -> Resumption | None:
    """Chooses each node's newest checkpoint, for methods without lockstep; nodes without one take the largest step."""
    newest = [max(of_node) for of_node in held if of_node]
    return _resumption(max(newest)[0], [bool(of_node) for of_node in held]) if newest else None


def choose_common(held: Sequence[Collection[Held]], method: str) -> Resumption | None:
    """Chooses the newest checkpoint that all nodes hold, for a method whose nodes cannot enter without their state.

    Raises:
        CheckpointError: nodes hold checkpoints, but none that all have.
    """
    if common := set.intersection(*(set(of_node) for of_node in held)):
        return _resumption(max(common)[0], [True] * len(held))
    if any(held):
        raise CheckpointError(
            f"the nodes hold no checkpoint of a common step ({_listing(held)}), and no node of {method} can begin "
            "without the momentum that all hold: bring the missing checkpoints back, or start anew in another run "
            "folder. Nodes of all other methods enter with the others' mean"
        )
    return None


@torch.no_grad()
def take_mean(node: Neighbours, vectors: Sequence[torch.Tensor], resumption: Resumption) -> None:
    """Gives late nodes the mean of the holders' vectors; holders keep their own. Collective over all nodes.

    Args:
        vectors: of floats, of equal sizes on all nodes; overwritten on late nodes.

    Raises:
        IslandLostError: no holder is left, or a node did not answer within the timeout.
    """
    is_holder = node.node in resumption.holders
    means, _ = mean_of_holders(node, vectors, is_holder)
    if is_holder:
        return
    if means is None:
        raise IslandLostError(
            f"no node that holds the checkpoint of step {resumption.step} came to give its parameters: start all "
            "nodes again",
            resumption.holders,
        )
    for vector, mean in zip(vectors, means, strict=True):
        vector.copy_(mean.view_as(vector))


def _resumption(step: int, holds: Sequence[bool]) -> Resumption:
    return Resumption(
        step,
        tuple(node for node, is_holder in enumerate(holds) if is_holder),
        tuple(node for node, is_holder in enumerate(holds) if not is_holder),
    )


def _listing(held: Sequence[Collection[Held]]) -> str:
    """Lists each node's steps, with the life where checkpoints of one step have different ones."""
    lives = Counter(step for step, _ in set().union(*held))

    def name(step: int, life: str) -> str:
        return f"{step} of life {life or 'unknown'}" if lives[step] > 1 else str(step)

    names = [", ".join(name(*state) for state in sorted(of_node)) or "none" for of_node in held]
    return "; ".join(f"node {node}: {text}" for node, text in enumerate(names))
