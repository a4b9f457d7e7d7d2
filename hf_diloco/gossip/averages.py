"""Averages of vectors in memory: over a node's neighbourhood, and over all nodes."""

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
"""The variance of n integers that are not all equal is at least 1/n - 1/n²: above 9e-4 with 1,024 nodes."""

_ROW_VALUES = 2048
"""Values of a block that stays in the processor's L1 cache while all neighbours are averaged into it."""


def mix_(out: torch.Tensor, own: torch.Tensor, others: Sequence[tuple[float, torch.Tensor]]) -> None:
    """Writes own + Σ_j w_j (other_j - own) to `out`, which equals Σ_j w_ij vector_j if the weights sum to 1.

    The neighbours' vectors are averaged into the running result one after the other; each counts by its share of the
    weight so far. In this form a row of weights sums to 1 exactly. Weights such as ⅓ are not exact in fp32, and the
    errors of a plain weighted sum add up over steps: on a ring, D² in fp32 ended tens to thousands of times farther
    from the solution. With this form, nodes that agree keep their values to the last bit. The weight of a neighbour
    that is left out goes to the node itself.

    Rounding of a value does not depend on its position, so vectors may be cut into pieces in any way.

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
    """Averages `own` with each of `others` in turn, in one pass per vector."""
    so_far = own
    for other, share in zip(others, shares, strict=True):
        so_far = torch.lerp(so_far, other, share, out=out)


@compiled_with_fma
def mix_on_processor(out: Array, own: Array, others: tuple[Array, ...], shares: Array) -> None:
    """Like `mix_in_passes`, in one pass over memory; bit-identical to `torch.lerp` on a processor with FMA."""
    one = shares.dtype.type(1)
    for low in range(0, own.shape[0], _ROW_VALUES):
        high = min(low + _ROW_VALUES, own.shape[0])
        out[low:high] = own[low:high]
        for j in range(len(others)):
            row, other, share = out[low:high], others[j][low:high], shares[j]
            if share < 0.5:
                for i in range(row.shape[0]):
                    row[i] = row[i] + share * (other[i] - row[i])
            else:  # start from the nearer end: with a share of 1 the result is exactly `other`
                for i in range(row.shape[0]):
                    row[i] = other[i] + (share - one) * (other[i] - row[i])


def mean_(out: torch.Tensor, vectors: Vectors) -> None:
    """Writes the mean of all nodes' `vectors`, summed in order, to `out`, which must not overlap them."""
    for where in blocks(out):
        total = out[where].copy_(vectors[0][where])
        for vector in vectors[1:]:
            total.add_(vector[where])
        total.mul_(1.0 / len(vectors))  # as `weighted_mean` does


def mean_of_holders(
    neighbours: Neighbours, vectors: Vectors, is_holder: bool
) -> tuple[list[torch.Tensor] | None, Traffic]:
    """Returns the mean of `vectors` over the nodes that hold them, bit-identical on all. Collective over all nodes.

    Args:
        neighbours: this node's end of the graph.
        vectors: of floats, of equal sizes on all nodes; read on holders only.
        is_holder: whether this node is one of them.

    Returns:
        New vectors, 1-D, with the dtype of the first one, or None if no holder took part; and the traffic.

    Raises:
        IslandLostError: a node did not answer within the timeout.
    """
    first = vectors[0]
    joint = torch.cat([*(vector.flatten().to(first) for vector in vectors), first.new_ones(1)])
    if not is_holder:
        joint.zero_()  # not a multiplication by 0: the values may be NaN
    traffic = neighbours.average(joint)
    share = float(joint[-1])  # of holders among the nodes that took part
    if not share:
        return None, traffic
    return list(joint[:-1].div_(share).split([vector.numel() for vector in vectors])), traffic


def are_equal(neighbours: Neighbours, text: str) -> bool:
    """Whether all nodes pass the same text; all get the same answer. Collective over all nodes.

    Raises:
        IslandLostError: a node did not answer within the timeout.
    """
    digits = torch.tensor([float(int(digit, 16)) for digit in xxhash.xxh32_hexdigest(text.encode())])
    joint = torch.cat([digits, digits.square()])  # small integers: their sums are exact in fp32
    neighbours.average(joint)
    mean, mean_of_squares = joint.chunk(2)
    return bool((mean_of_squares - mean.square()).max() < _LEAST_VARIANCE)


def blocks(vector: torch.Tensor) -> list[slice]:
    """Slices of a vector: on a CPU blocks that fit its cache; on an accelerator one, as each kernel costs a launch."""
    size = vector.numel()
    block = BLOCK_VALUES if vector.device.type == "cpu" else max(size, 1)
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]
