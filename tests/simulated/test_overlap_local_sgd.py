"""Overlap-Local-SGD: the paper's listing, what it is a special case of, and who is late."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError, ConfigError, FingerprintError
from hf_diloco.membership.round_records import Attempt
from hf_diloco.methods.outer import Groups, make_method
from hf_diloco.methods.outer.overlap_local_sgd import OverlapOptions
from hf_diloco.outer.schedule import count_rounds
from hf_diloco.store.objects import ObjectStore
from tests.clocks import FastClock, wait_until
from tests.islands import run_islands, try_islands
from tests.meetings import ENGINES
from tests.small_model import batches, take_step
from tests.streaming_meetings import Streams, train_all
from tests.streaming_reference import NUM_STEPS, Stack, make_optimizer, strided, vector_of, write_vector

pytestmark = pytest.mark.usefixtures("fast_clock")

OVERLAP: dict[str, Any] = {"method": "overlap-local-sgd", "sync_every": 4}
ALL = strided(1)[0]


class Listing:
    """Arithmetic of arXiv 2002.09539, section 3, on all islands at once.

    Args:
        islands: each one's weights; 1-D, of any dtype.
        pull: alpha.
        momentum: beta.
    """

    def __init__(self, islands: list[torch.Tensor], pull: float = 0.6, momentum: float = 0.7) -> None:
        self.anchor = islands[0].clone()
        self.islands = islands
        self._next = self.anchor
        self._v = torch.zeros_like(self.anchor)
        self._pull, self._momentum = pull, momentum

    def boundary(self) -> None:
        """Every tau steps: the average of a period ago arrives, pulls, and the next one leaves."""
        self.anchor = self._next
        for weights in self.islands:
            weights.mul_(1 - self._pull).add_(self.anchor, alpha=self._pull)
        self._next = self.anchor + self.leave()

    def leave(self) -> torch.Tensor:
        """The step of the anchor."""
        total = self.islands[0] - self.anchor
        for weights in self.islands[1:]:
            total = total + (weights - self.anchor)
        self._v = self._v * self._momentum + total * (1.0 / len(self.islands))
        return self._v

    def end(self) -> None:
        """What is under way arrives, and all take the anchor."""
        self.boundary()
        for weights in self.islands:
            weights.copy_(self._next)


def expected_weights(num_islands: int, sync_every: int, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    models = [Stack() for _ in range(num_islands)]
    optimizers = [make_optimizer(model) for model in models]
    data = [batches(island, NUM_STEPS) for island in range(num_islands)]
    listing = Listing([vector_of(model, ALL) for model in models])
    for step in range(num_steps):
        for model, optimizer, mine in zip(models, optimizers, data, strict=True):
            take_step(model, optimizer, mine[step])
        is_last = step == num_steps - 1
        if is_last or (step + 1) % sync_every == 0:
            for weights, model in zip(listing.islands, models, strict=True):
                weights.copy_(vector_of(model, ALL))
            listing.end() if is_last else listing.boundary()
            for weights, model in zip(listing.islands, models, strict=True):
                write_vector(model, ALL, weights)
    return listing.islands


@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("sync_every", [1, 4, 6])  # 18 steps end with a round, and in the middle of one
def test_a_run_is_the_listing_bit_for_bit(tmp_path: Path, sync_every: int, num_islands: int) -> None:
    meeting = Streams(tmp_path, num_islands, min_islands=num_islands, **{**OVERLAP, "sync_every": sync_every})
    found = train_all(meeting.join_all(), NUM_STEPS, NUM_STEPS)
    for member, expected in zip(found, expected_weights(num_islands, sync_every), strict=True):
        assert torch.equal(member.weights, expected)
        assert not member.missed
        assert member.session.outer.on_boundary
        assert member.session.outer.round == count_rounds(member.session.config, NUM_STEPS)


def test_the_first_boundary_pulls_to_where_all_began(tmp_path: Path) -> None:
    (member,) = train_all(Streams(tmp_path, 1, **OVERLAP).join_all(), 4)
    trained = Stack()
    start = vector_of(trained, ALL)
    optimizer = make_optimizer(trained)
    for batch in batches(0, 4):
        take_step(trained, optimizer, batch)
    assert torch.allclose(member.weights, 0.4 * vector_of(trained, ALL) + 0.6 * start, atol=1e-7)


def test_in_fp64_it_is_the_authors_program_at_a_constant_learning_rate() -> None:
    """Which keeps b = beta b + (z - x) / lr on each island, and averages what each has made of it."""
    rate, pull, beta, num_islands, size = 0.05, 0.6, 0.7, 4, 16
    generator = torch.Generator().manual_seed(3)
    goals = torch.randn(num_islands, size, generator=generator, dtype=torch.float64)
    scales = torch.rand(num_islands, size, generator=generator, dtype=torch.float64) + 0.5
    start = torch.randn(size, generator=generator, dtype=torch.float64)

    def steps(x: torch.Tensor, island: int, step: int) -> torch.Tensor:
        for inner in range(2):
            noise = torch.randn(
                size, generator=torch.Generator().manual_seed(1000 * step + 10 * island + inner), dtype=torch.float64
            )
            x = x - rate * (scales[island] * (x - goals[island]) + 0.1 * noise)
        return x

    # The authors': each island's buffer, and the mean of the anchors.
    theirs = [start.clone() for _ in range(num_islands)]
    buffers = [torch.zeros_like(start) for _ in range(num_islands)]
    anchor = arriving = start.clone()
    # Ours: the method's own vectors.
    config = DiLoCoConfig(method="overlap-local-sgd", sync_every=2)
    method = make_method(config, Groups())
    method.start(start)
    ours = [start.clone() for _ in range(num_islands)]
    pending: torch.Tensor | None = None
    for step in range(1000):
        theirs = [steps(x, island, step) for island, x in enumerate(theirs)]
        ours = [steps(x, island, step) for island, x in enumerate(ours)]
        anchor = arriving
        theirs = [(1 - pull) * x + pull * anchor for x in theirs]
        buffers = [beta * b + (anchor - x) / rate for b, x in zip(buffers, theirs, strict=True)]
        arriving = torch.stack([anchor - rate * b for b in buffers]).mean(0)
        if pending is not None:
            method.step(pending)
        kept = type(method).kept_share(config)
        ours = [kept * x + (1 - kept) * method.parameters for x in ours]
        deltas = [x.clone() for x in ours]
        for delta in deltas:
            method.pseudo_gradient_(delta)
        pending = torch.stack(deltas).mean(0)
    for x, y in zip(theirs, ours, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-12)
    assert (ours[0] - start).norm() > 1


@pytest.mark.parametrize("after", [3, 6, 8, 13])
def test_a_run_goes_on_with_an_exchange_under_way_bit_for_bit(tmp_path: Path, after: int) -> None:
    """All islands are killed, and start again."""
    meeting = Streams(tmp_path, **OVERLAP)
    first = train_all(meeting.join_all(), after, NUM_STEPS)
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in first]
    for member in first:
        member.die()
    again = train_all(meeting.join_all(checkpoints), NUM_STEPS - after, NUM_STEPS)
    for member, expected in zip(again, expected_weights(2, 4), strict=True):
        assert torch.equal(member.weights, expected)


@pytest.mark.parametrize("engine", ["bucket", "mesh"])
def test_who_is_late_by_more_than_a_period_is_left_behind(
    tmp_path: Path, engine: str, fast_clock: FastClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And holds up nobody for longer; what it trained comes to a later round."""
    settings = {**OVERLAP, **ENGINES[engine], "min_islands": 2, "grace": 200.0, "sync_timeout": 300.0}
    islands = Streams(tmp_path, 3, **settings).join_all()
    train_all(islands, 4)  # and the first round, as for a checkpoint: nobody is left behind for that
    started = fast_clock.now()
    run_islands(2, lambda which: islands[which].stream(8).drain())  # the third stands still
    assert fast_clock.now() - started < 100
    assert [report.participants for report in islands[0].reports] == [[0, 1, 2], [0, 1], [0, 1]]
    assert "round 2 takes place without island 2" in caplog.messages
    progress = islands[2].progress_of(0)
    assert progress.any()
    for _ in range(60):  # the second brings it back, on a busy machine the tenth
        train_all(islands, 4)
        if islands[0].reports[-1].participants == [0, 1, 2]:
            break
    assert islands[0].reports[-1].participants == [0, 1, 2]
    assert len({member.hash for member in islands}) == 1


def test_a_round_that_is_waited_for_uses_all_progress_and_leads_to_the_anchor(tmp_path: Path) -> None:
    """As where a late island comes just before a round."""
    islands = train_all(Streams(tmp_path, 2, **OVERLAP).join_all(), 3)
    own = [member.weights for member in islands]
    reports = run_islands(2, lambda which: islands[which].session.sync())
    assert [report.participants for report in reports] == [[0, 1], [0, 1]]
    for member in islands:
        assert torch.allclose(member.weights, (own[0] + own[1]) / 2, atol=1e-7)
        assert torch.equal(member.weights, member.session.outer.current.method.parameters)
        assert member.session.outer.on_boundary


def test_who_is_late_by_less_than_a_period_delays_nobody(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, **OVERLAP, min_islands=1, grace=200.0)
    first, late = meeting.join_all()
    has_trained = threading.Event()

    def slow() -> None:
        assert has_trained.wait(30)
        late.stream(4)

    thread = threading.Thread(target=slow)
    thread.start()
    first.stream(7)  # three steps into the period, without a wait
    has_trained.set()
    thread.join(30)
    offers = partial(ObjectStore(meeting.url).list, f"{Attempt(1, 0).path}/offers")
    wait_until(lambda: len(offers()) == 2, "the late one's offer, which it makes behind its training")
    run_islands(2, lambda which: (first, late)[which].stream(4).drain())
    assert first.reports[0].participants == [0, 1]


def test_an_island_that_joins_begins_at_the_anchor(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, max_islands=3, grace=0.5, snapshot_every=3, **OVERLAP)
    islands = train_all(meeting.join_all(), 13)
    late = meeting.join(2)
    assert late.hash == islands[0].hash
    state, other = late.session.outer.states[0], islands[0].session.outer.states[0]
    assert torch.equal(late.weights, islands[0].session.outer.current.method.parameters)
    assert torch.equal(state["momentum"], other["momentum"])
    everyone = [*islands, late]
    for _ in range(2):
        train_all(everyone, 4)
    assert late.reports[-1].participants == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_lr": 0.7}, "outer_lr=0.7: method=overlap-local-sgd moves its anchor by the whole step"),
        ({"nesterov": True}, "nesterov=True"),
        ({"fragment_update_alpha": 0.4}, r"options\.pull for it; set that to 0\.6"),
        ({"fragment_sync_delay": 2}, "fragment_sync_delay=2: method=overlap-local-sgd"),
        ({"num_fragments": 2}, "num_fragments=2: method=overlap-local-sgd"),
        ({"outer_momentum": "auto"}, "outer_momentum=auto"),
        ({"options": {"pull": 0}}, r"options\.pull"),
        ({"options": {"pul": 0.5}}, r"options\.pul.*pull"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiLoCoConfig(**{**OVERLAP, **settings})


def test_islands_with_another_pull_are_refused(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, **OVERLAP)
    outcomes = try_islands(2, lambda island: meeting.join(island, options={"pull": 0.5 + 0.1 * island}))
    refused = [one for one in outcomes if isinstance(one, FingerprintError)]
    assert refused
    assert "options.pull" in str(refused[0])


def test_a_pull_that_is_the_default_may_be_left_out(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, **OVERLAP)
    default = {"pull": OverlapOptions().pull}
    run_islands(2, lambda island: meeting.join(island, options=default if island else {}))


def test_a_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    (member,) = train_all(Streams(tmp_path / "first", 1, sync_every=4).join_all(), 4)
    checkpoint = member.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="method=diloco, here method=overlap-local-sgd"):
        Streams(tmp_path / "second", 1, **OVERLAP).join(0, checkpoint)


def test_the_step_is_diloco_with_a_heavy_ball() -> None:
    deltas = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    start = torch.randn(32, generator=torch.Generator().manual_seed(1))
    overlap = make_method(DiLoCoConfig(**OVERLAP))
    heavy = make_method(DiLoCoConfig(outer_lr=1.0, outer_momentum=0.7, nesterov=False))
    for method in (overlap, heavy):
        method.start(start)
        for delta in deltas:
            method.step(delta.clone())
    assert torch.equal(overlap.parameters, heavy.parameters)
