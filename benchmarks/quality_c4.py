"""Does the outer loop learn as well as synchronous training? Real C4, a small Llama, islands on this machine.

    python benchmarks/quality_c4.py --data 'en/c4-train.*.json.gz' --eval-data 'en/c4-validation.*.json.gz'

Every row is a run through `hf-diloco launch`. All start from one warm model (with --from-scratch: from equal random
weights), take the same number of steps, and are evaluated on the same held-out documents:

    one island          batch B: what an island reaches alone, on the whole corpus
    synchronous         batch B x islands in one data-parallel job: the same tokens as all islands, traffic every step
    DiLoCo ...          islands of batch B, each on its own share of the corpus, synchronised every H steps

--rows codecs: number formats on the wire, with and without error feedback. --rows streaming: fragments and overlap.

"recovered" is the share of the way from one island to synchronous training. Bytes are what one island sends: measured
for DiLoCo; for synchronous training 2 (M-1)/M x 4 bytes x parameters a step, as a ring all-reduce of fp32 gradients.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hf_diloco.report import load_run, summarise


@dataclass
class Plan:
    """One row: its name, number of islands, and what differs from the common settings."""

    name: str
    num_islands: int = 1
    diloco: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    num_processes: int = 1


@dataclass
class Row:
    """One row's figures; bytes are one island's."""

    name: str
    eval_loss: float
    bytes_sent: float
    against_fp32: float | None = None
    recovered: float | None = None
    less_traffic: float | None = None


NO_FEEDBACK = 1e-9
"""As good as none, which the configuration refuses for codecs that need it."""


def plans(args: argparse.Namespace) -> list[Plan]:
    """The rows of the table."""
    fitted = {"sync_every": args.sync_every, "outer_lr": args.outer_lr, "outer_momentum": args.outer_momentum}
    rows = {"learning": learning, "codecs": codecs, "streaming": streaming}[args.rows](args, fitted)
    return [Plan("DiLoCo, fitted", args.islands, fitted), *rows]


def codecs(args: argparse.Namespace, fitted: dict[str, Any]) -> list[Plan]:
    """One change of the fitted DiLoCo a row, but for the last two."""
    plain = {**fitted, "outer_lr": 1.0, "outer_momentum": 0.0}
    rows: dict[str, dict[str, Any]] = {
        "bf16": {"payload": "bf16"},
        "int8": {"payload": "int8"},
        "int4": {"payload": "int4"},
        "int4, feedback 1": {"payload": "int4", "error_feedback": 1.0},
        "fp4": {"payload": "fp4"},
        "fp4, feedback 1": {"payload": "fp4", "error_feedback": 1.0},
        "top-k 64 of 4096, feedback 0.95": {"payload": "topk"},
        "top-k 64 of 4096, no feedback": {"payload": "topk", "error_feedback": NO_FEEDBACK},
        "sign, feedback 1": {"payload": "sign"},
        "sign, no feedback": {"payload": "sign", "error_feedback": NO_FEEDBACK},
    }
    return [
        *(Plan(name, args.islands, {**fitted, **changes}) for name, changes in rows.items()),
        Plan("fp32, outer 1.0 / 0", args.islands, plain),
        Plan("SparseLoCo, outer 1.0", args.islands, {"sync_every": args.sync_every, "method": "sparseloco"}),
    ]


def streaming(args: argparse.Namespace, fitted: dict[str, Any]) -> list[Plan]:
    """Fragments without and with overlap, then with 4 bits."""
    two = {**fitted, "num_fragments": 2}
    rows = {
        "streaming, 2 fragments": two,
        "streaming, delay 1, alpha 0.5": {**two, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
        "streaming, delay 5, alpha 0.5": {**two, "fragment_sync_delay": 5, "fragment_update_alpha": 0.5},
        "streaming, delay 5, alpha 0": {**two, "fragment_sync_delay": 5},
        "streaming, delay 1, alpha 0.5, fp4": {
            **two,
            "fragment_sync_delay": 1,
            "fragment_update_alpha": 0.5,
            "payload": "fp4",
        },
        "eager": {**fitted, "method": "eager"},
        "whole model, delay 5, alpha 0.5": {**fitted, "fragment_sync_delay": 5, "fragment_update_alpha": 0.5},
    }
    return [Plan(name, args.islands, changes) for name, changes in rows.items()]


def learning(args: argparse.Namespace, fitted: dict[str, Any]) -> list[Plan]:
    """The baselines, and other outer settings."""
    alone = {"sync_every": args.steps, "outer_lr": 1.0, "outer_momentum": 0.0}
    return [
        Plan("one island", diloco=alone),
        Plan(
            "synchronous",
            diloco=alone,
            training={"per_device_train_batch_size": args.batch * args.islands // 2},
            num_processes=2,
        ),
        Plan("DiLoCo, fitted, bf16 payload", args.islands, {**fitted, "payload": "bf16"}),
        Plan("DiLoCo, paper's 0.7 / 0.9", args.islands, {**fitted, "outer_lr": 0.7, "outer_momentum": 0.9}),
        Plan("FedAvg (1.0 / 0)", args.islands, {**fitted, "outer_lr": 1.0, "outer_momentum": 0.0}),
    ]


def run_file(args: argparse.Namespace, plan: Plan, steps: int, model: dict[str, Any]) -> dict[str, Any]:
    """The run file of a row."""
    return {
        "name": re.sub(r"[^A-Za-z0-9.]+", "-", plan.name).strip("-"),
        "output": str(args.work),
        "seed": args.seed,
        "model": model,
        "tokenizer": {"train": {"vocab_size": 4096}} if "preset" in model else {},
        "data": {
            "source": "files",
            "files": [args.data],
            "eval_files": [args.eval_data],
            "sequence_length": 128,
            "num_eval_sequences": 256,
        },
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": args.batch,
            "per_device_eval_batch_size": 32,
            "learning_rate": args.learning_rate,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 20,
            "logging_steps": 10,
            "save_strategy": "no",
            **plan.training,
        },
        "launch": {"num_processes": plan.num_processes, "threads": 1, "resume": "never"},
        "sample": None,
        "diloco": {"num_islands": plan.num_islands, **plan.diloco},
    }


def launch(args: argparse.Namespace, plan: Plan, steps: int, model: dict[str, Any]) -> tuple[Path, Any]:
    """Runs a plan, unless an earlier call has finished it; returns its run folder and report."""
    settings = run_file(args, plan, steps, model)
    folder = args.work / settings["name"]
    if not (folder / "model").is_dir():
        args.work.mkdir(parents=True, exist_ok=True)
        path = args.work / f"{settings['name']}.yaml"
        path.write_text(yaml.safe_dump(settings))
        subprocess.run([sys.executable, "-m", "hf_diloco.cli", "launch", path], check=True, stdout=sys.stderr)
    return folder, summarise(load_run(folder))


def measure(args: argparse.Namespace) -> list[Row]:
    """Makes all runs, showing the table as it grows."""
    model: dict[str, Any] = {"preset": args.model}
    if not args.from_scratch:
        alone = {"sync_every": args.warm_steps, "outer_lr": 1.0, "outer_momentum": 0.0}
        warm, _ = launch(args, Plan("warm start", diloco=alone), args.warm_steps, model)
        model = {"path": str((warm / "model").resolve())}
    rows = []
    wanted = [plan for plan in plans(args) if not args.only or any(word in plan.name for word in args.only)]
    for plan in wanted:
        _, report = launch(args, plan, args.steps, model)
        sent = report.bytes_sent / plan.num_islands
        if plan.name == "synchronous":
            sent = args.steps * 2 * (args.islands - 1) / args.islands * 4 * report.num_parameters
        rows.append(Row(plan.name, report.eval_loss, sent))
        show(rows, args)
    return rows


def compare(rows: list[Row]) -> None:
    """Fills in what depends on the two baselines."""
    named = {row.name: row for row in rows}
    alone, synchronous, fp32 = (named.get(name) for name in ("one island", "synchronous", "DiLoCo, fitted"))
    for row in rows:
        if fp32:
            row.against_fp32 = row.eval_loss / fp32.eval_loss - 1
        if alone and synchronous:
            row.recovered = (alone.eval_loss - row.eval_loss) / (alone.eval_loss - synchronous.eval_loss)
        if synchronous and row.bytes_sent:
            row.less_traffic = synchronous.bytes_sent / row.bytes_sent


def show(rows: list[Row], args: argparse.Namespace) -> None:
    """Prints the table."""
    compare(rows)
    start = "from scratch" if args.from_scratch else f"after {args.warm_steps} warm steps"
    table = Table(
        title=f"{args.islands} islands, {args.model}, {args.steps} steps of batch {args.batch}, {start}, "
        f"H={args.sync_every}, seed {args.seed}"
    )
    for column in ("", "evaluation loss", "against fp32", "recovered", "MB sent by an island", "less traffic"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.eval_loss:.4f}",
            "" if row.against_fp32 is None else f"{row.against_fp32:+.2%}",
            "" if row.recovered is None else f"{row.recovered:.0%}",
            f"{row.bytes_sent / 1e6:,.1f}",
            "" if row.less_traffic is None else f"{row.less_traffic:.1f}x",
        )
    Console(width=110).print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="training documents: C4's *.json.gz files, a glob")
    parser.add_argument("--eval-data", required=True, help="held-out documents, a glob")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/quality_c4"), help="run folders; finished ones are kept"
    )
    parser.add_argument("--rows", choices=["learning", "codecs", "streaming"], default="learning")
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens a step and island")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--sync-every", type=int, default=15)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--only", nargs="*", default=[], help="run only rows whose names hold one of these words")
    args = parser.parse_args()
    args.work = args.work / f"seed{args.seed}{'-scratch' if args.from_scratch else ''}"
    rows = measure(args)
    (args.work / f"result-{args.rows}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
