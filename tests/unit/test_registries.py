"""A method, a number format or a graph of the package is one file: nothing else names it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_diloco.utils.own_files import classes_in
from tests.processes import ROOT

FILES = {
    "methods/outer/half_step.py": """
from hf_diloco.methods.outer.diloco import DiLoCo

class HalfStep(DiLoCo):
    name, summary = "half-step", "half of DiLoCo's"
""",
    "methods/gossip/lazy_sgd.py": """
from hf_diloco.methods.gossip.dsgd import DSGD

class LazySGD(DSGD):
    name = "lazy-sgd"
""",
    "codecs/tenth.py": """
from hf_diloco.codecs.casts import CastCodec
import torch

class Tenth(CastCodec):
    name, dtype, block_bytes, feedback_decay = "tenth", torch.float16, 2, 0.5
""",
}
GRAPH = """

@graph("line")
def line(num_nodes: int) -> PeriodicTopology:
    return ring(num_nodes)
"""
PROGRAM = """
import json
import torch
from hf_diloco import DiLoCoConfig, GossipConfig, make_topology
from hf_diloco.codecs import CODECS
from hf_diloco.methods.gossip import find_method
from hf_diloco.methods.outer import make_method

config = DiLoCoConfig(method="half-step", payload="tenth")
gossip = GossipConfig(method="lazy-sgd", topology="line").model_json_schema()["properties"]
code = torch.zeros(8, dtype=torch.uint8)
CODECS[config.payload].encode(torch.ones(4), code)
print(json.dumps({
    "outer": type(make_method(config)).__name__,
    "decay": config.feedback_decay,
    "code": code.view(torch.float16).tolist(),
    "gossip": find_method("lazy_sgd").__name__,
    "nodes": make_topology("line", 4).num_nodes,
    "schemas": [
        "tenth" in DiLoCoConfig.model_json_schema()["properties"]["payload"]["anyOf"][0]["enum"],
        "line" in gossip["topology"]["anyOf"][0]["enum"],
    ],
}))
"""


@pytest.mark.real_start
def test_one_more_file_is_all_that_a_method_a_number_format_or_a_graph_needs(tmp_path: Path) -> None:
    package = tmp_path / "hf_diloco"
    shutil.copytree(ROOT / "hf_diloco", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in FILES.items():
        (package / name).write_text(content)
    with (package / "methods/topology/graphs.py").open("a") as file:
        file.write(GRAPH)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "outer": "HalfStep",
        "decay": 0.5,
        "code": [1.0] * 4,
        "gossip": "LazySGD",
        "nodes": 4,
        "schemas": [True, True],
    }


def test_a_folder_s_classes_are_those_that_are_complete_and_have_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_shapes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(
        "from abc import ABC, abstractmethod\n"
        "class Shape(ABC):\n    name: str\n    @abstractmethod\n    def area(self): ...\n"
        "class Flat(Shape):\n    def area(self): return 0\n"
    )
    (package / "b.py").write_text(
        "from some_shapes.base import Flat, Shape\n"
        "class Dot(Flat):\n    name = 'dot'\n"
        "class Unnamed(Dot):\n    pass\n"
        "class Half(Shape):\n    name = 'half'\n"
        "class Line(Flat):\n    name = 'line'\n"
        "class Other:\n    name = 'other'\n"
    )
    (package / "a.py").write_text("from some_shapes.b import Dot\nclass Point(Dot):\n    name = 'point'\n")
    monkeypatch.syspath_prepend(tmp_path)
    from some_shapes.base import Shape  # type: ignore[import-not-found]

    assert [kind.name for kind in classes_in("some_shapes", Shape)] == ["point", "dot", "line"]
