"""A round is committed by more than half of those who vote; two that disagree commit nothing.

An island takes its own values from memory and not from the store, so it would not see that they are damaged there; and
one whose memory is bad would decide for all others if it came first. Each participant of an attempt therefore has one
place for its vote, which is written once:

    rounds/R/A/votes/I.json     the digest of the average that island I holds; or "", an abstention

Whoever has waited long enough for another, or sees that it is gone, writes the abstention in its place: a vote that
comes later does not count. So what was counted once stays true, and two islands that count at different times never
find two winners:

    commit      more than half of those that have not abstained hold one digest
    split       no digest can come to that any more: the attempt is aborted, and the round is taken again

That islands compute different averages once may be chance, and more often is a fault. The round is taken again, from
the same pseudo-gradients: who then comes to another average than before has computed at least one of them wrongly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hf_diloco.errors import IslandLostError
from hf_diloco.membership.candidates import Candidates, Rules
from hf_diloco.membership.decisions import Decisions, outcome_path
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.round_records import ABSTENTION, Attempt, OfferRecord, OutcomeRecord, VoteRecord, vote_path
from hf_diloco.utils.clock import Clock
from hf_diloco.utils.waiting import Wait

logger = logging.getLogger("hf_diloco")

MAX_SPLITS = 3
"""Attempts of one round in which islands disagree, before all end that do not know who is wrong."""
_MAX_OUTVOTED = 2


def winner(participants: Collection[int], votes: Mapping[int, str]) -> str | None:
    """The digest that more than half hold of all who have not abstained; "" if none can any more; None if one may yet.

    Args:
        participants: who has a vote.
        votes: what each that has voted holds; "" for an abstention.
    """
    counts = Counter(votes[island] for island in participants if votes.get(island))
    num_voters = sum(votes.get(island) != ABSTENTION for island in participants)
    digest, count = counts.most_common(1)[0] if counts else (ABSTENTION, 0)
    if 2 * count > num_voters:
        return digest
    num_silent = num_voters - counts.total()
    return None if 2 * (count + num_silent) > num_voters else ABSTENTION


@dataclass(eq=False, repr=False)
class Voting:
    """One island's part in votes; used by the island's leader only. All of it raises `StoreError` where the store does
    not answer.

    Attributes:
        candidates: the islands that take part, and which of them are at it.
        should_stop: polled while waiting; true ends the wait.
    """

    members: Members
    decisions: Decisions
    candidates: Candidates
    rules: Rules
    should_stop: Callable[[], bool]
    clock: Clock

    def __post_init__(self) -> None:
        self._log = self.members.log
        self._island = self.members.island
        self._voted: set[str] = set()  # attempts of one round

    def vote(self, folder: str, offers: Sequence[OfferRecord], mean: str, wait: Wait) -> OutcomeRecord:
        """Says that this island holds an average, if it has a vote, and decides the attempt; returns what counts.

        Others that have not voted are waited for while they are at it and the grace lasts; where islands exchange
        directly, also when more than half agree.

        Args:
            offers: that are in it; their islands have a vote.
            mean: digest of the average.
        """
        own, participants = self._island, {offer.island for offer in offers}
        vote = VoteRecord(island=own, mean=mean) if own in participants else None
        this_round = folder.rpartition("/")[0]
        self._voted = {folder, *(one for one in self._voted if one.rpartition("/")[0] == this_round)}
        awaited = self.rules.awaits(outcome_path(folder))
        watch = self._log.watch([folder, "heartbeats"], self.clock, vote_path(folder, own), vote, awaited)
        deadline = self.clock.now() + self.rules.grace
        while True:
            votes, at_it = watch.ask(
                partial(self._look, folder, participants, mean), partial(self.candidates.at_it, offers)
            )
            if self.should_stop() or self.clock.now() >= deadline:
                at_it = set()
            if isinstance(votes, OutcomeRecord):
                return votes
            at_it.discard(own)
            won_by = winner(participants, votes)
            silent = participants - votes.keys()
            if won_by is None and not silent & at_it:
                for island in silent:
                    self._place(folder, island, ABSTENTION)
                continue
            if won_by is not None and not (self.rules.needs_presence and silent & at_it):
                if won_by == mean:
                    return self.decisions.decide(folder, OutcomeRecord(by=own, kind="commit", mean=mean))
                if won_by == ABSTENTION:
                    return self._abort(folder, "its participants hold different averages, or none has voted", True)
                if not any(votes.get(island) == won_by for island in at_it):
                    return self._abort(folder, "those who agree on another average are gone", False)
            others = participants - {own}
            wait.look(silent & others or others)

    def _abort(self, folder: str, reason: str, is_split: bool) -> OutcomeRecord:
        wish = OutcomeRecord(by=self._island, kind="abort", is_split=is_split, reason=reason)
        return self.decisions.outcome(folder) or self.decisions.decide(folder, wish)

    def withdraw(self, folder: str) -> None:
        """Abstains in an attempt whose plan cannot be read, if rubbish lies where this island's vote would.

        Others cannot tell that from a vote by which somebody has committed.
        """
        path = vote_path(folder, self._island)
        is_there = path in self._log.list(f"{folder}/votes/")
        if is_there and folder not in self._voted and self._log.read_or_refuse(path, VoteRecord) is None:
            self._place(folder, self._island, ABSTENTION)

    def refuse_commit(self, folder: str, participants: Collection[int], mean: str) -> bool:
        """Whether the votes speak against an outcome that commits an average; it then counts as damaged.

        Args:
            participants: see `vote`.
            mean: digest of the average.

        Raises:
            IslandLostError: that is not known yet.
        """
        won_by = winner(participants, self._read(folder, participants, self._log.list(f"{folder}/votes/")))
        if won_by is None:
            raise IslandLostError(f"{folder} is committed, but most of those who take part have yet to vote")
        if won_by != mean:
            self.decisions.refuse_commit(folder, mean)
        return won_by != mean

    def _place(self, folder: str, island: int, mean: str) -> None:
        self._log.place(vote_path(folder, island), VoteRecord(island=island, mean=mean))

    def _look(self, folder: str, participants: Collection[int], mean: str) -> dict[int, str] | OutcomeRecord:
        """What each island that has voted holds; the outcome if the attempt is decided.

        A commit of another average than this island's counts when the votes are known, as anybody may have written it.
        """
        paths = self._log.list(f"{folder}/")
        outcome = (
            self.decisions.outcome(folder) if any(path.startswith(f"{folder}/outcome") for path in paths) else None
        )
        if outcome is not None and (outcome.kind == "abort" or outcome.mean == mean):
            return outcome
        votes = self._read(folder, participants, paths)
        return votes if outcome is None or winner(participants, votes) is None else outcome

    def _read(self, folder: str, participants: Collection[int], paths: Iterable[str]) -> dict[int, str]:
        """The participants' votes; one in another's name is none, and nobody waits for what else could be there."""
        places = {vote_path(folder, island): island for island in participants}
        votes = self._log.read_all([path for path in paths if path in places], VoteRecord)
        return {places[path]: vote.mean if vote.island == places[path] else ABSTENTION for path, vote in votes.items()}


class Doubts:
    """What one island knows of its own averages. Equal on all ranks, as what they are told is.

    Args:
        is_leader: this rank says what happens.
    """

    def __init__(self, is_leader: bool) -> None:
        self._level = logging.WARNING if is_leader else logging.DEBUG
        self._round = 0
        self._num_splits = 0
        self._is_outvoted = False
        self._num_outvoted = 0  # in a row, over rounds
        self._seen: dict[object, str] = {}

    def has(self, number: int) -> bool:
        """Whether round `number` was decided otherwise than this island would have, or not at all."""
        return self._round == number and (self._num_splits > 0 or self._is_outvoted)

    def judge(self, planned: Attempt, digest: str, outcome: OutcomeRecord) -> str:
        """Why this island must end after an attempt; "" if it need not.

        Args:
            planned: the attempt, as it was before this island voted.
            digest: of the average that it holds.
        """
        if planned.round != self._round:
            self._round, self._num_splits, self._is_outvoted, self._seen = planned.round, 0, False, {}
        if outcome.kind == "commit":
            return self._compare(planned, digest, outcome.mean)
        if not outcome.is_split:
            return ""
        contributions = tuple((offer.island, offer.incarnation, offer.serial) for offer in planned.offers)
        before = self._seen.setdefault(contributions, digest)
        self._num_splits += 1
        if before != digest:
            return (
                f"this island comes to one average of the same pseudo-gradients and then to another ({before[:12]}, "
                f"{digest[:12]}), and other islands to a third"
            )
        if self._num_splits >= MAX_SPLITS:
            return (
                f"in {self._num_splits} attempts islands came to different averages (this one to {digest[:12]}), and "
                "no majority agrees"
            )
        logger.log(self._level, "round %d is tried again: the islands hold different averages", planned.round)
        return ""

    def _compare(self, planned: Attempt, digest: str, agreed: str) -> str:
        if digest == agreed:
            if not self._is_outvoted:
                self._num_outvoted = 0
            return ""
        self._num_outvoted += 1
        if self._num_outvoted >= _MAX_OUTVOTED:
            return f"this island comes again to another average ({digest[:12]}) than the others ({agreed[:12]})"
        self._is_outvoted = True
        logger.log(
            self._level,
            "round %d is read again: this island comes to another average (%s) than the others (%s)",
            planned.round,
            digest[:12],
            agreed[:12],
        )
        return ""
