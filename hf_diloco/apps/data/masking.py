"""Masked language modelling (BERT, arXiv 1810.04805): which tokens are hidden, and what stands in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from hf_diloco.apps.data.packing import Example

NOT_PREDICTED = -100  # a label that the loss leaves out
SHARE_OF_MASKS, SHARE_OF_RANDOM = 0.8, 0.1  # of the hidden tokens; the rest stays as it is


class Masking:
    """A collator of blocks that hides tokens. A block's mask depends on its tokens and the seed alone.

    (Transformers' own draws from a random state that goes on from batch to batch: a resumed run would have other masks
    than an uninterrupted one, and islands would evaluate different ones.)

    Args:
        mask: number of the token that hides others.
        vocab_size: tokens that may stand in the place of a hidden one.
        share: of a block's tokens that are to be predicted.
        seed: of the run.
    """

    def __init__(self, mask: int, vocab_size: int, share: float, seed: int) -> None:
        self._mask = mask
        self._vocab_size = vocab_size
        self._share = share
        self._seed = seed

    def __call__(self, examples: Sequence[Example]) -> Example:
        """`input_ids` with hidden tokens, and `labels`: what they were, -100 elsewhere; both (examples, length)."""
        hidden = [self._hide(example["input_ids"]) for example in examples]
        return {name: torch.stack([one[name] for one in hidden]) for name in ("input_ids", "labels")}

    def _hide(self, tokens: torch.Tensor) -> Example:
        seed = xxhash.xxh64_intdigest(tokens.numpy().tobytes(), self._seed) >> 1
        generator = torch.Generator().manual_seed(seed)
        is_chosen = torch.rand(tokens.shape, generator=generator) < self._share
        kind = torch.rand(tokens.shape, generator=generator)
        others = torch.randint(self._vocab_size, tokens.shape, generator=generator)
        shown = torch.where(is_chosen & (kind < SHARE_OF_MASKS), self._mask, tokens)
        is_random = is_chosen & (kind >= SHARE_OF_MASKS) & (kind < SHARE_OF_MASKS + SHARE_OF_RANDOM)
        return {
            "input_ids": torch.where(is_random, others, shown),
            "labels": torch.where(is_chosen, tokens, NOT_PREDICTED),
        }
