"""Whole runs of islands as threads: what comes out, and what is refused or undone."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_diloco.codecs import Codec
from hf_diloco.codecs.int8 import Int8Codec
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import (
    CheckpointError,
    DamagedTransferError,
    DivergedError,
    DuplicateIslandError,
    ExchangeError,
    FingerprintError,
    IslandLostError,
    RendezvousError,
    StopRequested,
    StoreError,
)
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership import all_gather
from hf_diloco.outer.checkpoint import read_index
from hf_diloco.outer.export import outer_parameters
from hf_diloco.rounds import fixed
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import cosine_to_others
from hf_diloco.transport.base import Exchange, Lane
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.transport.open import Transport
from tests.clocks import LONG, StillClock
from tests.fixed_runs import (
    FaultyExchange,
    FaultyTransport,
    Run,
    assert_resumed_is_uninterrupted,
    cut,
    raise_it,
    save,
)
from tests.islands import run_islands, try_islands
from tests.small_model import batches, make_model, new_tensor_bytes, set_weights, take_step, weights_of

pytestmark = pytest.mark.usefixtures("quick_farewell")

FEDAVG: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


@dataclass
class Trained:
    weights: torch.Tensor
    reports: list[SyncReport]


def train(
    run: Run,
    data: Callable[[int], torch.Tensor],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(
        m.parameters(), lr=0.01
    ),
) -> list[Trained]:
    """Each island takes one step on each of its batches."""

    def island_main(island: int) -> Trained:
        model = make_model()
        optimizer = make_optimizer(model)
        session = run.join(island, model)
        reports = []
        for batch in data(island):
            take_step(model, optimizer, batch)
            if session.outer.count_step(weight=len(batch)):
                reports.append(session.sync())
        session.leave(finished=True)
        return Trained(weights_of(model), reports)

    return run_islands(run.num_islands, island_main)


def train_alone(
    data: torch.Tensor,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(
        m.parameters(), lr=0.01
    ),
) -> torch.Tensor:
    model = make_model()
    optimizer = make_optimizer(model)
    for batch in data:
        take_step(model, optimizer, batch)
    return weights_of(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# What comes out


@pytest.mark.parametrize("num_islands", [2, 3])
def test_a_sync_every_step_of_sgd_is_data_parallel(num_islands: int, tmp_path: Path) -> None:
    run = Run(tmp_path, num_islands, sync_every=1, **FEDAVG)
    trained = train(run, lambda island: batches(island, 12), sgd)
    whole = torch.cat([batches(island, 12) for island in range(num_islands)], dim=1)
    for one in trained:
        torch.testing.assert_close(one.weights, train_alone(whole, sgd), rtol=1e-5, atol=1e-6)


def test_weights_by_examples_make_unequal_batches_data_parallel(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, sync_every=1, weight_by="examples", **FEDAVG)
    trained = train(run, lambda island: batches(island, 12, size=6 if island else 2), sgd)
    whole = torch.cat([batches(0, 12, size=2), batches(1, 12, size=6)], dim=1)
    torch.testing.assert_close(trained[0].weights, train_alone(whole, sgd), rtol=1e-5, atol=1e-6)
    assert [one.reports[0].weight for one in trained] == [2, 6]


def test_one_island_with_lr_1_and_no_momentum_is_no_outer_loop(tmp_path: Path) -> None:
    (trained,) = train(Run(tmp_path, 1, sync_every=4, **FEDAVG), lambda island: batches(0, 20))
    torch.testing.assert_close(trained.weights, train_alone(batches(0, 20)), rtol=1e-4, atol=1e-5)
    assert len(trained.reports) == 5


def test_the_codec_is_ready_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Codec] = []
    monkeypatch.setattr(Int8Codec, "prepare", lambda codec: prepared.append(codec))
    session = Run(tmp_path, 1, payload="int8").join(0, make_model())
    assert prepared == [session.outer.codec]


@pytest.mark.parametrize("num_islands", [2, 4])
@pytest.mark.parametrize("payload", ["fp32", "bf16", "fp16"])
def test_islands_with_equal_data_are_one_island_bit_for_bit(
    num_islands: int, payload: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Powers of two, so that the average of equal values is exact; two islands send 16 bits only once."""
    if payload != "fp32" and num_islands > 2:
        num_islands = 2
    several = train(Run(tmp_path / "a", num_islands, sync_every=4, payload=payload), lambda island: batches(0, 20))
    if payload == "fp32":
        (one,) = train(Run(tmp_path / "b", 1, sync_every=4), lambda island: batches(0, 20))
        assert torch.equal(several[0].weights, one.weights)
        assert [report.outer_hash for report in several[0].reports] == [report.outer_hash for report in one.reports]
        assert all(report.cosine == pytest.approx(1, abs=1e-5) for report in several[0].reports)
    assert all(torch.equal(other.weights, several[0].weights) for other in several)
    assert caplog.text.count("they seem to train on the same data") == num_islands, "once an island"


def test_one_island_with_a_smaller_lr_is_lookahead(tmp_path: Path) -> None:
    data = batches(0, 12)
    (trained,) = train(Run(tmp_path, 1, sync_every=3, outer_lr=0.5, outer_momentum=0.0), lambda island: data, sgd)
    model = make_model()
    slow = weights_of(model)
    for start in range(0, 12, 3):
        for batch in data[start : start + 3]:
            take_step(model, sgd(model), batch)
        slow = slow + 0.5 * (weights_of(model) - slow)
        set_weights(model, slow)
    torch.testing.assert_close(trained.weights, slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("payload", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_islands", [2, 3, 5])
def test_all_islands_hold_the_same_bits_after_every_round(num_islands: int, payload: str, tmp_path: Path) -> None:
    run = Run(tmp_path, num_islands, sync_every=2, payload=payload)
    trained = train(run, lambda island: batches(island, 10))
    hashes = [[report.outer_hash for report in one.reports] for one in trained]
    assert len(set(hashes[0])) == 5, "every round moves"
    assert all(other == hashes[0] for other in hashes)
    assert all(torch.equal(other.weights, trained[0].weights) for other in trained)


def test_what_a_round_reports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, 2, sync_every=2, payload="bf16")
    trained = train(run, lambda island: batches(island, 6))
    num_parameters = trained[0].weights.numel()
    for one in trained:
        assert [report.round for report in one.reports] == [1, 2, 3]
        for report in one.reports:
            assert report.participants == [0, 1]
            assert report.bytes_sent == report.bytes_received == 2 * num_parameters
            assert report.weight == 1
            assert report.cosine is not None
            assert -1 <= report.cosine <= 1
            assert report.pseudo_gradient_norm > 0
            seconds = (report.seconds_computing, report.seconds_waiting, report.seconds_exchanging)
            assert all(0 <= value < 60 for value in (*seconds, report.seconds_applying))
    assert "same data" not in caplog.text


def test_norm_and_cosine_of_known_pseudo_gradients(tmp_path: Path) -> None:
    def island_main(island: int) -> SyncReport:
        model = nn.Linear(2, 1, bias=False)
        set_weights(model, torch.zeros(2))
        session = run.join(island, model)
        set_weights(model, [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]), torch.tensor([4.0, 0.0])][island])
        session.outer.count_step()
        return session.sync()

    run = Run(tmp_path, 3, sync_every=1)
    reports = run_islands(3, island_main)
    assert [report.pseudo_gradient_norm for report in reports] == [5, 2, 4]
    # The others' averages, up to sign and scale: (2, 1), (3.5, 2), (1.5, 3).
    expected = [(3 * 2 + 4 * 1) / (5 * 5**0.5), 2 / 16.25**0.5, 1.5 / 11.25**0.5]
    assert [report.cosine for report in reports] == pytest.approx(expected, rel=1e-5)


def test_a_single_island_has_no_others_to_compare_with() -> None:
    assert cosine_to_others(1.0, 1.0, 1.0, share=1.0) is None
    assert cosine_to_others(0.0, 0.0, 0.0, share=0.5) is None, "no pseudo-gradient, no direction"


@pytest.mark.parametrize("weight_by", ["examples", "tokens"])
def test_weights_3_to_1_by_hand(weight_by: str, tmp_path: Path) -> None:
    def island_main(island: int) -> torch.Tensor:
        model = make_model()
        set_weights(model, 10.0)
        session = run.join(island, model)
        set_weights(model, 10.0 - (5.0 if island else 1.0))
        assert session.outer.count_step(weight=2.0 if island else 6.0)
        session.sync()
        return weights_of(model)

    run = Run(tmp_path, 2, sync_every=1, weight_by=weight_by, **FEDAVG)
    for weights in run_islands(2, island_main):  # (3 * 1 + 1 * 5) / 4 = 2
        assert torch.equal(weights, torch.full_like(weights, 8.0))


def test_weights_count_from_round_to_round(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, sync_every=2, weight_by="examples")
    (trained,) = train(run, lambda island: batches(0, 6, size=7))
    assert [report.weight for report in trained.reports] == [14, 14, 14]


def test_inner_optimizer_state_is_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, sync_every=2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = run.join(0, model)
    for batch in batches(0, 2):
        take_step(model, optimizer, batch)
        session.outer.count_step()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    session.sync()
    after = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_frozen_parameters_are_neither_sent_nor_touched(tmp_path: Path) -> None:
    def island_main(island: int) -> tuple[torch.Tensor, SyncReport]:
        model = make_model(seed=island)
        model[0].requires_grad_(False)
        session = run.join(island, model)
        session.outer.count_step()
        return weights_of(model[0]), session.sync()

    run = Run(tmp_path, 2, sync_every=1)
    results = run_islands(2, island_main)
    for island, (frozen, report) in enumerate(results):
        assert torch.equal(frozen, weights_of(make_model(seed=island)[0]))
        assert report.bytes_sent == 4 * 9


def test_16_bit_parameters_have_an_outer_state_of_32(tmp_path: Path) -> None:
    model = make_model().bfloat16()
    session = Run(tmp_path, 1, sync_every=1).join(0, model)
    for _ in range(3):
        set_weights(model, weights_of(model).float() - 1e-2)
        session.outer.count_step()
        session.sync()
    outer = session.outer.current.method.parameters
    assert outer.dtype == torch.float32
    assert torch.equal(weights_of(model), outer.bfloat16())


def test_outer_state_takes_8_bytes_a_parameter_and_4_to_work_with(tmp_path: Path) -> None:
    model = nn.Linear(1000, 3000, bias=False)
    with new_tensor_bytes() as new_bytes:
        session = Run(tmp_path, 1, sync_every=1).join(0, model)
        for _ in range(2):
            session.outer.count_step()
            session.sync()
        new = new_bytes()
    fixed = 4 << 20  # buffers that do not grow with the model
    assert 12 * 3_000_000 <= new <= 12 * 3_000_000 + fixed


# What is left out


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_an_island_that_is_not_finite_is_left_out(
    bad: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def island_main(island: int) -> tuple[torch.Tensor, SyncReport]:
        model = make_model()
        set_weights(model, 10.0)
        session = run.join(island, model)
        values = torch.full_like(weights_of(model), 10.0 - (1.0 if island == 0 else 3.0))
        if island == 1:
            values[7] = bad
        set_weights(model, values)
        session.outer.count_step()
        report = session.sync()
        return weights_of(model), report

    run = Run(tmp_path, 3, sync_every=1, **FEDAVG)
    with caplog.at_level(logging.WARNING, "hf_diloco"):
        results = run_islands(3, island_main)
    for weights, report in results:
        assert torch.equal(weights, torch.full_like(weights, 8.0)), "the average of 9 and 7"
        assert report.participants == [0, 2]
    assert math.isnan(results[1][1].pseudo_gradient_norm)
    assert "round 1: the pseudo-gradient of island 1 is left out (not finite)" in caplog.text


def test_if_no_island_is_finite_nothing_happens(tmp_path: Path) -> None:
    def island_main(island: int) -> None:
        model = make_model()
        session = run.join(island, model)
        anchor = session.outer.current.method.parameters.clone()
        set_weights(model, math.nan)
        session.outer.count_step()
        with pytest.raises(
            ExchangeError, match=r"no island has a pseudo-gradient that counts.*lower the inner learning rate"
        ):
            session.sync()
        assert session.outer.round == 0
        assert weights_of(model).isnan().all()
        assert torch.equal(session.outer.current.method.parameters, anchor)

    run = Run(tmp_path, 2, sync_every=1)
    run_islands(2, island_main)


def test_if_no_island_has_examples_that_is_said(tmp_path: Path) -> None:
    def island_main(island: int) -> None:
        session = run.join(island, make_model())
        session.outer.count_step(weight=0.0)
        with pytest.raises(
            ExchangeError, match=r"counts.*no examples.*step\(weight=\.\.\.\), or set weight_by to uniform"
        ):
            session.sync()

    run = Run(tmp_path, 2, sync_every=1, weight_by="examples")
    run_islands(2, island_main)


# What is undone


def flip(mean: torch.Tensor) -> None:
    mean[3] += 1e-6


def damage(mean: torch.Tensor) -> None:
    raise DamagedTransferError([0])


@pytest.mark.parametrize(
    ("spoil", "own_error", "others_error", "text"),
    [
        (cut, ExchangeError, IslandLostError, r"round 3 was aborted; island 1: the link was cut; start all islands"),
        (
            flip,
            DivergedError,
            DivergedError,
            r"round 3 .* again and again: .* different averages .*memory of island 1, or",
        ),
        (damage, DamagedTransferError, IslandLostError, "aborted; island 1: what island 0 sent arrived damaged"),
    ],
)
def test_a_round_that_fails_changes_nothing(
    spoil: Callable[[torch.Tensor], None], own_error: type, others_error: type, text: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, 3, sync_every=2)
    faulty = threading.Event()

    def spoil_later(mean: torch.Tensor) -> None:
        if faulty.is_set():
            spoil(mean)

    def island_main(island: int) -> None:
        transport = run.transport(island)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = run.join(
            island, model, transport=FaultyTransport(transport, spoil_later) if island == 1 else transport
        )
        for batch in batches(island, 4):
            take_step(model, optimizer, batch)
            if session.outer.count_step():
                session.sync()
        faulty.set()
        for batch in batches(island, 2):
            take_step(model, optimizer, batch)
            session.outer.count_step()
        parameters = weights_of(model)
        state = {name: value.clone() for name, value in session.outer.current.method.state_dict().items()}
        moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
        outer_hash = session.outer.outer_hash
        try:
            session.sync()
        finally:
            assert torch.equal(weights_of(model), parameters)
            assert all(
                torch.equal(value, state[name]) for name, value in session.outer.current.method.state_dict().items()
            )
            assert all(torch.equal(a["exp_avg"], b) for a, b in zip(optimizer.state.values(), moments, strict=True))
            assert (session.outer.round, session.outer.steps, session.outer.outer_hash) == (2, 2, outer_hash)
            assert session.outer.is_due

    outcomes = try_islands(3, island_main)
    assert type(outcomes[1]) is own_error, outcomes[1]
    for island in (0, 2):
        with pytest.raises(others_error, match=text):
            raise_it(outcomes[island])


@pytest.mark.parametrize("fault", ["flipped", "damaged"])
@pytest.mark.parametrize(
    ("settings", "spoilt"),
    [
        ({"sync_every": 2}, (3, 9)),
        ({"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1}, (3, 8)),
        ({"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 2}, (7,)),
        ({"sync_every": 4, "num_fragments": 2}, (3, 9)),
        ({"sync_every": 4, "method": "eager"}, (3, 5)),
    ],
    ids=["diloco", "overlapped", "overlapped to the end", "streaming", "eager"],
)
def test_a_round_whose_averages_differ_once_is_taken_again(
    settings: dict[str, Any], spoilt: Sequence[int], fault: str, tmp_path: Path
) -> None:
    """`spoilt` exchanges: in the middle of the run, and after its last step."""
    run = Run(tmp_path, 2, **settings)
    seen = []

    def spoil_some(mean: torch.Tensor) -> None:
        seen.append(1)
        if len(seen) in spoilt:
            if fault == "damaged":
                raise DamagedTransferError([0])
            mean[3] += 1e-3

    def island_main(island: int) -> tuple[list[SyncReport], str, DivergedError | None]:
        transport = run.transport(island)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = run.join(
            island, model, transport=FaultyTransport(transport, spoil_some) if island == 1 else transport
        )
        reports = []
        for number, batch in enumerate(batches(island, 16)):
            take_step(model, optimizer, batch)
            session.outer.count_step()
            if session.is_due(number == 15):
                reports += session.advance(number == 15)
        session.close()
        return reports, session.outer.outer_hash, None

    first, second = run_islands(2, island_main)
    assert len(seen) > max(spoilt)
    assert first[1] == second[1]
    assert [report.round for report in first[0]] == list(range(1, len(first[0]) + 1))
    assert [report.outer_hash for report in first[0]] == [report.outer_hash for report in second[0]]


def test_what_comes_damaged_from_an_island_that_is_left_out_has_the_round_taken_again(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, sync_every=1)
    seen = []

    def spoil_once(mean: torch.Tensor) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise DamagedTransferError([2])

    def island_main(island: int) -> SyncReport:
        transport, model = run.transport(island), make_model()
        session = run.join(
            island, model, transport=FaultyTransport(transport, spoil_once) if island == 1 else transport
        )
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan if island == 2 else 0.5)
        session.outer.count_step()
        return session.sync()

    reports = run_islands(3, island_main)
    assert [report.participants for report in reports] == [[0, 1]] * 3
    assert len({report.outer_hash for report in reports}) == 1


def test_an_island_that_does_not_come_leaves_the_others_unchanged(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, timeout=0.4, sync_every=1)

    def island_main(island: int) -> None:
        model = make_model()
        session = run.join(island, model)
        if island == 1:
            return
        set_weights(model, 0.25)
        session.outer.count_step()
        with pytest.raises(IslandLostError, match="island 1 did not reach round 1 within sync_timeout") as caught:
            session.sync()
        assert caught.value.islands == (1,)
        assert torch.equal(weights_of(model), torch.full_like(weights_of(model), 0.25))
        assert session.outer.is_due

    run_islands(2, island_main)


def test_who_is_asked_to_stop_before_anybody_else_has_come_takes_leave_of_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fixed.FAREWELL_SECONDS, "early", LONG)
    clock = StillClock()
    with pytest.raises(StopRequested):
        Run(tmp_path, 2).join(0, make_model(), should_stop=lambda: True, clock=clock)
    assert clock.time - StillClock().time < 1


def test_a_wish_to_stop_ends_the_wait_for_others(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, sync_every=1)
    stop, stopped = threading.Event(), threading.Event()

    def island_main(island: int) -> None:
        model = make_model()
        session = run.join(island, model, should_stop=lambda: island == 0 and stop.is_set())
        session.outer.count_step()
        if island == 0:
            threading.Timer(0.3, stop.set).start()
            with pytest.raises(StopRequested):
                session.sync()
            stopped.set()
            session.leave(finished=False)
        else:
            assert stopped.wait(30)
            with pytest.raises(IslandLostError, match="island 0 left the run before round 1"):
                session.sync()
            session.leave(finished=False)

    run_islands(2, island_main)


class DeafLane(FaultyExchange):
    """Misses the messages of one island."""

    def __init__(self, inner: Exchange, deaf_to: int) -> None:
        super().__init__(inner, lambda mean: None)
        self._deaf_to = deaf_to

    def prepare(self, values: torch.Tensor, codec: Codec) -> None:
        self._inner.prepare(values, codec)

    def messages(self) -> dict[int, bytes]:
        return {peer: message for peer, message in super().messages().items() if peer != self._deaf_to}


class DeafTransport(Transport):
    def __init__(self, inner: Transport, deaf_to: int) -> None:
        self.store = inner.store
        self._inner, self._deaf_to = inner, deaf_to

    def open(self, lane: int) -> Exchange:
        return DeafLane(self._inner.open(lane), self._deaf_to)


class SocketTransport(Transport):
    """Real connections, found through a store in memory."""

    def __init__(self, run: Run, island: int) -> None:
        self.store = run.store
        self._run, self._island = run, island

    def open(self, lane: int) -> Exchange:
        return MeshExchange(Lane(self.store, str(lane), self._island, self._run.num_islands, "127.0.0.1", LONG))


@pytest.fixture
def links_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a link does not carry is not found in the store half a second later, when a deaf island is to stop."""
    monkeypatch.setattr(all_gather, "LOOK_SECONDS", LONG)


@pytest.mark.usefixtures("links_only")
@pytest.mark.parametrize(
    "settings",
    [{"sync_every": 1}, {"sync_every": 2, "num_fragments": 2, "fragment_sync_delay": 1}],
    ids=["diloco", "streaming"],
)
def test_who_goes_on_while_an_island_leaves_learns_it_at_once(settings: dict[str, Any], tmp_path: Path) -> None:
    """Islands 0 and 2 have heard all, and are in the exchange when island 1, which has not, is asked to stop."""
    run = Run(tmp_path, 3, timeout=300, **settings)
    begun = threading.Event()

    def island_main(island: int) -> None:
        model = make_model()
        transport = run.transport(island)
        session = run.join(
            island,
            model,
            should_stop=lambda: island == 1 and begun.is_set(),
            transport=DeafTransport(transport, deaf_to=2) if island == 1 else transport,
        )
        before = weights_of(model)
        session.outer.count_step()
        if island == 1:
            threading.Timer(0.2, begun.set).start()
        try:
            session.advance(is_last=True)
        finally:
            assert session.outer.round == 0
            assert torch.equal(weights_of(model), before)
            session.leave(finished=False)

    first, stopped, third = try_islands(3, island_main)
    assert isinstance(stopped, StopRequested)
    for outcome in (first, third):
        with pytest.raises(IslandLostError, match="island 1 left the run before round 1"):
            raise_it(outcome)


@pytest.mark.usefixtures("links_only")
@pytest.mark.parametrize("is_asked", [True, False])
def test_who_leaves_after_its_values_does_not_seem_lost(is_asked: bool, tmp_path: Path) -> None:
    """Island 0's values go ahead of what it knows: island 1 has the average when island 0 is asked to stop."""
    run = Run(tmp_path, 2, timeout=300, sync_every=1)
    begun = threading.Event()

    def island_main(island: int) -> None:
        transport = SocketTransport(run, island)
        session = run.join(
            island,
            make_model(),
            should_stop=lambda: begun.is_set() and (is_asked or island == 0),
            transport=DeafTransport(transport, deaf_to=1) if island == 0 else transport,
        )
        session.outer.count_step()
        if island == 0:
            threading.Timer(0.2, begun.set).start()
        try:
            session.advance(is_last=True)
        finally:
            session.leave(finished=False)

    stopped, other = try_islands(2, island_main)
    assert isinstance(stopped, StopRequested)
    with pytest.raises(StopRequested if is_asked else IslandLostError, match=None if is_asked else "island 0 left"):
        raise_it(other)


def test_who_leaves_early_wakes_those_who_wait(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, sync_every=1)

    def island_main(island: int) -> None:
        session = run.join(island, make_model())
        if island == 0:
            session.leave(finished=False)
            assert session.has_left
        else:
            session.outer.count_step()
            with pytest.raises(IslandLostError, match="island 0 left the run before round 1"):
                session.sync()
            session.leave(finished=False)

    run_islands(2, island_main)


def test_different_outer_parameters_before_a_round_stop_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, sync_every=1)

    def island_main(island: int) -> None:
        session = run.join(island, make_model())
        session.outer.outer_hash = f"abc{island}"
        session.outer.count_step()
        with pytest.raises(DivergedError, match=r"before round 1 .*\(island 0: abc0, island 1: abc1\)"):
            session.sync()

    run_islands(2, island_main)


# Joining


def test_all_start_from_island_0s_weights(tmp_path: Path) -> None:
    def island_main(island: int) -> tuple[bool, torch.Tensor, str]:
        model = make_model(seed=island)
        session = run.session(island)
        replaced = session.join(open_shards(model, None), tmp_path / str(island))
        assert session.speaks_for_all == (island == 0)
        assert torch.equal(session.outer.current.method.parameters, weights_of(model))
        return replaced, weights_of(model), session.outer.outer_hash

    run = Run(tmp_path, 3)
    results = run_islands(3, island_main)
    assert [replaced for replaced, _, _ in results] == [True] * 3
    assert all(torch.equal(weights, weights_of(make_model(seed=0))) for _, weights, _ in results)
    assert len({outer_hash for *_, outer_hash in results}) == 1


@pytest.mark.parametrize(("seed", "dtype", "is_refused"), [(0, "float32", 0), (1, "float32", 1), (1, "bfloat16", 0)])
def test_frozen_weights_must_be_equal_in_one_dtype(seed: int, dtype: str, is_refused: int, tmp_path: Path) -> None:
    """As LoRA's base model; the trained weights of islands may differ at first."""

    def island_main(island: int) -> None:
        model = make_model(seed * island, width=1024)
        next(model.parameters()).requires_grad_(False)
        if island:
            model.get_submodule("0").to(getattr(torch, dtype))
        run.session(island).join(open_shards(model, None), tmp_path / str(island))

    run = Run(tmp_path, 2, timeout=5)
    for outcome in try_islands(2, island_main):
        if is_refused:
            assert isinstance(outcome, FingerprintError)
            assert "frozen weights (float32) differs" in str(outcome)
            assert "load the same base model everywhere" in str(outcome)
        else:
            assert not isinstance(outcome, BaseException), outcome


def test_equal_weights_are_not_sent(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    joined = run_islands(
        2, lambda island: run.session(island).join(open_shards(make_model(), None), tmp_path / str(island))
    )
    assert joined == [False, False]


@pytest.mark.parametrize(
    ("config", "facts", "text"),
    [
        ({"sync_every": 7}, {}, r"sync_every differs \(island 0: 500, island 1: 7\)"),
        ({"outer_lr": 0.4}, {}, r"outer_lr differs \(island 0: 0.7, island 1: 0.4\)"),
        ({"outer_momentum": 0.5}, {}, r"outer_momentum differs \(island 0: 0.9, island 1: 0.5\)"),
        ({"nesterov": False}, {}, r"nesterov differs \(island 0: True, island 1: False\)"),
        ({"payload": "bf16"}, {}, r"payload differs \(island 0: fp32, island 1: bf16\)"),
        ({"weight_by": "tokens"}, {}, r"weight_by differs \(island 0: uniform, island 1: tokens\)"),
        ({}, {"tokenizer": "cd"}, r"tokenizer differs \(island 0: ab, island 1: cd\)"),
        ({}, {"tokenizer": "ab", "extra": 1}, r"extra differs \(island 0: None, island 1: 1\)"),
    ],
)
def test_islands_that_train_different_things_are_refused(
    config: dict[str, Any], facts: dict[str, Any], text: str, tmp_path: Path
) -> None:
    def island_main(island: int) -> None:
        session = run.session(island, config=config if island else {})
        own_facts = facts if island and facts else {"tokenizer": "ab"}
        session.join(open_shards(make_model(), None), tmp_path / str(island), own_facts)

    run = Run(tmp_path, 2)
    for outcome in try_islands(2, island_main):
        with pytest.raises(FingerprintError, match=rf"do not train the same thing: {text}; make it equal"):
            raise_it(outcome)


def test_islands_with_different_models_are_refused(tmp_path: Path) -> None:
    def island_main(island: int) -> None:
        run.join(island, make_model(width=8 + island))

    run = Run(tmp_path, 2)
    for outcome in try_islands(2, island_main):
        with pytest.raises(FingerprintError, match=r"trainable parameters differs \(island 0: 57, island 1: 64\)"):
            raise_it(outcome)


def test_islands_with_other_names_for_as_many_parameters_are_refused(tmp_path: Path) -> None:
    def island_main(island: int) -> None:
        run.join(island, nn.Linear(5, 3, bias=False) if island else nn.Linear(3, 5, bias=False))

    def named(island: int) -> None:
        model = nn.Sequential(nn.Linear(5, 3, bias=False))
        run2.join(island, model if island else model[0])

    run, run2 = Run(tmp_path, 2), Run(tmp_path, 2)
    run_islands(2, island_main)  # the outer loop sees flat parameters only: 15 are 15
    for outcome in try_islands(2, named):
        with pytest.raises(FingerprintError, match=r"model \(names and sizes\) differs"):
            raise_it(outcome)


def test_islands_that_write_to_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "same")

    def island_main(island: int) -> None:
        session = run.session(island)
        session.join(open_shards(make_model(), None), tmp_path / ("link" if island else "same"))

    run = Run(tmp_path, 2)
    for outcome in try_islands(2, island_main):
        with pytest.raises(
            RendezvousError, match=r"islands 0 and 1 both write to .*/same .*give each its own output_dir"
        ):
            raise_it(outcome)


def test_a_number_can_be_taken_once(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.session(1)
    with pytest.raises(DuplicateIslandError, match="as island 1"):
        run.session(1)


def test_islands_that_do_not_join_are_named(free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Over a real rendezvous. Nobody waits for the goodbye of islands that never came."""
    caplog.set_level(logging.INFO, "hf_diloco")
    url = f"tcp://127.0.0.1:{free_port}"
    session = FixedSession(DiLoCoConfig(num_islands=3, rendezvous=url, join_timeout=0.5), IslandGroup())
    with pytest.raises(
        RendezvousError, match=r"islands \[1, 2\] have not joined within 0.5 s \(join_timeout\)"
    ) as caught:
        session.join(open_shards(make_model(), None), tmp_path)
    assert f"num_islands (3) and rendezvous ({url})" in str(caught.value)
    assert "goodbye" not in caplog.text


def test_a_rendezvous_that_goes_while_islands_join_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)

    class Gone:
        """The machine of island 0 has gone down."""

        def __getattr__(self, name: str) -> Any:
            return getattr(run.store, name)

        def find_all(self, keys: list[str]) -> dict[str, bytes]:
            raise StoreError("nobody listens there")

    transport = run.transport(1)
    transport.store = Gone()  # type: ignore[assignment]
    with pytest.raises(IslandLostError, match=r"which island 0 keeps, does not answer \(nobody listens there\)"):
        run.join(1, make_model(), transport=transport)


@pytest.mark.parametrize("topic", ["join/1", "state/1", "rounds/00000001/00/offers"])
@pytest.mark.parametrize("content", ["nonsense", "{}", '{"weight": 1, "digest": "ab", "x": 1}'])
def test_records_of_something_else_are_refused(topic: str, content: str, tmp_path: Path) -> None:
    run = Run(tmp_path, 2, timeout=2, sync_every=1)

    class Forger:
        """Writes something else in place of one record."""

        def __getattr__(self, name: str) -> Any:
            return getattr(run.store, name)

        def set(self, key: str, value: str) -> None:
            run.store.set(key, content if key == topic else value)

    class ForgedLane(FaultyExchange):
        """Sends something else in place of one message."""

        def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
            forged = f'{{"topic": "{topic}", "record": {content}}}'.encode()
            return super().send_message(forged if json.loads(message)["topic"] == topic else message, notify)

    class ForgedTransport(FaultyTransport):
        def open(self, lane: int) -> Exchange:
            return ForgedLane(run.transport(1).open(lane), lambda mean: None)

    def island_main(island: int) -> None:
        transport = run.transport(island)
        if island:
            transport = ForgedTransport(transport, lambda mean: None)
            transport.store = Forger()  # type: ignore[assignment]
        session = run.join(island, make_model(), transport=transport)
        session.outer.count_step()
        session.sync()

    with pytest.raises(RendezvousError, match=r"island 1 sent|is not JSON"):
        raise_it(try_islands(2, island_main)[0])


# Going on from a checkpoint


@pytest.mark.parametrize("at", [4, 5, 6, 7])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(at: int, momentum: float, tmp_path: Path) -> None:
    config: dict[str, Any] = {"sync_every": 3, "outer_momentum": momentum, "weight_by": "examples"}
    rounds = assert_resumed_is_uninterrupted(tmp_path, 9, at, config, lambda session, _: session.outer.round)
    assert rounds == [3, 3]


def checkpoints_of_rounds(run: Run, rounds: Sequence[Sequence[int]]) -> list[Path]:
    """Trains all islands together; each keeps checkpoints of the rounds given for it."""

    def island_main(island: int) -> Path:
        model = make_model()
        session = run.join(island, model)
        for number in range(1, 4):
            set_weights(model, float(number))
            session.outer.count_step()
            session.sync()
            if number in rounds[island]:
                save(session, run.folder / str(island), number)
        session.leave(finished=True)
        return run.folder / str(island)

    return run_islands(run.num_islands, island_main)


def join_from(run: Run, checkpoints: Sequence[Path | None], width: int = 8) -> list[BaseException | None]:
    """The model is that of the checkpoint, unless it has another width."""

    def island_main(island: int) -> None:
        model, checkpoint = make_model(width=width), checkpoints[island]
        if checkpoint is not None and width == 8:
            model.load_state_dict(outer_parameters(checkpoint, read_index(checkpoint)))
        session = run.session(island)
        session.join(open_shards(model, None), run.folder / str(island), checkpoint=checkpoint)

    return try_islands(run.num_islands, island_main)


def test_islands_at_different_rounds_are_refused(tmp_path: Path) -> None:
    first, second = checkpoints_of_rounds(Run(tmp_path, 2, sync_every=1), [[1, 2], [1, 2]])
    outcomes = join_from(Run(tmp_path, 2, sync_every=1), [first / "checkpoint-1", second / "checkpoint-2"])
    text = r"are not at the same round \(island 0: round 1 of a checkpoint, island 1: round 2 of a checkpoint\)"
    for outcome in outcomes:
        with pytest.raises(CheckpointError, match=text):
            raise_it(outcome)
    for outcome in join_from(Run(tmp_path, 2, sync_every=1), [first / "checkpoint-1", None]):
        with pytest.raises(CheckpointError, match="island 1: a fresh start"):
            raise_it(outcome)


def test_checkpoints_of_different_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first, _ = checkpoints_of_rounds(Run(tmp_path / "a", 2, sync_every=1), [[1], [1]])
    _, second = checkpoints_of_rounds(Run(tmp_path / "b", 2, sync_every=1, outer_lr=0.1), [[1], [1]])
    run = Run(tmp_path / "c", 2, sync_every=1)
    for outcome in join_from(run, [first / "checkpoint-1", second / "checkpoint-1"]):
        with pytest.raises(DivergedError, match=r"checkpoints of round 1 hold different outer parameters"):
            raise_it(outcome)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    (folder,) = checkpoints_of_rounds(Run(tmp_path, 1, sync_every=1), [[1]])
    (outcome,) = join_from(Run(tmp_path, 1, sync_every=1), [folder / "checkpoint-1"], width=9)
    with pytest.raises(CheckpointError, match=r"outer state of another model: 57 trainable parameters, here 64"):
        raise_it(outcome)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([[], []], [None, None]),
        ([[1, 2, 3], [1, 2, 3]], ["checkpoint-3", "checkpoint-3"]),
        ([[1, 2, 3], [1, 2]], ["checkpoint-2", "checkpoint-2"]),
        ([[1, 3], [1, 2]], ["checkpoint-1", "checkpoint-1"]),
    ],
)
def test_the_newest_round_that_all_hold_is_found(
    rounds: Sequence[Sequence[int]], expected: list[str | None], tmp_path: Path
) -> None:
    checkpoints_of_rounds(Run(tmp_path, 2, sync_every=1), rounds)
    run = Run(tmp_path, 2, sync_every=1)
    found = run_islands(2, lambda island: run.session(island).common_checkpoint(tmp_path / str(island)))
    assert [path and path.name for path in found] == expected
    assert [path and path.parent.name for path in found] == [name and str(i) for i, name in enumerate(expected)]


@pytest.mark.parametrize("rounds", [[[1], [2, 3]], [[1, 2], []]])
def test_checkpoints_of_no_common_round_are_refused(rounds: Sequence[Sequence[int]], tmp_path: Path) -> None:
    checkpoints_of_rounds(Run(tmp_path, 2, sync_every=1), rounds)
    run = Run(tmp_path, 2, sync_every=1)
    for outcome in try_islands(2, lambda island: run.session(island).common_checkpoint(tmp_path / str(island))):
        with pytest.raises(CheckpointError, match=r"no checkpoint of a common round \(island 0: \[1.*start anew"):
            raise_it(outcome)


def swap_newest(tmp_path: Path, rounds: Sequence[int]) -> None:
    """Both islands hold `rounds`, but of the last of them each another life's, which went another way."""
    for name, rate in (("a", 0.7), ("b", 0.1)):
        (tmp_path / name).mkdir()
        checkpoints_of_rounds(Run(tmp_path / name, 2, sync_every=1, outer_lr=rate), [rounds, rounds])
    last = f"1/checkpoint-{rounds[-1]}"
    (tmp_path / "a" / last).rename(tmp_path / "a" / "1" / "replaced")
    (tmp_path / "b" / last).rename(tmp_path / "a" / last)


def test_islands_do_not_resume_one_round_from_different_lives(tmp_path: Path) -> None:
    """Both went back to round 1; the other was killed again when only this one had written its next checkpoint."""
    swap_newest(tmp_path, [1, 2])
    run = Run(tmp_path / "c", 2, sync_every=1)
    found = run_islands(2, lambda island: run.session(island).common_checkpoint(tmp_path / "a" / str(island)))
    assert [path and path.name for path in found] == ["checkpoint-1", "checkpoint-1"]


def test_checkpoints_of_different_lives_alone_are_refused(tmp_path: Path) -> None:
    swap_newest(tmp_path, [2])
    run = Run(tmp_path / "c", 2, sync_every=1)
    for outcome in try_islands(2, lambda island: run.session(island).common_checkpoint(tmp_path / "a" / str(island))):
        with pytest.raises(CheckpointError, match=r"island 1: \[2\]; of the same round, they hold different"):
            raise_it(outcome)


def test_a_momentum_that_is_new_begins_at_0(tmp_path: Path) -> None:
    (folder,) = checkpoints_of_rounds(Run(tmp_path, 1, sync_every=1, outer_momentum=0.0), [[2]])
    run = Run(tmp_path, 1, sync_every=1, outer_momentum=0.9)
    session, model, checkpoint = run.session(0), make_model(), folder / "checkpoint-2"
    model.load_state_dict(outer_parameters(checkpoint, read_index(checkpoint)))
    session.join(open_shards(model, None), tmp_path / "0", checkpoint=checkpoint)
    assert session.outer.round == 2
    assert not session.outer.current.method.state_dict()["momentum"].any()
