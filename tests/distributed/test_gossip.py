"""Decentralised training by processes: what threads compute, and what is left when one is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.methods.gossip import METHODS
from hf_diloco.methods.topology import make_topology
from tests.islands import run_islands
from tests.processes import Process, Processes, run
from tests.programs.gossip_node import train
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[1] / "programs" / "gossip_node.py"
ONE_SIDED = {"swarm-sgd"}  # takes what neighbours have published: which steps it sees is not the same twice
UNCODED = {"swarm-sgd", "pmsgd"}
SETTINGS: dict[str, dict[str, Any]] = {"decentlam": {"momentum": 0.5}}
FIXED_ONLY = {"d2"}
BEGINS = {"momentum-consensus": {"begins": True}}
"""Settings of methods whose exchange begins before the gradient."""


@pytest.fixture
def store() -> KeptStore:
    return KeptStore()


def spawn(processes: Processes, **settings: Any) -> Process:
    return processes.spawn([sys.executable, PROGRAM, json.dumps(settings)], env={"PYTHONPATH": "."})


def start(
    processes: Processes, store: KeptStore, folder: Path, graph: str, num_nodes: int, **settings: Any
) -> list[Process]:
    return [
        spawn(
            processes,
            store=store.port,
            node=node,
            num_nodes=num_nodes,
            graph=graph,
            result=str(folder / f"{node}.pt"),
            **settings,
        )
        for node in range(num_nodes)
    ]


# What comes out


@pytest.mark.parametrize(
    ("graph", "num_nodes", "payload"),
    [
        ("ring", 4, "fp32"),
        pytest.param("one-peer-exponential", 4, "fp32", marks=pytest.mark.slow),
        pytest.param("full", 5, "fp32", marks=pytest.mark.slow),
        pytest.param("full", 5, "int4", marks=pytest.mark.slow),
    ],
)
def test_processes_compute_what_threads_compute(
    graph: str, num_nodes: int, payload: str, store: KeptStore, tmp_path: Path
) -> None:
    """Every method, one after the other, bit for bit."""
    topology = make_topology(graph, num_nodes)
    names = (
        METHODS.keys() - (ONE_SIDED if payload == "fp32" else UNCODED) - (set() if topology.is_static else FIXED_ONLY)
    )
    methods = [(name, SETTINGS.get(name, {}) if topology.is_symmetric else {}) for name in sorted(names)]
    methods = [(name, more) for name, more in methods if topology.is_symmetric or name != "decentlam"]
    steps, size = 20, 10_001

    def simulate(node: int) -> list[Any]:
        neighbours = with_payload(graph_in_memory.node(node), payload)
        return [train(neighbours, name, more, steps, size) for name, more in methods]

    graph_in_memory = MemoryGraph(topology)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have
    expected = run_islands(num_nodes, simulate)
    torch.set_num_threads(threads_before)
    with Processes() as processes:
        settings = {"methods": methods, "steps": steps, "size": size, "payload": payload}
        for process in start(processes, store, tmp_path, graph, num_nodes, **settings):
            process.wait()
    for node in range(num_nodes):
        for (name, _), ours, theirs in zip(methods, torch.load(tmp_path / f"{node}.pt"), expected[node], strict=True):
            assert torch.equal(ours[0], theirs[0]), (name, node)
            assert torch.equal(ours[1], theirs[1]), (name, node, "mean")
            if name != "pmsgd":  # whose all-reduce comes in pieces of whole blocks
                assert ours[2] == theirs[2], (name, node, "bytes")


# Who is lost


def check_survivors(nodes: list[Process], victim: int, folder: Path, reason: str) -> None:
    survivors = [node for node in range(len(nodes)) if node != victim]
    means = []
    for node in survivors:
        output = nodes[node].wait().output
        assert f"averaged over {survivors}" in output, output
        assert f"lost [{victim}]" in output, output
        if abs(node - victim) in (1, len(nodes) - 1):  # next to it on the ring
            assert f"news: node {victim} was lost ({reason})" in output, output
        assert re.search(rf"news: the average of all nodes is over .* without node {victim}", output), output
        means.append(torch.load(folder / f"{node}.pt")[0][1])
    assert all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize(
    ("graph", "num_nodes", "method"),
    [
        ("ring", 5, "decentlam"),
        pytest.param("ring", 4, "pmsgd", marks=pytest.mark.slow),
        pytest.param("ring", 5, "momentum-consensus", marks=pytest.mark.slow),
    ],
)
def test_survivors_of_a_killed_node_finish(
    graph: str, num_nodes: int, method: str, store: KeptStore, tmp_path: Path
) -> None:
    victim = 2
    with Processes() as processes:
        settings = {"methods": [(method, {})], "steps": 60, "size": 1000, "pause": 0.05, **BEGINS.get(method, {})}
        nodes = start(processes, store, tmp_path, graph, num_nodes, **settings)
        nodes[victim].wait_for("step 20$")
        nodes[victim].kill()
        if method == "pmsgd":  # uses no edges
            for node, process in enumerate(nodes):
                if node != victim:
                    assert "averaged over [0, 1, 3]" in process.wait().output
        else:
            check_survivors(nodes, victim, tmp_path, "its connection broke")
        nodes[victim].wait(expect=-signal.SIGKILL)
        assert not processes.alive()


def test_a_node_that_dies_in_the_middle_of_a_transfer_holds_up_nobody(store: KeptStore, tmp_path: Path) -> None:
    """Gloo does not wake a transfer that is half through when its connection breaks."""
    victim = 1
    with Processes() as processes:
        settings = {"methods": [("dsgd", {})], "steps": 6, "size": 4 << 20, "exchange_timeout": 300}
        nodes = start(processes, store, tmp_path, "ring", 4, **settings)
        nodes[victim].wait_for("step 2$")
        os.kill(nodes[victim].pid, signal.SIGSTOP)
        time.sleep(1)  # its neighbours fill the buffers between them, and go no further
        nodes[victim].kill()
        begun = time.monotonic()
        for node in (0, 2):
            nodes[node].wait_for(rf"news: node {victim} was lost \(its connection broke\)")
        assert time.monotonic() - begun < 60
        check_survivors(nodes, victim, tmp_path, "its connection broke")


@pytest.mark.usefixtures("compiled_averages")
def test_a_stopped_node_is_given_up_and_nobody_else(store: KeptStore, tmp_path: Path) -> None:
    """Those who wait for it keep others waiting, who must not take that for a loss."""
    victim = 2
    with Processes() as processes:
        settings = {"methods": [("dsgd", {})], "steps": 40, "size": 1000, "pause": 0.05, "exchange_timeout": 8}
        nodes = start(processes, store, tmp_path, "ring", 6, **settings)
        nodes[victim].wait_for("step 10$")
        os.kill(nodes[victim].pid, signal.SIGSTOP)
        check_survivors(nodes, victim, tmp_path, "it did not come within 8 s")
        os.kill(nodes[victim].pid, signal.SIGCONT)
        output = nodes[victim].wait(expect=1).output
        assert "IslandLostError: all neighbours of node 2 are lost" in output


# Whose connection breaks


@pytest.mark.parametrize(
    ("graph", "method", "payload"),
    [
        pytest.param("ring", "decentlam", "fp32", marks=pytest.mark.slow),
        # whose exchange is behind the computation; of the same in one process: tests/simulated/test_gossip_reunion.py
        pytest.param("full", "momentum-consensus", "fp32", marks=pytest.mark.slow),
        pytest.param("ring", "dsgd", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_connection_that_breaks_is_made_again(
    graph: str, method: str, payload: str, store: KeptStore, tmp_path: Path
) -> None:
    """Nobody is started again; from one step on, which both name, all is as if nothing had happened."""
    one, other, num_nodes = 1, 2, 4
    with Processes() as processes:
        settings = {"methods": [(method, {})], "steps": 300, "size": 1000, "pause": 0.05, "payload": payload}
        settings |= {"cut": [one, 20, other], **BEGINS.get(method, {})}
        nodes = start(processes, store, tmp_path, graph, num_nodes, **settings)
        outputs = [process.wait().output for process in nodes]
    steps = set()
    for node, output in enumerate(outputs):
        assert f"averaged over {list(range(num_nodes))}" in output, output
        assert "lost []" in output, output
        peer = {one: other, other: one}.get(node)
        if peer is None:
            assert "news" not in output, output
            continue
        assert f"news: node {peer} was lost (its connection broke)" in output, output
        again = re.search(rf"news: node {peer} is connected again: it takes part from step (\d+) on", output)
        assert again, output
        steps.add(int(again.group(1)))
    assert len(steps) == 1
    assert 20 < steps.pop() < 300
    results = [torch.load(tmp_path / f"{node}.pt")[0] for node in range(num_nodes)]
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)
    distances = [float((x - mean).norm() / mean.norm()) for x, mean, _ in results]
    uninterrupted = run_islands(num_nodes, simulate_with(graph, num_nodes, method, payload))
    expected = [float((x - mean).norm() / mean.norm()) for x, mean, _ in uninterrupted]
    assert distances == pytest.approx(expected, rel=0.02, abs=1e-4), "where it ends without"


def simulate_with(graph: str, num_nodes: int, method: str, payload: str) -> Callable[[int], list[Any]]:
    in_memory = MemoryGraph(make_topology(graph, num_nodes))
    return lambda node: train(with_payload(in_memory.node(node), payload), method, {}, 300, 1000)


# Who returns


@pytest.mark.parametrize(
    ("graph", "num_nodes", "victim", "method", "payload"),
    [
        pytest.param("ring", 4, 2, "dmsgd", "fp32", marks=pytest.mark.slow),
        pytest.param("ring", 5, 1, "pmsgd", "fp32", marks=pytest.mark.slow),
        ("full", 4, 3, "dsgd", "int8"),
        pytest.param("ring", 4, 2, "momentum-consensus", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_is_started_again_takes_part_again(
    graph: str, num_nodes: int, victim: int, method: str, payload: str, store: KeptStore, tmp_path: Path
) -> None:
    """However long its start takes: the others go on until it has taken its steps, too."""
    with Processes() as processes:
        settings = {"methods": [(method, {})], "steps_after_entry": 120, "size": 1000, "pause": 0.03}
        settings |= {"payload": payload, **BEGINS.get(method, {})}
        nodes = start(processes, store, tmp_path, graph, num_nodes, **settings)
        nodes[victim].wait_for("step 20$")
        nodes[victim].kill()
        others = [process for node, process in enumerate(nodes) if node != victim]
        near = make_topology(graph, num_nodes).neighbours(victim)
        for node in near:
            nodes[node].wait_for(f"news: .*node {victim}")
        others[0].wait_for("step 60$")  # gradients are small by now: what it lacks will be
        again = spawn(
            processes,
            store=store.port,
            node=victim,
            num_nodes=num_nodes,
            graph=graph,
            result=str(tmp_path / f"{victim}.pt"),
            **settings,
        )
        entered = int(again.wait_for(r"entered at (\d+)").group(1))
        assert entered > 60
        for process in [*others, again]:
            output = process.wait().output
            assert f"averaged over {list(range(num_nodes))}" in output, output
            assert "lost []" in output, output
        for node in near:
            assert f"news: node {victim} has returned: it takes part from step {entered} on" in nodes[node].output
        results = [torch.load(tmp_path / f"{node}.pt")[0] for node in range(num_nodes)]
        assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)
        distances = [float((x - mean).norm() / mean.norm()) for x, mean, _ in results]
        others_distance = max(distances[:victim] + distances[victim + 1 :])
        # Where nothing but gradients is averaged, what it lacked at first, its momentum, keeps it apart for good.
        assert distances[victim] <= (0.1 if method == "pmsgd" else 1.2 * others_distance + 1e-3), distances
        assert not processes.alive()


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.slow), "lattice-16"])
def test_a_node_returns_where_nobody_waits_for_anybody(quantization: str, store: KeptStore, tmp_path: Path) -> None:
    """Twice; steps go on until it has taken some again."""
    num_nodes, victim = 4, 2
    near = make_topology("ring", num_nodes).neighbours(victim)
    returned = rf"news: node {victim} has returned: it takes part from step (\d+) on"
    with Processes() as processes:
        method = ("swarm-sgd", {"local_steps": 2, "quantization": quantization})
        settings = {"methods": [method], "end": "enough", "size": 1000, "pause": 0.01}
        nodes = start(processes, store, tmp_path, "ring", num_nodes, **settings)
        nodes[victim].wait_for("step 20$")
        for number in (1, 2):
            nodes[victim].kill()
            for node in near:
                nodes[node].wait_for("(?s:.*)".join([f"news: node {victim} was lost"] * number))
            nodes[victim] = spawn(
                processes,
                store=store.port,
                node=victim,
                num_nodes=num_nodes,
                graph="ring",
                result=str(tmp_path / f"{victim}.pt"),
                **settings,
            )
            entered = int(nodes[victim].wait_for(r"entered at (\d+)").group(1))
            for node in near:
                nodes[node].wait_for("(?s:.*)".join([returned] * number))
            assert entered == max(int(re.findall(returned, nodes[node].output)[-1]) for node in near)
            nodes[victim].wait_for(f"step {entered + 20}$")
        store.client().set("enough", "yes")
        for process in nodes:
            output = process.wait().output
            assert f"averaged over {list(range(num_nodes))}" in output, output
            assert "lost []" in output, output
        results = [torch.load(tmp_path / f"{node}.pt")[0] for node in range(num_nodes)]
        assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)
        assert results[victim][2] > 0, "others took what it published"
        assert not processes.alive()


@pytest.mark.real_start  # or it ends as forked processes do, without what a program does at its exit
def test_a_program_that_ends_without_closing_leaves_no_thread_to_abort_it() -> None:
    """Threads that Gloo wakes, as the other node's process ends, while the interpreter shuts down."""
    assert run([sys.executable, "-m", "tests.programs.gossip_exit"]).output.splitlines()[-1] == "left:"
