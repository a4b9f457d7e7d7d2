"""Error feedback: the equation, what it is good for, and what becomes of the residual in runs of islands."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hf_diloco.codecs import CODECS, Codec, base
from hf_diloco.codecs.base import ErrorFeedback
from hf_diloco.errors import ExchangeError
from hf_diloco.inner import open_shards
from hf_diloco.outer.checkpoint import load_outer, read_index
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.round import SyncClock, capture
from tests.fixed_runs import FaultyTransport, Run, assert_resumed_is_uninterrupted, cut, save
from tests.islands import run_islands, try_islands
from tests.small_model import batches, make_model, set_weights, take_step, weights_of

pytestmark = pytest.mark.usefixtures("quick_farewell")

FEDAVG: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
CODED = ["int8", "int4", "fp4", "topk", "sign"]
SIZES = [0, 1, 127, 4095, 4097, 3 * 4096 + 333]
WIDTH = 701  # of the hidden layer: 4,908 values, a block of 4,096 and part of another


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TILE_VALUES", 8192)


def sent_of(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    code = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, code)
    decoded = torch.empty_like(values)
    codec.decode(code, decoded)
    return decoded


def make_delta(seed: int, size: int) -> torch.Tensor:
    """Long tails, and most of it in a few places."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) ** 3


# The equation


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_equation_bit_for_bit_where_the_decay_is_exact(
    name: str, decay: float, size: int, small_tiles: None
) -> None:
    codec = CODECS[name]
    kept = ErrorFeedback(codec, decay, size)
    residual = torch.zeros(size)
    for number in range(5):
        delta = make_delta(number, size)
        total = decay * residual + delta
        square = kept.add_(delta)
        assert torch.equal(delta, total)
        assert square == pytest.approx(float(total.double().square().sum()), rel=1e-5)
        kept.commit()
        residual = total - sent_of(codec, total)
        assert torch.equal(kept.residual, residual)
    assert size < 4096 or bool(residual.any()), "something was left out"


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("decay", [1e-9, 0.95])
def test_it_is_the_equation_to_rounding(name: str, decay: float) -> None:
    codec, size = CODECS[name], 5000
    kept = ErrorFeedback(codec, decay, size)
    for number in range(5):
        before, delta = kept.residual.clone(), make_delta(number, size)
        total = delta.clone()
        kept.add_(total)
        exact = decay * before.double() + delta.double()
        # Three roundings: of the decay, the product and the sum.
        assert bool(((total - exact).abs() <= 3 * 2**-24 * (decay * before.abs() + delta.abs())).all())
        kept.commit()
        assert torch.equal(kept.residual, total - sent_of(codec, total))


@pytest.mark.parametrize("name", CODED)
def test_a_round_that_is_not_committed_leaves_no_trace(name: str) -> None:
    size = 4321
    kept, undisturbed = (ErrorFeedback(CODECS[name], 0.95, size) for _ in range(2))
    for number in range(3):
        for attempt in range(number):
            before = kept.residual.clone()
            kept.add_(make_delta(100 + attempt, size))
            assert torch.equal(kept.residual, before)
        first, second = make_delta(number, size), make_delta(number, size)
        assert kept.add_(first) == undisturbed.add_(second)
        assert torch.equal(first, second)
        kept.commit()
        undisturbed.commit()
        assert torch.equal(kept.residual, undisturbed.residual)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_gets_into_the_residual(name: str, bad: float) -> None:
    """It would stay there, and the island would be left out for ever."""
    kept = ErrorFeedback(CODECS[name], 1.0, 5000)
    kept.add_(make_delta(0, 5000))
    kept.commit()
    before = kept.residual.clone()
    delta = make_delta(1, 5000)
    delta[4500] = bad
    assert not math.isfinite(kept.add_(delta))
    kept.commit()
    assert torch.equal(kept.residual, before)
    assert math.isfinite(kept.add_(make_delta(2, 5000)))


@pytest.mark.parametrize("name", CODED)
def test_a_sum_beyond_fp32_never_gets_into_the_residual(name: str) -> None:
    kept = ErrorFeedback(CODECS[name], 1.0, 5000)
    kept.load(torch.full((5000,), 2e38))
    assert not math.isfinite(kept.add_(torch.full((5000,), 2e38)))
    kept.commit()
    assert bool((kept.residual == 2e38).all())


@given(
    name=st.sampled_from(CODED),
    size=st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 4097, 8197])),
    scales=st.lists(st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e4]), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60)
def test_what_was_sent_and_what_is_left_is_what_was_put_in(
    name: str, size: int, scales: list[float], seed: int
) -> None:
    codec = CODECS[name]
    kept = ErrorFeedback(codec, 1.0, size)
    put_in = torch.zeros(size, dtype=torch.float64)
    sent = torch.zeros(size, dtype=torch.float64)
    largest = 0.0
    for number, scale in enumerate(scales):
        delta = scale * make_delta(seed + number, size)
        put_in += delta
        kept.add_(delta)
        once = sent_of(codec, delta)
        sent += once
        kept.commit()
        largest = max([largest, *(float(one.abs().max()) for one in (delta, once) if size)])
    bound = 2 * len(scales) * 2**-24 * largest  # each round rounds a sum and a difference
    assert float((sent + kept.residual - put_in).abs().max() if size else 0) <= bound


@pytest.mark.parametrize("name", CODED)
def test_what_is_left_beside_later_progress_is_parted_from_it(name: str) -> None:
    """A pseudo-gradient was sent, its island trained on, and only then heard that it was used."""
    codec, size, decay = CODECS[name], 5001, 0.95
    kept = ErrorFeedback(codec, decay, size)
    kept.add_(make_delta(0, size))
    kept.commit()
    first, since = make_delta(1, size), make_delta(2, size)
    total = first.clone()
    kept.add_(total)
    sent = sent_of(codec, total)
    progress = first + since - sent
    kept.commit_beside(progress)
    assert torch.equal(kept.residual, total - sent)
    torch.testing.assert_close(progress, since, rtol=1e-6, atol=1e-4)


# What it is good for


class Point(nn.Module):
    """Parameters on a quadratic: half the squared distance to a target."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(size))


def find_minimum(run: Run, targets: list[torch.Tensor], num_rounds: int) -> torch.Tensor:
    """Each island goes to a target of its own; the mean of the targets is what they minimise together."""

    def island_main(island: int) -> torch.Tensor:
        model = Point(targets[island].numel())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.5)
        session = run.join(island, model)
        for _ in range(2 * num_rounds):
            optimizer.zero_grad()
            (0.5 * (model.at - targets[island]).square().sum()).backward()
            optimizer.step()
            schedule.step()
            if session.outer.count_step():
                session.sync()
        session.leave(finished=True)
        return weights_of(model)

    first, second = run_islands(2, island_main)
    assert torch.equal(first, second)
    return first


def drowned_targets() -> list[torch.Tensor]:
    """Where the islands' targets are opposite, most is to be sent, which amounts to nothing; more than top-k keeps."""
    size = 4096 + 1001
    quarrels = torch.zeros(size)
    common = torch.zeros(size)
    for block in (0, 4096):
        quarrels[block + 7 : block + 7 + 64 * 5 : 5] = 4.0
        common[block + 500 : block + 564] = torch.linspace(-1.0, 1.5, 64)
    return [common + quarrels, common - quarrels]


def outvoted_targets() -> list[torch.Tensor]:
    """One island wants to go by 3, the other by -1, so together by 1; by signs alone they do not move."""
    places = torch.arange(4096 + 1000) % 2 == 0
    return [torch.where(places, 3.0, -1.0), torch.where(places, -1.0, 3.0)]


@pytest.mark.parametrize(("payload", "targets"), [("topk", drowned_targets()), ("sign", outvoted_targets())])
def test_what_a_codec_never_sends_is_learned_with_feedback_only(
    payload: str, targets: list[torch.Tensor], tmp_path: Path
) -> None:
    optimum = (targets[0] + targets[1]) / 2
    settings = {"sync_every": 2, "payload": payload, **FEDAVG}
    without = find_minimum(Run(tmp_path / "a", 2, error_feedback=1e-9, **settings), targets, num_rounds=15)
    assert torch.allclose(without, torch.zeros_like(optimum), atol=1e-6), "nothing that counts ever arrives"
    found = find_minimum(Run(tmp_path / "b", 2, error_feedback=1.0, **settings), targets, num_rounds=100)
    assert float((found - optimum).abs().max()) < 0.1
    assert float((found - optimum).norm()) < 0.05 * float(optimum.norm())


# In runs of islands


def train(run: Run, num_steps: int = 10) -> list[tuple[torch.Tensor, list[str], FixedSession]]:
    def island_main(island: int) -> tuple[torch.Tensor, list[str], FixedSession]:
        model = make_model(width=WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = run.join(island, model)
        hashes = []
        for batch in batches(island, num_steps):
            take_step(model, optimizer, batch)
            if session.outer.count_step():
                hashes.append(session.sync().outer_hash)
        session.leave(finished=True)
        return weights_of(model), hashes, session

    return run_islands(run.num_islands, island_main)


def contribution_of(session: FixedSession) -> torch.Tensor:
    """What the island would send now."""
    own = capture(session.outer, SyncClock())
    own.complete(session.island)
    return own.delta


def residual_of(session: FixedSession) -> torch.Tensor:
    kept = session.outer.current.feedback
    assert kept is not None
    return kept.residual


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [{"payload": name} for name in CODECS]
    + [{"payload": name, "error_feedback": 0.9} for name in ("fp16", "int8", "int4", "fp4")],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_all_islands_hold_the_same_bits_after_every_round(
    num_islands: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    first, *others = train(Run(tmp_path, num_islands, sync_every=2, **settings), num_steps=6)
    assert len(set(first[1])) == 3, "every round moves"
    for weights, hashes, session in others:
        assert torch.equal(weights, first[0])
        assert hashes == first[1]
        if session.config.feedback_decay:
            assert not torch.equal(residual_of(session), residual_of(first[2])), "each has its own"


@pytest.mark.parametrize("payload", ["int8", "topk", "sign"])
def test_one_island_leaves_nothing_out(payload: str, tmp_path: Path) -> None:
    """It encodes nothing. What the codec would leave out must not come a second time."""
    ((alone, _, _),) = train(Run(tmp_path / "a", 1, sync_every=2, payload=payload, error_feedback=1.0))
    ((exact, _, _),) = train(Run(tmp_path / "b", 1, sync_every=2))
    assert torch.equal(alone, exact)


@pytest.mark.parametrize(("payload", "settings"), [("topk", {}), ("int4", {"error_feedback": 1.0}), ("sign", {})])
@pytest.mark.parametrize("at", [4, 5])
def test_a_run_goes_on_with_its_residual_bit_for_bit(
    payload: str, settings: dict[str, Any], at: int, tmp_path: Path
) -> None:
    def residual_that_was_saved(session: FixedSession, checkpoint: Path) -> bytes:
        stored = load_outer(checkpoint, read_index(checkpoint), session.outer.current.intervals)
        assert torch.equal(stored["residual"], residual_of(session))
        assert stored["residual"].any()
        return stored["residual"].numpy().tobytes()

    config = {"sync_every": 2, "payload": payload, **settings}
    assert_resumed_is_uninterrupted(tmp_path, 8, at, config, residual_that_was_saved, width=WIDTH)


def go_on(run: Run, folders: list[Path], num_steps: int) -> list[FixedSession]:
    """Joins from checkpoints, sees what residual that gives, and trains."""

    def island_main(island: int) -> FixedSession:
        model = make_model(width=WIDTH)
        whole = [(0, weights_of(model).numel())]
        set_weights(model, load_outer(folders[island], read_index(folders[island]), whole, only="anchor")["anchor"])
        session = run.session(island)
        session.join(open_shards(model, None), run.folder / str(island), checkpoint=folders[island])
        assert session.outer.round == 2
        if session.config.feedback_decay:
            assert not residual_of(session).any()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in batches(island, num_steps):
            take_step(model, optimizer, batch)
            if session.outer.count_step():
                session.sync()
        session.leave(finished=True)
        return session

    return run_islands(2, island_main)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"payload": "int8"}, {"payload": "int8", "error_feedback": 1.0}),
        ({"payload": "fp32"}, {"payload": "topk"}),
        ({"payload": "topk"}, {"payload": "fp32"}),
        ({"payload": "int4", "error_feedback": 0.5}, {"payload": "int4"}),
    ],
)
def test_a_run_may_go_on_with_feedback_or_without(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    before = train(Run(tmp_path / "before", 2, sync_every=2, **first), num_steps=4)
    folders = [save(session, tmp_path / f"saved-{island}", 4) for island, (_, _, session) in enumerate(before)]
    one, other = go_on(Run(tmp_path / "after", 2, sync_every=2, **second), folders, num_steps=4)
    assert one.outer.round == other.outer.round == 4
    assert one.outer.outer_hash == other.outer.outer_hash
    assert (one.outer.current.feedback is not None) == bool(one.config.feedback_decay)
    if one.config.feedback_decay:
        assert residual_of(one).any()


@pytest.mark.parametrize("payload", ["topk", "sign"])
@pytest.mark.parametrize("reason", ["not finite", "beyond reason", "no examples"])
def test_an_island_that_is_left_out_keeps_its_residual_and_sends_it_later(
    payload: str, reason: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "sync_every": 1,
        "weight_by": "examples",
        "payload": payload,
        "error_feedback": 1.0,
    }
    run = Run(tmp_path, 3, **settings, **FEDAVG)

    def island_main(island: int) -> list[torch.Tensor]:
        model = make_model(width=WIDTH)
        size = weights_of(model).numel()
        session = run.join(island, model)
        residuals = []
        for number in range(3):
            moved = weights_of(model) - (make_delta(10 * number + island, size) if number < 2 else 0)
            is_left_out = number == 1 and island == 1
            if is_left_out and reason != "no examples":
                moved[3] = math.nan if reason == "not finite" else 1e30
            set_weights(model, moved)
            session.outer.count_step(weight=0.0 if is_left_out and reason == "no examples" else 4.0)
            report = session.sync()
            assert report.participants == ([0, 2] if number == 1 else [0, 1, 2])
            assert torch.isfinite(weights_of(model)).all()
            residuals.append(residual_of(session).clone())
        session.leave(finished=True)
        return residuals

    codec = CODECS[payload]
    for island, (first, second, third) in enumerate(run_islands(3, island_main)):
        assert first.any()
        assert torch.equal(first, second) == (island == 1)
        # In the third round nothing was trained, so what was left is all that was sent.
        assert torch.equal(third, second - sent_of(codec, second))


@pytest.mark.parametrize("settings", [{"payload": "topk"}, {"payload": "int8", "error_feedback": 1.0}])
def test_a_round_that_fails_leaves_the_residual(settings: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, 3, sync_every=1, **settings)
    is_broken = threading.Event()
    everyone = threading.Barrier(3)

    def spoil(mean: torch.Tensor) -> None:
        if is_broken.is_set():
            cut(mean)

    def island_main(island: int) -> None:
        transport = run.transport(island)
        model = make_model(width=WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = run.join(island, model, transport=FaultyTransport(transport, spoil) if island == 1 else transport)
        for batch in batches(island, 2):
            take_step(model, optimizer, batch)
            session.outer.count_step()
            session.sync()
        everyone.wait(30)
        is_broken.set()
        before = residual_of(session).clone()
        assert before.any()
        take_step(model, optimizer, batches(9, 1)[0])
        session.outer.count_step()
        expected = contribution_of(session).clone()
        try:
            session.sync()
        finally:
            assert torch.equal(residual_of(session), before)
            assert torch.equal(contribution_of(session), expected), "the next try sends the same"

    for outcome in try_islands(3, island_main):
        assert isinstance(outcome, ExchangeError), outcome
