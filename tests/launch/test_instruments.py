"""The benchmarks by which a rebuilt package is held against the one before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.bits import compare
from benchmarks.moves import Profiler, count_importers, read_tree, read_trees
from tests.processes import run

pytestmark = pytest.mark.distributed

BITS = (sys.executable, "-m", "benchmarks.bits")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bits_are_those_of_another_run_and_a_difference_is_named(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    kinds = ["int8", "DecentLaM"]
    run([*BITS, "--output", record, "--only", *kinds], timeout=400)
    made = json.loads(record.read_text())
    assert [len(made["kinds"][kind]) for kind in kinds] == [2, 3]
    assert {"weights", "losses", "optimizer", "outer momentum"} < made["kinds"]["int8"]["island-1"].keys()
    again = run([*BITS, "--check", record, "--only", kinds[0]], timeout=400)
    assert "int8: equal" in again.output
    made["environment"]["torch"] = "0"
    record.write_text(json.dumps(made))
    refused = run([*BITS, "--check", record, "--only", kinds[0]], expect=1)
    assert "was recorded with torch 0, here" in refused.output


def test_what_differs_between_records_is_named() -> None:
    old = {"kinds": {"eager": {"island-0": {"weights": "a", "outer momentum": "b"}}, "gone": {}}}
    assert compare(old, old) == []
    new = {"kinds": {"eager": {"island-0": {"weights": "c", "outer velocity": "b"}}, "added": {}}}
    assert compare(old, new) == [
        "eager, island-0: outer momentum only old",
        "eager, island-0: outer velocity only new",
        "eager, island-0: weights differs",
    ]


def test_moves_are_calls_into_other_files_and_back(tmp_path: Path) -> None:
    package = make_package(
        tmp_path, {"a": "from p.b import f\ndef g(): f(); f()\n", "b": "def f(): [].append(len([]))\n"}
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from p.a import g  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    profiler = Profiler(package)
    profiler.begin()
    sys.setprofile(profiler.see)
    g()
    sys.setprofile(None)
    profiler.close()
    (trace,) = profiler.end().values()
    assert [Path(file).stem for file in trace.files] == ["a", "b", "a", "b", "a"]
    assert (trace.num_files, trace.num_moves) == (2, 5)


def test_the_tree_is_measured(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "one": "from p import two\nfrom .inner import three\n",
            "two": "def f():\n    def g():\n        pass\n",
            "inner/three": "import p.two\n" + "\n" * 400,
        },
    )
    (package / "inner" / "__init__.py").write_text("")
    assert count_importers(read_trees(package)) == {"p.one": 0, "p.two": 2, "p.inner.three": 1}
    figures = read_tree(package)
    assert figures["lines"] == [2 + 3 + 401]
    assert (figures["files"], figures["modules in the root"], figures["modules with one importer"]) == ([5], [2], [1])
    assert (figures["files over 400 lines"], figures["lines of the longest file"]) == ([1], [401])
    assert figures["lines of the median function"] == [2.5]


def make_package(folder: Path, modules: dict[str, str]) -> Path:
    package = folder / "p"
    for name, text in {"__init__": "", **modules}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_a_synchronisation_is_followed(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    shown = run([sys.executable, "-m", "benchmarks.moves", "--rounds", "1", "--json", output], timeout=200)
    looks = json.loads(output.read_text())["here"]
    fixed, elastic = looks["fixed membership, tcp://"], looks["elastic membership, a folder"]
    for figures in (fixed, elastic):
        assert all(3 < files < moves for files, moves in zip(figures["files"], figures["moves"], strict=False))
    assert "| the tree | lines | " in shown.output
