"""SlowMo over gossip methods against NumPy written from its equations; who lacks the outer state; what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_diloco.errors import CheckpointError, ConfigError, IslandLostError
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.config import GossipConfig, SlowMoSettings
from hf_diloco.gossip.neighbours import MemoryGraph, MemoryNeighbours, Neighbours
from hf_diloco.methods.gossip import GossipOptimizer, make_optimizer
from hf_diloco.methods.topology import RandomMatching, make_topology
from hf_diloco.report import load_run, summarise
from hf_diloco.report.rows import overview
from hf_diloco.trainer.gossip_start import check_gossip
from hf_diloco.transport.base import Traffic
from tests.gossip_reference import (
    NUM_NODES,
    Array,
    Gradient,
    LeastSquares,
    Reference,
    agreed,
    da_dmsgd,
    decentlam,
    dmsgd,
    dsgd,
    momentum_consensus,
    nodes,
    pmsgd,
    qg_dmsgd,
    single,
    train,
)
from tests.islands import run_islands
from tests.tiny_nodes import events, run_of, simulate, weights

pytestmark = pytest.mark.usefixtures("one_thread")

TAU, ALPHA, BETA = 5, 0.8, 0.6
SETTINGS = {"sync_every": TAU, "outer_lr": ALPHA, "outer_momentum": BETA}
LRS = [0.02 * (1 + step % 7) for step in range(4 * TAU + 3)]


def settings_of(**changes: Any) -> SlowMoSettings:
    return SlowMoSettings(**{**SETTINGS, **changes})


def slowmo(
    base: Reference,
    W: Array,
    x: Array,
    gradient: Gradient,
    lrs: list[float],
    average: bool,
    tau: int = TAU,
    alpha: float = ALPHA,
    beta: float = BETA,
    **settings: Any,
) -> Array:
    """The paper's listing, with v = γu; the method begins anew in each period."""
    v, before = np.zeros_like(x), 0.0
    for begin in range(0, len(lrs), tau):
        of_period = lrs[begin : begin + tau]
        end = base(W, x, gradient, of_period, **settings)
        if len(of_period) < tau:
            return end
        if average:
            end = np.tile(end.mean(0), (len(x), 1))
        v = beta * (of_period[-1] / before if before else 0.0) * v + x - end
        x, before = x - alpha * v, of_period[-1]
    return x


# Equations


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("method", "reference", "settings"),
    [
        ("dsgd", dsgd, {}),
        ("dsgd", dsgd, {"combine_first": True}),
        ("dmsgd", dmsgd, {"momentum": 0.9}),
        ("da-dmsgd", da_dmsgd, {"momentum": 0.9}),
        ("decentlam", decentlam, {"momentum": 0.9}),
        ("qg-dmsgd", qg_dmsgd, {"momentum": 0.9}),
        ("momentum-consensus", momentum_consensus, {"momentum": 0.8, "omega": 0.5}),
    ],
)
def test_it_is_its_equation_while_lr_changes(
    method: str, reference: Reference, settings: dict[str, Any], average: bool
) -> None:
    problem, topology, start = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    ours = train(method, topology, start, problem.gradient, LRS, slowmo=settings_of(average=average), **settings)
    theirs = slowmo(reference, topology.weights(0), start, problem.gradient, LRS, average, **settings)
    np.testing.assert_allclose(ours[-1], theirs, rtol=0, atol=1e-12 * np.abs(theirs).max())
    plain = reference(topology.weights(0), start, problem.gradient, LRS, **settings)
    assert np.abs(plain - theirs).max() > 1e-3


def test_over_pmsgd_no_average_is_needed() -> None:
    problem, topology, start = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    ours = train("pmsgd", topology, start, problem.gradient, LRS, slowmo=settings_of(average=False), momentum=0.9)[-1]
    theirs = slowmo(pmsgd, topology.weights(0), start, problem.gradient, LRS, average=True, momentum=0.9)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert (ours == ours[0]).all()


def test_over_swarm_sgd_whose_pairs_meet() -> None:
    """Pairs are drawn by the number of the average, which goes on where the momentum begins anew."""
    problem, topology, start = LeastSquares.easy(), make_topology("full", NUM_NODES), agreed(NUM_NODES, 3)
    options: dict[str, Any] = {"blocking": True, "local_steps": 1, "momentum": 0.5, "seed": 3}
    ours = train("swarm-sgd", topology, start, problem.gradient, LRS, slowmo=settings_of(), **options)[-1]
    num_done = 0

    def reference(W: Array, x: Array, gradient: Gradient, lrs: list[float], momentum: float) -> Array:
        nonlocal num_done
        matching, m = RandomMatching(NUM_NODES, 3), np.zeros_like(x)
        for step, lr in enumerate(lrs, num_done):
            m = momentum * m + gradient(x, step)
            x = matching.weights(step) @ (x - lr * m)
        num_done += len(lrs)
        return x

    theirs = slowmo(reference, np.eye(NUM_NODES), start, problem.gradient, LRS, average=True, momentum=0.5)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("buffers", ["keep", "average"])
def test_what_becomes_of_the_methods_momentum(buffers: str) -> None:
    problem, topology, x = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    outer = settings_of(inner_buffers=buffers)
    ours = train("dmsgd", topology, x, problem.gradient, LRS, slowmo=outer, momentum=0.9)[-1]
    W, m, v, x0, before = topology.weights(0), np.zeros_like(x), np.zeros_like(x), x, 0.0
    for step, lr in enumerate(LRS, 1):
        m = 0.9 * m + problem.gradient(x)
        x = W @ (x - lr * m)
        if step % TAU == 0:
            v = BETA * (lr / before if before else 0.0) * v + x0 - x.mean(0)
            x, before = x0 - ALPHA * v, lr
            x0 = x
            m = np.tile(m.mean(0), (NUM_NODES, 1)) if buffers == "average" else m
    np.testing.assert_allclose(ours, x, rtol=0, atol=1e-12)


def test_a_learning_rate_of_zero_is_harmless() -> None:
    """At the beginning, in the whole of a period, and in the last step of one."""
    lrs = [0.0, 0.05, 0.1, 0.1, 0.1, *[0.1] * 4, 0.0, *[0.0] * TAU, *[0.1] * TAU, *[0.05] * TAU]
    problem, topology, start = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    ours = train("dsgd", topology, start, problem.gradient, lrs, slowmo=settings_of())
    theirs = slowmo(dsgd, topology.weights(0), start, problem.gradient, lrs, average=True)
    np.testing.assert_allclose(ours[-1], theirs, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours[3 * TAU], ours[2 * TAU], rtol=0, atol=1e-15, err_msg="nothing moves at 0")


@pytest.mark.parametrize("tau", [1, 4])
def test_with_alpha_1_and_beta_0_it_is_an_average_now_and_then(tau: int) -> None:
    problem, topology, x = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    outer = SlowMoSettings(sync_every=tau, outer_lr=1, outer_momentum=0)
    ours = train("dsgd", topology, x, problem.gradient, LRS, slowmo=outer)
    for step, lr in enumerate(LRS, 1):
        x = topology.weights(0) @ (x - lr * problem.gradient(x))
        x = np.tile(x.mean(0), (NUM_NODES, 1)) if step % tau == 0 else x
        np.testing.assert_allclose(ours[step], x, rtol=0, atol=1e-12)
        assert (ours[step] == ours[step, 0]).all() == (step % tau == 0)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.0), (1.0, 0.7)], ids=["lookahead", "slowmo"])
def test_one_node_is_one_worker(alpha: float, beta: float) -> None:
    """Around `torch.optim.SGD` in a loop of its own."""
    problem = LeastSquares.easy(1)
    outer = SlowMoSettings(sync_every=TAU, outer_lr=alpha, outer_momentum=beta, average=False)
    topology, start = make_topology("full", 1), agreed(1, 3)
    ours = train("dmsgd", topology, start, problem.gradient, LRS, slowmo=outer, momentum=0.9)[-1, 0]
    x = torch.nn.Parameter(torch.tensor(start[0]))
    slow, v, before = x.detach().clone(), torch.zeros(3, dtype=torch.float64), 0.0
    sgd = torch.optim.SGD([x], 0.1, momentum=0.9)
    for step, lr in enumerate(LRS, 1):
        sgd.param_groups[0]["lr"] = lr
        x.grad = torch.tensor(problem.gradient(x.detach().numpy()[None])[0])
        sgd.step()
        if step % TAU == 0:
            v = beta * (lr / before if before else 0.0) * v + slow - x.detach()
            slow, before = slow - alpha * v, lr
            x.data.copy_(slow)
            sgd.state.clear()
    np.testing.assert_allclose(ours, x.detach().numpy(), rtol=0, atol=1e-12)


def test_each_parameter_group_has_its_own_rate() -> None:
    """Two groups in one optimizer are two optimizers."""
    problem, topology = LeastSquares.easy(4), make_topology("ring", 4)
    rates = [LRS, LRS[::-1]]

    def run(groups: list[int]) -> list[list[torch.Tensor]]:
        graph = MemoryGraph(topology)

        def node(number: int) -> list[torch.Tensor]:
            xs = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in groups]
            optimizer = make_optimizer(
                "dsgd", [{"params": [x]} for x in xs], graph.node(number), 0.1, slowmo=settings_of()
            )
            for step in range(len(LRS)):
                for x, group, which in zip(xs, optimizer.param_groups, groups, strict=True):
                    group["lr"] = rates[which][step]
                    x.grad = torch.tensor(problem.hessians[number] @ x.detach().numpy() - problem.c[number])
                optimizer.step()
            return [x.detach() for x in xs]

        return run_islands(4, node)

    together = run([0, 1])
    for which in (0, 1):
        for both, alone in zip(together, run([which]), strict=True):
            torch.testing.assert_close(both[which], alone[0], rtol=0, atol=1e-12)
    assert not torch.allclose(together[0][0], together[0][1])


# What all nodes hold


class Small:
    """Nodes of DSGD on a ring, in fp32, each on a problem of its own."""

    def __init__(self, num_nodes: int = 3, size: int = 1001, payload: Any = "fp32", **changes: Any) -> None:
        self.topology = make_topology("ring", num_nodes)
        self.settings = settings_of(**changes)
        self.size = size
        self.graph = MemoryGraph(self.topology)
        self._payload = payload

    def neighbours(self, number: int) -> Neighbours:
        return with_payload(self.graph.node(number), self._payload)

    def node(self, number: int, neighbours: Neighbours | None = None) -> tuple[torch.nn.Parameter, GossipOptimizer]:
        x = torch.nn.Parameter(torch.ones(self.size))
        return x, make_optimizer("dsgd", [x], neighbours or self.neighbours(number), 0.05, slowmo=self.settings)

    def step(self, number: int, x: torch.nn.Parameter, optimizer: GossipOptimizer) -> None:
        generator = torch.Generator().manual_seed(number)
        x.grad = x.detach() - torch.randn(self.size, generator=generator)
        optimizer.step()

    def run(self, live: Any) -> list[Any]:
        return run_islands(self.topology.num_nodes, live)


def assert_equal(values: list[torch.Tensor], are_equal: bool = True) -> None:
    assert all(torch.equal(value, values[0]) for value in values[1:]) == are_equal


@pytest.mark.parametrize("average", [True, False])
def test_nodes_hold_the_same_bits_where_they_average_though_their_rates_differ(average: bool) -> None:
    small = Small(average=average)

    def live(number: int) -> list[torch.Tensor]:
        x, optimizer = small.node(number)
        held = []
        for step in range(3 * TAU):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + step % 4) * (1 + 0.1 * number)
            small.step(number, x, optimizer)
            held.append(x.detach().clone())
        return [held[TAU - 1], held[TAU], held[2 * TAU - 1], held[3 * TAU - 1]]

    first, between, second, last = zip(*small.run(live), strict=True)
    for held in (first, second, last):
        assert_equal(list(held), average)
    assert_equal(list(between), are_equal=False)


def test_bytes_of_the_average_count() -> None:
    small = Small(4)

    def live(number: int) -> list[int]:
        x, optimizer = small.node(number)
        sent = []
        for _ in range(TAU):
            small.step(number, x, optimizer)
            sent.append(optimizer.traffic.bytes_sent)
        return sent

    for sent in small.run(live):
        assert sent[-2] == 2 * 4 * small.size
        assert sent[-1] == pytest.approx(sent[-2] + 2 * 3 / 4 * 4 * small.size, rel=0.01)


def test_codes_of_differences_begin_anew_after_an_outer_step() -> None:
    small = Small(size=8192, payload="int8")

    def live(number: int) -> list[int]:
        x, optimizer = small.node(number)
        sent = []
        for _ in range(TAU + 2):
            small.step(number, x, optimizer)
            sent.append(optimizer.traffic.bytes_sent)
        return sent

    for sent in small.run(live):
        assert sent[0] == sent[TAU] == 2 * 4 * small.size
        assert sent[1] == sent[TAU + 1] < 0.3 * sent[0]


@pytest.mark.parametrize("late", [[2], [0, 1]])
def test_a_node_that_enters_takes_the_outer_state_of_the_others(late: list[int]) -> None:
    """It is as if it had never lost it."""

    entry = 2 * TAU + 3

    def enter(x: torch.Tensor) -> int:
        x.fill_(0.5)
        return entry

    def run(enters: bool) -> list[torch.Tensor]:
        small = Small()

        def live(number: int) -> torch.Tensor:
            x, optimizer = small.node(number)
            for step in range(5 * TAU):
                if step == entry and number in late:
                    if enters:
                        x, optimizer = small.node(number)
                        optimizer.begin_at(enter)
                        saved = copy.deepcopy((x.detach(), optimizer.state_dict()))  # and is stopped at once
                        x, optimizer = small.node(number)
                        x.data.copy_(saved[0])
                        optimizer.load_state_dict(saved[1])
                    else:
                        x.data.fill_(0.5)
                small.step(number, x, optimizer)
                if (step + 1) % TAU == 0:
                    last = x.detach().clone()
            return last

        return small.run(live)

    entered, stayed = run(True), run(False)
    assert_equal(entered)
    torch.testing.assert_close(entered[0], stayed[0], rtol=0, atol=1e-6)


def test_a_further_training_begins_at_the_mean_without_momentum() -> None:
    small = Small(outer_lr=1.0)

    def live(number: int) -> tuple[torch.Tensor, ...]:
        x, optimizer = small.node(number)
        for _ in range(TAU + 2):
            small.step(number, x, optimizer)
        optimizer.begin_training()
        begun = x.detach().clone()
        for _ in range(TAU):
            small.step(number, x, optimizer)
        first = x.detach().clone()
        for _ in range(TAU):
            small.step(number, x, optimizer)
        return begun, first, x.detach().clone()

    begun, first, second = zip(*small.run(live), strict=True)
    assert_equal(list(begun), are_equal=False)
    assert_equal(list(first))
    assert_equal(list(second))

    def plain(number: int) -> torch.Tensor:
        x = torch.nn.Parameter(begun[number].clone())
        base = make_optimizer("dsgd", [x], others.neighbours(number), 0.05)
        for _ in range(TAU):
            small.step(number, x, base)
        return x.detach().clone()

    others = Small()
    expected = torch.stack(others.run(plain)).mean(0)  # v = 0, and alpha = 1: x_0 - (x_0 - x)
    torch.testing.assert_close(first[0], expected, rtol=0, atol=1e-6)


class NoRendezvous(MemoryNeighbours):
    """Averages over all nodes fail from the first to the last of `fails`."""

    fails = range(1, 2)
    num_averages = 0

    def average(self, vector: torch.Tensor) -> Traffic:
        self.num_averages += 1
        if self.num_averages in self.fails:
            raise IslandLostError("the rendezvous is gone")
        return super().average(vector)


LEFT_OUT = "this outer step is left out, as there is no average of all nodes"


def assert_first_outer_step_is_left_out(small: Small, neighbours: Callable[[int], MemoryNeighbours | None]) -> None:
    """Nodes differ after it, and are equal again after the next two."""

    def live(number: int) -> tuple[torch.Tensor, ...]:
        x, optimizer = small.node(number, neighbours(number))
        held = []
        for _ in range(3 * TAU):
            small.step(number, x, optimizer)
            held.append(x.detach().clone())
        return held[TAU - 1], held[2 * TAU - 1], held[3 * TAU - 1]

    first, second, third = zip(*small.run(live), strict=True)
    assert_equal(list(first), are_equal=False)
    assert_equal(list(second))
    assert_equal(list(third))


def test_an_outer_step_without_an_average_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    small = Small()
    graph = MemoryGraph(small.topology)

    assert_first_outer_step_is_left_out(small, lambda number: NoRendezvous(graph, number))
    assert caplog.text.count(LEFT_OUT) == 3


def test_the_methods_momentum_outlives_an_outer_step_that_is_left_out() -> None:
    x = torch.nn.Parameter(torch.ones(4))
    neighbours = NoRendezvous(MemoryGraph(make_topology("ring", 1)), 0)
    optimizer = make_optimizer("dmsgd", [x], neighbours, 0.1, slowmo=settings_of(inner_buffers="zero"))
    for is_kept in (True, False):
        for _ in range(TAU):
            x.grad = torch.ones(4)
            optimizer.step()
        assert bool(optimizer.vector("momentum_buffer").any()) == is_kept


class CameTooLate(MemoryNeighbours):
    """For the first average, which the others have formed without this node."""

    has_come = False

    def average(self, vector: torch.Tensor) -> Traffic:
        if self.has_come:
            return super().average(vector)
        self.has_come = True
        super().average(torch.zeros_like(vector))
        raise IslandLostError("the others average without this node")


def test_a_node_without_which_the_others_took_an_outer_step_takes_their_outer_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small = Small()

    assert_first_outer_step_is_left_out(
        small, lambda number: CameTooLate(small.graph, number) if number == 2 else None
    )
    assert caplog.text.count(LEFT_OUT) == 1


class HoldersLeave(MemoryNeighbours):
    """Who holds the slow momentum is lost before the second average: what late nodes give is all that comes."""

    num_averages = 0

    def average(self, vector: torch.Tensor) -> Traffic:
        self.num_averages += 1
        if self.num_averages == 2:
            vector.zero_()
        return super().average(vector)


def test_an_outer_step_without_any_holder_of_the_momentum_is_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small = Small()
    graph = MemoryGraph(small.topology)

    def live(number: int) -> tuple[torch.Tensor, ...]:
        x, optimizer = small.node(number, HoldersLeave(graph, number))
        if number == 2:
            optimizer.begin_at(lambda x: 0)
        held = []
        for _ in range(2 * TAU):
            small.step(number, x, optimizer)
            held.append(x.detach().clone())
        return held[TAU - 1], held[2 * TAU - 1]

    first, second = zip(*small.run(live), strict=True)
    assert caplog.text.count("no node is left that holds the slow momentum") == 3
    assert_equal(list(first), are_equal=False)
    assert_equal(list(second))


# Checkpoints


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("method", "buffers"), [("dsgd", "zero"), ("decentlam", "keep"), ("momentum-consensus", "average")]
)
def test_a_resumed_run_goes_on_bit_for_bit(method: str, buffers: str, average: bool) -> None:
    if buffers == "average" and not average:
        buffers = "zero"
    outer = SlowMoSettings(sync_every=4, outer_momentum=0.6, average=average, inner_buffers=buffers)
    settings: dict[str, Any] = {"slowmo": outer, **({} if method == "dsgd" else {"momentum": 0.5})}
    topology = make_topology("ring", 4)
    straight = nodes(topology, method, 14, **settings)
    for step in (8, 10):
        resumed = nodes(topology, method, 14, resume_at=step, **settings)
        for one, other in zip(straight, resumed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert all(a.isfinite().all() for a in one)


def test_a_state_with_slowmo_goes_on_with_it_and_without_without() -> None:
    x = torch.nn.Parameter(torch.zeros(2))
    without, with_it = single("dsgd", [x]), single("dsgd", [x], slowmo=settings_of())
    with_it.load_state_dict(with_it.state_dict())  # of a run that ended before its first step
    with pytest.raises(CheckpointError, match="was saved without slowmo, and training goes on with it"):
        with_it.load_state_dict(without.state_dict())
    with pytest.raises(CheckpointError, match="was saved with slowmo, and training goes on without it"):
        without.load_state_dict(with_it.state_dict())
    x.grad = torch.ones(2)
    with_it.step()
    larger = single("dsgd", [torch.nn.Parameter(torch.zeros(3))], slowmo=settings_of())
    with pytest.raises(CheckpointError, match="of 2 parameters, and the model has 3"):
        larger.load_state_dict(with_it.state_dict())


@pytest.mark.parametrize("average", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_resumed_run_through_the_trainer_is_one_that_never_stopped(average: str, tmp_path: Path) -> None:
    settings = f"gossip.slowmo={{sync_every: 3, outer_momentum: 0.6, average: {average}}}"
    run = run_of(tmp_path, settings)
    assert simulate(run) == 0
    expected = weights(run.folder / "model")
    for node in range(3):  # as if all had been killed between two checkpoints
        (run.folder / f"island-{node}" / "checkpoint-8" / "gossip.json").unlink()
    (run.folder / "model" / "model.safetensors").unlink()
    assert simulate(run) == 0
    assert events(run, 0, "start")[-1]["step"] == 4
    found = weights(run.folder / "model")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    method = "decentlam on ring, slowmo every 3 steps (lr 1, momentum 0.6)"
    assert ("method", method) in overview(summarise(load_run(run.folder)))


@pytest.mark.slow
def test_a_node_without_the_checkpoint_takes_the_outer_state_of_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path, "gossip.num_nodes=4", "gossip.slowmo={sync_every: 3}", "training.max_steps=9")
    assert simulate(run) == 0
    assert events(run, 0, "eval")[-1]["consensus_distance"] == pytest.approx(0, abs=1e-7)
    for node in range(4):
        (run.folder / f"island-{node}" / "checkpoint-9" / "gossip.json").unlink()
        (run.folder / f"island-{node}" / "checkpoint-8" / "gossip.json").unlink()
    (run.folder / "island-2" / "checkpoint-4" / "gossip.json").unlink()
    (run.folder / "model" / "model.safetensors").unlink()
    assert simulate(run) == 0
    assert [events(run, node, "start")[-1]["step"] for node in range(4)] == [4] * 4
    assert "enters with their mean" in events(run, 0, "neighbour")[-1]["news"]
    assert events(run, 0, "eval")[-1]["consensus_distance"] == pytest.approx(0, abs=1e-7)
    saved = [
        torch.load(run.folder / f"island-{node}" / "checkpoint-9" / "optimizer.pt", weights_only=True)["slowmo"]
        for node in range(4)
    ]
    assert_equal([state["anchor"] for state in saved])
    assert_equal([state["slow-momentum"] for state in saved])
    assert not any(state["is_late"] for state in saved)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slowmo": {"sync_every": 0}}, "slowmo.sync_every"),
        ({"slowmo": {"sync_every": True}}, "should be a number"),
        ({"slowmo": {"outer_lr": 0}}, "slowmo.outer_lr"),
        ({"slowmo": {"outer_momentum": 1}}, "less than 1"),
        ({"slowmo": {"momentum": 0.5}}, "slowmo.momentum"),
        ({"slowmo": {"average": False, "inner_buffers": "average"}}, "set inner_buffers to zero or keep"),
        ({"slowmo": {}, "method": "d2"}, "remove slowmo, or choose decentlam"),
        ({"slowmo": {}, "method": "swarm-sgd"}, r"set options: \{blocking: true\}"),
        ({"slowmo": {"average": False}, "method": "swarm-sgd"}, r"set options: \{blocking: true\}"),
        ({"slowmo": {}, "method": "pmsgd"}, "slowmo.average=true: .*set it to false"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gossip(GossipConfig(num_nodes=3, rendezvous="tcp://127.0.0.1:1", **settings))


def test_defaults_are_the_papers() -> None:
    outer = GossipConfig(slowmo={}).slowmo
    assert outer == SlowMoSettings(sync_every=48, outer_lr=1.0, outer_momentum=0.7, average=True, inner_buffers="zero")
