"""Nothing in the package can unpickle: a pickle from another machine would be a program that runs here.

`make style` looks at every file of the package (pyproject.toml, "banned-api" and the rules S); these tests show that
it would find what it is there for, and that no file of the package is excused.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig

from tests.processes import ROOT

FORBIDDEN = """\
import pickle
from pickle import loads
import cloudpickle
import dill
import joblib
import marshal
import shelve
import torch; torch.load("x")
from torch import load
import numpy as np; np.load("x")
import torch.distributed as dist; dist.broadcast_object_list([], 0)
from torch.distributed import all_gather_object
import torch.distributed as dist; dist.gather_object(1)
import torch.distributed as dist; dist.scatter_object_list([])
import torch.distributed as dist; dist.send_object_list([])
import torch.distributed as dist; dist.recv_object_list([])
from accelerate.utils import gather_object
from accelerate.utils import broadcast_object_list
import yaml; yaml.unsafe_load("x")
import yaml; yaml.full_load("x")
eval("1")
exec("1")
"""
RULES = {"S102", "S301", "S302", "S307", "TID251"}
BY_METHOD = re.compile(r"\.(gather_for_metrics_object|broadcast_object|\w+_object_list|all_gather_object)\(")


def found_in(source: str, name: str) -> set[int]:
    """The lines in which `make style` would find something that unpickles."""
    ruff = shutil.which("ruff", path=sysconfig.get_path("scripts"))
    assert ruff, "make install-dev installs it"
    command = [ruff, "check", "--output-format=json", "--no-cache", "--stdin-filename", str(ROOT / name), "-"]
    completed = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT)
    return {found["location"]["row"] for found in json.loads(completed.stdout) if found["code"] in RULES}


def test_the_linter_finds_all_that_unpickles() -> None:
    lines = range(1, len(FORBIDDEN.splitlines()) + 1)
    for name in ("hf_diloco/new.py", "hf_diloco/transport/new.py", "train_lm.py", "scripts/new.py"):
        assert set(lines) - found_in(FORBIDDEN, name) == set(), name


def test_the_linter_lets_other_calls_pass() -> None:
    assert found_in("import json, yaml\njson.loads('1')\nyaml.safe_load('1')\n", "hf_diloco/new.py") == set()


def test_no_file_of_the_package_is_excused_or_calls_one_by_a_method() -> None:
    sources = [*(ROOT / "hf_diloco").rglob("*.py"), ROOT / "train_lm.py", *(ROOT / "scripts").rglob("*.py")]
    assert len(sources) > 200
    for path in sources:
        text = path.read_text()
        assert not re.search(r"noqa(:.*\b(S\d+|TID251)\b|\s*$)|ruff: noqa", text, re.MULTILINE), path
        assert not BY_METHOD.search(text), path
