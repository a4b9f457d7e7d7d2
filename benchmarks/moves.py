"""How far one has to look to follow a synchronisation through the code, and how the code is laid out.

    python -m benchmarks.moves
    python -m benchmarks.moves --against COMMIT --json FILE

Two islands, threads of this process, train a small model with `OuterLoop`, in fp32. A profiler follows the call of
`OuterLoop.step` that synchronises, on either island, and the threads that the island has for it:

files   of the package that the thread runs through
moves   how often it goes from a file of the package to another one, by a call or back from one

Waiting is looking again and again, so that moves differ from round to round: each number is the least of `--rounds`
rounds. Of two numbers the first is the island that has fewer. "elsewhere" are all other threads of both islands
meanwhile, which also give signs of life and tidy up.

The rest is read from the files: blank lines and comments count; a module "with one importer" is imported by exactly
one other of the package, be it the `__init__` of its folder; a function's length is from `def` to its end.

`--against` has this program look at another commit, too, in a worktree of its own, and prints it beside.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path("hf_diloco")
ROOT = Path(__file__).resolve().parents[1]
LONG = 400
NUM_ISLANDS = 2

Figures = dict[str, list[float]]
"""One or two numbers by what they are."""


# Moves


@dataclass
class Trace:
    """The files of the package that one thread went through, in order."""

    files: list[str] = field(default_factory=list)

    @property
    def num_files(self) -> int:
        """Different ones."""
        return len(set(self.files))

    @property
    def num_moves(self) -> int:
        """From one to another; coming to the first counts, too."""
        return len(self.files)

    def note(self, file: str | None) -> None:
        """It now runs in `file`; None: outside the package, which is no place of its own."""
        if file is not None and (not self.files or self.files[-1] != file):
            self.files.append(file)


class Profiler:
    """Follows threads while it is switched on: all that start after it was made.

    Attributes:
        traces: by the identity of the thread.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self.is_on = False
        self.traces: dict[int, Trace] = {}
        threading.setprofile(self.see)

    def close(self) -> None:
        """Threads that start from now on are not followed."""
        threading.setprofile(None)

    def begin(self) -> None:
        """Forgets what it saw, and looks."""
        self.traces = {}
        self.is_on = True

    def end(self) -> dict[int, Trace]:
        """What it saw."""
        self.is_on = False
        return self.traces

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """What `sys.setprofile` calls."""
        if not self.is_on or event not in ("call", "return"):
            return
        now = frame if event == "call" else frame.f_back
        while now is not None and not now.f_code.co_filename.startswith(self._package):
            if event == "call":
                return
            now = now.f_back
        if now is not None:
            trace = self.traces.setdefault(threading.get_ident(), Trace())
            trace.note(now.f_code.co_filename)


def follow(rendezvous: str, folder: Path, num_rounds: int) -> Figures:
    """Files and moves of a synchronisation of two islands that meet there.

    Args:
        rendezvous: an address or a store.
        folder: where islands may write.
        num_rounds: how many are looked at, after two that are not.
    """
    from accelerate import Accelerator

    import hf_diloco

    Accelerator(cpu=True)  # the first is not for two threads to make at once
    profiler = Profiler(Path(hf_diloco.__file__).parent)
    meet = threading.Barrier(NUM_ISLANDS)
    seen: list[dict[int, Trace]] = []
    idents: list[int] = [0] * NUM_ISLANDS
    failures: list[BaseException] = []

    def train(island: int) -> None:
        idents[island] = threading.get_ident()
        try:
            for synchronise in island_rounds(island, rendezvous, folder / f"{island}", 2 + num_rounds):
                if meet.wait() == 0:
                    profiler.begin()
                meet.wait()
                synchronise()
                if meet.wait() == 0:
                    seen.append(profiler.end())
                meet.wait()
        except BaseException as error:
            failures.append(error)
            meet.abort()

    threads = [threading.Thread(target=train, args=(island,), daemon=True) for island in range(NUM_ISLANDS)]
    for thread in threads:
        thread.start()
    while not failures and any(thread.is_alive() for thread in threads):  # else one would wait long for who has failed
        time.sleep(0.1)
    profiler.close()
    if failures:
        raise failures[0]
    rounds = seen[2:]
    islands = [[traces[ident] for traces in rounds] for ident in idents]
    others = [[trace for ident, trace in traces.items() if ident not in idents] for traces in rounds]
    return {
        "files": sorted(min(trace.num_files for trace in traces) for traces in islands),
        "moves": sorted(min(trace.num_moves for trace in traces) for traces in islands),
        "moves elsewhere": [min(sum(trace.num_moves for trace in traces) for traces in others)],
    }


def island_rounds(island: int, rendezvous: str, folder: Path, num_rounds: int) -> Iterator[Callable[[], object]]:
    """Trains an island; yields what synchronises, to be called once each time."""
    import torch
    from accelerate import Accelerator
    from torch import nn

    from hf_diloco import DiLoCoConfig, OuterLoop

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    config = DiLoCoConfig(sync_every=2, num_islands=NUM_ISLANDS, island=island, rendezvous=rendezvous)
    with OuterLoop(accelerator, prepared, optimizer, config, output_dir=folder) as outer:
        for step in range(1, 2 * num_rounds + 1):
            accelerator.backward(prepared(torch.randn(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                outer.step()
            else:
                yield outer.step
                if outer.report is None or outer.report.participants != list(range(NUM_ISLANDS)):
                    raise SystemExit(f"error: round {outer.round} was not of all islands: {outer.report}")


# The tree


def read_tree(package: Path) -> Figures:
    """Lines, files and modules of a package."""
    lengths = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    trees = read_trees(package)
    functions = sorted(length for tree in trees.values() for length in function_lengths(tree))
    importers = count_importers(trees)
    root = [path for path in lengths if path.parent == package and not path.name.startswith("__")]
    return {
        "lines": [sum(lengths.values())],
        "files": [len(lengths)],
        "modules in the root": [len(root)],
        "modules with one importer": [sum(number == 1 for number in importers.values())],
        f"files over {LONG} lines": [sum(length > LONG for length in lengths.values())],
        "lines of the median file": [statistics.median(lengths.values())],
        "lines of the longest file": [max(lengths.values())],
        "lines of the median function": [statistics.median(functions)],
        "lines of a function, 95th percentile": [functions[int(0.95 * len(functions))]],
    }


def read_trees(package: Path) -> dict[Path, ast.Module]:
    """The syntax of each file, by its path from above the package."""
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package.parent): ast.parse(path.read_text()) for path in paths}


def function_lengths(tree: ast.Module) -> Iterator[int]:
    """Lines of each function and method, without decorators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def count_importers(trees: dict[Path, ast.Module]) -> dict[str, int]:
    """How many other modules import each, by its name; without those that are only run."""
    modules = {name_of(path): path for path in trees}
    importers: dict[str, set[str]] = {name: set() for name, path in modules.items() if path.stem != "__main__"}
    for name, path in modules.items():
        for imported in imports_of(trees[path], name, path.stem == "__init__", modules.keys()):
            if imported in importers and imported != name:
                importers[imported].add(name)
    return {name: len(those) for name, those in importers.items() if modules[name].stem != "__init__"}


def name_of(path: Path) -> str:
    """Of the module in a file."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, name: str, is_package: bool, modules: Any) -> Iterator[str]:
    """The modules that one imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")
            above = parents[: len(parents) - node.level + is_package] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in modules else source


# Both


def look(num_rounds: int) -> dict[str, Figures]:
    """All figures of the tree that this program lies in."""
    from tests.processes import find_free_port

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        return {
            "fixed membership, tcp://": follow(f"tcp://127.0.0.1:{find_free_port()}", folder / "a", num_rounds),
            "elastic membership, a folder": follow(f"file://{folder}/store", folder / "b", num_rounds),
            "the tree": read_tree(ROOT / PACKAGE),
        }


def look_at(commit: str, num_rounds: int) -> dict[str, Figures]:
    """All figures of another commit, by this program."""
    from benchmarks.bits import run_in, worktree

    with worktree(commit) as folder, tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary, "figures.json")
        for name in ("moves.py", "bits.py"):
            shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks" / name)
        run_in(folder, "benchmarks.moves", "--json", output, "--rounds", str(num_rounds))
        answer: dict[str, dict[str, Figures]] = json.loads(output.read_text())
        return answer["here"]


def make_table(looks: dict[str, dict[str, Figures]]) -> str:
    """Markdown, a column for each tree."""
    lines = [f"| | | {' | '.join(looks)} |", "|---|---|" + "---|" * len(looks)]
    here = looks["here"]
    for where, figures in here.items():
        for position, what in enumerate(figures):
            cells = [describe(figures_of[where].get(what, [])) for figures_of in looks.values()]
            lines.append(f"| {'' if position else where} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(numbers: list[float]) -> str:
    """One number, or both where they differ."""
    return "–".join(f"{number:,.10g}" for number in dict.fromkeys(numbers))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="another commit, beside")
    parser.add_argument("--rounds", type=int, default=6, help="of which each number is the least")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args()
    before = {args.against: look_at(args.against, args.rounds)} if args.against else {}
    looks = {**before, "here": look(args.rounds)}
    if args.json:
        args.json.write_text(json.dumps(looks, indent=1) + "\n")
    print(make_table(looks))


if __name__ == "__main__":
    main()
