"""Votes on averages: a round is committed by more than half of the voters; two that disagree commit nothing.

An island takes its own values from memory and not from the store, so it would not notice that they are corrupt there;
and an island with faulty memory would decide for all others if it came first. So each participant of an attempt has
one vote, a record that is written once:

    rounds/R/A/votes/I.json     the digest of the average that island I holds; or "", an abstention

An island that has waited long enough for another, or sees that it is gone, writes the abstention for it; a later vote
does not count. So votes never change, and two islands that count at different times never find two winners:

    commit      more than half of the islands that have not abstained hold the same digest
    split       no digest can reach that any more: the attempt is aborted, and the round is repeated
    no vote     all participants have abstained: this attempt is aborted, too, but no average is in doubt

If islands compute different averages once, it may be chance; if it happens more often, it is a fault. The round is
repeated from the same pseudo-gradients: an island that then computes another average than before has computed at least
one of the two wrongly.
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
"""Number of split attempts of one round after which all islands end that cannot tell which one is wrong."""
_MAX_OUTVOTED = 2


def winner(participants: Collection[int], votes: Mapping[int, str]) -> str | None:
    """Counts the votes: the digest that each voter holds, or "" for an abstention.

    Returns:
        The digest held by more than half of the islands that have not abstained; "" if no digest can win any more;
        None if one may still win.
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
    """One island's part in votes; used by the island's leader only. All methods raise `StoreError` if the store does
    not answer.

    Attributes:
        candidates: tells which participants are carrying out the attempt.
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
        """Votes for an average, if this island has a vote, and decides the attempt; returns the outcome that counts.

        Waits for other voters while they carry out the attempt and the grace lasts; with direct exchange, even after
        more than half agree. The islands of the attempt's `offers` have a vote.
        """
        own, participants = self._island, {offer.island for offer in offers}
        vote = VoteRecord(island=own, mean=mean) if own in participants else None
        this_round = folder.rpartition("/")[0]
        self._voted = {folder, *(one for one in self._voted if one.rpartition("/")[0] == this_round)}
        awaited = self.rules.awaits(outcome_path(folder))
        watch = self._log.watch([folder, "heartbeats"], self.clock, vote_path(folder, own), vote, awaited)
        deadline = self.clock.now() + self.rules.grace
        while True:
            votes, carrying_out = watch.ask(
                partial(self._look, folder, participants, mean), partial(self.candidates.carrying_out, offers)
            )
            if self.should_stop() or self.clock.now() >= deadline:
                carrying_out = set()
            if isinstance(votes, OutcomeRecord):
                return votes
            carrying_out.discard(own)
            won_by = winner(participants, votes)
            silent = participants - votes.keys()
            if won_by is None and not silent & carrying_out:
                for island in silent:
                    self._place(folder, island, ABSTENTION)
                continue
            if won_by is not None and not (self.rules.needs_presence and silent & carrying_out):
                if won_by == mean:
                    return self.decisions.decide(folder, OutcomeRecord(by=own, kind="commit", mean=mean))
                if won_by == ABSTENTION:
                    if any(votes.values()):
                        return self._abort(folder, "its participants hold different averages", is_split=True)
                    return self._abort(folder, "none of its participants has voted")
                if not any(votes.get(island) == won_by for island in carrying_out):
                    return self._abort(folder, "those who agree on another average are gone")
            others = participants - {own}
            wait.look(silent & others or others)

    def _abort(self, folder: str, reason: str, is_split: bool = False) -> OutcomeRecord:
        wish = OutcomeRecord(by=self._island, kind="abort", is_split=is_split, reason=reason)
        return self.decisions.outcome(folder) or self.decisions.decide(folder, wish)

    def withdraw(self, folder: str) -> None:
        """Abstains in an attempt whose plan cannot be read, if this island's vote record there is invalid.

        The other islands cannot tell an invalid record from a vote that led to a commit.
        """
        path = vote_path(folder, self._island)
        is_there = path in self._log.list(f"{folder}/votes/")
        if is_there and folder not in self._voted and self._log.read_or_refuse(path, VoteRecord) is None:
            self._place(folder, self._island, ABSTENTION)

    def refuse_commit(self, folder: str, participants: Collection[int], mean: str) -> bool:
        """Whether the votes contradict a commit of an average; the commit then counts as corrupt.

        Raises:
            IslandLostError: too many votes are still missing.
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
        """Returns the vote of each island that has voted, or the outcome if the attempt is decided.

        A commit of another average than this island's counts only once the votes have a winner, because any island
        may have written it.
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
        """Reads the participants' votes. A vote in another island's name counts as an abstention."""
        places = {vote_path(folder, island): island for island in participants}
        votes = self._log.read_all([path for path in paths if path in places], VoteRecord)
        return {places[path]: vote.mean if vote.island == places[path] else ABSTENTION for path, vote in votes.items()}


class Doubts:
    """Tracks whether one island's averages are wrong. Equal on all ranks, because all get the same calls."""

    def __init__(self, is_leader: bool) -> None:
        self._level = logging.WARNING if is_leader else logging.DEBUG
        self._round = 0
        self._num_splits = 0
        self._is_outvoted = False
        self._num_outvoted = 0  # in a row, across rounds
        self._seen: dict[object, str] = {}

    def has(self, number: int) -> bool:
        """Whether an attempt of round `number` was split, or committed with another average than this island's."""
        return self._round == number and (self._num_splits > 0 or self._is_outvoted)

    def judge(self, planned: Attempt, digest: str, outcome: OutcomeRecord) -> str:
        """Returns why this island must end after an attempt in which its average has a digest; "" if it need not."""
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
                f"this island computed two different averages of the same pseudo-gradients ({before[:12]}, "
                f"{digest[:12]}), and other islands a third"
            )
        if self._num_splits >= MAX_SPLITS:
            return (
                f"in {self._num_splits} attempts islands computed different averages (this one {digest[:12]}), and "
                "no majority agrees"
            )
        logger.log(self._level, "retrying round %d: the islands hold different averages", planned.round)
        return ""

    def _compare(self, planned: Attempt, digest: str, agreed: str) -> str:
        if digest == agreed:
            if not self._is_outvoted:
                self._num_outvoted = 0
            return ""
        self._num_outvoted += 1
        if self._num_outvoted >= _MAX_OUTVOTED:
            return f"this island again computed another average ({digest[:12]}) than the others ({agreed[:12]})"
        self._is_outvoted = True
        logger.log(
            self._level,
            "reading round %d again: this island computed another average (%s) than the others (%s)",
            planned.round,
            digest[:12],
            agreed[:12],
        )
        return ""
