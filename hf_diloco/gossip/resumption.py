"""From which checkpoints all nodes go on when they are started again, and how those enter who lack theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hf_diloco.errors import CheckpointError, IslandLostError, PayloadError
from hf_diloco.gossip.averages import mean_of_holders
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.records import Record
from hf_diloco.utils.text import numbers, plural

Held: TypeAlias = tuple[int, str]
"""Step and life of a checkpoint that a node holds."""


def read_held(record: Record, node: int) -> list[Held]:
    """What a node shows of its checkpoints.

    Raises:
        PayloadError: it is something else.
    """
    try:
        return [(int(step), str(life)) for step, life in record["held"]]
    except (KeyError, TypeError, ValueError):
        raise PayloadError(
            f"node {node} shows its checkpoints in another way ({record}): give all nodes the same version, and the "
            "rendezvous a port of its own"
        ) from None


@dataclass(frozen=True)
class Resumption:
    """What all nodes go on from.

    Attributes:
        step: optimizer steps before it.
        holders: nodes that have a checkpoint to begin with.
        late: all others, which enter with the holders' mean.
    """

    step: int
    holders: tuple[int, ...]
    late: tuple[int, ...]

    def describe(self, held: Sequence[Collection[Held]]) -> str:
        """What happens, in words.

        Args:
            held: whole checkpoints of each node.
        """
        which = f"{plural('node', len(self.late))} {numbers(self.late)}"
        return (
            f"{which} {'lacks' if len(self.late) == 1 else 'lack'} the checkpoint of step {self.step}, from which "
            f"{plural('node', len(self.holders))} {numbers(self.holders)} "
            f"{'goes' if len(self.holders) == 1 else 'go'} on ({_listing(held)}): {which} "
            f"{'enters' if len(self.late) == 1 else 'enter'} with their mean, and without momentum"
        )


def choose_step(held: Sequence[Collection[Held]]) -> Resumption | None:
    """The newest step that a majority of nodes holds; if no step has one, the newest that any node holds.

    Checkpoints of one step are different ones where all had gone back after some were written.

    Args:
        held: whole checkpoints of each node, in the order of the nodes.

    Returns:
        None if no node holds any.
    """
    num_holders = Counter(state for of_node in held for state in of_node)
    if not num_holders:
        return None
    by_majority = [state for state, number in num_holders.items() if 2 * number > len(held)]
    state = max(by_majority or num_holders, key=lambda state: (state[0], num_holders[state], state[1]))
    return _resumption(state[0], [state in of_node for of_node in held])


def choose_own(held: Sequence[Collection[Held]]) -> Resumption | None:
    """For a method whose nodes are not in step: each resumes from its newest; nodes without one at the largest step.

    Args:
        held: see `choose_step`.
    """
    newest = [max(of_node) for of_node in held if of_node]
    return _resumption(max(newest)[0], [bool(of_node) for of_node in held]) if newest else None


def choose_common(held: Sequence[Collection[Held]], method: str) -> Resumption | None:
    """The newest step that all nodes hold, for a method whose nodes cannot enter without their state.

    Args:
        held: see `choose_step`.
        method: its name.

    Raises:
        CheckpointError: nodes hold checkpoints, but of no common step.
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
        node: this node's end of the graph.
        vectors: of floats, of equal sizes on all nodes; overwritten on late nodes.
        resumption: who gives and who takes.

    Raises:
        IslandLostError: no holder is left, or a node did not come in time.
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
    """Steps by node; with the life where it tells checkpoints of one step apart."""
    lives = Counter(step for step, _ in set().union(*held))

    def name(step: int, life: str) -> str:
        return f"{step} of life {life or 'unknown'}" if lives[step] > 1 else str(step)

    names = [", ".join(name(*state) for state in sorted(of_node)) or "none" for of_node in held]
    return "; ".join(f"node {node}: {text}" for node, text in enumerate(names))
