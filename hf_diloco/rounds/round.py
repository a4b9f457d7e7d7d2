"""The way of a contribution: captured once, then agree -> average -> vote -> outer step, in one piece of code.

    capture      read the masters                                     nothing is changed
    complete     make the pseudo-gradient                             where the round is carried out
    agree        who takes part in its round                          a `Quorum` or `Unanimity` decides
    average      into scratch memory
    vote         the round is committed for all, or for none          until here nothing is changed
    outer step   the outer parameters, on every island alike; the report

A round in which training waits, one behind the inner steps, a late one and one that is caught up with differ in when
that is done, and in what becomes of the island's own progress meanwhile (`Rounds.progress`).
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
"""Cosine above which islands have learnt the same, but for the rounding of a payload."""


class RoundPassed(DiLoCoError):
    """A round under way takes place without what this island has for it."""


class RoundRepeated(DiLoCoError):
    """All islands have aborted a round, and take it again: their averages differed, or a transfer came damaged."""


class Part(Enum):
    """How much of this island's progress a round uses up."""

    NONE = auto()
    SOME = auto()
    WHOLE = auto()


class FurtherVector:
    """A vector that islands average in fp32 in the same attempt as a pseudo-gradient: both are committed, or neither.

    Args:
        partition: which part of it is this rank's.
        read: a copy of this rank's part, once the average of the pseudo-gradient is there. Collective in the island.

    Attributes:
        values: this rank's part of its average, if the round is committed.
    """

    values: torch.Tensor

    def __init__(self, partition: Partition, read: Callable[[], torch.Tensor]) -> None:
        self.partition = partition
        self.read = read


@dataclass
class Contribution:
    """An island's progress since the last round of a fragment, as captured.

    Attributes:
        number: of its round.
        fragment: whose round it is.
        delta: this rank's part of the pseudo-gradient, in the fragment's scratch vector; of the masters, until
            `complete`.
        weight: what it weighs in the average.
        steps: inner steps behind it.
        examples: examples or tokens behind it.
        due_at: inner steps after which it was due.
        rates: this island's inner learning rates, where the method wants them.
        clock: what its round takes.
        is_begun: the fragment's next inner steps have begun: training does not wait for the round.
        part: how much of it the round uses up.
        used: what the others have read of it, where that is a part that is known.
        further_vectors: what else the round averages, where all islands must be there.
        square: of the whole island's pseudo-gradient.
        is_complete: the pseudo-gradient is made.
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
        """Makes the pseudo-gradient, once. Collective over the island's ranks.

        Where training does not wait for the round, it does not wait for this either: nothing changes the outer
        parameters of a fragment while its round is under way.

        Args:
            island: see `Fragment.pseudo_gradient_`, as the next.
            with_residual: False for what was trained only.
        """
        if self.is_complete:
            return
        num_steps = None if self.is_begun else self.steps
        with self.applying():
            self.square = self.fragment.pseudo_gradient_(island, num_steps, with_residual)
        self.is_complete = True

    def applying(self) -> AbstractContextManager[None]:
        """Counts what is done within, if training waits for it."""
        return nullcontext() if self.is_begun else self.clock.counts("applying")

    @property
    def is_finite(self) -> bool:
        """Whether every value is."""
        return math.isfinite(self.square)

    @property
    def norm(self) -> float:
        """The norm of the island's pseudo-gradient; NaN if a value is not finite."""
        return math.sqrt(self.square) if self.is_finite else math.nan

    def offer(self, island: int, incarnation: int, serial: int, state: str) -> OfferRecord:
        """What the island says of it; see `OfferRecord`."""
        return OfferRecord(
            island=island,
            incarnation=incarnation,
            serial=serial,
            steps=self.steps,
            weight=self.weight if self.is_finite else 0.0,
            norm=self.norm if self.is_finite else None,
            state=state,
            rates=list(self.rates),
            is_last=bool(self.further_vectors),  # before an average only the last of an eager island has any
        )

    def give_back(self) -> None:
        """Nothing came of it after it had begun: its inner steps count for the next try."""
        self.fragment.steps += self.steps
        self.fragment.weight += self.examples
        self.fragment.due_at = self.due_at
        self.fragment.install_in = None


def capture(outer: OuterState, clock: SyncClock) -> Contribution:
    """This island's progress since the last round of the fragment that is next. Collective over the island's ranks.

    Args:
        outer: this rank's outer state, which is not changed.

    Raises:
        UnsupportedError: what the island trains is no longer what islands exchange.
    """
    outer.shards.check_trained()
    fragment, number, config = outer.current, outer.num_begun + 1, outer.config
    with clock.counts("applying"):
        delta = fragment.read_masters()
    weight = fragment.weight
    if config.weight_by == "uniform":  # who comes and goes may have taken more or fewer steps than the others
        weight = fragment.steps / steps_before(config, number) if fragment.meets_in_store else 1.0
    return Contribution(
        number, fragment, delta, weight, fragment.steps, fragment.weight, fragment.due_at, outer.rates, clock
    )


class Rounds(ABC):
    """Takes contributions through their rounds, one at a time, on whichever thread.

    Every method is collective over the island's ranks. How islands agree is the subclass's.

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
        """Agrees on the round of a contribution, and takes it.

        Raises:
            DiLoCoError: it does not take place, or without this contribution. Nothing was changed.
        """

    def agree(self, own: Contribution) -> Attempt:
        """Offers what this island has, and waits for the plan."""
        own.complete(self.island)
        with own.clock.counts("exchanging"):
            offer = self.make_offer(own)
        number = self.outer.round + 1
        with own.clock.counts("waiting"):
            planned = self.island.on_leader(lambda: self.decider.agree(number, offer), Attempt)
        self.check_state(planned)
        return planned

    def check_state(self, planned: Attempt) -> None:
        """Raises `DivergedError` unless this rank holds the outer parameters that all agreed on."""
        if planned.agreed.state != self.outer.outer_hash:
            raise DivergedError(
                f"round {planned.round}: this island's outer parameters ({self.outer.outer_hash[:12]}) are not those "
                f"that all agreed on ({planned.agreed.state[:12]}): suspect memory or a changed library. It ends "
                "before it spoils the others; started again, it resumes from its last checkpoint"
            )

    def abort(self, planned: Attempt, islands: Collection[int], reason: str) -> OutcomeRecord:
        """Says that the values of some islands could not be used, or why else there is no average.

        Returns:
            What was decided, which may be otherwise.
        """
        offer = next((one.offer for one in planned.agreed.participants if one.island in islands), "")
        return self.island.on_leader(lambda: self.decider.abort(planned, offer, reason), OutcomeRecord)

    @abstractmethod
    def make_offer(self, own: Contribution) -> OfferRecord:
        """Makes a pseudo-gradient ready for others, and says what there is."""

    def attempt(self, planned: Attempt, own: Contribution, mean: torch.Tensor) -> SyncReport | None:
        """Averages what a plan names, and takes the outer step if the islands commit it.

        Args:
            mean: takes this rank's part of the average.

        Returns:
            The figures; None if the round is to be tried again.
        """
        with own.clock.counts("exchanging"):
            stats = self.average(planned, own, mean)
        if stats is None:
            return None
        with own.clock.counts("waiting"):
            outcome = self.vote(planned, stats.digest)
        if not self.settle(planned, own, mean, stats.digest, outcome):
            return None
        weights = planned.participants
        took_part = own.part is Part.WHOLE and self.config.island in weights
        with own.applying(), self.progress(planned, own):
            self.outer.step(planned.round, mean, took_part, planned.agreed.rates, self.island)
        return self._report(planned, own, stats, weights)

    @abstractmethod
    def average(self, planned: Attempt, own: Contribution, mean: torch.Tensor) -> AverageStats | None:
        """Writes this rank's part of the average that a plan names to `mean`; None if the round is to be tried again.

        Returns:
            What was measured, with the digest of the whole average.
        """

    def vote(self, planned: Attempt, digest: str) -> OutcomeRecord:
        """Votes for an average; returns what was decided."""
        return self.island.on_leader(lambda: self.decider.commit(planned, digest), OutcomeRecord)

    @abstractmethod
    def settle(
        self, planned: Attempt, own: Contribution, mean: torch.Tensor, digest: str, outcome: OutcomeRecord
    ) -> bool:
        """Does what follows from an outcome; returns whether the round is committed, or is to be tried again."""

    def say_again(self, number: int, reason: object) -> None:
        """Says that a round is tried again."""
        if self.island.is_leader:
            logger.warning("round %d is tried again: %s", number, reason)

    @abstractmethod
    def progress(self, planned: Attempt, own: Contribution) -> AbstractContextManager[None]:
        """What becomes of this island's own progress in the outer step of a committed round, which is taken within."""

    def _report(
        self, planned: Attempt, own: Contribution, stats: AverageStats, weights: Mapping[int, float]
    ) -> SyncReport:
        clock = own.clock
        counted = [clock.traffic.bytes_sent, clock.traffic.bytes_received, stats.dot, stats.square]
        sent, received, dot, square = self.island.sum(counted)
        cosine = None
        if self.config.island in weights and not self.outer.codec.needs_feedback:  # else too little is in the average
            share = weights[self.config.island] / sum(weights.values())
            cosine = cosine_to_others(dot, own.square, square, share)
        if planned.round == 1 and cosine is not None:
            self._warn_of_same_data(cosine)
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

    def _warn_of_same_data(self, cosine: float) -> None:
        if self.island.is_leader and cosine > _SAME_DATA:
            logger.warning(
                "the first pseudo-gradient of island %d is that of the others (cosine %.5f): they seem to train on "
                "the same data in the same order. Give each island its own share (docs/data.md)",
                self.config.island,
                cosine,
            )


def cosine_to_others(dot: float, own: float, mean: float, share: float) -> float | None:
    """Cosine of Delta_i to (mean - share * Delta_i), the part of the mean that the others made."""
    if share >= 1:
        return None
    others = mean - 2 * share * dot + share * share * own
    if not (own > 0 and others > 0):
        return None
    return (dot - share * own) / math.sqrt(own * others)


class SyncClock:
    """Where the seconds and bytes of a round go.

    Args:
        last_end: when the round before it was over, in seconds of the monotonic clock.

    Attributes:
        computing: until it was made.
        waiting: for other islands.
        exchanging: moving and averaging pseudo-gradients.
        applying: what training waits for beside: the masters, the outer step.
        traffic: of this rank.
    """

    def __init__(self, last_end: float | None = None) -> None:
        self.computing = 0.0 if last_end is None else time.monotonic() - last_end
        self.waiting = self.exchanging = self.applying = 0.0
        self.traffic = Traffic()

    @contextmanager
    def counts(self, what: Literal["waiting", "exchanging", "applying"]) -> Iterator[None]:
        """Counts what is done within."""
        begun = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - begun)
