"""Streaming DiLoCo: fragments in turn, and rounds behind the inner steps, against the equations written out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_diloco.errors import ConfigError, ExchangeError
from hf_diloco.inner import open_shards
from hf_diloco.outer.fragment import EagerFragment
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.measures import SyncReport
from tests.fixed_runs import FaultyTransport, Run, cut, save
from tests.islands import run_islands
from tests.small_model import batches, new_tensor_bytes, take_step
from tests.streaming_reference import (
    NUM_STEPS,
    Stack,
    expected_weights,
    make_optimizer,
    strided,
    vector_of,
    write_vector,
)

pytestmark = pytest.mark.usefixtures("quick_farewell")

# The islands


def steps_of(
    session: FixedSession, model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, end: int
) -> Iterator[list[SyncReport]]:
    """Takes a step on each batch; yields the reports of the rounds that ended with it."""
    first = end - len(data)
    for number, batch in enumerate(data, start=first + 1):
        take_step(model, optimizer, batch)
        session.outer.count_step(len(batch))
        is_last = number == NUM_STEPS
        yield session.advance(is_last) if session.is_due(is_last) else []


def train(run: Run) -> list[tuple[torch.Tensor, list[SyncReport], FixedSession]]:
    def island_main(island: int) -> tuple[torch.Tensor, list[SyncReport], FixedSession]:
        model = Stack()
        session = run.join(island, model)
        steps = steps_of(session, model, make_optimizer(model), batches(island, NUM_STEPS), NUM_STEPS)
        reports = [report for ended in steps for report in ended]
        session.leave(finished=True)
        return vector_of(model, strided(1)[0]), reports, session

    return run_islands(run.num_islands, island_main)


CASES: list[dict[str, Any]] = [
    {"sync_every": 3},
    {"sync_every": 4, "num_fragments": 2},
    {"sync_every": 4, "num_fragments": 4},
    {"sync_every": 7, "num_fragments": 3},
    {"sync_every": 4, "fragment_sync_delay": 2},
    {"sync_every": 4, "fragment_sync_delay": 3, "fragment_update_alpha": 0.5},
    {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    {"sync_every": 8, "num_fragments": 4, "fragment_sync_delay": 5, "fragment_update_alpha": 0.25},
]


@pytest.mark.parametrize("num_islands", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("config", CASES, ids=lambda config: "-".join(map(str, config.values())))
def test_it_computes_the_equations_bit_for_bit(num_islands: int, config: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, num_islands, **config)
    for (weights, _, _), expected in zip(train(run), expected_weights(num_islands, config), strict=True):
        assert torch.equal(weights, expected)


@pytest.mark.parametrize("config", CASES[1:], ids=lambda config: "-".join(map(str, config.values())))
def test_after_the_last_step_all_hold_the_same_outer_parameters(config: dict[str, Any], tmp_path: Path) -> None:
    first, second = train(Run(tmp_path, 2, **config))
    assert torch.equal(first[0], second[0])
    assert first[2].outer.on_boundary
    assert [(report.round, report.outer_hash) for report in first[1]] == [
        (report.round, report.outer_hash) for report in second[1]
    ]
    num_fragments = config.get("num_fragments", 1)
    assert [report.round for report in first[1]] == list(range(1, len(first[1]) + 1))
    assert [report.fragment for report in first[1]] == [number % num_fragments for number in range(len(first[1]))]


@pytest.mark.parametrize(
    "config",
    [
        {"fragment_sync_delay": 3, "fragment_update_alpha": 0.5},
        {"num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
        {"method": "overlap-local-sgd"},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_a_loop_that_ends_with_the_step_at_which_a_round_begins_ends_on_the_outer_parameters(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Which it learns only at its end, without `num_steps`."""

    def island_main(island: int) -> torch.Tensor:
        model = Stack()
        session = run.join(island, model)
        optimizer = make_optimizer(model)
        for batch in batches(island, 8):
            take_step(model, optimizer, batch)
            session.outer.count_step(len(batch))
            if session.is_due():
                session.advance()
        assert session.is_due(is_last=True)
        session.advance(is_last=True)
        session.leave(finished=True)
        assert session.outer.on_boundary
        assert [distance for (distance,) in session.outer.distances()] == [0.0] * len(session.outer.fragments)
        return vector_of(model, strided(1)[0])

    run = Run(tmp_path, 2, sync_every=4, **config)
    first, second = run_islands(2, island_main)
    assert torch.equal(first, second)


@pytest.mark.parametrize("payload", ["int8", "topk"])
def test_every_codec_streams(payload: str, tmp_path: Path) -> None:
    first, second = train(Run(tmp_path, 2, payload=payload, **CASES[-1]))
    assert torch.equal(first[0], second[0])
    fp32, _ = train(Run(tmp_path / "fp32", 2, **CASES[-1]))
    assert not torch.equal(first[0], fp32[0])


def test_sparseloco_is_diloco_with_its_settings_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "payload": "topk"}
    one = train(Run(tmp_path / "sparseloco", 2, method="sparseloco", sync_every=4))
    other = train(Run(tmp_path / "diloco", 2, **settings, sync_every=4))
    for (weights, _, session), (expected, _, _) in zip(one, other, strict=True):
        assert torch.equal(weights, expected)
        assert "residual" in session.outer.fragments[0].state_dict()


def test_a_fragments_traffic_is_its_own(tmp_path: Path) -> None:
    (_, reports, _), _ = train(Run(tmp_path, 2, sync_every=4, num_fragments=4))
    sizes = [sum(dict(Stack().named_parameters())[name].numel() for name in names) for names in strided(4)]
    assert [report.bytes_sent for report in reports[:4]] == [4 * size for size in sizes]


def test_examples_of_a_step_count_for_every_fragment(tmp_path: Path) -> None:
    session = Run(tmp_path, 1, sync_every=4, num_fragments=2, weight_by="examples").join(0, Stack())
    weights = []
    for _ in range(8):
        session.outer.add_weight(1.0)  # of a step that only accumulates gradients
        session.outer.count_step(2.0)
        weights += [report.weight for report in (session.advance() if session.is_due() else [])]
    assert weights == [6.0, 12.0, 12.0, 12.0]


def test_training_goes_on_while_a_round_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Island 1 comes to its round only after island 0 has taken all the steps of the delay.

    Pseudo-gradients are made behind the steps, too."""
    run = Run(tmp_path, 2, sync_every=4, fragment_sync_delay=3)
    has_trained = threading.Event()
    makers: list[str] = []

    def island_main(island: int) -> float:
        model = Stack()
        session = run.join(island, model)
        method = session.outer.current.method
        make = method.pseudo_gradient_

        def make_and_note(parameters: torch.Tensor) -> float:
            makers.append(threading.current_thread().name)
            return make(parameters)

        monkeypatch.setattr(method, "pseudo_gradient_", make_and_note)
        steps = steps_of(session, model, make_optimizer(model), batches(island, NUM_STEPS), NUM_STEPS)
        hidden = 0.0
        for number, ended in enumerate(steps, start=1):
            if number == 6 and island == 0:
                time.sleep(0.2)  # until the round's thread has had its turn, on a busy machine too
                has_trained.set()
            if number == 3 and island == 1:
                assert has_trained.wait(timeout=60)
            hidden = max([hidden, *(report.seconds_hidden for report in ended)])
        session.leave(finished=True)
        return hidden

    hidden = run_islands(2, island_main)
    assert hidden[0] > 0
    assert all(name.startswith("hf-diloco-round") for name in makers[:4]), makers


# Going on from a checkpoint


@pytest.mark.parametrize("at", [8, 9, *(pytest.param(at, marks=pytest.mark.slow) for at in (3, 10, 12, 14))])
@pytest.mark.parametrize(
    "config",
    [*CASES[3:], {"sync_every": 4, "method": "eager"}],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_a_run_goes_on_from_the_middle_of_a_round_bit_for_bit(at: int, config: dict[str, Any], tmp_path: Path) -> None:
    def run_steps(run: Run, island: int, first: int, last: int, state: dict[str, Any] | None) -> Any:
        model = Stack()
        optimizer = make_optimizer(model)
        session = run.session(island)
        if state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        session.join(
            open_shards(model, None), run.folder / str(island), checkpoint=state["checkpoint"] if state else None
        )
        steps = steps_of(session, model, optimizer, batches(island, NUM_STEPS)[first:last], last)
        hashes = [report.outer_hash for ended in steps for report in ended]
        hashes += [report.outer_hash for report in session.drain()]
        where = save(session, run.folder / str(island), last)
        session.leave(finished=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "checkpoint": where}
        return vector_of(model, strided(1)[0]), hashes, saved

    feedback = 0.0 if "method" in config else 1.0
    settings = {**config, "payload": "int8", "error_feedback": feedback, "weight_by": "examples"}
    whole, before, after = (Run(tmp_path / name, 2, **settings) for name in ("whole", "before", "after"))
    uninterrupted = run_islands(2, lambda island: run_steps(whole, island, 0, NUM_STEPS, None))
    stopped = run_islands(2, lambda island: run_steps(before, island, 0, at, None))
    resumed = run_islands(2, lambda island: run_steps(after, island, at, NUM_STEPS, stopped[island][2]))
    for island in range(2):
        assert torch.equal(resumed[island][0], uninterrupted[island][0])
        assert stopped[island][1] + resumed[island][1] == uninterrupted[island][1]


def test_a_checkpoint_of_other_fragments_is_refused(tmp_path: Path) -> None:
    session = Run(tmp_path, 1, sync_every=4, num_fragments=2).join(0, Stack())
    checkpoint = save(session, tmp_path / "0", 0)
    other = Run(tmp_path, 1, sync_every=4, num_fragments=4).session(0)
    with pytest.raises(Exception, match=r"num_fragments=2, here num_fragments=4.*resume with the same"):
        other.join(open_shards(Stack(), None), tmp_path / "0", checkpoint=checkpoint)


# Eager


def expected_eager(num_islands: int, sync_every: int, lr: float = 0.7, mu: float = 0.9) -> list[torch.Tensor]:
    """arXiv 2502.12996 written out: own pseudo-gradient at once, the others' a round later, all equal at last."""
    names = strided(1)[0]
    models = [Stack() for _ in range(num_islands)]
    optimizers = [make_optimizer(model) for model in models]
    anchors = [vector_of(model, names) for model in models]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    shares = [torch.zeros_like(anchor) for anchor in anchors]
    mean = torch.zeros_like(anchors[0])
    data = [batches(island, NUM_STEPS) for island in range(num_islands)]

    def outer_step(island: int, update: torch.Tensor) -> None:
        momenta[island] = momenta[island] * mu + update
        anchors[island] = anchors[island] - (momenta[island] * mu + update) * lr

    for step in range(1, NUM_STEPS + 1):
        for model, optimizer, mine in zip(models, optimizers, data, strict=True):
            take_step(model, optimizer, mine[step - 1])
        if step % sync_every and step != NUM_STEPS:
            continue
        deltas = [anchor - vector_of(model, names) for anchor, model in zip(anchors, models, strict=True)]
        new_mean = sum(deltas[1:], deltas[0]) * (1.0 / num_islands)
        for island, delta in enumerate(deltas):
            correction = mean - shares[island]
            if step == NUM_STEPS:
                outer_step(island, correction + new_mean)
                continue
            shares[island] = delta * (1.0 / num_islands)
            outer_step(island, correction + shares[island])
            write_vector(models[island], names, anchors[island])
        mean = new_mean
    final = sum(anchors[1:], anchors[0]) * (1.0 / num_islands)
    return [final] * num_islands


@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("sync_every", [3, 4, 7])
def test_eager_updates_compute_the_equation(num_islands: int, sync_every: int, tmp_path: Path) -> None:
    results = train(Run(tmp_path, num_islands, sync_every=sync_every, method="eager"))
    for (weights, _, session), expected in zip(results, expected_eager(num_islands, sync_every), strict=True):
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=2e-7)
        assert torch.equal(weights, results[0][0])
        assert session.outer.on_boundary
    hashes = [[(report.round, report.outer_hash) for report in reports] for _, reports, _ in results]
    assert all(other == hashes[0] for other in hashes)
    assert [number for number, _ in hashes[0]] == list(range(1, -(-NUM_STEPS // sync_every) + 1))


def test_a_single_eager_island_is_diloco(tmp_path: Path) -> None:
    eager = train(Run(tmp_path / "eager", 1, sync_every=3, method="eager"))
    plain = train(Run(tmp_path / "plain", 1, sync_every=3))
    torch.testing.assert_close(eager[0][0], plain[0][0], rtol=1e-6, atol=1e-7)


def test_an_eager_island_has_its_own_progress_at_once_and_the_others_a_round_later(tmp_path: Path) -> None:
    """Island 1 does not move: island 0's outer parameters take half of its step now, and all that is known next."""
    run = Run(tmp_path, 2, sync_every=1, method="eager", outer_lr=1.0, outer_momentum=0.0)

    def island_main(island: int) -> list[float]:
        model = Stack()
        session = run.join(island, model)
        start = vector_of(model, strided(1)[0])
        seen = []
        for step in range(1, 4):
            moved = vector_of(model, strided(1)[0]) + (1.0 if island == 0 and step == 1 else 0.0)
            write_vector(model, strided(1)[0], moved)
            session.outer.count_step()
            session.advance(is_last=step == 3)
            seen.append(float((vector_of(model, strided(1)[0]) - start).mean()))
        session.leave(finished=True)
        return seen

    moving, still = run_islands(2, island_main)
    assert moving == pytest.approx([0.5, 0.5, 0.5], abs=1e-6)
    assert still == pytest.approx([0.0, 0.5, 0.5], abs=1e-6)


def test_a_checkpoint_of_fragments_cut_otherwise_is_refused(tmp_path: Path) -> None:
    session = Run(tmp_path, 1, sync_every=4, num_fragments=2).join(0, Stack())
    checkpoint = save(session, tmp_path / "0", 0)
    other = Run(tmp_path, 1, sync_every=4, num_fragments=2, fragment_order="sequential").session(0)
    with pytest.raises(Exception, match="the same fragment_order and fragment_patterns"):
        other.join(open_shards(Stack(), None), tmp_path / "0", checkpoint=checkpoint)


# Failures


@pytest.mark.parametrize("delay", [0, 2])
def test_a_round_that_fails_is_tried_again_with_all_that_was_trained(delay: int, tmp_path: Path) -> None:
    """The round fails on all islands; each goes on from its checkpoint, and nothing that was trained is lost."""
    config: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": delay}
    broken, mended = Run(tmp_path / "broken", 2, **config), Run(tmp_path / "mended", 2, **config)

    def island_main(island: int) -> Path:
        transport = broken.transport(island)
        model = Stack()
        session = broken.join(island, model, transport=FaultyTransport(transport, cut) if island == 1 else transport)
        anchors = [part.method.parameters.clone() for part in session.outer.fragments]
        steps = steps_of(session, model, make_optimizer(model), batches(island, 2 + delay), 2 + delay)
        with pytest.raises(ExchangeError):
            list(steps)
        assert session.drain() == []
        outer = session.outer
        assert (outer.round, outer.num_begun, outer.steps, outer.current.weight) == (
            0,
            0,
            2 + delay,
            4.0 * (2 + delay),
        )
        assert outer.is_due
        assert all(part.install_in is None for part in outer.fragments)
        for part, anchor in zip(outer.fragments, anchors, strict=True):
            assert torch.equal(part.method.parameters, anchor)
        checkpoint = save(session, broken.folder / str(island), 2 + delay)
        session.leave(finished=False)
        torch.save(model.state_dict(), checkpoint / "model.pt")
        return checkpoint

    checkpoints = run_islands(2, island_main)

    def resume(island: int) -> int:
        model = Stack()
        model.load_state_dict(torch.load(checkpoints[island] / "model.pt"))
        session = mended.session(island)
        session.join(open_shards(model, None), mended.folder / str(island), checkpoint=checkpoints[island])
        assert session.is_due()
        reports = session.advance(is_last=True)
        session.leave(finished=True)
        return len(reports)

    assert run_islands(2, resume) == [2, 2]


@pytest.mark.parametrize("stops", [(13,), (7, 13)], ids=["to the end", "resumed once more before the next round"])
def test_islands_that_resume_at_different_steps_of_a_round_take_as_many(
    stops: tuple[int, ...], tmp_path: Path
) -> None:
    """The first round fails behind step 5; island 0 is killed, and goes on from step 3, island 1 from step 6."""
    config: dict[str, Any] = {"sync_every": 4, "fragment_sync_delay": 2}
    broken = Run(tmp_path / "broken", 2, **config)
    end, last = (3, 6), 13

    def break_off(island: int) -> tuple[Path, dict[str, Any]]:
        transport, model = broken.transport(island), Stack()
        session = broken.join(island, model, transport=FaultyTransport(transport, cut) if island else transport)
        steps = steps_of(session, model, make_optimizer(model), batches(island, NUM_STEPS)[: end[island]], end[island])
        if island:
            with pytest.raises(ExchangeError):
                list(steps)
        else:
            list(steps)
        checkpoint = save(session, broken.folder / str(island), end[island])
        if not island:  # of which no more is seen than its part in the round
            session.outer.count_step(4)
            session.advance()
        session.leave(finished=False)
        return checkpoint, model.state_dict()

    saved = run_islands(2, break_off)
    begun, rounds = list(end), [list[int](), list[int]()]

    def resume(run: Run, island: int, stop: int) -> tuple[Path, dict[str, Any]]:
        checkpoint, state = saved[island]
        model = Stack()
        model.load_state_dict(state)
        session = run.session(island)
        session.join(open_shards(model, None), run.folder / str(island), checkpoint=checkpoint)
        reports = session.advance() if session.is_due() else []
        optimizer = make_optimizer(model)
        for step in range(begun[island] + 1, stop + 1):
            take_step(model, optimizer, batches(island, NUM_STEPS)[step - 1])
            session.outer.count_step(4)
            if session.is_due(step == last):
                reports += session.advance(step == last)
        reports += session.drain()
        rounds[island] += [report.round for report in reports]
        begun[island] = stop
        checkpoint = save(session, run.folder / str(island), stop)
        session.leave(finished=stop == last)
        return checkpoint, model.state_dict()

    for stop in stops:
        mended = Run(tmp_path / f"to-{stop}", 2, **config)
        saved = run_islands(2, partial(resume, mended, stop=stop))
    assert rounds[0] == rounds[1] == [1, 2, 3, 4]
    weights = [torch.cat([value.reshape(-1) for value in state.values()]) for _, state in saved]
    assert torch.equal(*weights)


def test_an_eager_round_that_fails_is_made_up_for_bit_for_bit(tmp_path: Path) -> None:
    """The second round fails behind the steps of the third; resumed, the run ends as if it had not."""
    config: dict[str, Any] = {"sync_every": 4, "method": "eager"}
    whole, broken, mended = (Run(tmp_path / name, 2, **config) for name in ("whole", "broken", "mended"))
    faulty = threading.Event()

    def spoil(mean: torch.Tensor) -> None:
        if faulty.is_set():
            raise ExchangeError("the link was cut")

    def break_off(island: int) -> tuple[Path, dict[str, Any]]:
        model = Stack()
        optimizer = make_optimizer(model)
        transport = broken.transport(island)
        session = broken.join(island, model, transport=FaultyTransport(transport, spoil) if island else transport)
        data = batches(island, NUM_STEPS)
        list(steps_of(session, model, optimizer, data[:7], 7))
        session.drain()
        faulty.set()
        with pytest.raises(ExchangeError):
            list(steps_of(session, model, optimizer, data[7:12], 12))
        assert (session.outer.round, session.outer.steps) == (1, 4)
        checkpoint = save(session, broken.folder / str(island), 12)
        session.leave(finished=False)
        return checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    saved = run_islands(2, break_off)

    def resume(island: int) -> torch.Tensor:
        checkpoint, state = saved[island]
        model = Stack()
        optimizer = make_optimizer(model)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        session = mended.session(island)
        session.join(open_shards(model, None), mended.folder / str(island), checkpoint=checkpoint)
        assert session.is_due()
        reports = session.advance()
        assert [report.round for report in reports] == [2]
        list(steps_of(session, model, optimizer, batches(island, NUM_STEPS)[12:], NUM_STEPS))
        session.leave(finished=True)
        return vector_of(model, strided(1)[0])

    resumed, uninterrupted = run_islands(2, resume), train(whole)
    for island in range(2):
        assert torch.equal(resumed[island], uninterrupted[island][0])


@pytest.mark.parametrize("saves_again", [False, True])
def test_an_eager_round_that_fails_keeps_its_pseudo_gradient_with_fewer_islands(
    tmp_path: Path, saves_again: bool
) -> None:
    """It was taken as one of three; the round that makes up for it may be of one."""
    config: dict[str, Any] = {"sync_every": 4, "method": "eager"}
    broken = Run(tmp_path / "broken", 3, **config)

    def break_off(island: int) -> tuple[Path, Stack, torch.Tensor]:
        transport = broken.transport(island)
        model = Stack()
        session = broken.join(island, model, transport=FaultyTransport(transport, cut) if island else transport)
        list(steps_of(session, model, make_optimizer(model), batches(island, NUM_STEPS)[:4], 4))
        session.drain()
        fragment = session.outer.current
        assert isinstance(fragment, EagerFragment)
        checkpoint = save(session, broken.folder / str(island), 4)
        session.leave(finished=False)
        return checkpoint, model, fragment.method.own * 3

    checkpoint, model, captured = run_islands(3, break_off)[0]
    for attempt in range(1 + saves_again):
        run = Run(tmp_path / f"mended-{attempt}", 1, **config)
        session = run.session(0)
        session.join(open_shards(model, None), run.folder / "0", checkpoint=checkpoint)
        fragment = session.outer.current
        assert isinstance(fragment, EagerFragment)
        assert torch.equal(fragment.anticipated(), captured)
        checkpoint = save(session, run.folder / "0", 4)
        session.leave(finished=False)


@pytest.mark.parametrize(
    "config",
    [
        {"sync_every": 2, "method": "eager"},
        {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
        {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_an_island_that_is_not_finite_is_healed_and_spoils_nobody(config: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, 2, **config)

    def island_main(island: int) -> torch.Tensor:
        model = Stack()
        session = run.join(island, model)
        for step in range(1, NUM_STEPS + 1):
            moved = vector_of(model, strided(1)[0]) - 0.01 * (island + 1)
            if island == 1 and step == 3:
                moved[:] = torch.nan
            write_vector(model, strided(1)[0], moved)
            session.outer.count_step()
            if session.is_due(step == NUM_STEPS):
                session.advance(step == NUM_STEPS)
            assert island == 1 or torch.isfinite(vector_of(model, strided(1)[0])).all()
        session.leave(finished=True)
        return vector_of(model, strided(1)[0])

    first, second = run_islands(2, island_main)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


# Memory


class Wide(nn.Module):
    """Four blocks of 250,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(500, 500, bias=False)]) for _ in range(4)])


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        ({}, 8 + 4),
        ({"fragment_sync_delay": 1}, 8 + 4),
        ({"num_fragments": 4}, 8 + 4 / 4),
        ({"num_fragments": 4, "fragment_sync_delay": 1}, 8 + 2 * 4 / 4),
        ({"num_fragments": 4, "payload": "int8"}, 8 + 4 / 4),
        ({"payload": "topk"}, 8 + 4 + 8),
        ({"method": "sparseloco"}, 4 + 4 + 8),
        ({"method": "eager"}, 12 + 2 * 4),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bytes_a_parameter(config: dict[str, Any], num_bytes: float, tmp_path: Path) -> None:
    """Outer parameters and momentum, a vector for each round under way, and what the method keeps besides."""

    models = [Wide() for _ in range(2)]
    run = Run(tmp_path, 2, sync_every=4, **config)

    def island_main(island: int) -> FixedSession:
        session = run.join(island, models[island])
        for _ in range(11):
            session.outer.count_step()
            if session.is_due():
                session.advance()
        session.drain()
        return session

    with new_tensor_bytes() as new_bytes:
        sessions = run_islands(2, island_main)
        new = new_bytes()
    num_parameters = 2 * 1_000_000
    fixed = 12 << 20  # of two islands: buffers that do not grow with the model
    assert num_bytes * num_parameters <= new <= num_bytes * num_parameters + fixed
    for session in sessions:
        session.close()


# Settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_fragments": 5, "sync_every": 4}, r"num_fragments=5 is more than sync_every=4"),
        ({"fragment_patterns": ["a", "b"]}, r"fragment_patterns has 2 entries, and num_fragments=1"),
        ({"fragment_sync_delay": 4, "sync_every": 4}, r"fragment_sync_delay=4 must be less than sync_every=4"),
        ({"fragment_update_alpha": 0.5}, r"fragment_update_alpha=0.5 needs fragment_sync_delay"),
        ({"method": "eager", "rendezvous": "file:///tmp/x"}, r"method=eager needs a rendezvous at tcp://"),
        ({"method": "eager", "num_fragments": 2}, r"num_fragments=2: method=eager averages the whole model"),
        ({"method": "eager", "payload": "topk"}, r"payload=topk with error_feedback=0.95: method=eager cannot add"),
        ({"payload": "fp32", "error_feedback": 0.5}, r"error_feedback=0.5 has no use with payload=fp32"),
        ({"payload": "topk", "error_feedback": 0}, r"payload=topk .* does not learn without error_feedback"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    from hf_diloco.config.diloco import DiLoCoConfig

    with pytest.raises(ConfigError, match=text):
        DiLoCoConfig(**settings)


def test_more_fragments_than_blocks_are_refused_before_training(tmp_path: Path) -> None:
    session = Run(tmp_path, 1, sync_every=8, num_fragments=5).session(0)
    with pytest.raises(ConfigError, match=r"num_fragments=5: each fragment needs.*take 1 to 4"):
        session.join(open_shards(Stack(), None), tmp_path / "0")
