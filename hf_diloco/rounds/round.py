"""The steps of a round, in one place: capture once, then agree -> average -> vote -> outer step.

    capture      read the masters                                     nothing is changed
    complete     make the pseudo-gradient                             where the round is carried out
    agree        who takes part in its round                          a `Quorum` or `Unanimity` decides
    average      into scratch memory
    vote         the round is committed for all, or for none          until here nothing is changed
    outer step   the outer parameters, on every island alike; the report

Rounds for which training waits, rounds behind the inner steps, late rounds and catching up differ in when these steps
run, and in how they treat the island's own progress (`Rounds.progress`).
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

import torch

from hf_diloco.errors import DiLoCoError, DivergedError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord
from hf_diloco.membership.unanimity import Unanimity
from hf_diloco.outer.fragment import Fragment
from hf_diloco.outer.schedule import steps_before
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.transport.base import AverageStats, Traffic

logger = logging.getLogger("hf_diloco")

_SAME_DATA = 0.9999
"""Cosine above which pseudo-gradients are equal up to the payload's rounding."""


class RoundPassed(DiLoCoError):
    """A round in flight takes place without this island's contribution to it."""


class RoundRepeated(DiLoCoError):
    """All islands have aborted a round and repeat it: their averages differed, or a transfer was corrupt."""


class Part(Enum):
    """How much of this island's progress a round consumes."""

    NONE = auto()
    SOME = auto()
    WHOLE = auto()


@dataclass
class FurtherVector:
    """A vector that islands average in fp32 in the same attempt as a pseudo-gradient: both are committed, or neither.

    Attributes:
        partition: this rank's part of the vector.
        read: returns a copy of this rank's part; called after the pseudo-gradient is averaged. Collective in the
            island.
        values: this rank's part of the average, if the round is committed.
    """

    partition: Partition
    read: Callable[[], torch.Tensor]
    values: torch.Tensor = field(init=False)


@dataclass
class Contribution:
    """An island's progress since the last round of a fragment, as captured.

    Attributes:
        number: of its round.
        delta: this rank's part, in the fragment's scratch vector: the masters until `complete`, then the
            pseudo-gradient.
        steps, examples: inner steps, and examples or tokens, in it.
        due_at: inner steps after which it was due.
        rates: this island's inner learning rates, if the method uses them.
        is_begun: the fragment's next inner steps have begun: training does not wait for the round.
        part: how much of it the round consumes.
        used: if that is `Part.SOME`, the consumed part as the other islands read it; None if unknown.
        further_vectors: other vectors that the round averages, where all islands must be there.
        square: squared norm of the whole island's pseudo-gradient.
    """

    number: int
    fragment: Fragment
    delta: torch.Tensor
    weight: float
    steps: int
    examples: float
    due_at: int
    rates: Sequence[float]
    clock: SyncClock
    is_begun: bool = False
    part: Part = Part.WHOLE
    used: torch.Tensor | None = None
    further_vectors: Sequence[FurtherVector] = ()
    square: float = math.nan
    is_complete: bool = False

    def complete(self, island: IslandGroup, with_residual: bool = True) -> None:
        """Makes the pseudo-gradient; later calls are no-ops. Collective over the island's ranks.

        If training does not wait for the round, this may run during the next inner steps: nothing changes the outer
        parameters of a fragment while its round is in flight. `with_residual`: see `Fragment.pseudo_gradient_`.
        """
        if self.is_complete:
            return
        num_steps = None if self.is_begun else self.steps
        with self.applying():
            self.square = self.fragment.pseudo_gradient_(island, num_steps, with_residual)
        self.is_complete = True

    def applying(self) -> AbstractContextManager[None]:
        """Counts the time of its body as "applying", if training waits for the round."""
        return nullcontext() if self.is_begun else self.clock.counts("applying")

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.square)

    @property
    def norm(self) -> float:
        """The norm of the island's pseudo-gradient; NaN if a value is not finite."""
        return math.sqrt(self.square) if self.is_finite else math.nan

    def offer(self, island: int, incarnation: int, serial: int, state: str) -> OfferRecord:
        """Returns the offer of this contribution; see `OfferRecord`."""
        return OfferRecord(
            island=island,
            incarnation=incarnation,
            serial=serial,
            steps=self.steps,
            weight=self.weight if self.is_finite else 0.0,
            norm=self.norm if self.is_finite else None,
            state=state,
            rates=list(self.rates),
            is_last=bool(self.further_vectors),  # at this point only an eager island's last contribution has any
        )

    def give_back(self) -> None:
        """Returns the inner steps to the fragment after the round has failed; they count for the next attempt."""
        self.fragment.steps += self.steps
        self.fragment.weight += self.examples
        self.fragment.due_at = self.due_at
        self.fragment.install_in = None


def capture(outer: OuterState, clock: SyncClock) -> Contribution:
    """Captures this island's progress since the last round of the next fragment. Collective over the island's ranks.

    Raises:
        UnsupportedError: the trainable parameters have changed since the island joined.
    """
    outer.shards.check_trained()
    fragment, number, config = outer.current, outer.num_begun + 1, outer.config
    with clock.counts("applying"):
        delta = fragment.read_masters()
    weight = fragment.weight
    if config.weight_by == "uniform":  # islands that come and go may take different numbers of steps
        weight = fragment.steps / steps_before(config, number) if fragment.meets_in_store else 1.0
    return Contribution(
        number, fragment, delta, weight, fragment.steps, fragment.weight, fragment.due_at, outer.rates, clock
    )


class Rounds(ABC):
    """Carries out the rounds of contributions, one at a time, on any thread.

    Every method is collective over the island's ranks. Subclasses define how islands agree.

    Args:
        outer: this rank's outer state.
        island: the ranks of this island; a group that nothing else uses while a thread carries out rounds.
        decider: decides rounds; on the island's leader only.
    """

    decider: Quorum | Unanimity

    def __init__(self, outer: OuterState, island: IslandGroup, decider: Quorum | Unanimity | None) -> None:
        self.config = outer.config
        self.outer = outer
        self.island = island
        if decider is not None:
            self.decider = decider

    @abstractmethod
    def carry_out(self, own: Contribution) -> SyncReport:
        """Agrees on the round of a contribution, and carries it out.

        Raises:
            DiLoCoError: the round does not take place, or takes place without this contribution. Nothing was changed.
        """

    def agree(self, own: Contribution) -> Attempt:
        """Offers this island's contribution, and waits for the plan."""
        own.complete(self.island)
        with own.clock.counts("exchanging"):
            offer = self.make_offer(own)
        number = self.outer.round + 1
        with own.clock.counts("waiting"):
            planned = self.island.on_leader(lambda: self.decider.agree(number, offer), Attempt)
        self.check_state(planned)
        return planned

    def check_state(self, planned: Attempt) -> None:
        """Raises `DivergedError` unless this island holds the outer parameters that the plan starts from."""
        if planned.agreed.state != self.outer.outer_hash:
            raise DivergedError(
                f"round {planned.round}: this island's outer parameters ({self.outer.outer_hash[:12]}) are not those "
                f"that all agreed on ({planned.agreed.state[:12]}): suspect memory or a changed library. It ends "
                "before it spoils the others; started again, it resumes from its last checkpoint"
            )

    def abort(self, planned: Attempt, islands: Collection[int], reason: str) -> OutcomeRecord:
        """Aborts an attempt because the values of `islands` are unusable, or for another reason.

        Returns:
            The outcome that counts, which may be a commit.
        """
        offer = next((one.offer for one in planned.agreed.participants if one.island in islands), "")
        return self.island.on_leader(lambda: self.decider.abort(planned, offer, reason), OutcomeRecord)

    @abstractmethod
    def make_offer(self, own: Contribution) -> OfferRecord:
        """Makes a pseudo-gradient available to the other islands, and returns the offer."""

    def attempt(self, planned: Attempt, own: Contribution, mean: torch.Tensor) -> SyncReport | None:
        """Averages the plan's pseudo-gradients into `mean`; takes the outer step if the islands commit the average.

        Returns:
            The figures; None if the round needs another attempt.
        """
        with own.clock.counts("exchanging"):
            stats = self.average(planned, own, mean)
        if stats is None:
            return None
        with own.clock.counts("waiting"):
            outcome = self.island.on_leader(lambda: self.decider.commit(planned, stats.digest), OutcomeRecord)
        if not self.apply_outcome(planned, own, mean, stats.digest, outcome):
            return None
        took_part = own.part is Part.WHOLE and self.config.island in planned.participants
        with own.applying(), self.progress(planned, own):
            self.outer.step(planned.round, mean, took_part, planned.agreed.rates, self.island)
        return self._report(planned, own, stats)

    @abstractmethod
    def average(self, planned: Attempt, own: Contribution, mean: torch.Tensor) -> AverageStats | None:
        """Writes this rank's part of the plan's average to `mean`.

        Returns:
            The measurements, with the digest of the whole average; None if the round needs another attempt.
        """

    @abstractmethod
    def apply_outcome(
        self, planned: Attempt, own: Contribution, mean: torch.Tensor, digest: str, outcome: OutcomeRecord
    ) -> bool:
        """Acts on an outcome; returns whether the round is committed. If not, it needs another attempt."""

    def say_again(self, number: int, reason: object) -> None:
        """Logs that a round is attempted again."""
        if self.island.is_leader:
            logger.warning("retrying round %d: %s", number, reason)

    @abstractmethod
    def progress(self, planned: Attempt, own: Contribution) -> AbstractContextManager[None]:
        """Wraps the outer step of a committed round, and updates this island's own progress accordingly."""

    def _report(self, planned: Attempt, own: Contribution, stats: AverageStats) -> SyncReport:
        clock, weights = own.clock, planned.participants
        counted = [clock.traffic.bytes_sent, clock.traffic.bytes_received, stats.dot, stats.square]
        sent, received, dot, square = self.island.sum(counted)
        cosine = None
        if self.config.island in weights and not self.outer.codec.needs_feedback:  # else it drops most values
            share = weights[self.config.island] / sum(weights.values())
            cosine = cosine_to_others(dot, own.square, square, share)
        if planned.round == 1 and cosine is not None and cosine > _SAME_DATA and self.island.is_leader:
            logger.warning(
                "the first pseudo-gradient of island %d is that of the others (cosine %.5f): they seem to train on "
                "the same data in the same order. Give each island its own share (docs/data.md)",
                self.config.island,
                cosine,
            )
        return SyncReport(
            round=planned.round,
            participants=list(weights),
            seconds_computing=clock.computing,
            seconds_waiting=clock.waiting,
            seconds_exchanging=clock.exchanging,
            seconds_applying=clock.applying,
            bytes_sent=int(sent),
            bytes_received=int(received),
            pseudo_gradient_norm=own.norm,
            cosine=cosine,
            weight=own.weight,
            outer_hash=self.outer.outer_hash,
            fragment=self.outer.number_of(planned.round),
        )


def cosine_to_others(dot: float, own: float, mean: float, share: float) -> float | None:
    """Returns the cosine between Delta_i and (mean - share * Delta_i), the other islands' part of the mean.

    Args:
        dot: Delta_i . mean.
        own: squared norm of Delta_i.
        mean: squared norm of the mean.
        share: weight of Delta_i in the mean, divided by the sum of weights.

    Returns:
        None if either vector is zero or NaN, or the island has all the weight.
    """
    if share >= 1:
        return None
    others = mean - 2 * share * dot + share * share * own
    if not (own > 0 and others > 0):
        return None
    return (dot - share * own) / math.sqrt(own * others)


class SyncClock:
    """Counts the seconds of a round, as in `SyncReport`, and this rank's traffic.

    Args:
        last_end: end of the previous round, in seconds of the monotonic clock.
    """

    def __init__(self, last_end: float | None = None) -> None:
        self.computing = 0.0 if last_end is None else time.monotonic() - last_end
        self.waiting = self.exchanging = self.applying = 0.0
        self.traffic = Traffic()

    @contextmanager
    def counts(self, what: Literal["waiting", "exchanging", "applying"]) -> Iterator[None]:
        """Adds the time of its body to the attribute `what`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - begun)
