"""What the records of all islands amount to. Every island sees the same records and comes to the same verdict."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from hf_diloco.errors import CheckpointError, DiLoCoError, DivergedError, ExchangeError, IslandLostError
from hf_diloco.membership.records import ArrivalRecord, StateRecord, VoteRecord
from hf_diloco.utils.text import numbers, plural


def states_are_equal(states: Sequence[StateRecord]) -> bool:
    """Whether all islands hold the same outer parameters already; on a fresh start they need not.

    Raises:
        CheckpointError: they stand at different rounds.
        DivergedError: they resume at one round, but from different parameters.
    """
    if len({(state.round, state.resumed) for state in states}) > 1:
        standing = ", ".join(
            f"island {island}: {f'round {s.round} of a checkpoint' if s.resumed else 'a fresh start'}"
            for island, s in enumerate(states)
        )
        raise CheckpointError(
            f"the islands do not stand at the same round ({standing}): resume all from checkpoints of one round"
        )
    equal = len({state.digest for state in states}) == 1
    if states[0].resumed and not equal:
        raise DivergedError(
            f"the islands' checkpoints of round {states[0].round} hold different outer parameters "
            f"({_digests(dict(enumerate(states)))}): they belong to different runs, or a disk lies"
        )
    return equal


def weigh(arrivals: Sequence[ArrivalRecord], round_number: int) -> list[float]:
    """Each island's weight in the average.

    Raises:
        DivergedError: the islands start the round from different outer parameters.
        ExchangeError: no island has anything to contribute.
    """
    if len({arrival.digest for arrival in arrivals}) > 1:
        raise DivergedError(
            f"before round {round_number} the islands hold different outer parameters "
            f"({_digests(dict(enumerate(arrivals)))}): this should be impossible; suspect memory or a changed "
            "library, and resume from the last checkpoint"
        )
    weights = [arrival.weight for arrival in arrivals]
    if not any(weights):
        raise ExchangeError(
            f"round {round_number}: no island has a finite pseudo-gradient with any examples behind it: lower the "
            "inner learning rate and resume from an earlier checkpoint"
        )
    return weights


def agree_on_rates(rates: Sequence[Sequence[float]]) -> list[float]:
    """The inner learning rate of each parameter group with which all islands take an outer step.

    The lower median of the participants': one that they all have comes out as it is.
    """
    return [statistics.median_low(group) for group in zip(*rates, strict=False)]


def why_aborted(votes: Mapping[int, VoteRecord], round_number: int, num_islands: int) -> DiLoCoError:
    """The error for a round that was not committed."""
    reasons = [f"island {island}: {vote.reason}" for island, vote in votes.items() if not vote.ok]
    if len(votes) == num_islands and not reasons:
        digests = Counter(vote.digest for vote in votes.values())
        usual, count = digests.most_common(1)[0]
        wrong = [island for island, vote in votes.items() if vote.digest != usual] if 2 * count > num_islands else []
        who = f"{plural('island', len(wrong))} {numbers(wrong)} did each time: suspect" if wrong else "suspect"
        return DivergedError(
            f"round {round_number} was aborted: the islands computed different averages again and again "
            f"({_digests(votes)}); {who} memory, or a library or processor that differs. Each writes a checkpoint of "
            "its state before the round; start all islands again",
            is_state_sound=True,
        )
    silent = sorted(set(range(num_islands)) - votes.keys())
    cause = "; ".join(reasons) or f"islands {silent} did not vote, being lost or late"
    return IslandLostError(
        f"round {round_number} was aborted; {cause}. Start all islands again: the run resumes from the "
        "newest round that all hold",
        () if reasons else silent,
    )


def _digests(records: Mapping[int, StateRecord | ArrivalRecord | VoteRecord]) -> str:
    return ", ".join(f"island {island}: {record.digest[:12]}" for island, record in records.items())
