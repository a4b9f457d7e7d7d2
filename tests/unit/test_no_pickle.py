"""Nothing in the package can unpickle: a pickle from another machine would be a program that runs here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.processes import ROOT

SOURCES = [
    *sorted((ROOT / "hf_diloco").rglob("*.py")),
    ROOT / "train_lm.py",
    *sorted((ROOT / "scripts").rglob("*.py")),
]
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {
    *("torch.load", "np.load", "numpy.load"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_object", "gather_for_metrics_object"),
    *("eval", "exec", "yaml.unsafe_load", "yaml.full_load"),
}


def find_pickles(source: str) -> list[str]:
    """What of a program could unpickle, or run text as a program: imported modules and called functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [name for name in [node.module or ""] if name.partition(".")[0] in MODULES]
            found += [alias.name for alias in node.names if alias.name in CALLS]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in CALLS or name.rpartition(".")[2] in CALLS else []
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_unpickles_nothing(path: Path) -> None:
    assert not find_pickles(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.broadcast_object_list([], 0)",
        "from torch.distributed import all_gather_object",
        "import yaml\nyaml.unsafe_load('x')",
        "eval('1')",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert find_pickles(source)
