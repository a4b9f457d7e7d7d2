"""What a round averages beside the pseudo-gradient: with it, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_diloco.errors import DamagedTransferError, DiLoCoError, ExchangeError
from hf_diloco.inner import open_shards
from hf_diloco.rounds.fixed import FixedSession
from tests.fixed_runs import FaultyTransport, Run, save
from tests.islands import run_islands
from tests.small_model import batches, make_model, set_weights, take_step, weights_of

pytestmark = pytest.mark.usefixtures("quick_farewell")

AVERAGED: dict[str, Any] = {"method": "slowmo", "options": {"inner_buffers": "average"}}
NUM_STEPS = 8

Fault = Callable[[int], DiLoCoError | None]
"""What happens to island 1 where it averages something for the n-th time."""


def damaged_at(number: int) -> Fault:
    return lambda place: DamagedTransferError([0]) if place == number else None


def cut_from(number: float) -> Fault:
    return lambda place: ExchangeError("the link was cut") if place >= number else None


SOUND = cut_from(math.inf)


class Island:
    """One that trains; `error` is what ended that."""

    def __init__(self, run: Run, island: int, fault: Fault = SOUND, spoilt_at: int = 0) -> None:
        self.run, self.island, self.spoilt_at = run, island, spoilt_at
        self.model: nn.Module = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = self._open(fault if island == 1 else SOUND)
        self.session.join(open_shards(self.model, self.optimizer), run.folder / str(island))
        self.error: DiLoCoError | None = None
        self.hashes: list[str] = []  # of rounds

    def _open(self, fault: Fault) -> FixedSession:
        num_averages = 0

        def spoil(mean: torch.Tensor) -> None:
            nonlocal num_averages
            num_averages += 1
            if error := fault(num_averages):
                raise error

        return self.run.session(self.island, transport=FaultyTransport(self.run.transport(self.island), spoil))

    @property
    def state(self) -> list[torch.Tensor]:
        """Of the island's own training."""
        moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
        return [weights_of(self.model), *moments]

    def train(self, first: int = 0, last: int = NUM_STEPS) -> Island:
        try:
            self._advance(first, last)  # a round that is due when it resumes
            for step, batch in enumerate(batches(self.island, NUM_STEPS)[first:], first + 1):
                take_step(self.model, self.optimizer, batch)
                if step == self.spoilt_at and self.island == 1:
                    set_weights(self.model, math.nan)
                self.session.outer.count_step(4.0 + self.island)
                self._advance(step, last)
        except DiLoCoError as error:
            self.error = error
        return self

    def _advance(self, step: int, last: int) -> None:
        before = [value.nan_to_num() for value in self.state]
        try:
            if self.session.is_due(step == last):
                self.hashes += [report.outer_hash for report in self.session.advance(step == last)]
        except DiLoCoError:
            now = [value.nan_to_num() for value in self.state]
            assert all(map(torch.equal, now, before)), "a round that fails changes nothing"
            raise

    def resume(self, run: Run, step: int) -> Island:
        self.hashes += [report.outer_hash for report in self.session.drain()]
        checkpoint = save(self.session, self.run.folder / str(self.island), step)
        self.session.leave(finished=False)
        self.run = run
        self.session = self._open(SOUND)
        self.session.join(
            open_shards(self.model, self.optimizer), run.folder / str(self.island), checkpoint=checkpoint
        )
        return self.train(step)


@pytest.mark.parametrize(
    ("settings", "step", "place"),
    [
        pytest.param({**AVERAGED, "sync_every": 4}, 4, 1, id="pseudo-gradient"),
        pytest.param({**AVERAGED, "sync_every": 4}, 4, 2, id="first buffer"),
        pytest.param({**AVERAGED, "sync_every": 4}, 8, 6, id="last buffer"),
        pytest.param({"method": "eager", "sync_every": 4}, 8, 2, id="eager"),
        pytest.param({"method": "eager", "sync_every": 4}, 8, 3, id="eager, parameters"),
    ],
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["damaged", "cut"])
def test_what_fails_is_taken_again_as_if_nothing_had(
    settings: dict[str, Any], step: int, place: int, is_cut: bool, tmp_path: Path
) -> None:
    """At once where something arrived damaged; from checkpoints where the link was cut. No bit differs."""
    fault = cut_from(place) if is_cut else damaged_at(place)
    assert_nothing_seems_to_have_failed(settings, step, fault, tmp_path)


@pytest.mark.parametrize("fault", [damaged_at(2), cut_from(2)], ids=["damaged", "cut"])
def test_an_eager_round_is_taken_again_without_who_was_left_out_of_it(fault: Fault, tmp_path: Path) -> None:
    """Of round 2, which fails behind the steps of round 3, island 1 has nothing to make up for: it was not finite."""
    assert_nothing_seems_to_have_failed({"method": "eager", "sync_every": 2}, 6, fault, tmp_path, spoilt_at=4)


@pytest.mark.parametrize("fault", [damaged_at(2), cut_from(2)], ids=["damaged", "cut"])
def test_an_eager_round_is_taken_again_with_the_weights_of_the_first_time(fault: Fault, tmp_path: Path) -> None:
    settings = {"method": "eager", "sync_every": 2, "weight_by": "examples"}
    assert_nothing_seems_to_have_failed(settings, 6, fault, tmp_path)


def assert_nothing_seems_to_have_failed(
    settings: dict[str, Any], step: int, fault: Fault, folder: Path, spoilt_at: int = 0
) -> None:
    whole, faulty, mended = (Run(folder / name, 2, **settings) for name in ("whole", "faulty", "mended"))
    expected = run_islands(2, lambda island: Island(whole, island, spoilt_at=spoilt_at).train())
    islands = run_islands(2, lambda island: Island(faulty, island, fault, spoilt_at).train())
    is_cut = isinstance(fault(10**6), ExchangeError)
    assert [bool(island.error) for island in islands] == [is_cut, is_cut], [island.error for island in islands]
    if is_cut:
        run_islands(2, lambda island: islands[island].resume(mended, step))
    for island, other in zip(islands, expected, strict=True):
        assert island.session.outer.on_boundary
        assert torch.equal(weights_of(island.model), weights_of(islands[0].model))
        assert all(map(torch.equal, island.state, other.state))
        assert island.hashes == other.hashes


@pytest.mark.parametrize("sync_every", [3, 4], ids=["between rounds", "with a round"])
def test_an_eager_loop_that_ends_unannounced_ends_equal_on_all_islands(sync_every: int, tmp_path: Path) -> None:
    run = Run(tmp_path, 2, method="eager", sync_every=sync_every)

    def island_main(island: int) -> torch.Tensor:
        one = Island(run, island).train(last=NUM_STEPS + 1)
        assert one.session.is_due(is_last=True)
        one.session.advance(is_last=True)
        assert not one.session.is_due(is_last=True)
        return weights_of(one.model)

    first, second = run_islands(2, island_main)
    assert torch.equal(first, second)
