"""A user's own methods, codec and graph, from files of theirs, through the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.chaos import run_file
from hf_diloco import codecs
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.trainer.gossip_start import check_gossip
from tests.processes import ROOT, Processes, find_free_port, run
from tests.records import events

METHOD, CODEC = "sign_momentum.py:SignMomentum", "grid.py:Grid"
GOSSIP, GRAPH = "sign_gossip.py:SignGossip", "alternating_ring.py:AlternatingRing"
NUM_NODES = 4
SYNC_EVERY = 2


def take_from_docs(page: str, file: Path) -> None:
    """The Python file that a page of the documentation shows."""
    text = (ROOT / "docs" / page).read_text()
    (code,) = re.findall(rf"```python\n(# {re.escape(file.name)}\n.*?)```", text, re.DOTALL)
    file.write_text(code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with both files and a run file."""
    monkeypatch.chdir(tmp_path)
    take_from_docs("methods.md", tmp_path / "sign_momentum.py")
    take_from_docs("codecs.md", tmp_path / "grid.py")
    settings = {"num_islands": 2, "max_islands": None, "min_islands": None, "outer_lr": 1e-3, "payload": CODEC}
    own: dict[str, Any] = {"method": METHOD, "options": {"smoothing": 0.5}, "outer_momentum": 0.9}
    content = run_file(tmp_path, 3, SYNC_EVERY, **{**settings, **own})
    content["training"]["save_steps"] = SYNC_EVERY
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def launch(folder: Path, *more: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(folder / "run.yaml"), *more]
    return run(command, cwd=folder, expect=expect, env={"OMP_NUM_THREADS": 1}).output


def syncs(folder: Path, island: int) -> list[dict[str, Any]]:
    return events(folder / "chaos" / f"island-{island}", "sync")


@pytest.mark.distributed
def test_a_run_and_its_resumption(folder: Path) -> None:
    launch(folder, "training.max_steps=4")
    launch(folder, "--resume", "auto")
    mine, other = syncs(folder, 0), syncs(folder, 1)
    assert [sync["round"] for sync in mine] == [1, 2, 3]
    assert [sync["outer_hash"] for sync in mine] == [sync["outer_hash"] for sync in other]
    assert len({sync["outer_hash"] for sync in mine}) == 3
    assert 0 < mine[-1]["bytes_sent"] < 40_000  # a byte each of 29,536 parameters, not four


@pytest.mark.distributed
def test_islands_with_different_files_are_refused(folder: Path) -> None:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    other = folder / "other"
    other.mkdir()
    for name in ("grid.py", "sign_momentum.py"):
        (other / name).write_text((folder / name).read_text())
    (other / "sign_momentum.py").write_text((folder / "sign_momentum.py").read_text() + "# another\n")
    with Processes() as processes:
        jobs = []
        for island, home in enumerate((folder, other)):
            command = [sys.executable, "-m", "hf_diloco.cli", "launch", folder / "run.yaml"]
            place = ["--island", str(island), "--rendezvous", rendezvous]
            jobs.append(processes.spawn([*map(str, command), *place], cwd=home, env={"OMP_NUM_THREADS": 1}))
        output = " ".join("\n".join(job.wait(100, expect=1).output for job in jobs).split())
    assert len(set(re.findall(r"SignMomentum of a file with SHA-256 ([0-9a-f]{16})", output))) == 2
    assert "algorithm differs" in output


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("method", "missing.py:Method", "there is no file missing.py"),
        ("method", "sign_momentum.py:Method", "sign_momentum.py has no class Method: correct the name"),
        (
            "method",
            "grid.py:Grid",
            "Grid is no OuterMethod: let it inherit from hf_diloco.methods.outer.base.OuterMethod",
        ),
        ("method", "broken.py:Method", "broken.py cannot be run: ZeroDivisionError"),
        ("method", "half.py:Half", "Half lacks make, step"),
        ("method", "half.py:Taken", "diloco is a method of hf_diloco: give the class another name"),
        ("payload", "missing.py:Codec", "there is no file missing.py"),
        ("payload", METHOD, "SignMomentum is no Codec"),
        ("payload", "half.py:Coded", "Coded lacks decode, encode"),
        ("payload", "half.py:Sized", "Sized says no block_bytes: give the class that attribute"),
        (
            "payload",
            "half.py:Late",
            "Late says no name: write name = '...' in the class itself",
        ),
        ("payload", "half.py:Builtin", "fp32 is a number format of hf_diloco: give the class another name"),
        ("payload", "half.py:Asking", "Asking() cannot be made ("),
        ("payload", "half.py:Uneven", "block_values is 3000: give a power of two, up to 262,144"),
        ("payload", "half.py:Lossy", "feedback_decay is 2: give a share, from 0 to 1"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(
    setting: str, value: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "CODECS", dict(codecs.CODECS))  # one that is loaded stays
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "half.py").write_text(
        "from hf_diloco.codecs import Codec\n"
        "from hf_diloco.methods.outer import OuterMethod\n"
        "from hf_diloco.methods.outer.diloco import DiLoCo\n"
        "class Half(OuterMethod):\n    name = summary = 'half'\n"
        "class Taken(DiLoCo):\n    pass\n"
        "class Coded(Codec):\n    name = 'coded'\n"
        "class Sized(Coded):\n    block_values = 1\n    encode = decode = None\n"
        "class Late(Codec):\n    encode = decode = None\n    def __init__(self):\n        self.name = 'late'\n"
        "class Builtin(Sized):\n    name, block_bytes = 'fp32', 4\n"
        "class Asking(Builtin):\n    name = 'asking'\n    def __init__(self, level): pass\n"
        "class Uneven(Builtin):\n    name, block_values = 'uneven', 3000\n"
        "class Lossy(Builtin):\n    name, feedback_decay = 'lossy', 2\n"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        DiLoCoConfig(**{setting: value})


# Nodes on a graph


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files of both and a run file."""
    monkeypatch.chdir(tmp_path)
    for name in ("sign_gossip.py", "alternating_ring.py"):
        take_from_docs("vision.md", tmp_path / name)
    content: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "vision" / "quickstart.yaml").read_text())
    content["name"], content["output"] = "own", str(tmp_path / "runs")
    content["training"] |= {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    content["gossip"] |= {"method": GOSSIP, "topology": GRAPH, "num_nodes": NUM_NODES}
    content["launch"] = {"use_cpu": True, "threads": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def node_events(folder: Path, node: int, event: str) -> list[dict[str, Any]]:
    return events(folder / "runs" / "own" / f"island-{node}", event)


@pytest.mark.distributed
def test_nodes_train_and_resume_by_a_method_and_on_a_graph_of_ones_own(nodes: Path) -> None:
    launch(nodes)
    launch(nodes, "training.max_steps=6", "--resume", "auto")
    first, resumed = node_events(nodes, 0, "start")
    assert (first["method"], first["topology"], resumed["resumed"]) == ("sign-gossip", "alternating-ring", True)
    vector = 4 * first["num_parameters"]
    for node in range(NUM_NODES):
        sent = sum(event["bytes_sent"] for event in node_events(nodes, node, "mix"))
        assert 6 * vector < sent < 10 * vector, "six for steps, where a ring has twelve, and three for means of all"


def test_the_graph_is_shown(nodes: Path) -> None:
    shown = run([sys.executable, "-m", "hf_diloco.cli", "topology", GRAPH, "--json"], cwd=nodes).output
    figures = json.loads(shown)
    assert (figures["name"], figures["period"]) == ("alternating-ring", 2)
    assert figures["most_bytes_per_step"] == 4 * 25_600_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "missing.py:Method"}, "there is no file missing.py"),
        ({"method": GRAPH}, "AlternatingRing is no GossipOptimizer: let it inherit from hf_diloco"),
        ({"method": "half.py:Half"}, "Half lacks update"),
        ({"method": "half.py:Nameless"}, "Nameless says no name"),
        ({"method": "half.py:Taken"}, "dsgd is a method of hf_diloco: give the class another name"),
        (
            {"options": {"omega": 1}},
            "omega: method sign-gossip has no such setting; it has momentum,",
        ),
        (
            {"topology": GOSSIP},
            "SignGossip is no Topology: let it inherit from hf_diloco.methods.topology.base.Topology",
        ),
        ({"num_nodes": 5}, "alternating-ring: "),
        ({"topology": "half.py:Small"}, "made with num_nodes=4, it has 1; correct it"),
        ({"topology": "half.py:Broken"}, "it cannot be made with num_nodes=4 (ZeroDivisionError: division by zero)"),
    ],
)
def test_a_method_or_graph_that_cannot_be_used_is_one_clear_error(
    settings: dict[str, Any], message: str, nodes: Path
) -> None:
    (nodes / "half.py").write_text(
        "from hf_diloco.methods.gossip import GossipOptimizer\n"
        "from hf_diloco.methods.gossip.dsgd import DSGD\n"
        "from hf_diloco.methods.topology import PeriodicTopology\n"
        "class Half(GossipOptimizer):\n    name = 'half'\n"
        "class Nameless(GossipOptimizer):\n    def update(self, x, g): pass\n"
        "class Taken(DSGD):\n    pass\n"
        "class Small(PeriodicTopology):\n    def __init__(self, num_nodes): super().__init__('small', [[1]])\n"
        "class Broken(PeriodicTopology):\n    def __init__(self, num_nodes): 1 / 0\n"
    )
    given = {"method": GOSSIP, "topology": GRAPH, "num_nodes": NUM_NODES, **settings}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_gossip(GossipConfig(rendezvous="tcp://127.0.0.1:9", **given))


@pytest.mark.distributed
@pytest.mark.parametrize("changed", ["sign_gossip.py", "alternating_ring.py"])
def test_nodes_with_different_files_are_refused(changed: str, nodes: Path) -> None:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    other = nodes / "other"
    other.mkdir()
    for name in ("sign_gossip.py", "alternating_ring.py"):
        (other / name).write_text((nodes / name).read_text() + ("# another\n" if name == changed else ""))
    with Processes() as processes:
        jobs = []
        for node, home in enumerate((nodes, other)):
            command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(nodes / "run.yaml"), "gossip.num_nodes=2"]
            place = ["--node", str(node), "--rendezvous", rendezvous]
            jobs.append(processes.spawn([*command, *place], cwd=home, env={"OMP_NUM_THREADS": 1}))
        output = " ".join("\n".join(job.wait(100, expect=1).output for job in jobs).split())
    kind, setting = ("SignGossip", "method") if changed == "sign_gossip.py" else ("AlternatingRing", "topology")
    assert len(set(re.findall(rf"{kind} of a file with SHA-256 ([0-9a-f]{{16}})", output))) == 2
    assert f"{setting} differs" in output
