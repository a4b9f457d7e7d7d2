"""Cuts a model into fragments that synchronise at different steps (Streaming DiLoCo, arXiv 2501.18512).

A fragment is a set of whole transformer blocks and of modules outside the blocks: embeddings, final norm, head.
The cut depends only on the names and sizes of the parameters, so it is the same on all ranks of all islands.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from hf_diloco.errors import ConfigError
from hf_diloco.inner.base import Segment, Shards
from hf_diloco.utils.settings import compile_pattern
from hf_diloco.utils.text import numbers, plural, short_count

Unit = tuple[str, int | None]
"""The unit that is never split: entry `number` of the module list `path`, or (path, None), a module outside all
lists."""

_ENTRY = re.compile(r"(?:(.*?)\.)?(\d+)\.(.+)")  # non-greedy: of nested lists (a block's experts), the outermost


def cut_into_fragments(
    sizes: Mapping[str, int],
    num_fragments: int,
    order: Literal["strided", "sequential"],
    patterns: Sequence[str] = (),
) -> list[list[str]]:
    """Assigns the trainable parameters to fragments.

    Blocks go to fragments by `order`. Then each module outside the blocks, the largest first, goes to the fragment
    that is smallest so far.

    Args:
        sizes: element count of each trainable parameter by name, in the model's order.
        num_fragments: P; with 1 the whole model is one fragment, whatever its structure.
        order: "strided", as in the paper: block l belongs to fragment l mod P; or "sequential": runs of successive
            blocks with about as many elements each. Blocks of several stacks (encoder, decoder) share one numbering.
        patterns: `num_fragments` regular expressions, used instead of blocks and order: a parameter belongs to the
            first pattern that `re.search` finds in its name.

    Returns:
        The names in each fragment, in the model's order. Each name is in one fragment; no fragment is empty.

    Raises:
        ConfigError: there are too few blocks; or the patterns are invalid or leave a gap. The message names the block
            count or the pattern.
    """
    if patterns:
        return _cut_by_patterns(sizes, patterns)
    if num_fragments == 1:
        return [list(sizes)]
    units = {name: _unit_of(name) for name in sizes}
    weights: dict[Unit, int] = {}
    for name, unit in units.items():
        weights[unit] = weights.get(unit, 0) + sizes[name]
    blocks = _find_blocks(sizes, weights)
    if not 1 <= num_fragments <= len(blocks):
        raise ConfigError(
            f"num_fragments={num_fragments}: each fragment needs a transformer block, and the names of the trainable "
            f"parameters (as model.layers.0.…) show {len(blocks)} {plural('block', len(blocks))}: take "
            f"{'1' if len(blocks) < 2 else f'1 to {len(blocks)}'}, or say by fragment_patterns which names go where"
        )
    if order == "strided":
        chosen = [block % num_fragments for block in range(len(blocks))]
    else:
        chosen = _cut_into_runs([weights[block] for block in blocks], num_fragments)
    fragment_of = dict(zip(blocks, chosen, strict=True))
    totals = [0] * num_fragments
    others = [unit for unit in weights if unit not in fragment_of]
    for unit in blocks + sorted(others, key=lambda unit: -weights[unit]):  # ties keep the model's order
        fragment = fragment_of.setdefault(unit, totals.index(min(totals)))
        totals[fragment] += weights[unit]
    return [[name for name, unit in units.items() if fragment_of[unit] == one] for one in range(num_fragments)]


def describe_fragments(fragments: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> str:
    """Returns one line per fragment, such as:

    "fragment 0: 3.15M parameters in 28 tensors: model.embed_tokens; model.layers 0, 4, 8"
    """
    lines = []
    for fragment, names in enumerate(fragments):
        found: dict[str, list[int]] = {}
        for path, number in dict.fromkeys(map(_unit_of, names)):
            found.setdefault(path, []).extend([] if number is None else [number])
        words = "; ".join(f"{path} {numbers(entries, limit=100)}".strip() for path, entries in found.items())
        count = f"{short_count(sum(sizes[name] for name in names))} parameters"
        lines.append(f"fragment {fragment}: {count} in {len(names)} {plural('tensor', len(names))}: {words}")
    return "\n".join(lines)


class FragmentShards(Shards):
    """A rank's shards of one fragment, which has the parameters `names`, in the model's order. There may be none."""

    def __init__(self, shards: Shards, names: Sequence[str]) -> None:
        self._shards = shards
        self.description = shards.description
        self.is_replicated = shards.is_replicated
        self.sizes = {name: shards.sizes[name] for name in names}
        self.inner = shards.inner

    def segments(self) -> list[Segment]:
        return [segment for segment in self._shards.segments() if segment.name in self.sizes]

    def commit(self, names: Collection[str] | None = None) -> None:
        self._shards.commit(self.sizes if names is None else names)


def _unit_of(name: str) -> Unit:
    entry = _ENTRY.match(name)
    return (entry[1] or "", int(entry[2])) if entry else (name.rpartition(".")[0] or name, None)


def _find_blocks(sizes: Mapping[str, int], weights: Mapping[Unit, int]) -> list[Unit]:
    """Returns the entries of the module list with the most elements, and of all lists that are not small beside it.

    A list is small if it has fewer elements than half a mean block, such as two layers that project images. Lists of
    modules without submodules, such as the Linears of a head's nn.Sequential, count only if there are no others.
    """
    lists: dict[str, list[int]] = {}
    for (path, number), weight in weights.items():
        if number is not None:
            lists.setdefault(path, []).append(weight)
    nested = {entry[1] or "" for entry in map(_ENTRY.match, sizes) if entry and "." in entry[3]}
    stacks = {path: entries for path, entries in lists.items() if path in nested} or lists
    largest = max(stacks.values(), key=sum, default=[])
    stacks = {path: entries for path, entries in stacks.items() if 2 * len(largest) * sum(entries) >= sum(largest)}
    return [(path, number) for path, number in weights if number is not None and path in stacks]


def _cut_into_runs(weights: Sequence[int], num_runs: int) -> list[int]:
    """Returns the run of each block: runs end as near as possible to equal parts of all elements; none is empty."""
    ends = list(accumulate(weights, initial=0))
    starts = [0]
    for run in range(1, num_runs):
        possible = range(starts[-1] + 1, len(weights) - (num_runs - run) + 1)  # leaves a block for each later run
        starts.append(min(possible, key=lambda end: abs(num_runs * ends[end] - run * ends[-1])))
    return [bisect_right(starts, block) - 1 for block in range(len(weights))]


def _cut_by_patterns(sizes: Mapping[str, int], patterns: Sequence[str]) -> list[list[str]]:
    compiled = [compile_pattern("fragment_patterns", pattern) for pattern in patterns]
    fragments: list[list[str]] = [[] for _ in patterns]
    for name in sizes:
        matching = (one for one, pattern in enumerate(compiled) if pattern.search(name))
        if (first := next(matching, None)) is None:
            raise ConfigError(f"fragment_patterns: none matches {name}; widen one, or end with '.' for all else")
        fragments[first].append(name)
    for pattern, names in zip(patterns, fragments, strict=True):
        if not names:
            raise ConfigError(f"fragment_patterns: {pattern!r} matches nothing that those before it leave; correct it")
    return fragments
