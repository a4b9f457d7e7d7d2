"""The outer step against written-out numbers, against torch's SGD, and to the last bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.outer import base
from hf_diloco.methods.outer.diloco import DiLoCo
from hf_diloco.outer.checkpoint import read_index
from hf_diloco.outer.saved_state import save_state
from hf_diloco.rounds.fixed import FixedSession

CHUNK = 8
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_CHUNK_VALUES", CHUNK)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def started(anchor: torch.Tensor, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> DiLoCo:
    strategy = DiLoCo(lr, momentum, nesterov)
    strategy.start(anchor)
    return strategy


def sum_of_squares(strategy: DiLoCo, parameters: torch.Tensor) -> tuple[torch.Tensor, float]:
    delta = parameters.clone()
    return delta, strategy.pseudo_gradient_(delta)


def test_two_rounds_by_hand_with_nesterov() -> None:
    strategy = started(torch.tensor([1.0, -2.0]))
    # Round 1. The islands' average parameters are 0.8 and -2.3, so Delta = 0.2, 0.3 and m = 0.2, 0.3.
    #   1.0 - 0.7 (0.2 + 0.9 * 0.2) = 1.0 - 0.7 * 0.38 = 0.734
    #  -2.0 - 0.7 (0.3 + 0.9 * 0.3) = -2.0 - 0.7 * 0.57 = -2.399
    outer = strategy.step(torch.tensor([0.2, 0.3]))
    torch.testing.assert_close(outer, torch.tensor([0.734, -2.399]), rtol=0, atol=5e-7)
    # Round 2. Delta = 0.1, -0.4; m = 0.9 * 0.2 + 0.1 = 0.28 and 0.9 * 0.3 - 0.4 = -0.13.
    #   0.734 - 0.7 (0.1 + 0.9 * 0.28) = 0.734 - 0.7 * 0.352 = 0.4876
    #  -2.399 - 0.7 (-0.4 - 0.9 * 0.13) = -2.399 + 0.7 * 0.517 = -2.0371
    outer = strategy.step(torch.tensor([0.1, -0.4]))
    torch.testing.assert_close(outer, torch.tensor([0.4876, -2.0371]), rtol=0, atol=5e-7)
    torch.testing.assert_close(strategy.state_dict()["momentum"], torch.tensor([0.28, -0.13]), rtol=0, atol=1e-7)


def test_two_rounds_by_hand_without_nesterov() -> None:
    strategy = started(torch.tensor([1.0]), nesterov=False)
    # 1.0 - 0.7 * 0.2 = 0.86; then m = 0.9 * 0.2 + 0.1 = 0.28, 0.86 - 0.7 * 0.28 = 0.664
    assert strategy.step(torch.tensor([0.2])).item() == pytest.approx(0.86, abs=1e-7)
    assert strategy.step(torch.tensor([0.1])).item() == pytest.approx(0.664, abs=1e-7)


def test_numbers_without_rounding_come_out_exactly() -> None:
    strategy = started(torch.tensor([8.0]), lr=0.5, momentum=0.25)
    # m = 4, 8 - 0.5 (4 + 0.25 * 4) = 5.5; then m = 1 + 2 = 3, 5.5 - 0.5 (2 + 0.25 * 3) = 4.125
    assert strategy.step(torch.tensor([4.0])).item() == 5.5
    assert strategy.step(torch.tensor([2.0])).item() == 4.125


def test_pseudo_gradient_is_old_minus_new() -> None:
    strategy = started(torch.tensor([1.0, 2.0]))
    delta, square = sum_of_squares(strategy, torch.tensor([0.5, 5.0]))
    assert delta.tolist() == [0.5, -3.0]
    assert square == 0.25 + 9.0
    assert strategy.parameters.tolist() == [1.0, 2.0], "the anchor stays"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_value_that_is_no_pseudo_gradient_shows_in_the_sum_of_squares(value: float, small_chunks: None) -> None:
    parameters = torch.zeros(3 * CHUNK)
    parameters[CHUNK + 3] = value
    _, square = sum_of_squares(started(torch.zeros(3 * CHUNK)), parameters)
    assert not math.isfinite(square)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_round_descends(momentum: float) -> None:
    """Inner steps reduce a loss; the outer step along their pseudo-gradient must reduce it as well."""
    target = torch.tensor([3.0, -1.0, 2.0])
    strategy = started(torch.zeros(3), lr=0.4, momentum=momentum)

    def loss() -> float:
        return float((strategy.parameters - target).square().sum())

    before = loss()
    for _ in range(3):
        inner = strategy.parameters.clone()
        for _ in range(5):
            inner -= 0.05 * 2 * (inner - target)
        strategy.pseudo_gradient_(inner)
        strategy.step(inner)
        assert loss() < before
        before = loss()


def test_lr_1_without_momentum_is_federated_averaging() -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=generator)
    islands = [anchor + 0.1 * torch.randn(1000, generator=generator) for _ in range(4)]
    strategy = started(anchor, lr=1.0, momentum=0.0)
    average = torch.stack(islands).double().mean(0)
    deltas = torch.stack([sum_of_squares(strategy, island)[0] for island in islands])
    torch.testing.assert_close(strategy.step(deltas.mean(0)).double(), average, rtol=0, atol=4 * EPSILON * 5)


sizes = st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 1, 3 * CHUNK + 1, 37])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    size=sizes,
    seed=st.integers(0, 1 << 30),
    lr=st.floats(0.01, 2.0),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    nesterov=st.booleans(),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
)
def test_it_is_torchs_sgd(
    small_chunks: None, size: int, seed: int, lr: float, momentum: float, nesterov: bool, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randn(size, generator=generator)
    strategy = started(anchor.clone(), lr, momentum, nesterov)
    parameter = torch.nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    reach = anchor.abs()
    for _ in range(4):
        delta = scale * torch.randn(size, generator=generator)
        parameter.grad = delta.clone()
        reference.step()
        reach = reach + lr * 5 * delta.abs() / (1 - momentum)
        difference = (strategy.step(delta.clone()) - parameter.detach()).abs()
        assert bool((difference <= 4 * EPSILON * reach).all()), float((difference / reach).max() / EPSILON)
    if momentum:
        theirs = reference.state[parameter]["momentum_buffer"] if size else torch.empty(0)
        torch.testing.assert_close(strategy.state_dict()["momentum"], theirs, rtol=1e-5, atol=scale * 1e-5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(size=st.integers(0, 70), cut=st.integers(0, 70), chunk=st.integers(1, 80), seed=st.integers(0, 1 << 30))
def test_cuts_and_chunks_do_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, size: int, cut: int, chunk: int, seed: int
) -> None:
    """A rank's part of the vector begins anywhere, in another place on an island with other shards."""
    generator = torch.Generator().manual_seed(seed)
    anchor, *deltas = torch.randn(4, size, generator=generator)
    monkeypatch.setattr(base, "_CHUNK_VALUES", 1 << 16)
    whole = started(anchor)
    for delta in deltas:
        whole.step(delta.clone())
    monkeypatch.setattr(base, "_CHUNK_VALUES", chunk)
    parts = []
    for low, high in pairwise([0, min(cut, size), size]):
        part = started(anchor[low:high])
        for delta in deltas:
            part.step(delta.clone()[low:high])  # a view that begins at any alignment
        parts.append(part)
    for name, value in whole.state_dict().items():
        assert torch.equal(torch.cat([part.state_dict()[name] for part in parts]), value), name


def test_threads_do_not_change_a_bit(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_CHUNK_VALUES", 1 << 17)
    anchor, *deltas = torch.randn(4, 300_001, generator=torch.Generator().manual_seed(0))
    squares, states = [], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        strategy = started(anchor)
        squares.append(sum_of_squares(strategy, deltas[0])[1])
        for delta in deltas:
            strategy.step(delta.clone())
        states.append(strategy.state_dict())
    assert squares[0] == pytest.approx(squares[1], rel=1e-5)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_state_is_8_bytes_a_parameter_and_4_without_momentum() -> None:
    for momentum, num_bytes in ((0.9, 8), (0.0, 4)):
        state = started(torch.zeros(1000), momentum=momentum).state_dict()
        assert sum(value.nbytes for value in state.values()) == num_bytes * 1000


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_goes_on_where_it_was_saved(momentum: float) -> None:
    anchor, *deltas = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    straight = started(anchor.clone(), momentum=momentum)
    straight.step(deltas[0].clone())
    resumed = DiLoCo(0.7, momentum)
    resumed.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    for delta in deltas[1:]:
        assert torch.equal(straight.step(delta.clone()), resumed.step(delta.clone()))


# Settings that are "auto"


@pytest.mark.parametrize(
    ("settings", "num_rounds", "expected"),
    [
        ({"num_islands": 1}, 500, (0.7, 0.6)),
        ({"num_islands": 1}, 20, (0.7, 0.5)),
        ({"num_islands": 1, "outer_momentum": 0.9}, 500, (0.4, 0.9)),
        ({"num_islands": 2}, 50, (0.6, 0.9)),
        ({"num_islands": 2}, 49, (0.6, 0.5)),
        ({"num_islands": 7}, None, (0.6, 0.9)),
        ({"num_islands": 8}, 128, (0.8, 0.9)),
        ({"num_islands": 15}, 128, (0.8, 0.9)),
        ({"num_islands": 16}, 128, (1.0, 0.9)),
        ({"num_islands": 64, "outer_lr": 0.3}, 128, (0.3, 0.9)),
    ],
)
def test_what_is_chosen_by_islands_and_rounds(
    settings: dict[str, Any], num_rounds: int | None, expected: tuple[float, float]
) -> None:
    auto = {"outer_lr": "auto", "outer_momentum": "auto", "rendezvous": "tcp://10.0.0.1:29400"}
    config = DiLoCoConfig(**{**auto, **settings})
    chosen = DiLoCo.choose(config, num_rounds)
    now = config.model_copy(update=dict(chosen.values))
    assert (now.outer_lr, now.outer_momentum) == expected
    assert all(f"{name} {value:g} (" in chosen.source for name, value in chosen.values.items())


def test_what_is_chosen_is_computed_with_said_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 1)
    session = FixedSession(DiLoCoConfig(sync_every=1, outer_lr="auto", outer_momentum="auto"), IslandGroup())
    session.num_rounds = 40
    with caplog.at_level(logging.INFO, "hf_diloco"):
        session.join(open_shards(model, None), tmp_path)
    assert "chosen: outer_momentum 0.5 (40 rounds, in which 0.9 overshoots), outer_lr 0.7 (one island" in caplog.text
    assert isinstance(session.outer.current.method, DiLoCo)
    assert (session.outer.current.method.lr, session.outer.current.method.momentum) == (0.7, 0.5)
    save_state(session.outer, tmp_path / "checkpoint-0", 0, {})
    saved = read_index(tmp_path / "checkpoint-0").settings
    assert (saved["outer_lr"], saved["outer_momentum"]) == (0.7, 0.5)
    session.leave(finished=True)


def test_start_copies() -> None:
    parameters = torch.ones(4)
    strategy = started(parameters)
    parameters.zero_()
    assert strategy.parameters.tolist() == [1.0] * 4
