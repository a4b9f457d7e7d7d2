"""What an island makes of averages that are not those of the others: once it reads again, the second time it ends."""

from __future__ import annotations

import pytest

from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord, Participant, PlanRecord
from hf_diloco.membership.voting import MAX_SPLITS, Doubts

SPLIT = OutcomeRecord(by=1, kind="abort", is_split=True)


@pytest.fixture
def doubts() -> Doubts:
    return Doubts(is_leader=True)


def planned(number: int, serial: int = 0) -> Attempt:
    """An attempt of a round; of another `serial`, with another pseudo-gradient."""
    offer = OfferRecord(
        island=0, incarnation=1, serial=serial, steps=1, weight=1.0, norm=1.0, state="ab", objects=[{}]
    )
    plan = PlanRecord(by=0, state="ab", participants=[Participant(offer="o", island=0, weight=1.0, norm=1.0)])
    return Attempt(number, 0, plan, offers=(offer,))


def commit(mean: str) -> OutcomeRecord:
    return OutcomeRecord(by=1, kind="commit", mean=mean)


def test_who_is_outvoted_reads_again_and_ends_if_it_is_outvoted_again(doubts: Doubts) -> None:
    assert doubts.judge(planned(1), "aa", commit("bb")) == ""
    assert doubts.has(1)
    assert doubts.judge(planned(1), "aa", commit("bb")) == (
        "this island again computed another average (aa) than the others (bb)"
    )


def test_who_is_wrong_in_two_rounds_one_after_the_other_ends(doubts: Doubts) -> None:
    """Though it was right when it read again."""
    for mean in ("bb", "aa"):
        assert doubts.judge(planned(1), "aa", commit(mean)) == ""
    assert not doubts.has(2)
    assert doubts.judge(planned(2), "aa", commit("bb")).startswith("this island again computed another average")


def test_a_round_that_goes_well_at_once_clears_an_island(doubts: Doubts) -> None:
    for number, mean in ((1, "bb"), (1, "aa"), (2, "aa"), (3, "bb")):
        assert doubts.judge(planned(number), "aa", commit(mean)) == ""
        assert doubts.has(number) == (number != 2)


def test_islands_that_disagree_again_and_again_end(doubts: Doubts) -> None:
    for _ in range(MAX_SPLITS - 1):
        assert doubts.judge(planned(1), "aa", SPLIT) == ""
        assert doubts.has(1)
    assert doubts.judge(planned(1), "aa", SPLIT).startswith("in 3 attempts islands computed different averages")
    assert doubts.judge(planned(2), "aa", SPLIT) == "", "in another round they begin anew"


def test_who_comes_to_two_averages_of_the_same_pseudo_gradients_ends(doubts: Doubts) -> None:
    assert doubts.judge(planned(1, serial=0), "aa", SPLIT) == ""
    assert doubts.judge(planned(1, serial=1), "bb", SPLIT) == "", "these are others"
    doubts = Doubts(is_leader=False)
    assert doubts.judge(planned(1), "aa", SPLIT) == ""
    assert doubts.judge(planned(1), "bb", SPLIT).startswith("this island computed two different averages of the same ")


def test_an_attempt_that_came_to_nothing_for_another_reason_says_nothing(doubts: Doubts) -> None:
    for _ in range(2 * MAX_SPLITS):
        assert doubts.judge(planned(1), "aa", OutcomeRecord(by=1, kind="abort", reason="gone")) == ""
    assert not doubts.has(1)
