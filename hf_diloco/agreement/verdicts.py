"""What the records of all islands amount to. Every island sees the same records and comes to the same verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_diloco.agreement.records import ArrivalRecord, StateRecord, VoteRecord
from hf_diloco.errors import CheckpointError, DiLoCoError, DivergedError, ExchangeError, IslandLostError


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


def why_aborted(votes: Mapping[int, VoteRecord], round_number: int, num_islands: int) -> DiLoCoError:
    """The error for a round that was not committed."""
    reasons = [f"island {island}: {vote.reason}" for island, vote in votes.items() if not vote.ok]
    if len(votes) == num_islands and not reasons:
        return DivergedError(
            f"round {round_number} was aborted: the islands computed different averages ({_digests(votes)})"
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
