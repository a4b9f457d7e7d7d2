"""Averages of vectors that lie in memory: of a node's neighbourhood, and of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from hf_diloco.codecs.compiled import Array, compiled_with_fma, is_compiled_for
from hf_diloco.transport.base import BLOCK_VALUES, Traffic

if TYPE_CHECKING:
    from hf_diloco.gossip.neighbours import Neighbours

Vectors = Sequence[torch.Tensor]


_LEAST_VARIANCE = 1e-4
"""Of numbers that are whole, but not all equal, it is at least 1/n - 1/n²: above 9e-4 with 1,024 nodes."""

_ROW_VALUES = 2048
"""Values that go from one neighbour's turn to the next in the processor's nearest cache."""


def mix_(out: torch.Tensor, own: torch.Tensor, others: Sequence[tuple[float, torch.Tensor]]) -> None:
    """Writes own + Σ_j w_j (other_j - own) to `out`, which is Σ_j w_ij vector_j where the weights sum to 1.

    One after the other, the neighbours' vectors are averaged with what came out so far: each has its share of the
    weight up to there. In this form a row of weights sums to 1 exactly. Weights as ⅓ are not exact in fp32, and errors
    of a plain weighted sum add up over steps: on a ring D² in fp32 ended tens to thousands of times farther from the
    solution. Here nodes that agree stay where they are to the last bit. A neighbour that is left out leaves its weight
    to the node itself.

    A value is rounded the same wherever it lies in a vector, so that nothing depends on how vectors are cut.

    Args:
        out: 1-D, contiguous; overlaps no other argument.
        own: this node's vector.
        others: weight and vector of each neighbour, in the order of their numbers.
    """
    shares, total = [], 1.0 - sum(weight for weight, _ in others)
    for weight, _ in others:
        total += weight
        shares.append(weight / total)
    vectors = [other for _, other in others]
    if not others:
        out.copy_(own)
    elif is_compiled_for(out):
        arrays = tuple(vector.numpy() for vector in vectors)
        mix_on_processor(out.numpy(), own.numpy(), arrays, np.array(shares, arrays[0].dtype))
    else:
        mix_in_passes(out, own, vectors, shares)


def mix_in_passes(out: torch.Tensor, own: torch.Tensor, others: Vectors, shares: Sequence[float]) -> None:
    """Averages `own` with each of `others` in turn, one pass a vector."""
    so_far = own
    for other, share in zip(others, shares, strict=True):
        so_far = torch.lerp(so_far, other, share, out=out)


@compiled_with_fma
def mix_on_processor(out: Array, own: Array, others: tuple[Array, ...], shares: Array) -> None:
    """As `mix_in_passes`, in one pass over memory, with the bits of `torch.lerp` on a processor with FMA."""
    one = shares.dtype.type(1)
    for low in range(0, own.shape[0], _ROW_VALUES):
        high = min(low + _ROW_VALUES, own.shape[0])
        out[low:high] = own[low:high]
        for j in range(len(others)):
            row, other, share = out[low:high], others[j][low:high], shares[j]
            if share < 0.5:
                for i in range(row.shape[0]):
                    row[i] = row[i] + share * (other[i] - row[i])
            else:  # from the nearer end: with all of the weight, exactly the other
                for i in range(row.shape[0]):
                    row[i] = other[i] + (share - one) * (other[i] - row[i])


def mean_(out: torch.Tensor, vectors: Vectors) -> None:
    """Writes the mean of all nodes' `vectors`, in their order, to `out`, which overlaps none of them."""
    for where in blocks(out):
        total = out[where].copy_(vectors[0][where])
        for vector in vectors[1:]:
            total.add_(vector[where])
        total.mul_(1.0 / len(vectors))  # as `weighted_mean` does


def mean_of_holders(
    neighbours: Neighbours, vectors: Vectors, is_holder: bool
) -> tuple[list[torch.Tensor] | None, Traffic]:
    """The mean of `vectors` over those nodes that hold them, with the same bits on all. Collective over all nodes.

    Args:
        neighbours: this node's end of the graph.
        vectors: of floats, of equal sizes on all nodes; read on holders only.
        is_holder: this node holds them.

    Returns:
        New vectors, 1-D, of the first one's type, or None if no holder came; and what it moved.

    Raises:
        IslandLostError: a node did not come in time.
    """
    first = vectors[0]
    joint = torch.cat([*(vector.flatten().to(first) for vector in vectors), first.new_ones(1)])
    if not is_holder:
        joint.zero_()  # not a factor: what is there may be no number
    traffic = neighbours.average(joint)
    share = float(joint[-1])  # of holders among those who came
    if not share:
        return None, traffic
    return list(joint[:-1].div_(share).split([vector.numel() for vector in vectors])), traffic


def are_equal(neighbours: Neighbours, text: str) -> bool:
    """Whether all nodes give the same text; the same answer on all. Collective over all nodes.

    Raises:
        IslandLostError: a node did not come in time.
    """
    digits = torch.tensor([float(int(digit, 16)) for digit in xxhash.xxh32_hexdigest(text.encode())])
    joint = torch.cat([digits, digits.square()])  # so small that their sums are exact in fp32
    neighbours.average(joint)
    mean, mean_of_squares = joint.chunk(2)
    return bool((mean_of_squares - mean.square()).max() < _LEAST_VARIANCE)


def blocks(vector: torch.Tensor) -> list[slice]:
    """On a processor, blocks that stay in its cache; on an accelerator all at once, as each kernel costs a launch."""
    size = vector.numel()
    block = BLOCK_VALUES if vector.device.type == "cpu" else max(size, 1)
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]
