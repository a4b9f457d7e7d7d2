"""Do decentralised methods learn as well as data parallelism? Eight nodes on a ring, Fashion-MNIST, skewed labels.

    python benchmarks/gossip_vision.py --data FOLDER_OF_IDX_FILES
    python benchmarks/gossip_vision.py --data FOLDER --processes --methods decentlam dmsgd --seeds 1
    python benchmarks/gossip_vision.py --data FOLDER --methods decentlam --batches 128 --payloads fp32 int8 int4

Every row is a run through the command line, with another method, batch size and seed; all have seen as many images at
the end. The learning rate grows with the batch, after a warm-up, as is usual with large batches (arXiv 1706.02677).
Methods without momentum take 1 / (1 - 0.9) times the rate of those with it: equally long steps. Accuracies are of the
mean of all nodes, on the whole test set: mean and standard deviation over the seeds.

By default nodes are threads of one process: the numbers are those of eight processes, bit for bit, if each has one
thread. --processes starts eight. Runs that have ended are not made again: they are looked up in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

NUM_NODES = 8
MOMENTUM = 0.9
ROOT = Path(__file__).resolve().parents[1]
METHODS: dict[str, dict[str, Any]] = {
    "pmsgd": {"momentum": MOMENTUM},
    "dsgd": {},
    "dmsgd": {"momentum": MOMENTUM},
    "da-dmsgd": {"momentum": MOMENTUM},
    "qg-dmsgd": {"momentum": MOMENTUM},
    "decentlam": {"momentum": MOMENTUM},
    "d2": {},
    "momentum-consensus": {"momentum": MOMENTUM},  # ω = ½
    "swarm-sgd": {"momentum": MOMENTUM, "options": {"local_steps": 1, "blocking": True}},
}
"""swarm-sgd in its blocking form, whose numbers do not depend on who is faster."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    batch: int  # of one node
    seed: int
    payload: str = "fp32"

    @property
    def name(self) -> str:
        payload = "" if self.payload == "fp32" else f"-{self.payload}"
        return f"{self.method}-b{self.batch}-s{self.seed}{payload}"


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        accuracy: of the mean of all nodes.
        step_bytes: sent by a node in a step, evaluations included.
    """

    accuracy: float
    step_bytes: float


def run_file(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """The run file of a cell."""
    images = cell.batch * NUM_NODES
    steps = max(1, args.epochs * args.examples // images)
    lr = args.lr * images / 256 / (1 if "momentum" in METHODS[cell.method] else 1 - MOMENTUM)
    return {
        "name": cell.name,
        "output": str(args.work),
        "seed": cell.seed,
        "model": {"preset": "resnet-tiny"},
        "data": {
            "source": "idx",
            "path": str(Path(args.data).resolve()),
            "shares": "dirichlet",
            "dirichlet_alpha": args.alpha,
            "max_train_examples": args.examples,
            "augment": {"horizontal_flip": True},
        },
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": cell.batch,
            "per_device_eval_batch_size": 256,
            "learning_rate": lr,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(1, steps // 10),
            "weight_decay": 1e-4,
            "max_grad_norm": 0.0,
            "logging_steps": max(1, steps // 10),
            "save_strategy": "no",
        },
        "gossip": {
            "method": cell.method,
            "topology": "ring",
            "num_nodes": NUM_NODES,
            "payload": cell.payload,
            **METHODS[cell.method],
        },
        "launch": {"use_cpu": True, "threads": 1, "resume": "auto"},
    }


def outcome(cell: Cell, args: argparse.Namespace) -> Outcome | None:
    """Trains, unless that has been done; None if it failed."""
    summary = args.work / cell.name / "island-0" / "summary.json"
    if not summary.exists():
        path = args.work / f"{cell.name}.yaml"
        path.write_text(yaml.safe_dump(run_file(cell, args)))
        in_one_process = [] if args.processes else ["--simulate", str(NUM_NODES)]
        log = (args.work / f"{cell.name}.log").open("w")
        command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(path), *in_one_process]
        subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if not summary.exists():
        return None
    lines = (summary.parent / "metrics.jsonl").read_text().splitlines()
    end = next(event for event in map(json.loads, reversed(lines)) if event["event"] == "end")
    return Outcome(float(json.loads(summary.read_text())["eval_accuracy"]), end["bytes_sent"] / end["step"])


def table(found: dict[Cell, Outcome | None], args: argparse.Namespace) -> Table:
    """Methods and payloads by batch sizes."""
    images = f"{args.epochs} epochs of {args.examples:,} images, ring of {NUM_NODES}, Dirichlet {args.alpha:g}"
    made = Table(title=f"test accuracy in %, {images}, {len(args.seeds)} seeds")
    made.add_column("method")
    for batch in args.batches:
        lr = args.lr * batch * NUM_NODES / 256
        made.add_column(f"batch {batch * NUM_NODES:,}\n(8 x {batch}), γ {lr:.3g}", justify="right")
    made.add_column("bytes a step", justify="right")
    for method in args.methods:
        for payload in args.payloads:
            cells = [[found.get(Cell(method, batch, seed, payload)) for seed in args.seeds] for batch in args.batches]
            sent = [one.step_bytes for one in cells[0] if one is not None]
            name = method if args.payloads == ["fp32"] else f"{method}, {payload}"
            made.add_row(name, *(_mean(values) for values in cells), f"{statistics.mean(sent):,.0f}" if sent else "")
    return made


def _mean(values: list[Outcome | None]) -> str:
    known = [100 * value.accuracy for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} failed"
    spread = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{spread}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="with the four idx files of Fashion-MNIST")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128, 512], help="images a step of one node")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--payloads", nargs="+", default=["fp32"], help="how vectors travel (gossip.payload)")
    parser.add_argument("--examples", type=int, default=24_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02, help="with momentum, for 256 images a step of all nodes")
    parser.add_argument("--alpha", type=float, default=1.0, help="of all classes together; small: few classes a node")
    parser.add_argument("--processes", action="store_true", help="eight processes a run, not threads of one")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=Path("runs/gossip-vision"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    cells = [
        Cell(method, batch, seed, payload)
        for seed in args.seeds
        for batch in args.batches
        for method in args.methods
        for payload in args.payloads
    ]
    with ThreadPoolExecutor(args.jobs) as jobs:
        found = dict(zip(cells, jobs.map(lambda cell: outcome(cell, args), cells), strict=True))
    Console(width=140).print(table(found, args))


if __name__ == "__main__":
    main()
