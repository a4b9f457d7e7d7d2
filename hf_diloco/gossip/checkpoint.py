"""Which checkpoints of a node are whole, and from which one all nodes go on.

The Trainer's checkpoint holds everything: this node's parameters, the method's vectors with the optimizer's state, and
the random generators. What is added is a record of who wrote it, last, so that a checkpoint without it is not whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_diloco.errors import CheckpointError
from hf_diloco.files import write_whole

_INDEX = "gossip.json"


class GossipIndex(BaseModel):
    """The contents of `gossip.json`: whose checkpoint it is, and what must be equal where it is gone on from."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    step: int = Field(ge=0)
    node: int
    num_nodes: int
    method: str
    facts: dict[str, str | int | float | bool | None]


def save_index(checkpoint: Path, index: GossipIndex) -> None:
    """Marks a checkpoint as whole."""
    write_whole(checkpoint / _INDEX, index.model_dump_json(indent=1))


def read_index(checkpoint: Path) -> GossipIndex:
    """The record of a checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = checkpoint / _INDEX
    try:
        return GossipIndex.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} has no {_INDEX}: it was not written by a node of a graph, or the run was killed while "
            "writing it. Resume from an earlier checkpoint"
        ) from None
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): resume from an earlier checkpoint"
        ) from None


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


def newest_common(steps: Sequence[Sequence[int]]) -> int | None:
    """The newest step of which all nodes hold a whole checkpoint; None if no node holds any.

    Args:
        steps: what each node holds, in their order.

    Raises:
        CheckpointError: nodes hold checkpoints, but of no common step.
    """
    common = set.intersection(*(set(some) for some in steps))
    if common:
        return max(common)
    if any(steps):
        listing = ", ".join(f"node {node}: {sorted(some) or 'none'}" for node, some in enumerate(steps))
        raise CheckpointError(
            f"the nodes hold no checkpoint of a common step ({listing}): bring the missing checkpoints back, or start "
            "anew in another run folder"
        )
    return None
