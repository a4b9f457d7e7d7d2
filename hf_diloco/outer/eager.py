"""One rank's outer state where others' pseudo-gradients come a round late; see `methods.outer.eager`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.outer.eager import Eager
from hf_diloco.outer.fragment import Fragment


class EagerFragment(Fragment):
    """Outer parameters and momentum, which differ slightly from island to island, and the averages not used yet.

    Its digest is one of all averages so far, which are equal on all islands.
    """

    method: Eager

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._means: list[torch.Tensor] = []
        self._vectors: list[torch.Tensor] = []  # that they lie in, of the pool's
        self._num_hashed = 0

    def step(self, mean: torch.Tensor, took_part: bool = True, rates: Sequence[float] = ()) -> None:
        """Keeps the average of a round until `step_eagerly`; `scratch` is another vector from now on."""
        self._means.append(mean)
        if self._vector is not None:
            self._vectors.append(self._vector)
            self._vector = None

    def step_eagerly(self, delta: torch.Tensor | None) -> None:
        """Takes the outer step with this island's own `delta` and what has arrived of the others'."""
        self.method.step_eagerly(delta, self._means)
        for vector in self._vectors:
            self._pool.give(vector)
        self._means, self._vectors, self._num_hashed = [], [], 0

    @property
    def is_owed_a_mean(self) -> bool:
        """Whether a round that this island has anticipated did not take place. Asked on all ranks alike."""
        (size,) = self._island.sum([float(self.method.own.abs().sum())])
        return not self._means and size > 0

    def anticipated(self) -> torch.Tensor:
        """The pseudo-gradient of that round, in `scratch`."""
        return torch.mul(self.method.own, self.config.num_islands, out=self.scratch)

    def make_digest(self, island: IslandGroup | None = None) -> None:
        if not self.digest:
            super().make_digest(island)
        for mean in self._means[self._num_hashed :]:
            latest = self.partition.digest(mean, island or self._island)
            self.digest = xxhash.xxh3_128_hexdigest((self.digest + latest).encode())
        self._num_hashed = len(self._means)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = super().state_dict()
        if self._means:
            state["mean"] = self._means[0]
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        state = dict(state)
        mean = state.pop("mean", None)
        self._means = [] if mean is None else [mean]
        self._vectors, self._num_hashed = [], len(self._means)
        super().load_state_dict(state)
