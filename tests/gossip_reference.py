"""Decentralised optimizers in NumPy, written from the equations; the problem they solve; nodes as threads that do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.methods.gossip import GossipOptimizer, make_optimizer
from hf_diloco.methods.topology import Topology, make_topology
from tests.islands import run_islands

Array = NDArray[np.float64]
Gradient = Callable[[Array, int], Array]  # of all nodes at once: [n, d] and the step to [n, d]
Reference = Callable[..., Array]
NUM_NODES = 8


class LeastSquares:
    """f_i(x) = ½ x·H_i x - c_i·x, one a node, each with its own solution."""

    def __init__(self, hessians: Array, solutions: Array) -> None:
        self.hessians = hessians
        self.c = np.einsum("nij,nj->ni", hessians, solutions)
        self.solution = np.linalg.solve(hessians.sum(0), self.c.sum(0))

    @classmethod
    def gaussian(cls, num_nodes: int = NUM_NODES, seed: int = 0) -> LeastSquares:
        """A_i of 50 x 30 Gaussian values."""
        rng = np.random.default_rng(seed)
        a = rng.standard_normal((num_nodes, 50, 30))
        return cls(a.transpose(0, 2, 1) @ a, rng.standard_normal((num_nodes, 30)))

    @classmethod
    def easy(cls, num_nodes: int = NUM_NODES, size: int = 3) -> LeastSquares:
        """Eigenvalues from 0.5 to 1.5: limits are reached within some hundred steps."""
        rng = np.random.default_rng(1)
        q = np.linalg.qr(rng.standard_normal((num_nodes, size, size)))[0]
        return cls(
            np.einsum("nij,j,nkj->nik", q, np.linspace(0.5, 1.5, size), q), rng.standard_normal((num_nodes, size))
        )

    def gradient(self, x: Array, step: int = 0) -> Array:
        return np.einsum("nij,nj->ni", self.hessians, x) - self.c

    def limit(self, mixing: Array, lr: float, adapt: Array) -> Array:
        """x with x = mixing x - lr adapt (H x - c), where `mixing` and `adapt` are [n, n]: [n, d]."""
        n, d = self.c.shape
        left = np.kron(np.eye(n) - mixing, np.eye(d))
        for i in range(n):
            for j in range(n):
                left[i * d : (i + 1) * d, j * d : (j + 1) * d] += lr * adapt[i, j] * self.hessians[j]
        return np.linalg.solve(left, lr * (adapt @ self.c).ravel()).reshape(n, d)

    def bias(self, x: Array) -> float:
        """mean_i |x_i - x*|² / |x*|²."""
        return float(((x - self.solution) ** 2).sum(1).mean() / (self.solution**2).sum())


def train(
    method: str,
    topology: Topology,
    start: Array,
    gradient: Gradient,
    lrs: list[float],
    momenta: Array | None = None,
    **settings: Any,
) -> Array:
    """Runs each node's optimizer as a thread, in fp64; what all nodes held after each step, [steps + 1, n, d]."""
    graph = MemoryGraph(topology)
    history = np.empty((len(lrs) + 1, *start.shape))
    history[0] = start

    def node(number: int) -> None:
        x = torch.nn.Parameter(torch.tensor(start[number]))
        optimizer = make_optimizer(method, [x], graph.node(number), lrs[0], **settings)
        if momenta is not None:
            optimizer.vector("momentum_buffer").copy_(torch.from_numpy(momenta[number]))
        for step, lr in enumerate(lrs):
            optimizer.param_groups[0]["lr"] = lr
            now = history[step].copy()
            now[number] = x.detach().numpy()
            x.grad = torch.tensor(gradient(now, step)[number])
            optimizer.step()
            history[step + 1, number] = x.detach().numpy()

    run_islands(topology.num_nodes, node)
    return history


def dsgd(W: Array, x: Array, gradient: Gradient, lrs: list[float], combine_first: bool = False) -> Array:
    for step, lr in enumerate(lrs):
        g = gradient(x, step)
        x = W @ x - lr * g if combine_first else W @ (x - lr * g)
    return x


def dmsgd(
    W: Array,
    x: Array,
    gradient: Gradient,
    lrs: list[float],
    momentum: float,
    combine_first: bool = False,
    nesterov: bool = False,
) -> Array:
    m = np.zeros_like(x)
    for step, lr in enumerate(lrs):
        g = gradient(x, step)
        m = momentum * m + g
        update = g + momentum * m if nesterov else m
        x = W @ x - lr * update if combine_first else W @ (x - lr * update)
    return x


def da_dmsgd(W: Array, x: Array, gradient: Gradient, lrs: list[float], momentum: float) -> Array:
    m = np.zeros_like(x)
    for step, lr in enumerate(lrs):
        ahead = momentum * m + gradient(x, step)
        x = W @ (x - lr * ahead)
        m = W @ ahead
    return x


def decentlam(W: Array, x: Array, gradient: Gradient, lrs: list[float], momentum: float) -> Array:
    move, lr_before = np.zeros_like(x), lrs[0]
    for step, lr in enumerate(lrs):
        move = momentum * min(2, lr / lr_before) * move + x - W @ (x - lr * gradient(x, step))
        x, lr_before = x - move, lr
    return x


def qg_dmsgd(
    W: Array,
    x: Array,
    gradient: Gradient,
    lrs: list[float],
    momentum: float,
    average_momentum: float | None = None,
    nesterov: bool = False,
) -> Array:
    mu = momentum if average_momentum is None else average_momentum
    m, lr_before = np.zeros_like(x), lrs[0]
    for step, lr in enumerate(lrs):
        g = gradient(x, step)
        m = m * min(1, 2 * lr_before / lr)
        ahead = momentum * m + g
        new = W @ (x - lr * (g + momentum * ahead if nesterov else ahead))
        m = mu * m + (1 - mu) * (x - new) / lr
        x, lr_before = new, lr
    return x


def d2(W: Array, x: Array, gradient: Gradient, lrs: list[float]) -> Array:
    half = (np.eye(len(W)) + W) / 2
    correction, lr_before = np.zeros_like(x), lrs[0]
    for step, lr in enumerate(lrs):
        descended = x - lr * gradient(x, step)
        x = half @ (descended + min(1, lr / lr_before) * correction)
        correction, lr_before = x - descended, lr
    return x


def momentum_consensus(
    W: Array, x: Array, gradient: Gradient, lrs: list[float], momentum: float, omega: float
) -> Array:
    before = x
    for step, lr in enumerate(lrs):
        v = x - before
        new = W @ x - lr * gradient(x, step) + momentum * ((1 - omega) * v + omega * W @ v)
        before, x = x, new
    return x


def pmsgd(W: Array, x: Array, gradient: Gradient, lrs: list[float], momentum: float, nesterov: bool = False) -> Array:
    m = np.zeros_like(x)
    for step, lr in enumerate(lrs):
        g = np.broadcast_to(gradient(x, step).mean(0), x.shape)
        m = momentum * m + g
        x = x - lr * (g + momentum * m if nesterov else m)
    return x


def agreed(n: int, d: int) -> Array:
    return np.tile(np.random.default_rng(5).standard_normal(d), (n, 1))


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def nodes(
    topology: Topology, method: str, num_steps: int, resume_at: int | None = None, **settings: Any
) -> list[list[torch.Tensor]]:
    """Trains a small network on every node, each with its own data; saves and loads at `resume_at`."""
    graph = MemoryGraph(topology)
    start = network()

    def make(model: torch.nn.Sequential, number: int) -> tuple[GossipOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters())},
            {"params": list(model[2].parameters()), "lr": 0.02},
        ]
        optimizer = make_optimizer(method, groups, graph.node(number), 0.05, **settings)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    def node(number: int) -> list[torch.Tensor]:
        model = copy.deepcopy(start)
        optimizer, scheduler = make(model, number)
        generator = torch.Generator().manual_seed(number)
        for step in range(num_steps):
            if step == resume_at:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
                model = network(seed=9)
                optimizer, scheduler = make(model, number)
                for thing, state in zip((model, optimizer, scheduler), saved, strict=True):
                    thing.load_state_dict(state)  # type: ignore[attr-defined]
            inputs, labels = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
            (model(inputs) - labels).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return run_islands(topology.num_nodes, node)


def single(method: str, params: Any, lr: float = 0.1, **settings: Any) -> GossipOptimizer:
    """The only node of its graph."""
    return make_optimizer(method, params, MemoryGraph(make_topology("full", 1)).node(0), lr, **settings)
