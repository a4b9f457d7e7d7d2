"""One node of a decentralised least-squares run, as a process of its own.

Settings, as JSON: store (port), node, num_nodes, graph, methods (list of [name, settings]), steps, size (values),
result (file); if need be: exchange_timeout (seconds), pause (seconds a step), payload, begins (whether exchanges
begin before the pause, by `NodeNeighbours`, where the method allows it), end (a key of the store: steps are taken
until it is there, however many), steps_after_entry (that all take after the step at which one has returned, instead of
`steps`), cut ([node, step, peer]: after that step of that node its connections to the peer
break). Each method begins anew. After the last step the mean over all nodes is taken.
Prints "step N" after each step, and what happened to other nodes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.topology import make_topology
from tests.tcp_stores import await_value, reach

LR = 0.05


class Problem:
    """f_i(x) = ½ Σ_k h_k (x_k - s_k)², one a node, each with its own h between 0.5 and 1.5 and its own solution s."""

    def __init__(self, node: int, size: int) -> None:
        generator = torch.Generator().manual_seed(node)
        self._h = 0.5 + torch.rand(size, generator=generator)
        self._s = torch.randn(size, generator=generator)

    def gradient(self, x: torch.Tensor) -> torch.Tensor:
        return self._h * (x - self._s)


def train(
    neighbours: Neighbours,
    method: str,
    settings: dict[str, Any],
    steps: int,
    size: int,
    after: Callable[[int], None] = lambda step: None,
    pause: float = 0,
    has_ended: Callable[[int], bool] | None = None,
    entered: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """The parameters at the end, their mean over all nodes, and the bytes that were sent; calls `after` each step."""
    problem = Problem(neighbours.node, size)
    x = torch.nn.Parameter(torch.ones(size))
    optimizer = make_optimizer(method, [x], neighbours, LR, **settings)
    num_bytes = begin = 0
    if neighbours.is_returning:
        begin = neighbours.enter(x.data)
        optimizer.param_groups[0]["num_steps"] = begin
        entered(begin)
    step = begin
    while not has_ended(step) if has_ended else step < steps:
        optimizer.begin_exchange()
        time.sleep(pause)
        x.grad = problem.gradient(x.detach())
        optimizer.step()
        num_bytes += optimizer.traffic.bytes_sent
        after(step)
        step += 1
    with optimizer.averaged_weights():
        mean = x.detach().clone()
    return [x.detach().clone(), mean, num_bytes]


def cut_connections(pid: int) -> None:
    """Ends those of this process with another one of this machine, as a router does that forgets them."""
    theirs = {one.laddr for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED}
    cut = [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr in theirs]
    assert cut, f"none with process {pid}"
    for one in cut:
        with socket.socket(fileno=os.dup(one.fd)) as link:
            link.shutdown(socket.SHUT_RDWR)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    store = reach(settings["store"])
    topology = make_topology(settings["graph"], settings["num_nodes"])
    mesh = MeshNeighbours(
        store,
        topology,
        settings["node"],
        "127.0.0.1",
        Members(store.log, settings["node"], unit="node"),
        connect_timeout=180,
        exchange_timeout=settings.get("exchange_timeout", 60),
    )
    neighbours = with_payload(mesh, settings.get("payload", "fp32"))
    if settings.get("begins"):
        neighbours = NodeNeighbours(neighbours, topology, mesh.node, IslandGroup())

    store.set(f"pid/{mesh.node}", str(os.getpid()))
    cutter, cut_step, cut_off = settings.get("cut", [None, None, None])

    def after(step: int) -> None:
        print(f"step {step}", flush=True)
        if (mesh.node, step) == (cutter, cut_step):
            cut_connections(int(await_value(store, f"pid/{cut_off}")))
        for line in neighbours.take_events():
            print(f"news: {line}", flush=True)

    steps, steps_after_entry = settings.get("steps"), settings.get("steps_after_entry")

    def entered(step: int) -> None:
        print(f"entered at {step}", flush=True)
        if steps_after_entry:  # all others wait for this node's next step before they are there
            store.set("last", str(step + steps_after_entry))

    def has_ended(step: int) -> bool:
        if "end" in settings:
            return store.find(settings["end"]) is not None
        if steps_after_entry:
            return (last := store.find("last")) is not None and step >= int(last)
        return bool(step >= steps)

    results = [
        train(neighbours, method, more, 0, settings["size"], after, settings.get("pause", 0), has_ended, entered)
        for method, more in settings["methods"]
    ]
    torch.save(results, settings["result"])
    for line in neighbours.take_events():
        print(f"news: {line}", flush=True)
    print(f"averaged over {list(mesh.averaged_over)}", flush=True)
    print(f"lost {sorted(mesh.lost)}", flush=True)
    neighbours.share("end", {}) if not mesh.lost else None
    neighbours.close()


if __name__ == "__main__":
    main()
