"""SlowMo against its equations in NumPy, its special cases, and in runs of islands as threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Adafactor

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError, ConfigError, DiLoCoError, FingerprintError, UnsupportedError
from hf_diloco.inner import open_shards
from hf_diloco.methods.outer import Groups, OuterMethod, base, make_method
from hf_diloco.methods.outer.diloco import DiLoCo
from hf_diloco.methods.outer.slowmo import SlowMo
from hf_diloco.outer.checkpoint import load_outer, read_index
from hf_diloco.outer.saved_state import save_state
from hf_diloco.rounds.fixed import FixedSession
from tests.fixed_runs import Run
from tests.islands import run_islands, try_islands
from tests.meetings import ENGINES, Meeting, Member
from tests.small_model import batches, make_model, set_weights, take_step, weights_of

pytestmark = pytest.mark.usefixtures("fast_clock", "quick_farewell")

SLOWMO: dict[str, Any] = {"method": "slowmo", "outer_lr": 1.0, "outer_momentum": 0.6}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever the engine, the same must come out; tests that meet in no store run once."""
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", list(ENGINES), indirect=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "engine", ENGINES[request.param])


both_engines = pytest.mark.usefixtures("engine")


# The equations


def vectors(number: int, size: int = 40) -> list[np.ndarray]:
    return list(np.random.default_rng(0).standard_normal((number, size)))


def walk(method: OuterMethod, deltas: Sequence[np.ndarray], rates: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """The outer parameters after each round, in fp64."""
    method.start(torch.zeros(deltas[0].size, dtype=torch.float64))
    steps = zip(deltas, rates, strict=True)
    return [method.step(torch.from_numpy(delta.copy()), rate).numpy().copy() for delta, rate in steps]


def written_out(deltas: Sequence[np.ndarray], rates: Sequence[float], alpha: float, beta: float) -> list[np.ndarray]:
    """The paper's own listing, which divides by the learning rate."""
    x, u, found = np.zeros_like(deltas[0]), np.zeros_like(deltas[0]), []
    for delta, rate in zip(deltas, rates, strict=True):
        u = beta * u + delta / rate
        x = x - alpha * rate * u
        found.append(x)
    return found


def cosine(number: int) -> list[float]:
    """Learning rates that begin near 0, rise, and fall."""
    return [float(1e-3 * np.sin(np.pi * (k + 0.5) / number)) for k in range(number)]


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.6), (0.5, 0.8), (1.0, 0.0)])
def test_it_is_the_listing_wherever_the_rate_is_above_0(alpha: float, beta: float) -> None:
    deltas, rates = vectors(50), cosine(50)
    found = walk(SlowMo(alpha, beta), deltas, [[rate] for rate in rates])
    for ours, theirs in zip(found, written_out(deltas, rates, alpha, beta), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * np.abs(theirs).max())


def test_each_parameter_group_has_the_momentum_of_its_own_rates() -> None:
    deltas = vectors(30)
    rates = list(zip(cosine(30), [0.1 / (k + 1) for k in range(30)], strict=True))
    groups = Groups(2, [(0, 7, 1), (7, 25, 0), (25, 40, 1)])
    found = walk(SlowMo(1.0, 0.7, groups), deltas, rates)
    for places, rate in ((range(7, 25), cosine(30)), ([*range(7), *range(25, 40)], [one for _, one in rates])):
        expected = written_out([delta[list(places)] for delta in deltas], rate, 1.0, 0.7)
        np.testing.assert_allclose(found[-1][list(places)], expected[-1], rtol=1e-12)


def test_a_schedule_that_starts_and_ends_at_0_is_harmless() -> None:
    deltas, rates = vectors(12), [0.0, *cosine(10), 0.0]
    deltas[0] = deltas[-1] = np.zeros(40)  # nothing is learnt at rate 0
    found = walk(SlowMo(1.0, 0.6), deltas, [[rate] for rate in rates])
    between = written_out(deltas[1:-1], cosine(10), 1.0, 0.6)
    assert not found[0].any()
    for ours, theirs in zip(found[1:-1], between, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_array_equal(found[-1], found[-2])


@pytest.mark.parametrize("odd", [0.0, 1e-320])
def test_momentum_begins_anew_after_a_rate_of_0(odd: float) -> None:
    deltas = vectors(5)
    found = walk(SlowMo(1.0, 0.6), deltas, [[1e-3], [1e-3], [odd], [1e-3], [1e-3]])
    afresh = walk(SlowMo(1.0, 0.6), deltas[3:], [[1e-3], [1e-3]])
    assert np.isfinite(found[-1]).all()
    np.testing.assert_allclose(found[4] - found[2], afresh[1], rtol=1e-12)


# Special cases


def test_at_a_constant_rate_it_is_dilocos_heavy_ball() -> None:
    deltas = vectors(200)
    slow = walk(SlowMo(0.7, 0.9), deltas, [[3e-4]] * 200)
    heavy = walk(DiLoCo(0.7, 0.9, nesterov=False), deltas, [[]] * 200)
    assert max(float(np.abs(a - b).max()) for a, b in zip(slow, heavy, strict=True)) == 0.0
    nesterov = walk(DiLoCo(0.7, 0.9), deltas, [[]] * 200)
    assert np.abs(slow[-1] - nesterov[-1]).max() > 1e-3


def test_alpha_1_and_beta_0_is_local_sgd() -> None:
    """The outer parameters are the mean of the islands', whatever the learning rate does."""
    islands = np.random.default_rng(1).standard_normal((4, 40))
    method = SlowMo(1.0, 0.0)
    method.start(torch.ones(40, dtype=torch.float64))
    found = method.step(torch.from_numpy((1.0 - islands).mean(0)), [0.1])
    np.testing.assert_allclose(found.numpy(), islands.mean(0), rtol=0, atol=1e-14)
    assert method.state_dict().keys() == {"anchor", "rates"}, "4 bytes a parameter"


def test_one_island_and_beta_0_is_lookahead() -> None:
    """slow <- slow + alpha (fast - slow), as in arXiv 1907.08610."""
    slow = np.zeros(40)
    method = SlowMo(0.5, 0.0)
    method.start(torch.zeros(40, dtype=torch.float64))
    for fast in vectors(20):
        slow = slow + 0.5 * (fast - slow)
        fast_now = torch.from_numpy(fast.copy())
        method.pseudo_gradient_(fast_now)
        found = method.step(fast_now, [0.1])
    np.testing.assert_allclose(found.numpy(), slow, rtol=1e-12)


def test_alpha_1_over_sgd_is_bmuf() -> None:
    """Blockwise model-update filtering: Delta(t) = eta Delta(t-1) + zeta G(t), W = W + Delta, with zeta = 1."""
    update, w, deltas = np.zeros(40), np.zeros(40), vectors(30)
    for delta in deltas:
        update = 0.9 * update - delta
        w = w + update
    np.testing.assert_allclose(walk(SlowMo(1.0, 0.9), deltas, [[0.1]] * 30)[-1], w, rtol=1e-12)


PRESETS: list[tuple[str, dict[str, Any]]] = [
    ("local-sgd", {"outer_lr": 1.0, "outer_momentum": 0.0}),
    ("bmuf", {"outer_lr": 1.0, "outer_momentum": 0.6}),
    ("lookahead", {"outer_lr": 0.5, "outer_momentum": 0.0, "sync_every": 5}),
]


@pytest.mark.parametrize(("name", "settings"), PRESETS)
def test_a_preset_is_its_settings(name: str, settings: dict[str, Any]) -> None:
    preset, spelled_out = DiLoCoConfig(method=name), DiLoCoConfig(method="slowmo", **settings)
    assert preset.model_dump(exclude={"method"}) == spelled_out.model_dump(exclude={"method"})
    deltas, rates = vectors(12), [[rate] for rate in cosine(12)]
    found, expected = (walk(make_method(config), deltas, rates) for config in (preset, spelled_out))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "local-sgd", "outer_momentum": 0.5}, "outer_momentum=0.5: .* or choose method=slowmo"),
        ({"method": "bmuf", "outer_lr": 0.7}, "outer_lr=0.7: method=bmuf is method=slowmo with outer_lr=1"),
        ({"method": "lookahead", "outer_momentum": 0.5}, "remove outer_momentum"),
        ({"method": "lookahead", "num_islands": 2, "rendezvous": "tcp://127.0.0.1:1"}, "set num_islands to 1"),
        ({"method": "lookahead", "nesterov": True}, "method=lookahead is a heavy ball"),
    ],
)
def test_a_preset_that_would_be_another_method_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiLoCoConfig(**settings)


# State


def test_cuts_and_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's part of the vector begins anywhere, in the middle of a group or not."""
    anchor, *deltas = torch.randn(5, 101, generator=torch.Generator().manual_seed(0))
    rates = [(0.1, 0.2), (0.1, 0.4), (0.3, 0.0), (0.2, 0.5)]
    runs = [(0, 20, 0), (20, 21, 1), (21, 80, 0), (80, 101, 1)]

    def steps(low: int, high: int) -> dict[str, torch.Tensor]:
        mine = [(max(a, low) - low, min(b, high) - low, group) for a, b, group in runs if a < high and b > low]
        method = SlowMo(0.9, 0.6, Groups(2, mine))
        method.start(anchor[low:high])
        for delta, rate in zip(deltas, rates, strict=True):
            method.step(delta.clone()[low:high], rate)
        return method.state_dict()

    whole = steps(0, 101)
    monkeypatch.setattr(base, "_CHUNK_VALUES", 8)
    parts = [steps(low, high) for low, high in pairwise([0, 13, 20, 60, 101])]
    for name in ("anchor", "slow-momentum"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_state_goes_on_where_it_was_saved() -> None:
    deltas = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    straight, resumed = SlowMo(1.0, 0.6), SlowMo(1.0, 0.6)
    straight.start(torch.zeros(50))
    straight.step(deltas[0].clone(), [0.1])
    resumed.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    for delta, rate in zip(deltas[1:], (0.2, 0.3, 0.1), strict=True):
        assert torch.equal(straight.step(delta.clone(), [rate]), resumed.step(delta.clone(), [rate]))


def test_other_parameter_groups_are_refused() -> None:
    straight = SlowMo()
    straight.start(torch.zeros(5))
    with pytest.raises(CheckpointError, match="rates of 1 parameter groups, and the inner optimizer has 2"):
        SlowMo(groups=Groups(2)).load_state_dict(straight.state_dict())
    with pytest.raises(DiLoCoError, match="learning rates of 2 parameter groups, and the inner optimizer here has 1"):
        straight.step(torch.zeros(5), [0.1, 0.2])


# Settings


def test_defaults_are_the_methods() -> None:
    config = DiLoCoConfig(method="slowmo")
    assert (config.sync_every, config.outer_lr, config.outer_momentum, config.nesterov) == (12, 1.0, 0.6, False)
    given = DiLoCoConfig(method="slowmo", sync_every=48, outer_momentum=0.4)
    assert (given.sync_every, given.outer_momentum) == (48, 0.4)
    assert DiLoCoConfig(**given.model_dump()) == given


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method": "slowmoo"}, r"'slowmoo': no such method \(did you mean slowmo\?\); there are diloco, eager"),
        ({"options": {"inner_buffers": "keep"}}, "options={'inner_buffers': 'keep'}: method=diloco has no settings"),
        ({**SLOWMO, "options": {"inner_bufers": "keep"}}, "unknown setting options.inner_bufers='keep'"),
        ({**SLOWMO, "options": {"inner_buffers": "drop"}}, "options.inner_buffers: input should be 'zero', 'keep' or"),
        ({**SLOWMO, "num_fragments": 2}, "num_fragments=2: method=slowmo averages the whole model.*method=diloco"),
        ({**SLOWMO, "fragment_sync_delay": 2}, "fragment_sync_delay=2: method=slowmo"),
        ({**SLOWMO, "payload": "sign"}, "payload=sign with error_feedback=1: method=slowmo cannot.*method=diloco"),
        ({**SLOWMO, "payload": "int4", "error_feedback": 0.5}, "payload=int4 with error_feedback=0.5"),
        ({**SLOWMO, "nesterov": True}, "nesterov=True: the momentum of method=slowmo is a heavy ball; remove it"),
        (
            {**SLOWMO, "options": {"inner_buffers": "average"}, "rendezvous": "file:///tmp/x"},
            "options.inner_buffers=average needs a rendezvous at tcp://",
        ),
        (
            {
                **SLOWMO,
                "options": {"inner_buffers": "average"},
                "rendezvous": "tcp://127.0.0.1:29400",
                "num_islands": 2,
                "min_islands": 1,
            },
            "options.inner_buffers=average needs .* islands that stay",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DiLoCoConfig(**settings)


# The inner optimizer


def two_groups(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Weights and biases, with learning rates of their own."""
    weights = [one for name, one in model.named_parameters() if name.endswith("weight")]
    biases = [one for name, one in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": lr / 2}]
    return torch.optim.SGD(groups, lr=lr)


def test_rates_are_those_of_the_last_step_whenever_the_scheduler_is_stepped() -> None:
    model = make_model()
    optimizer = two_groups(model)
    shards = open_shards(model, optimizer)
    shards.inner.watch()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    for step in range(4):
        take_step(model, optimizer, batches(0, 1)[0])
        scheduler.step()
        assert shards.inner.rates == pytest.approx([0.1 * step / 10, 0.05 * step / 10])
    assert shards.inner.groups == {"0.weight": 0, "0.bias": 1, "2.weight": 0, "2.bias": 1}


def test_an_island_that_has_left_no_longer_watches_the_optimizer(tmp_path: Path) -> None:
    model = make_model()
    optimizer = two_groups(model)
    session = Run(tmp_path, 1, sync_every=4, **SLOWMO).session(0)
    session.join(open_shards(model, optimizer), tmp_path / "0")
    assert optimizer._optimizer_step_pre_hooks
    session.leave(finished=False)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_schedule_that_ends_a_rounding_error_below_0_ends_at_0(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.3, end_factor=0.0, total_iters=3)
    session = Run(tmp_path, 1, sync_every=4, **SLOWMO).session(0)
    session.join(open_shards(model, optimizer), tmp_path / "0")
    for batch in batches(0, 4):
        rate = optimizer.param_groups[0]["lr"]
        take_step(model, optimizer, batch)
        session.outer.count_step()
        scheduler.step()
    assert rate < 0
    session.sync()
    assert session.outer.rates == [0.0]


def lead(session: FixedSession, optimizer: torch.optim.Optimizer, model: nn.Module, rate: float, to: float) -> None:
    """A step with this learning rate, after which all weights are `to`."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    optimizer.step()
    set_weights(model, to)
    session.outer.count_step()
    session.sync()


def test_all_islands_take_the_rate_agreed_on(tmp_path: Path) -> None:
    """Of .1, .2 and .4 the median; a left-out island has no say."""
    places = [[1.0, 2.0, 4.0], [1.5, 2.5, float("nan")], [0.5, 0.5, 0.5]]
    rates = [[0.1, 0.2, 0.4], [0.8, 0.2, 0.1], [0.1, 0.1, 0.1]]

    def island_main(island: int) -> tuple[list[float], str]:
        model = make_model()
        set_weights(model, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = run.session(island)
        session.join(open_shards(model, optimizer), tmp_path / str(island))
        found = []
        for place, rate in zip(places, rates, strict=True):
            lead(session, optimizer, model, rate[island], place[island])
            found.append(float(weights_of(model)[0]))
        return found, session.outer.outer_hash

    run = Run(tmp_path, 3, sync_every=1, **SLOWMO)
    results = run_islands(3, island_main)
    assert len({digest for _, digest in results}) == 1
    x, v, before, expected = 0.0, 0.0, 0.0, []
    for place, agreed in zip(places, [0.2, 0.2, 0.1], strict=True):
        mean = float(np.nanmean([x - one for one in place]))
        v = 0.6 * (agreed / before if before else 0.0) * v + mean
        x, before = x - v, agreed
        expected.append(x)
    for found, _ in results:
        assert found == pytest.approx(expected, abs=1e-5)


def aux_adam(model: nn.Module) -> torch.optim.Optimizer:
    """DeepSpeed's Muon of a model without a hidden matrix: all is trained by the Adam that it has inside."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return MuonWithAuxAdam([{"params": list(model.parameters()), "lr": 0.01, "use_muon": False}])


def test_a_count_of_steps_that_a_group_keeps_begins_anew(tmp_path: Path) -> None:
    """As fused optimizers keep it."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = Run(tmp_path, 1, sync_every=1, **SLOWMO, options={"inner_buffers": "zero"}).session(0)
    session.join(open_shards(model, optimizer), tmp_path / "0")
    optimizer.param_groups[0]["step"] = 1
    take_step(model, optimizer, batches(0, 1)[0])
    assert session.outer.count_step()
    session.sync()
    assert optimizer.param_groups[0]["step"] == 0


def test_buffers_that_older_versions_of_torch_left_empty_stay_so(tmp_path: Path) -> None:
    """In checkpoints of SGD without momentum."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = optimizer.state_dict()
    saved["state"] = {number: {"momentum_buffer": None} for number in saved["param_groups"][0]["params"]}
    optimizer.load_state_dict(saved)
    session = Run(tmp_path, 1, sync_every=1, **SLOWMO, options={"inner_buffers": "zero"}).session(0)
    session.join(open_shards(model, optimizer), tmp_path / "0")
    take_step(model, optimizer, batches(0, 1)[0])
    assert session.outer.count_step()
    session.sync()
    take_step(model, optimizer, batches(0, 1)[0])
    assert [state["momentum_buffer"] for state in optimizer.state.values()] == [None] * len(saved["state"])


def test_zeroed_momentum_with_dampening_begins_as_in_a_new_optimizer(tmp_path: Path) -> None:
    """SGD dampens all gradients of its momentum but the first; also of one that a checkpoint holds, of zeros."""
    models = [make_model() for _ in range(3)]
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}
    trained, afresh, resumed = (torch.optim.SGD(model.parameters(), **settings) for model in models)
    session = Run(tmp_path, 1, sync_every=2, **SLOWMO).session(0)
    session.join(open_shards(models[0], trained), tmp_path / "0")
    for batch in batches(0, 2):
        take_step(models[0], trained, batch)
        session.outer.count_step()
    session.sync()
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    save_state(session.outer, tmp_path / "checkpoint-2", 2, {})
    resumed.load_state_dict(trained.state_dict())
    assert all("momentum_buffer" in state for state in resumed.state.values())  # else sharded ones cannot be loaded
    again = Run(tmp_path, 1, sync_every=2, **SLOWMO).session(0)
    again.join(open_shards(models[2], resumed), tmp_path / "2", checkpoint=tmp_path / "checkpoint-2")
    for batch in batches(9, 2):
        for model, optimizer in zip(models, (trained, afresh, resumed), strict=True):
            take_step(model, optimizer, batch)
            assert torch.equal(weights_of(model), weights_of(models[0]))


@pytest.mark.parametrize("wanted", ["zero", "keep", None])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "deepspeed"])
def test_buffers_after_a_round(kind: str, wanted: str | None, tmp_path: Path) -> None:
    """By default SGD's momentum begins anew, and AdamW's moments stay. DeepSpeed counts its steps in plain numbers."""
    model = make_model()

    def make_optimizer() -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if kind == "deepspeed":
            return aux_adam(model)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def all_held() -> list[torch.Tensor]:
        return [torch.as_tensor(value).clone() for state in optimizer.state.values() for value in state.values()]

    optimizer = make_optimizer()
    session = Run(tmp_path, 1, sync_every=3, **SLOWMO, options={"inner_buffers": wanted}).session(0)
    session.join(open_shards(model, optimizer), tmp_path / "0")
    for batch in batches(0, 3):
        take_step(model, optimizer, batch)
        held = all_held()
        if session.outer.count_step():
            session.sync()
    now = all_held()
    is_zeroed = wanted == "zero" or (wanted is None and kind == "sgd")
    assert any(value.any() for value in held)
    for value, before in zip(now, held, strict=True):
        assert torch.equal(value, torch.zeros_like(before) if is_zeroed else before)
    afresh = make_optimizer()
    start = weights_of(model)
    take_step(model, optimizer, batches(9, 1)[0])
    moved = weights_of(model)
    set_weights(model, start)
    take_step(model, afresh, batches(9, 1)[0])
    assert torch.equal(moved, weights_of(model)) == is_zeroed


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_buffers_are_averaged_over_the_islands(kind: str, tmp_path: Path) -> None:
    """Of three islands, the second of which is not finite and has no say."""

    def island_main(island: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        model = make_model()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        session = run.session(island)
        session.join(open_shards(model, optimizer), tmp_path / str(island))
        for batch in batches(island, 3):
            take_step(model, optimizer, batch)
        if island == 1:
            set_weights(model, float("nan"))
        mine = [one.clone() for one in buffers_of(optimizer)]
        session.outer.add_weight(1.0 + island)
        for _ in range(3):
            session.outer.count_step()
        report = session.sync()
        return mine, buffers_of(optimizer), report.bytes_sent

    def buffers_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        states = optimizer.state.values()
        return [state[name] for name in names for state in states]

    names = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}[kind]
    run = Run(tmp_path, 3, sync_every=3, weight_by="examples", **SLOWMO, options={"inner_buffers": "average"})
    results = run_islands(3, island_main)
    for place, (first, third) in enumerate(zip(results[0][0], results[2][0], strict=True)):
        for _, after, _ in results:
            torch.testing.assert_close(after[place], (first + 3 * third) / 4, rtol=1e-5, atol=1e-9)
            assert torch.equal(after[place], results[0][1][place])
    plain = weights_of(make_model()).numel() * 4
    assert {sent for _, _, sent in results} >= {results[0][2]}
    assert min(sent for _, _, sent in results) >= (1 + len(names)) * plain, "the further vectors are counted"


def test_an_optimizer_that_chooses_its_own_rates(tmp_path: Path) -> None:
    """It has none that SlowMo could see; DiLoCo needs none."""
    model = make_model()
    optimizer = Adafactor(model.parameters())
    with pytest.raises(UnsupportedError, match=r"learning rates of Adafactor cannot be seen.*method=diloco"):
        Run(tmp_path, 1, **SLOWMO).session(0).join(open_shards(model, optimizer), tmp_path / "0")
    session = Run(tmp_path, 1, sync_every=1).session(0)
    session.join(open_shards(model, optimizer), tmp_path / "1")
    take_step(model, optimizer, batches(0, 1)[0])
    session.outer.count_step()
    assert session.sync().round == 1


def test_an_optimizer_whose_buffers_are_not_known_is_refused(tmp_path: Path) -> None:
    model = make_model()
    session = Run(tmp_path, 1, **SLOWMO, options={"inner_buffers": "zero"}).session(0)
    shards = open_shards(model, torch.optim.Adagrad(model.parameters()))
    with pytest.raises(UnsupportedError, match=r"inner_buffers=zero: the buffers of Adagrad are not known.*keep"):
        session.join(shards, tmp_path / "0")


def test_deepspeeds_muon_is_refused_where_its_momentum_would_be_averaged(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, **SLOWMO, options={"inner_buffers": "average"})

    def join(island: int) -> None:
        model = make_model()
        run.session(island).join(open_shards(model, aux_adam(model)), tmp_path / str(island))

    for outcome in try_islands(2, join):
        assert isinstance(outcome, UnsupportedError)
        assert "the momentum of DeepSpeed's Muon is laid out differently from the master weights" in str(outcome)
        assert "set it to keep or zero" in str(outcome)


def test_without_an_optimizer_of_torch_it_is_refused(tmp_path: Path) -> None:
    session = Run(tmp_path, 1, **SLOWMO).session(0)
    with pytest.raises(UnsupportedError, match=r"learning rates of NoneType cannot be seen.*method=diloco"):
        session.join(open_shards(make_model(), None), tmp_path / "0")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"method": "diloco"}, r"algorithm differs \(island 0: slowmo, island 1: diloco\)"),
        ({"options": {"inner_buffers": "zero"}}, "options.inner_buffers differs"),
    ],
)
def test_islands_of_other_methods_are_refused(other: dict[str, Any], told: str, tmp_path: Path) -> None:
    run = Run(tmp_path, 2, outer_lr=1.0, outer_momentum=0.5, nesterov=False)

    def join(island: int) -> None:
        model = make_model()
        config = {"method": "slowmo", **(other if island else {})}
        session = run.session(island, config=config)
        session.join(open_shards(model, torch.optim.SGD(model.parameters(), lr=0.1)), tmp_path / str(island))

    for outcome in try_islands(2, join):
        assert isinstance(outcome, FingerprintError)
        assert told.replace("\\", "") in str(outcome)


# Checkpoints


def trained(run: Run, folder: Path, steps: range, checkpoint: Path | None = None) -> FixedSession:
    """Steps of one island with a learning rate that rises; it is saved after each."""
    model = make_model()
    optimizer = two_groups(model)
    if checkpoint is not None:
        model.load_state_dict(torch.load(checkpoint / "model.pt", weights_only=True))
    session = run.session(0)
    session.join(open_shards(model, optimizer), folder, checkpoint=checkpoint)
    for step in steps:
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.01 * (step + 1) ** (number + 1)
        take_step(model, optimizer, batches(step, 1)[0])
        if session.outer.count_step():
            session.sync()
        saved = folder / f"checkpoint-{step}"
        saved.mkdir(parents=True)
        torch.save(model.state_dict(), saved / "model.pt")
        save_state(session.outer, saved, step, {})
    return session


@pytest.mark.parametrize("step", [2, 3, 4])
def test_resumed_is_uninterrupted(step: int, tmp_path: Path) -> None:
    run = Run(tmp_path, 1, sync_every=2, **SLOWMO)
    whole = trained(run, tmp_path / "whole", range(8))
    again = Run(tmp_path, 1, sync_every=2, **SLOWMO)
    resumed = trained(again, tmp_path / "again", range(step + 1, 8), tmp_path / "whole" / f"checkpoint-{step}")
    for name, value in whole.outer.current.method.state_dict().items():
        assert torch.equal(value, resumed.outer.current.method.state_dict()[name]), name


def test_a_checkpoint_is_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    session = trained(Run(tmp_path, 1, sync_every=2, **SLOWMO), tmp_path / "run", range(4))
    folder = tmp_path / "run" / "checkpoint-3"
    held = session.outer.current.method.state_dict()
    for low, high in ((0, 20), (20, session.outer.current.partition.numel)):
        part = load_outer(folder, read_index(folder), [(low, high - low)])
        assert torch.equal(part["slow-momentum"], held["slow-momentum"][low:high])
        assert torch.equal(part["rates"], held["rates"])


def test_a_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    trained(Run(tmp_path, 1, sync_every=2, **SLOWMO), tmp_path / "run", range(2))
    with pytest.raises(CheckpointError, match=r"of a run with method=slowmo, here method=diloco.*resume with"):
        trained(Run(tmp_path, 1, sync_every=2), tmp_path / "x", range(2), tmp_path / "run" / "checkpoint-1")


# Among islands that come and go


def go_on(member: Member, to: int, rates: Callable[[int], float]) -> Member:
    """Trains to a round; the learning rate is one of the island's own steps."""
    while member.session.outer.round < to:
        member.optimizer.param_groups[0]["lr"] = rates(member.session.outer.num_steps)
        member.train(1)
    return member


def state_of(member: Member) -> dict[str, torch.Tensor]:
    return member.session.outer.current.method.state_dict()


def assert_equal_states(one: Member, other: Member) -> None:
    assert one.hash == other.hash
    for name, value in state_of(one).items():
        assert torch.equal(value, state_of(other)[name]), name


@both_engines
def test_a_late_island_replays_with_the_rate_agreed_on(tmp_path: Path) -> None:
    """Its own learning rate is another one when it carries out the rounds that it was away for."""
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.0, **SLOWMO)
    first, late = run_islands(2, lambda island: meeting.island(island))
    late.optimizer.param_groups[0]["lr"] = 7.0  # a step that it takes, and brings to a later round
    go_on(first, 4, lambda step: 0.01 * (step + 1))
    late.train(1)
    late.sync()
    assert late.session.outer.round == 4
    assert state_of(late)["rates"].tolist() == pytest.approx([0.08])
    assert state_of(first)["slow-momentum"].any()
    assert_equal_states(first, late)


@both_engines
def test_an_island_that_joins_takes_momentum_and_rates_from_a_snapshot(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=2, min_islands=1, grace=5.0, snapshot_every=2, keep_rounds=1, **SLOWMO)
    first = go_on(meeting.island(0), 5, lambda step: 0.01 * (step + 1))
    second = meeting.island(1, seed=5)
    assert second.session.outer.round == 5
    assert_equal_states(first, second)
    first, second = run_islands(2, lambda which: go_on([first, second][which], 8, lambda step: 0.02))
    assert_equal_states(first, second)


@both_engines
def test_a_killed_island_comes_back(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=1.0, **SLOWMO)
    rates: Callable[[int], float] = lambda step: 0.05 / (step + 1)  # noqa: E731
    islands = run_islands(2, lambda island: go_on(meeting.island(island), 2, rates))
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    islands[1].die()
    go_on(islands[0], 4, rates)
    again = meeting.island(1, seed=9, checkpoint=checkpoint)
    assert_equal_states(islands[0], again)
    islands = run_islands(2, lambda which: go_on([islands[0], again][which], 7, rates))
    assert_equal_states(*islands)
    assert [0, 1] in [report.participants for report in islands[1].reports]


def test_its_round_in_a_store_is_that_over_tcp(tmp_path: Path) -> None:
    """With a learning rate that changes, bit for bit."""
    rates: Callable[[int], float] = lambda step: 0.01 * (step + 1)  # noqa: E731
    meeting = Meeting(tmp_path, 2, **SLOWMO)
    met = run_islands(2, lambda island: go_on(meeting.island(island), 4, rates).leave())

    def island_main(island: int) -> torch.Tensor:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = run.session(island)
        session.join(open_shards(model, optimizer), tmp_path / f"fixed-{island}")
        for step, batch in enumerate(itertools.islice(batches(100 + island, 64), 8)):
            optimizer.param_groups[0]["lr"] = rates(step)
            take_step(model, optimizer, batch)
            if session.outer.count_step():
                session.sync()
        return weights_of(model)

    run = Run(tmp_path, 2, sync_every=2, **SLOWMO)
    for member, expected in zip(met, run_islands(2, island_main), strict=True):
        assert torch.equal(member.weights, expected)
