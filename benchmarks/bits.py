"""Whether a change of the code leaves every bit of what training ends with as it was: one short run of each kind.

    python -m benchmarks.bits --against COMMIT
    python -m benchmarks.bits --output FILE
    python -m benchmarks.bits --check FILE --only plain eager

Each kind is a run of a few seconds through the command line or `OuterLoop`, of islands or nodes that are processes of
one thread. A record holds the SHA-256 of what each of them ends with: its weights, every vector of its outer state and
of its optimizer's, and its training losses. `--against` makes the records of another commit, in a worktree of its own
and with its own `benchmarks/bits.py`, and of this tree, one after the other, and says what differs; so does `--check`
with a record that was made before. Exit code 1: something differs.

Bits depend on the processor and on the versions of libraries: a record says where it was made, and `--check` refuses
one from elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from tests import forks
from tests.equivalence.runs import LAUNCH, Runs, zero
from tests.processes import ROOT, Processes, find_free_port, run

STEPS = 8
TIMEOUT = 900.0
"""Seconds that a run may take on a machine with much other work."""

TWO_RANKS: dict[str, Any] = {
    "training": {"per_device_train_batch_size": 2},
    "launch": {"num_processes": 2, "threads": 1},
}
ISLANDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "streaming with delay": {
        "diloco": {"num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    },
    "eager": {"diloco": {"method": "eager", "sync_every": 2}},
    "int8": {"diloco": {"payload": "int8", "sync_every": 2}},
    "top-k with feedback": {"diloco": {"payload": "topk", "error_feedback": 0.95, "sync_every": 2}},
    "slowmo": {"diloco": {"method": "slowmo", "sync_every": 2, "outer_momentum": 0.6}},
    "overlap-local-sgd": {"diloco": {"method": "overlap-local-sgd", "sync_every": 2}},
    "DDP": TWO_RANKS,
    "ZeRO-1": {**TWO_RANKS, "deepspeed": zero(1)},
    "ZeRO-2": {**TWO_RANKS, "deepspeed": zero(2)},
    "ZeRO-3": {**TWO_RANKS, "deepspeed": zero(3)},
}
"""What the run file of each kind changes of `tests/equivalence/runs.py`'s, of two islands that train a tiny Llama."""

NODES: dict[str, dict[str, Any]] = {
    "DecentLaM": {"method": "decentlam", "momentum": 0.9},
    "SwarmSGD": {
        "method": "swarm-sgd",
        "options": {"local_steps": 1, "blocking": True},
    },  # its form that is determined
    "momentum consensus": {"method": "momentum-consensus", "momentum": 0.9},
}
"""The `gossip` block of each kind, of three nodes that train a tiny residual network."""

VISION: dict[str, Any] = {
    "model": {"config": {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8}},
    "data": {"max_train_examples": 240, "max_eval_examples": 50, "shares": "dirichlet", "image_size": 8},
    "training": {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_steps": STEPS,
    },
    "gossip": {"topology": "ring", "num_nodes": 3, "exchange_timeout": 300},
    "launch": {"use_cpu": True, "threads": 1},
}

MISSED = "missed round"
KINDS = [*ISLANDS, MISSED, *NODES]
MISSED_GRACE = 6.0
LOOKS = 5.0
"""Seconds after which an island has seen where the others are."""
ALL = [0, 1, 2]
MISSED_STEP = 4
MISSED_ROUNDS = {2: ALL, MISSED_STEP: [0, 1], 6: ALL, 8: ALL}
"""By step, who takes part in each round of three islands, of which the last comes too late for the second."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}

Digests = dict[str, str]
"""By what it is of: "weights", "losses", "outer momentum" and so on."""


# Digests


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def digest_tensor(tensor: torch.Tensor) -> str:
    """Of its dtype, its shape and its bytes."""
    values = tensor.detach().contiguous().cpu().reshape(-1)
    return digest([f"{tensor.dtype} {tuple(tensor.shape)}".encode(), bytes(values.view(torch.uint8).numpy())])


def digest_weights(path: Path) -> str:
    """Of all tensors of a model's file, by name."""
    return digest(f"{name} {one}".encode() for name, one in sorted(read_digests(path)))


def digest_state(folder: Path) -> Digests:
    """Of all tensors of a name, over a checkpoint's files of all ranks and fragments, whatever those are called."""
    found: dict[str, list[str]] = {}
    for path in folder.glob("*/*.safetensors"):
        for name, one in read_digests(path):
            found.setdefault(name, []).append(one)
    return {f"outer {name}": digest(one.encode() for one in sorted(many)) for name, many in found.items()}


def digest_optimizer(path: Path) -> Digests:
    """Of all tensors of an optimizer's state; none under DeepSpeed, which has files of its own."""
    if not path.exists():
        return {}
    found: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(digest_tensor(value))
        elif isinstance(value, dict | list | tuple):
            for part in value.values() if isinstance(value, dict) else value:
                visit(part)

    visit(torch.load(path, weights_only=True))
    return {"optimizer": digest(one.encode() for one in sorted(found))}


def read_digests(path: Path) -> Iterator[tuple[str, str]]:
    """Names and digests of the tensors of a file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            yield name, digest_tensor(file.get_tensor(name))


def digest_run(folder: Path) -> dict[str, Digests]:
    """Of each island, or node, of a run that has ended with a checkpoint."""
    return {island.name: digest_island(island) for island in sorted(folder.glob("island-*"))}


def digest_island(folder: Path) -> Digests:
    """Of one island, or node."""
    checkpoint = folder / f"checkpoint-{STEPS}"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["event"] == "train"]
    return {
        "weights": digest_weights(checkpoint / "model.safetensors"),
        "losses": digest([json.dumps(losses).encode()]),
        **digest_state(checkpoint),
        **digest_optimizer(checkpoint / "optimizer.pt"),
    }


# Runs of each kind


def run_islands(name: str, runs: Runs) -> dict[str, Digests]:
    """A kind of `ISLANDS`."""
    changes = ISLANDS[name]
    training = {**changes.get("training", {}), "save_strategy": "steps", "save_steps": STEPS}
    path = runs.write(name.replace(" ", "-"), {**changes, "training": training})
    run([*LAUNCH, path], timeout=TIMEOUT)
    return digest_run(path.with_suffix(""))


def run_nodes(name: str, folder: Path) -> dict[str, Digests]:
    """A kind of `NODES`."""
    run_name = name.replace(" ", "-")
    path = folder / f"{run_name}.yaml"
    gossip = {**VISION["gossip"], **NODES[name]}
    path.write_text(yaml.safe_dump({**VISION, "name": run_name, "output": str(folder), "gossip": gossip}))
    run([*LAUNCH, path], timeout=TIMEOUT)
    return digest_run(folder / run_name)


def run_missed(folder: Path) -> dict[str, Digests]:
    """Three islands in a store, of which one misses a round; made again where others were late, too."""
    for attempt in range(5):
        work = folder / f"missed-{attempt}"
        work.mkdir()
        with Processes() as processes:
            islands = [
                processes.spawn(
                    [sys.executable, "-m", "benchmarks.bits", "--missed", work, "--island", number],  # type: ignore[list-item]
                    env={"MASTER_PORT": find_free_port()},
                )
                for number in ALL
            ]
            for island in islands:
                island.wait(timeout=TIMEOUT)
        answers = [json.loads((work / f"{number}.json").read_text()) for number in ALL]
        rounds = [{int(step): who for step, who in answer["rounds"].items()} for answer in answers]
        late = {step: who for step, who in rounds[-1].items() if step != MISSED_STEP}
        if rounds[:2] == [MISSED_ROUNDS] * 2 and late == {2: ALL, 6: ALL, 8: ALL}:
            return {f"island-{number}": answers[number]["digests"] for number in ALL}
        print(f"{MISSED}: rounds of {rounds}, made again", file=sys.stderr, flush=True)
    raise SystemExit(f"error: no attempt had the rounds {MISSED_ROUNDS}: is there too much other work?")


def train_missed(folder: Path, number: int) -> None:
    """One of those three islands. The last lets the others take the second round, and then catches up."""
    from accelerate import Accelerator

    from hf_diloco import DiLoCoConfig, OuterLoop

    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.05))
    torch.manual_seed(1 + number)
    config = DiLoCoConfig(
        sync_every=2,
        num_islands=3,
        min_islands=2,
        island=number,
        rendezvous=f"file://{folder}/store",
        grace=MISSED_GRACE,
    )
    is_late, rounds, losses = number == ALL[-1], {}, []
    with OuterLoop(accelerator, model, optimizer, config, output_dir=folder / f"{number}", num_steps=STEPS) as outer:
        for step in range(1, STEPS + 1):
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if is_late and step == MISSED_STEP:
                wait_for(folder / "passed")
                time.sleep(LOOKS)
            if report := outer.step():
                rounds[step] = list(report.participants)
            if step == MISSED_STEP:
                (folder / ("caught up" if is_late else "passed")).touch()
                wait_for(folder / "caught up")
        outer.save_state(folder / f"state-{number}")
        accelerator.save_model(model, folder / f"model-{number}")
    digests = {
        "weights": digest_weights(folder / f"model-{number}" / "model.safetensors"),
        "losses": digest([json.dumps(losses).encode()]),
        **digest_state(folder / f"state-{number}"),
    }
    (folder / f"{number}.json").write_text(json.dumps({"rounds": rounds, "digests": digests}))


def wait_for(path: Path) -> None:
    """Until it is there, or much time has passed: then the rounds are others, and it is made again."""
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


# Records


def record(names: Sequence[str]) -> dict[str, Any]:
    """Runs these kinds; returns where that was, and the digests of each."""
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="hf-diloco-bits-") as temporary:
        folder = Path(temporary)
        os.environ.setdefault("HF_HOME", str(folder / "cache"))
        forks.install(anywhere=True)
        runs = Runs(folder)
        kinds = {}
        for name in names:
            begin = time.monotonic()
            kinds[name] = run_kind(name, runs)
            print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return {"commit": describe_commit(), "environment": describe_environment(), "kinds": kinds}


def run_kind(name: str, runs: Runs) -> dict[str, Digests]:
    """The digests of each island, or node."""
    if name in ISLANDS:
        return run_islands(name, runs)
    return run_missed(runs.folder) if name == MISSED else run_nodes(name, runs.folder)


def describe_commit() -> str:
    """The one that this tree holds, and whether it was changed; empty where there is no git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def describe_environment() -> dict[str, str]:
    """What bits may depend on beside the code."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    libraries = ("torch", "numpy", "numba", "transformers", "accelerate", "deepspeed", "tokenizers", "datasets")
    return {
        "cpu": f"{model}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in libraries},
    }


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs, a line each; kinds that only one of both has are not compared."""
    lines = []
    for kind in old["kinds"].keys() & new["kinds"].keys():
        before, after = old["kinds"][kind], new["kinds"][kind]
        for island in before.keys() | after.keys():
            first, second = before.get(island, {}), after.get(island, {})
            for what in first.keys() | second.keys():
                if first.get(what) != second.get(what):
                    both = (
                        "differs"
                        if what in first and what in second
                        else "only " + ("old" if what in first else "new")
                    )
                    lines.append(f"{kind}, {island}: {what} {both}")
    return sorted(lines)


def tell(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Prints what differs.

    Raises:
        SystemExit: something does, or there is nothing to compare.
    """
    common = [kind for kind in new["kinds"] if kind in old["kinds"]]
    lines = compare(old, new)
    for kind in new["kinds"]:
        differ = sum(line.startswith(f"{kind}, ") for line in lines)
        print(
            f"{kind}: "
            + ("not in the other record" if kind not in common else f"{differ} differ" if differ else "equal")
        )
    print("\n".join(lines))
    if lines or not common:
        raise SystemExit(1)


def refuse_other_environment(old: dict[str, str], path: Path) -> None:
    """Raises `SystemExit` unless a record was made where this one is."""
    here = describe_environment()
    differ = [f"{name} {old.get(name)}, here {here.get(name)}" for name in here if old.get(name) != here[name]]
    if differ:
        raise SystemExit(f"error: {path} was recorded with {'; '.join(differ)}: use --against COMMIT")


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A folder that holds the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="hf-diloco-worktree-") as temporary:
        folder = Path(temporary, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def run_in(folder: Path, module: str, *arguments: str | Path) -> None:
    """Runs a benchmark of the tree in `folder`, with the package that is there."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    where = [sys.executable, "-c", "import hf_diloco; print(hf_diloco.__file__)"]
    package = Path(
        subprocess.run(where, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout.strip()
    )
    assert package.is_relative_to(folder), f"{package} comes first, before {folder}"
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=folder, env=env, check=True)


def record_at(commit: str, names: Sequence[str]) -> dict[str, Any]:
    """The record of another commit."""
    with worktree(commit) as folder, tempfile.TemporaryDirectory() as temporary:
        if not (folder / "benchmarks" / "bits.py").exists():
            raise SystemExit(f"error: {commit} has no benchmarks/bits.py: give a later commit")
        output = Path(temporary, "record.json")
        run_in(folder, "benchmarks.bits", "--output", output, "--only", *names)
        answer: dict[str, Any] = json.loads(output.read_text())
        return answer


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with a record")
    parser.add_argument("--against", metavar="COMMIT", help="compare with another commit")
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--missed", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.missed:
        train_missed(args.missed, args.island)
        return
    old = json.loads(args.check.read_text()) if args.check else None
    if old:
        refuse_other_environment(old["environment"], args.check)
    if args.against:
        old = record_at(args.against, args.only)
    new = record(args.only)
    if args.output:
        args.output.write_text(json.dumps(new, indent=1) + "\n")
    if old:
        tell(old, new)
    elif not args.output:
        print(json.dumps(new, indent=1))


if __name__ == "__main__":
    main()
