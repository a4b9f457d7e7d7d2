"""Decentralised optimizers against NumPy written from the equations, closed forms of their limits, and theory."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hf_diloco.errors import CheckpointError, ConfigError, ExchangeError, IslandLostError, UnsupportedError
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.methods.gossip import METHODS, flat, make_optimizer
from hf_diloco.methods.gossip.d2 import D2
from hf_diloco.methods.gossip.decentlam import DecentLaM
from hf_diloco.methods.gossip.dmsgd import DmSGD
from hf_diloco.methods.gossip.flat import MAX_LEFT_OUT
from hf_diloco.methods.gossip.momentum_consensus import move_in_passes, move_on_processor
from hf_diloco.methods.topology import make_topology
from tests.gossip_reference import (
    NUM_NODES,
    Array,
    LeastSquares,
    Reference,
    agreed,
    d2,
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
from tests.islands import run_islands, try_islands

pytestmark = pytest.mark.usefixtures("one_thread")


GRAPHS = ["ring", "grid", "hypercube", "symmetric-exponential"]


CASES: list[tuple[str, Reference, dict[str, Any]]] = [
    ("dsgd", dsgd, {}),
    ("dsgd", dsgd, {"combine_first": True}),
    ("dmsgd", dmsgd, {"momentum": 0.9}),
    ("dmsgd", dmsgd, {"momentum": 0.8, "nesterov": True}),
    ("dmsgd", dmsgd, {"momentum": 0.9, "combine_first": True}),
    ("da-dmsgd", da_dmsgd, {"momentum": 0.9}),
    ("decentlam", decentlam, {"momentum": 0.9}),
    ("qg-dmsgd", qg_dmsgd, {"momentum": 0.9}),
    ("qg-dmsgd", qg_dmsgd, {"momentum": 0.9, "average_momentum": 0.5, "nesterov": True}),
    ("d2", d2, {}),
    ("momentum-consensus", momentum_consensus, {"momentum": 0.8, "omega": 1.0}),
    ("momentum-consensus", momentum_consensus, {"momentum": 0.9, "omega": 0.3}),
    ("pmsgd", pmsgd, {"momentum": 0.9}),
    ("pmsgd", pmsgd, {"momentum": 0.9, "nesterov": True}),
]
IDS = [" ".join([name, *(f"{key}={value}" for key, value in settings.items())]) for name, _, settings in CASES]
IN_STEP: dict[str, dict[str, Any]] = {"swarm-sgd": {"blocking": True}}
"""Settings with which nodes wait for each other, where they else take what another thread happens to have ready."""
CHANGING = [0.05 * (1 + 2 * step % 7) for step in range(30)]


# Equations


@pytest.mark.parametrize(("method", "reference", "settings"), CASES, ids=IDS)
@pytest.mark.parametrize("graph", ["ring", "grid"])
def test_it_is_its_equation_while_lr_changes(
    method: str, reference: Reference, settings: dict[str, Any], graph: str
) -> None:
    problem, topology = LeastSquares.easy(), make_topology(graph, NUM_NODES)
    start = agreed(NUM_NODES, 3)
    ours = train(method, topology, start, problem.gradient, CHANGING, **settings)[-1]
    theirs = reference(topology.weights(0), start, problem.gradient, CHANGING, **settings)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10 * np.abs(theirs).max())


def test_every_method_has_an_equation_here() -> None:
    """Or elsewhere: SwarmSGD's pairs are random, and it has no limit. See test_swarmsgd.py."""
    assert {name for name, _, _ in CASES} | {"swarm-sgd"} == set(METHODS)


@pytest.mark.parametrize("graph", ["one-peer-exponential", "random-matching", "exponential"])
@pytest.mark.parametrize("method", ["dsgd", "qg-dmsgd"])
def test_graphs_that_change_or_are_directed(graph: str, method: str) -> None:
    problem, topology = LeastSquares.easy(), make_topology(graph, NUM_NODES)
    start, lr = agreed(NUM_NODES, 3), 0.1
    ours = train(method, topology, start, problem.gradient, [lr] * 12)[-1]
    x, m, beta = start, np.zeros_like(start), 0.9 if method == "qg-dmsgd" else 0.0
    for step in range(12):
        new = topology.weights(step) @ (x - lr * (beta * m + problem.gradient(x)))
        m, x = beta * m + (1 - beta) * (x - new) / lr, new
    np.testing.assert_allclose(ours, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("graph", GRAPHS)
def test_decentlam_is_a_heavy_ball(graph: str) -> None:
    problem, topology = LeastSquares.easy(), make_topology(graph, NUM_NODES)
    W, lr, beta = topology.weights(0), 0.1, 0.9
    x = before = agreed(NUM_NODES, 3)
    ours = train("decentlam", topology, x, problem.gradient, [lr] * 60, momentum=beta)
    for step in range(60):
        x, before = W @ (x - lr * problem.gradient(x)) + beta * (x - before), x
        np.testing.assert_allclose(ours[step + 1], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["decentlam", "qg-dmsgd", "d2"])
def test_a_rate_that_leaps_up_leaves_nodes_together(method: str) -> None:
    """As at a restart of a cosine; what a state says of the small rate before is no measure at the large one."""
    lrs = [0.1 * (1 + np.cos(np.pi * (step % 100) / 100)) / 2 for step in range(200)]
    run = train(method, make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3), LeastSquares.easy().gradient, lrs)
    apart = [float(np.linalg.norm(x - x.mean(0))) for x in run]
    assert max(apart[100:]) < 1.1 * max(apart[:100])


def test_where_a_correction_of_d2_is_lost_the_mean_does_not_run_away_as_the_rate_falls() -> None:
    """With a node's: it begins anew, while the others go on."""
    problem, num_steps, begins = LeastSquares.easy(4), 300, 100
    graph, start = MemoryGraph(make_topology("ring", 4)), agreed(4, 3)

    def run(number: int, falls: bool) -> Array:
        x = torch.nn.Parameter(torch.tensor(start[number]))
        optimizer = make_optimizer("d2", [x], graph.node(number), 0.1)
        for step in range(num_steps):
            if (number, step) == (3, begins):
                optimizer.begin_at(lambda _: begins)
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / num_steps) if falls else 0.1
            x.grad = torch.tensor(problem.gradient(np.tile(x.detach().numpy(), (4, 1)))[number])
            optimizer.step()
        return x.detach().numpy()

    constant, falling = (np.stack(run_islands(4, partial(run, falls=falls))) for falls in (False, True))
    assert problem.bias(falling) < 1.1 * problem.bias(constant)


# Values that are not finite


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite_is_left_out(
    method: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    problem, start = LeastSquares.easy(), agreed(NUM_NODES, 3)

    def with_values(which: slice, given: float) -> Array:
        def gradient(x: Array, step: int) -> Array:
            g = problem.gradient(x)
            if step in (2, 3, 4):
                g[5, which] = given
            return g

        settings = IN_STEP.get(method, {})
        return train(method, make_topology("ring", NUM_NODES), start, gradient, [0.1] * 8, **settings)

    np.testing.assert_array_equal(with_values(slice(1, 2), value), with_values(slice(None), 0.0))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["step 3", "step 4"]


@pytest.mark.parametrize("with_pause", [False, True])
def test_a_node_ends_after_many_steps_in_a_row_whose_gradients_are_not_finite(with_pause: bool) -> None:
    graph = MemoryGraph(make_topology("ring", 3))

    def run(number: int) -> int:
        x = torch.nn.Parameter(torch.ones(3))
        optimizer = make_optimizer("dsgd", [x], graph.node(number), 0.1)
        for step in range(MAX_LEFT_OUT + 50):
            is_finite = with_pause and step == MAX_LEFT_OUT - 1
            x.grad = torch.full((3,), 0.0 if is_finite else torch.nan)
            optimizer.step()
        return optimizer.num_steps

    outcomes = try_islands(3, run)
    if with_pause:
        assert outcomes == [MAX_LEFT_OUT + 50] * 3
    else:
        expected = f"step {MAX_LEFT_OUT}: none of the last {MAX_LEFT_OUT} gradients of node "
        assert all(isinstance(error, ExchangeError) and expected in str(error) for error in outcomes)


@pytest.mark.parametrize(
    ("method", "where"),
    [*((method, "parameters") for method in METHODS), ("da-dmsgd", "momentum"), ("momentum-consensus", "momentum")],
)
def test_what_is_not_finite_is_not_sent(method: str, where: str) -> None:
    """Its node ends before; the others are told so where they wait."""
    graph = MemoryGraph(make_topology("ring", 4))

    def step(number: int) -> None:
        neighbours, x = graph.node(number), torch.nn.Parameter(torch.ones(3))
        optimizer = make_optimizer(method, [x], neighbours, 0.1, **IN_STEP.get(method, {}))
        x.grad = torch.ones(3)
        optimizer.step()
        if number == 2:
            vector = optimizer.flat_parameters if where == "parameters" else optimizer.vector("momentum_buffer")
            vector[1] = torch.inf
            if method == "pmsgd":  # which sends gradients alone; nor is that of such parameters finite
                x.grad.fill_(torch.nan)
        try:
            optimizer.step()
        finally:
            neighbours.close()

    outcomes = try_islands(4, step)
    assert isinstance(outcomes[2], ExchangeError)
    assert "step 2: the parameters of node 2 are beyond all bounds, and not sent" in str(outcomes[2])
    assert all(isinstance(outcome, IslandLostError) for number, outcome in enumerate(outcomes) if number != 2)


# Special cases


@pytest.mark.parametrize(
    ("method", "settings", "form"),
    [
        ("dmsgd", {}, {}),
        ("dmsgd", {"combine_first": True}, {"combine_first": True}),
        ("da-dmsgd", {}, {}),
        ("decentlam", {}, {}),
        ("qg-dmsgd", {}, {}),
        ("momentum-consensus", {}, {"combine_first": True}),
    ],
)
def test_without_momentum_it_is_dsgd(method: str, settings: dict[str, Any], form: dict[str, Any]) -> None:
    problem, topology, start = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    ours = train(method, topology, start, problem.gradient, CHANGING, momentum=0.0, **settings)
    plain = train("dsgd", topology, start, problem.gradient, CHANGING, **form)
    if method in ("dmsgd", "da-dmsgd", "qg-dmsgd", "momentum-consensus"):
        np.testing.assert_array_equal(ours, plain)
    else:
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["dmsgd", "da-dmsgd", "decentlam", "dsgd"])
def test_on_the_full_graph_it_is_centralised(method: str) -> None:
    """With DmSGD's own momenta only the mean is centralised; so are, after mixing, all nodes."""
    problem, topology, start = LeastSquares.easy(), make_topology("full", NUM_NODES), agreed(NUM_NODES, 3)
    settings: dict[str, Any] = {"momentum": 0.9 if method != "dsgd" else 0.0}
    central = train("pmsgd", topology, start, problem.gradient, [0.1] * 40, **settings)
    ours = train(method, topology, start, problem.gradient, [0.1] * 40, **({} if method == "dsgd" else settings))
    np.testing.assert_allclose(ours, central, rtol=0, atol=1e-12)


def test_pmsgd_is_torchs_sgd_on_the_mean_with_equal_bits_on_all_nodes() -> None:
    problem, topology, start = LeastSquares.easy(), make_topology("ring", NUM_NODES), agreed(NUM_NODES, 3)
    ours = train("pmsgd", topology, start, problem.gradient, [0.1] * 20, nesterov=True, weight_decay=0.01)
    assert (ours == ours[:, :1]).all()
    x = torch.nn.Parameter(torch.tensor(start[0]))
    sgd = torch.optim.SGD([x], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    for _ in range(20):
        x.grad = torch.tensor(problem.gradient(np.tile(x.detach().numpy(), (NUM_NODES, 1))).mean(0))
        sgd.step()
    np.testing.assert_allclose(ours[-1, 0], x.detach().numpy(), rtol=0, atol=1e-12)


def test_nodes_that_agree_and_have_equal_data_stay_equal_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((20, 1, 4))
    for method in METHODS:
        history = train(
            method,
            make_topology("grid", 6),
            agreed(6, 4),
            lambda x, t: np.tile(gradients[t], (6, 1)),
            [0.1] * 20,
            **IN_STEP.get(method, {}),
        )
        assert (history == history[:, :1]).all(), method


@pytest.mark.parametrize("method", ["decentlam", "qg-dmsgd"])
def test_an_lr_of_zero_averages_and_divides_by_nothing(method: str) -> None:
    problem, topology = LeastSquares.easy(), make_topology("ring", NUM_NODES)
    start = np.random.default_rng(0).standard_normal((NUM_NODES, 3))
    history = train(method, topology, start, problem.gradient, [0.0, 0.0, 0.1, 0.1])
    np.testing.assert_allclose(history[1], topology.weights(0) @ start, rtol=0, atol=1e-15)
    assert np.isfinite(history).all()


# Limits


def limit_of(method: str, settings: dict[str, Any], W: Array, problem: LeastSquares, lr: float) -> Array:
    """The closed form of the fixed point, [n, d]."""
    beta = settings.get("momentum", 0.0)
    if method in ("d2", "pmsgd"):
        return np.tile(problem.solution, (len(W), 1))
    if method == "da-dmsgd":  # m̂ = (I - βW)⁻¹ g
        return problem.limit(W, lr, W @ np.linalg.inv(np.eye(len(W)) - beta * W))
    if method == "dmsgd":
        lr = lr / (1 - beta)
    if method == "qg-dmsgd" and settings.get("nesterov"):
        lr = lr * (1 + beta)
    own = settings.get("combine_first") or method == "momentum-consensus"
    return problem.limit(W, lr, np.eye(len(W)) if own else W)


@pytest.mark.parametrize(("method", "reference", "settings"), CASES, ids=IDS)
def test_the_limit_is_its_closed_form(method: str, reference: Reference, settings: dict[str, Any]) -> None:
    problem, topology = LeastSquares.easy(num_nodes=4), make_topology("ring", 4)
    settings = settings | ({"momentum": 0.6} if "momentum" in settings else {})
    lr = 0.1
    reached = train(method, topology, agreed(4, 3), problem.gradient, [lr] * 500, **settings)[-1]
    expected = limit_of(method, settings, topology.weights(0), problem, lr)
    np.testing.assert_allclose(reached, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("method", "reference", "settings"), CASES, ids=IDS)
def test_a_node_in_the_limit_stays_there(method: str, reference: Reference, settings: dict[str, Any]) -> None:
    """On the problem of the theory, whose limits take too long to run to."""
    if method == "d2":
        pytest.skip("its state in the limit is not a function of its parameters; it is run to it elsewhere")
    problem, topology, lr = LeastSquares.gaussian(), make_topology("ring", NUM_NODES), 1e-5
    W, beta = topology.weights(0), settings.get("momentum", 0.0)
    limit = limit_of(method, settings, W, problem, lr)
    momenta = None
    if method == "dmsgd":
        momenta = problem.gradient(limit) / (1 - beta)
    elif method == "da-dmsgd":
        momenta = W @ np.linalg.inv(np.eye(NUM_NODES) - beta * W) @ problem.gradient(limit)
    history = train(method, topology, limit, problem.gradient, [lr] * 5, momenta, **settings)
    np.testing.assert_allclose(history[-1], limit, rtol=0, atol=1e-12)


def test_d2_reaches_the_solution() -> None:
    problem, topology = LeastSquares.gaussian(), make_topology("ring", NUM_NODES)
    x = d2(topology.weights(0), np.zeros((NUM_NODES, 30)), problem.gradient, [4e-3] * 500)
    assert problem.bias(x) < 1e-24
    easy = LeastSquares.easy(4)
    ours = train("d2", make_topology("ring", 4), agreed(4, 3), easy.gradient, [0.3] * 400)[-1]
    assert np.abs(ours - easy.solution).max() < 1e-12


def test_d2_reaches_the_solution_in_fp32_too() -> None:
    """Its rounding errors add up: with a plain weighted sum it missed by 1e-4 here, and by more with every step."""
    easy, topology = LeastSquares.easy(4), make_topology("ring", 4)
    graph = MemoryGraph(topology)
    hessians, c = (torch.tensor(values, dtype=torch.float32) for values in (easy.hessians, easy.c))

    def node(number: int) -> Array:
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = make_optimizer("d2", [x], graph.node(number), 0.1)
        for _ in range(1500):
            x.grad = hessians[number] @ x.detach() - c[number]
            optimizer.step()
        return x.detach().double().numpy()

    assert max(np.abs(x - easy.solution).max() for x in run_islands(4, node)) < 2e-5


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("beta", [0.8, 0.9])
def test_biases_are_as_theory_says(graph: str, beta: float) -> None:
    problem, W, lr = LeastSquares.gaussian(), make_topology(graph, NUM_NODES).weights(0), 1e-5

    def bias(method: str, **settings: Any) -> float:
        return problem.bias(limit_of(method, settings, W, problem, lr))

    plain = bias("dsgd")
    assert bias("dmsgd", momentum=beta) / plain == pytest.approx(1 / (1 - beta) ** 2, rel=0.06)
    assert bias("decentlam", momentum=beta) / plain == pytest.approx(1, rel=1e-3)
    assert bias("qg-dmsgd", momentum=beta) / plain == pytest.approx(1, rel=1e-3)
    assert plain < bias("da-dmsgd", momentum=beta) < bias("dmsgd", momentum=beta)


def test_biases_that_are_run_to_are_those_that_are_solved_for() -> None:
    """Rings of the theory's problem at a larger lr: DecentLaM ends where DSGD does, DmSGD does not."""
    problem, W, lr = LeastSquares.gaussian(), make_topology("ring", NUM_NODES).weights(0), 2e-4
    for method, run, beta in (("dsgd", dsgd, None), ("dmsgd", dmsgd, 0.8), ("decentlam", decentlam, 0.8)):
        settings: dict[str, Any] = {} if beta is None else {"momentum": beta}
        x = run(W, np.zeros((NUM_NODES, 30)), problem.gradient, [lr] * 5000, **settings)
        np.testing.assert_allclose(x, limit_of(method, settings, W, problem, lr), rtol=0, atol=1e-9)


# A torch optimizer


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("graph", ["ring", "one-peer-exponential"])
def test_a_resumed_run_goes_on_bit_for_bit(method: str, graph: str) -> None:
    settings: dict[str, Any] = {"weight_decay": 0.01, **IN_STEP.get(method, {})}
    if "momentum_buffer" in METHODS[method].state_names:
        settings["momentum"] = 0.5
    if method == "d2" and graph != "ring":
        pytest.skip("refused on a graph that changes")
    topology = make_topology(graph, 4)
    straight = nodes(topology, method, 12, **settings)
    resumed = nodes(topology, method, 12, resume_at=7, **settings)
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(a.isfinite().all() for a in one)


def test_groups_have_their_own_lr_momentum_and_weight_decay() -> None:
    """A node alone with momentum SGD is torch's, group for group."""
    torch.manual_seed(0)
    ours = [
        torch.nn.Parameter(torch.randn(3, 2)),
        torch.nn.Parameter(torch.randn(4)),
        torch.nn.Parameter(torch.ones(())),
    ]
    theirs = copy.deepcopy(ours)

    def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:2], "lr": 0.03, "weight_decay": 0.2},
            {"params": parameters[2:], "momentum": 0.5},
        ]

    optimizers = [
        single("dmsgd", groups(ours), momentum=0.9, nesterov=True),
        torch.optim.SGD(groups(theirs), lr=0.1, momentum=0.9, nesterov=True),
    ]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) for optimizer in optimizers]
    for _ in range(20):
        for own, their in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            their.grad = own.grad.clone()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-6)


def test_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in METHODS:
        results = []
        for chunk in (1 << 17, 5):
            monkeypatch.setattr(flat, "_CHUNK_VALUES", chunk)
            results.append(nodes(make_topology("ring", 3), method, 4, **IN_STEP.get(method, {})))
        for one, other in zip(*results, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loops_do_what_pytorchs_operations_do(dtype: torch.dtype) -> None:
    """Those are what runs on an accelerator. Where a processor rounds products and sums apart, last bits differ."""
    torch.manual_seed(0)
    x, g, mixed, v = (torch.randn(10_001, dtype=dtype) for _ in range(4))
    new, moved = x.clone(), v.clone()
    kind = x.numpy().dtype.type
    move_on_processor(new.numpy(), g.numpy(), mixed.numpy(), moved.numpy(), kind(0.01), kind(0.9))
    move_in_passes(x, g, mixed, v, 0.01, 0.9)
    torch.testing.assert_close(new, x, rtol=0, atol=8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(moved, v, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_lars_scales_each_tensor() -> None:
    x, y = torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.nn.Parameter(torch.zeros(2))
    x.grad, y.grad = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0])
    single("dsgd", [x, y], lr=0.5, weight_decay=0.1, lars=0.01).step()
    # ‖x‖ = 5, ‖g‖ = 2: trust = 0.01 * 5 / (2 + 0.1 * 5) = 0.02; g + λx = 0.3, 2.4; 3 - 0.5 * 0.006, 4 - 0.5 * 0.048
    torch.testing.assert_close(x.data, torch.tensor([2.997, 3.976]))
    torch.testing.assert_close(y.data, torch.tensor([-0.5, 0.0]))  # a norm is 0: as without


def test_a_parameter_without_gradient_still_averages() -> None:
    graph = MemoryGraph(make_topology("full", 2))

    def node(number: int) -> torch.Tensor:
        x, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.full((2,), 2.0 * number))
        x.grad = torch.ones(2)
        make_optimizer("dsgd", [x, unused], graph.node(number), 0.1).step()
        return unused.detach()

    assert all(torch.equal(values, torch.ones(2)) for values in run_islands(2, node))


@pytest.mark.parametrize("method", list(METHODS))
def test_frozen_parameters_and_empty_groups_keep_still(method: str) -> None:
    trained, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [frozen, trained]}]
    optimizer = single(method, groups, weight_decay=0.5, lars=0.01)
    for _ in range(3):
        trained.grad = torch.ones(2)
        optimizer.step()
    assert torch.equal(frozen, torch.full((2,), 3.0))
    assert (trained < 1).all()


def test_closure_gives_the_loss() -> None:
    x = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = single("dsgd", [x])

    def closure() -> float:
        optimizer.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert x.item() == pytest.approx(2 - 0.1 * 4)


def test_parameters_keep_their_memory_format_and_may_be_loaded_by_assignment() -> None:
    convolution = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = copy.deepcopy(convolution.state_dict())
    optimizer = single("dsgd", convolution.parameters())
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(convolution.weight, before["weight"])
    convolution.weight.data = torch.ones(8, 4, 3, 3)
    convolution.weight.grad = torch.ones(8, 4, 3, 3)
    optimizer.step()
    torch.testing.assert_close(convolution.weight.data, torch.full((8, 4, 3, 3), 0.9))


def test_averaged_weights_come_and_go() -> None:
    graph = MemoryGraph(make_topology("ring", 4))

    def node(number: int) -> tuple[float, float]:
        x = torch.nn.Parameter(torch.tensor([float(number)]))
        optimizer = make_optimizer("dsgd", [x], graph.node(number), 0.1)
        with optimizer.averaged_weights():
            inside = x.item()
        return inside, x.item()

    assert run_islands(4, node) == [(1.5, float(number)) for number in range(4)]


@pytest.mark.parametrize("method", list(METHODS))
def test_bytes_are_counted(method: str) -> None:
    """A ring: d values to each of 2 neighbours, twice where momentum is sent; an all-reduce sends 2d (n - 1) / n; a
    partner is sent d."""
    graph = MemoryGraph(make_topology("ring", 4))

    def node(number: int) -> tuple[int, int]:
        x = torch.nn.Parameter(torch.zeros(1000))
        optimizer = make_optimizer(method, [x], graph.node(number), 0.1, **IN_STEP.get(method, {}))
        for _ in range(2):
            optimizer.step()
        return optimizer.traffic.bytes_sent, optimizer.traffic.bytes_received

    expected = {"pmsgd": 6000, "swarm-sgd": 4000}.get(method, 2 * 4000 * METHODS[method].num_vectors)
    assert set(run_islands(4, node)) == {(expected, expected)}


def test_memory_is_one_vector_of_state_and_two_of_work() -> None:
    x = torch.nn.Parameter(torch.zeros(1000))
    optimizer = single("decentlam", [x])
    optimizer.step()
    vectors = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    assert sum(vector.numel() for vector in vectors) == 3000  # parameters, gradients, received
    assert optimizer.state[x]["momentum_buffer"].numel() == 1000


# What is refused


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("decentlm", {}, ["decentlm", "did you mean decentlam?"]),
        ("adam", {}, ["adam", "there are d2, da-dmsgd"]),
        ("decentlam", {"nesterov": True}, ["nesterov", "no such setting", "momentum"]),
        ("dmsgd", {"momntum": 0.9}, ["momntum", "did you mean momentum?"]),
        ("dmsgd", {"momentum": 1.0}, ["momentum=1.0", "below 1"]),
        ("dsgd", {"lr": -1.0}, ["lr=-1.0"]),
        ("dsgd", {"lr": float("nan")}, ["lr=nan"]),
        ("dsgd", {"weight_decay": -0.1}, ["weight_decay=-0.1"]),
        ("dsgd", {"lars": -0.1}, ["lars=-0.1"]),
        ("dsgd", {"lars": 1e30}, ["lars=1e+30", "from 0 to 1"]),
        ("momentum-consensus", {"omega": 1.5}, ["omega=1.5"]),
        ("momentum-consensus", {"omega": "half"}, ["omega='half': give a number"]),
        ("momentum-consensus", {"omega": True}, ["omega=True: give a number"]),
        ("qg-dmsgd", {"average_momentum": 1.0}, ["average_momentum=1.0"]),
        ("qg-dmsgd", {"average_momentum": "0.9"}, ["average_momentum='0.9': give a number"]),
        ("swarm-sgd", {"local_steps": 2.5}, ["local_steps=2.5: give a whole number"]),
        ("swarm-sgd", {"blocking": "no"}, ["blocking='no': give true or false"]),
        ("swarm-sgd", {"quantization": 8}, ["quantization=8: give text"]),
    ],
)
def test_a_wrong_setting_is_one_clear_error(method: str, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        single(method, [torch.nn.Parameter(torch.zeros(2))], **{"lr": 0.1, **settings})
    assert all(word in str(caught.value) for word in words), caught.value


def test_decentlam_on_a_directed_graph_needs_small_momentum() -> None:
    node = MemoryGraph(make_topology("exponential", 8)).node(0)
    x = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match="QG-DmSGD"):
        DecentLaM(x, node, 0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=r"0\.9"):
        DecentLaM([{"params": x, "momentum": 0.9}], node, 0.1, momentum=0.1)
    DecentLaM(x, node, 0.1, momentum=0.3)


@pytest.mark.parametrize("graph", ["exponential", "one-peer-exponential", "random-matching"])
def test_d2_needs_a_fixed_symmetric_graph(graph: str) -> None:
    with pytest.raises(ConfigError, match="symmetric"):
        D2([torch.nn.Parameter(torch.zeros(2))], MemoryGraph(make_topology(graph, 8)).node(0), 0.1)


def test_parameters_that_it_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="the parameter groups are empty"):
        single("dsgd", [{"params": []}])
    with pytest.raises(UnsupportedError, match="bfloat16"):
        single("dsgd", [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    with pytest.raises(UnsupportedError, match="several"):
        single("dsgd", [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    x = torch.nn.Parameter(torch.zeros(2))
    optimizer = single("dsgd", [x])
    with pytest.raises(UnsupportedError, match="added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    x.data = x.data.double()
    with pytest.raises(UnsupportedError, match="float64"):
        optimizer.step()
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = single("dsgd", [embedding.weight])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        optimizer.step()


def test_a_node_of_pmsgd_cannot_come_back_alone() -> None:
    """The others go on with a momentum that it lacks."""
    x = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedError, match=r"pmsgd: a node cannot return.*start all nodes again"):
        single("pmsgd", [x]).begin_at(lambda flat: 1)
    assert single("dsgd", [x]).begin_at(lambda flat: 1) == 1


def test_settings_are_those_of_the_run_that_goes_on() -> None:
    """A node that enters without a checkpoint has them, too; the learning rate is the schedule's."""
    x = torch.nn.Parameter(torch.ones(2))
    before = single("dmsgd", [x], momentum=0.9, weight_decay=0.1)
    before.param_groups[0]["lr"] = 0.03
    before.step()
    now = single("dmsgd", [x], momentum=0.5, weight_decay=0.2)
    now.load_state_dict(before.state_dict())
    (group,) = now.param_groups
    assert {name: group[name] for name in ("lr", "num_steps", "momentum", "weight_decay")} == {
        "lr": 0.03,
        "num_steps": 1,
        "momentum": 0.5,
        "weight_decay": 0.2,
    }


def test_the_state_of_another_method_is_refused() -> None:
    x = torch.nn.Parameter(torch.zeros(2))
    saved = single("dsgd", [x]).state_dict()
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        DmSGD([x], MemoryGraph(make_topology("full", 1)).node(0), 0.1).load_state_dict(saved)


def test_a_node_that_stays_away_is_named() -> None:
    graph = MemoryGraph(make_topology("ring", 3), timeout=0.3)

    def node(number: int) -> None:
        if number != 1:
            x = torch.nn.Parameter(torch.zeros(2))
            make_optimizer("dsgd", [x], graph.node(number), 0.1).step()

    outcomes = try_islands(3, node)
    for number in (0, 2):
        error = outcomes[number]
        assert isinstance(error, IslandLostError)
        assert error.islands == (1,)
