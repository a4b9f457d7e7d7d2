"""Chooses the step that restarted nodes resume from, and how nodes without that checkpoint enter.

Nodes that were lost before a run ended hold older checkpoints than the others, or none. All nodes are here when they
agree, so no two parts of them can choose differently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hf_diloco.errors import CheckpointError, IslandLostError
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.utils.text import numbers, plural


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

    def describe(self, steps: Sequence[Collection[int]]) -> str:
        """What happens, in words.

        Args:
            steps: of which each node holds whole checkpoints.
        """
        which = f"{plural('node', len(self.late))} {numbers(self.late)}"
        return (
            f"{which} {'lacks' if len(self.late) == 1 else 'lack'} the checkpoint of step {self.step}, from which "
            f"{plural('node', len(self.holders))} {numbers(self.holders)} "
            f"{'goes' if len(self.holders) == 1 else 'go'} on ({_listing(steps)}): {which} "
            f"{'enters' if len(self.late) == 1 else 'enter'} with their mean, and without momentum"
        )


def choose_step(steps: Sequence[Collection[int]]) -> Resumption | None:
    """The newest step that a majority of nodes holds; if no step has one, the newest that any node holds.

    Args:
        steps: of which each node holds whole checkpoints, in the order of the nodes.

    Returns:
        None if no node holds any.
    """
    known = sorted(set().union(*steps), reverse=True)
    if not known:
        return None
    by_majority = (step for step in known if 2 * sum(step in held for held in steps) > len(steps))
    step = next(by_majority, known[0])
    return _resumption(step, [step in held for held in steps])


def choose_own(steps: Sequence[Collection[int]]) -> Resumption | None:
    """For a method whose nodes are not in step: each resumes from its newest; nodes without one at the largest step.

    Args:
        steps: see `choose_step`.
    """
    newest = [max(held) for held in steps if held]
    return _resumption(max(newest), [bool(held) for held in steps]) if newest else None


def choose_common(steps: Sequence[Collection[int]], method: str) -> Resumption | None:
    """The newest step that all nodes hold, for a method whose nodes cannot enter without their state.

    Args:
        steps: see `choose_step`.
        method: its name.

    Raises:
        CheckpointError: nodes hold checkpoints, but of no common step.
    """
    if common := set.intersection(*(set(held) for held in steps)):
        return _resumption(max(common), [True] * len(steps))
    if any(steps):
        raise CheckpointError(
            f"the nodes hold no checkpoint of a common step ({_listing(steps)}), and no node of {method} can begin "
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
    first = vectors[0]
    is_holder = node.node in resumption.holders
    joint = torch.cat([*(vector.flatten().to(first) for vector in vectors), first.new_ones(1)])
    if not is_holder:
        joint.zero_()  # not a factor: what is there may be no number
    node.average(joint)
    share = float(joint[-1])  # of holders among those who came
    if is_holder:
        return
    if share == 0:
        raise IslandLostError(
            f"no node that holds the checkpoint of step {resumption.step} came to give its parameters: start all "
            "nodes again",
            resumption.holders,
        )
    parts = joint[:-1].div_(share).split([vector.numel() for vector in vectors])
    for vector, part in zip(vectors, parts, strict=True):
        vector.copy_(part.view_as(vector))


def _resumption(step: int, holds: Sequence[bool]) -> Resumption:
    return Resumption(
        step,
        tuple(node for node, is_holder in enumerate(holds) if is_holder),
        tuple(node for node, is_holder in enumerate(holds) if not is_holder),
    )


def _listing(steps: Sequence[Collection[int]]) -> str:
    return "; ".join(f"node {node}: {', '.join(map(str, sorted(held))) or 'none'}" for node, held in enumerate(steps))
