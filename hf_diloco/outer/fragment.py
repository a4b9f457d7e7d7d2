"""One rank's part of the outer state of the parameters that are synchronised together: all, or one fragment's.

    masters -> pseudo_gradient (+ residual) -> (average over the islands) -> step -> masters

With one fragment (DiLoCo) the outer parameters are installed in the masters at once. In Streaming DiLoCo
(arXiv 2501.18512) the average may arrive `fragment_sync_delay` inner steps later; the outer step still starts from the
old outer parameters, and the masters become alpha * local + (1 - alpha) * outer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from hf_diloco.codecs import find_codec
from hf_diloco.codecs.base import ErrorFeedback
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner.device_copies import page_lock
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Interval, Partition
from hf_diloco.methods.outer import Groups, make_method
from hf_diloco.methods.outer.base import chunks
from hf_diloco.methods.outer.eager import Eager


class ScratchPool:
    """A pool of fp32 host vectors of `size` values, for data in flight. Allocates one when none is free, for reuse.

    Args:
        is_locked: whether to page-lock the vectors, because the masters are on a CUDA device.
    """

    def __init__(self, size: int, is_locked: bool) -> None:
        self.size = size
        self.is_locked = is_locked
        self._free: list[torch.Tensor] = []
        self._locked: list[torch.Tensor] = []  # a view alone would not keep a vector's pages locked

    def take(self) -> torch.Tensor:
        try:
            return self._free.pop()
        except IndexError:  # not checked first: another thread could take the last vector in between
            return self._make()

    def _make(self) -> torch.Tensor:
        vector = torch.empty(self.size)
        if self.is_locked:
            self._locked.append(page_lock(vector))
        return vector

    def give(self, vector: torch.Tensor) -> None:
        self._free.append(vector)


class Fragment:
    """Outer parameters, momentum and residual of one fragment, and its inner steps since its last round.

    Args:
        partition: this rank's part of the fragment.
        intervals: the same part in the canonical index space of the whole model.
        pool: of vectors at least as long as this part.
        due_at: inner steps before its first round.
        groups: the inner optimizer's parameter groups, if the method uses its learning rates.

    Attributes:
        method: holds the outer parameters and the rest of the method's state, and takes the outer step.
        steps: inner steps since the last round.
        weight: examples or tokens since then.
        due_at: inner steps since then at which the next round is due.
        meets_in_store: the islands may come and go.
        install_in: inner steps until the outer parameters of the round in flight are installed in the masters; None:
            no round is in flight.
        digest: of the whole island's outer parameters of the fragment; empty before there are any.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        island: IslandGroup,
        partition: Partition,
        intervals: list[Interval],
        pool: ScratchPool,
        due_at: int,
        groups: Groups | None = None,
    ) -> None:
        self.config = config
        self.partition = partition
        self.intervals = intervals
        self.method = make_method(config, groups)
        self.codec = find_codec(config.payload)
        self.steps = 0
        self.weight = 0.0
        self.due_at = due_at
        self.install_in: int | None = None
        self.digest = ""
        self._island = island
        self._pool = pool
        self._vector: torch.Tensor | None = None
        self._fed_at: int | None = None  # inner steps in the pseudo-gradient that `feedback` has not committed
        self.meets_in_store = config.meets_in_store
        is_alone = config.num_islands == 1 and not self.meets_in_store  # nothing is encoded, so there is no residual
        decay = 0.0 if is_alone else config.feedback_decay
        self.feedback = ErrorFeedback(self.codec, decay, partition.numel) if decay else None

    @property
    def scratch(self) -> torch.Tensor:
        """This fragment's fp32 host vector, `partition.numel` values; taken from the pool until `release_scratch`."""
        if self._vector is None:
            self._vector = self._pool.take()
        return self._vector[: self.partition.numel]

    def release_scratch(self) -> None:
        """Returns the scratch vector to the pool."""
        if self._vector is not None:
            self._pool.give(self._vector)
            self._vector = None

    def lend(self) -> torch.Tensor:
        """Returns a second vector like `scratch`, to be returned with `take_back`."""
        return self._pool.take()[: self.partition.numel]

    def take_back(self, vector: torch.Tensor) -> None:
        """Returns a vector from `lend` to the pool."""
        self._pool.give(vector.as_strided((self._pool.size,), (1,), 0))

    def read_masters(self) -> torch.Tensor:
        """Copies this rank's part of the masters into `scratch` and returns it. Collective in the island."""
        masters = self.scratch
        self.partition.gather(masters)
        return masters

    def pseudo_gradient_(self, island: IslandGroup, num_steps: int | None, with_residual: bool = True) -> float:
        """Turns the masters in `scratch` into this island's pseudo-gradient, in place; changes nothing else.

        With error feedback, adds the residual of earlier pseudo-gradients. Collective over the island's ranks.

        Args:
            island: the ranks of the island; a group that nothing else uses meanwhile.
            num_steps: inner steps in this pseudo-gradient; None if later inner steps have begun.
            with_residual: False for the pseudo-gradient without the residual; `feedback` then stays unchanged.

        Returns:
            The sum of squares over the whole island; not finite exactly if a value is not, or the sum overflows fp32.
        """
        own_square = self.method.pseudo_gradient_(self.scratch)
        if with_residual and self.feedback is not None:
            fed_square = self.feedback.add_(self.scratch)
            self._fed_at = num_steps
            if math.isfinite(own_square):  # else keep it: sums in fp64 hide the overflow
                own_square = fed_square
        (square,) = island.sum([own_square])
        return square

    def take_progress(self) -> float:
        """Writes the outer parameters minus the masters into `scratch`; returns this rank's sum of squares."""
        return self.method.pseudo_gradient_(self.read_masters())

    def step(self, mean: torch.Tensor, took_part: bool = True, rates: Sequence[float] = ()) -> None:
        """Takes the outer step with this rank's part of the average; the masters stay as they are.

        Args:
            took_part: whether the average includes the last pseudo-gradient from `pseudo_gradient_`.
            rates: see `OuterMethod.step`.
        """
        if took_part:
            self._commit_feedback()
        self.method.step(mean, rates)

    def _commit_feedback(self) -> None:
        """Commits the residual of the last pseudo-gradient from `pseudo_gradient_`, after a round has used it."""
        if self.feedback is not None:
            self.feedback.commit()
            self._fed_at = None

    def take_out(self, progress: torch.Tensor, sent: torch.Tensor, num_steps: int) -> None:
        """Subtracts from `progress`, in place, an earlier pseudo-gradient of this island that a round has used.

        With error feedback, the part lost in its encoding becomes the residual. If another pseudo-gradient was made
        since, that part is not known any more and stays in `progress`; the sum of progress and residual is the same.

        Args:
            progress: this rank's part of the progress since the last round.
            sent: the earlier pseudo-gradient as the other islands decoded it, of `num_steps` inner steps.
        """
        progress.sub_(sent)
        if self.feedback is not None and self._fed_at == num_steps:
            self.feedback.commit_beside(progress)
        self._fed_at = None

    def commit_share(self, num_steps: int) -> None:
        """Commits the residual of the pseudo-gradient of `num_steps`; estimates it if another was made since.

        Collective over the island's ranks.
        """
        if self.feedback is None:
            return
        if self._fed_at != num_steps:
            self.take_progress()
            self.feedback.add_(self.scratch.mul_(num_steps / max(self.steps, 1)))
        self._commit_feedback()

    def encode_alone(self, mean: torch.Tensor) -> None:
        """Rounds the average of a single participant as its codec does; otherwise the residual is counted twice."""
        if self.feedback is not None:
            self.codec.round_trip(mean, mean)

    def write_masters(self, alpha: float = 0.0) -> None:
        """Writes alpha * masters + (1 - alpha) * outer parameters into the masters. Collective in the island.

        If the masters are not finite, alpha counts as 0.
        """
        if alpha:
            (square,) = self._island.sum([self._merge(alpha)])
            if math.isfinite(square):
                self.partition.scatter(self.scratch)
                return
        if self._pool.is_locked:
            page_lock(self.method.parameters)
        self.partition.scatter(self.method.parameters)

    def _merge(self, alpha: float) -> float:
        """Puts alpha * masters + (1 - alpha) * outer parameters in `scratch`; returns the masters' sum of squares."""
        self.partition.gather(self.scratch)
        square = 0.0
        for where in chunks(self.partition.numel):
            mine = self.scratch[where]
            square += float(torch.dot(mine, mine))
            mine.mul_(alpha).add_(self.method.parameters[where], alpha=1 - alpha)
        return square

    def start_anew(self, due_at: int | None = None) -> None:
        """Begins the inner steps of the next round.

        Args:
            due_at: number of inner steps before the round; default: `sync_every`. If all islands must be there and the
                last round was late, the default is fewer by the delay, so that the number of rounds does not depend on
                the step at which each island resumed.
        """
        if due_at is None:
            late = 0 if self.meets_in_store else max(0, self.steps - self.due_at)
            due_at = self.config.sync_every - late % self.config.sync_every
        self.steps = 0
        self.weight = 0.0
        self.due_at = due_at
        self._fed_at = None

    def count_down(self, num_steps: int) -> None:
        """Subtracts `num_steps` inner steps that a round has used, and their share of the weight."""
        self.weight *= 1 - num_steps / self.steps
        self.steps -= num_steps

    def make_digest(self, island: IslandGroup | None = None) -> None:
        """Computes `digest`. Collective over the ranks of `island`; default: the one given to the constructor."""
        self.digest = self.partition.digest(self.method.parameters, island or self._island)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all of this rank's outer state by name, not copied."""
        state = self.method.state_dict()
        if self.feedback is not None:
            state["residual"] = self.feedback.residual
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores the state from `state_dict`, written under these settings or others, without copying."""
        state = dict(state)
        residual = state.pop("residual", None)
        if self.feedback is not None:
            self.feedback.load(residual)
            self._fed_at = None
        self.method.load_state_dict(state)


class EagerFragment(Fragment):
    """A fragment where the other islands' pseudo-gradients are applied a round late; see `methods.outer.eager`.

    Outer parameters and momentum differ slightly from island to island, and averages are kept until they are applied.
    The digest covers all averages so far, which are equal on all islands.

    Attributes:
        anticipated_of: number of islands in the average whose own part this island has applied in advance.
    """

    method: Eager

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.anticipated_of = self.config.num_islands
        self._means: list[torch.Tensor] = []
        self._vectors: list[torch.Tensor] = []  # the pool's vectors that hold the means
        self._num_hashed = 0

    def step(self, mean: torch.Tensor, took_part: bool = True, rates: Sequence[float] = ()) -> None:
        """Keeps the average of a round until `step_eagerly`, and its vector, so `scratch` is another from now on."""
        self._means.append(mean)
        if self._vector is not None:
            self._vectors.append(self._vector)
            self._vector = None

    def step_eagerly(self, delta: torch.Tensor | None, weight: float) -> None:
        """Takes the outer step with this island's own `delta` and the averages that arrived since the last step."""
        self.method.step_eagerly(delta, weight, self._means)
        self.anticipated_of = self.config.num_islands
        self._drop_means()

    def last_parameters(self, mean: torch.Tensor) -> torch.Tensor:
        """Returns a copy of this island's outer parameters after `mean`, the average of the last round, is applied."""
        return self.method.last_parameters([*self._means, mean])

    def finish(self, parameters: torch.Tensor) -> None:
        """Ends the run with the mean of all islands' last parameters."""
        self.method.finish(self._means, parameters)
        self._drop_means()

    def _drop_means(self) -> None:
        for vector in self._vectors:
            self._pool.give(vector)
        self._means, self._vectors, self._num_hashed = [], [], 0

    @property
    def is_owed_a_mean(self) -> bool:
        """Whether the island has applied its own part of a round in advance, and the round did not take place."""
        return not self._means and self.method.ahead != 0

    def anticipated(self) -> torch.Tensor:
        """Returns the pseudo-gradient that was applied in advance, in `scratch`."""
        return torch.mul(self.method.own, self.anticipated_of, out=self.scratch)

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
