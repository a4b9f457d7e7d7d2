"""What does it cost when islands miss rounds, or come and go? Real C4, a small Llama, islands on this machine.

    python benchmarks/unreliable.py drops --data 'en/c4-train.*.json.gz' --eval-data 'en/c4-validation.*.json.gz'
    python benchmarks/unreliable.py pools --data ... --eval-data ...

drops: four islands, in step; each misses each round but the last with probability 0, 10, 30, 50 %. It then sends and
gets nothing, goes on from its own weights, and brings its progress to the next round that it does not miss. pools: the
same number of island-rounds, spread over time in five ways: a constant pool, one that doubles or halves midway, one
that grows or shrinks step by step; islands join from the store, and leave when they are asked to (SIGTERM).

Every island is a process that meets the others in a folder as object store. The evaluation is that of island 0's outer
model after the last round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hf_diloco.apps.common.environment import STOPPED

FINISHED = 0
DROP_RATES = (0.0, 0.1, 0.3, 0.5)
_ENV = "HF_DILOCO_BENCHMARK"


@dataclass(frozen=True)
class Presence:
    """An island's part in a run: from which round on, and for how many."""

    island: int
    first_round: int
    num_rounds: int


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    islands: tuple[Presence, ...]
    drop_rate: float = 0.0

    @property
    def island_rounds(self) -> int:
        """The compute, in rounds of one island."""
        return sum(presence.num_rounds for presence in self.islands)


def drop_cases(num_rounds: int) -> list[Case]:
    """Four islands that miss rounds."""
    islands = tuple(Presence(island, 0, num_rounds) for island in range(4))
    return [Case(f"{rate:.0%} of the rounds missed", islands, rate) for rate in DROP_RATES]


def pool_cases(num_rounds: int) -> list[Case]:
    """Pools of one to five islands; equal compute in all, island 0 in all rounds."""
    sizes = {
        "constant, 3": [3, 3, 3, 3, 3],
        "ramp-up, 1 to 5": [1, 2, 3, 4, 5],
        "ramp-down, 5 to 1": [5, 4, 3, 2, 1],
        "doubling, 2 to 4": [2, 4],
        "halving, 4 to 2": [4, 2],
    }
    return [Case(name, _presences(pool, num_rounds)) for name, pool in sizes.items()]


def _presences(sizes: list[int], num_rounds: int) -> tuple[Presence, ...]:
    phase = num_rounds // len(sizes)
    found = []
    for island in range(max(sizes)):
        there = [number for number, size in enumerate(sizes) if island < size]
        found.append(Presence(island, there[0] * phase, len(there) * phase))
    return tuple(found)


def run_file(args: argparse.Namespace, case: Case, folder: Path) -> dict[str, Any]:
    """The run file that all islands of a case share."""
    return {
        "name": "run",
        "output": str(folder),
        "seed": args.seed,
        "model": {"path": str(args.start)} if args.start else {"preset": args.model},
        "tokenizer": {} if args.start else {"train": {"vocab_size": 4096}},
        "data": {
            "source": "files",
            "files": [args.data],
            "eval_files": [args.eval_data],
            "sequence_length": 128,
            "num_eval_sequences": 256,
        },
        "training": {
            "max_steps": args.rounds * args.sync_every,
            "per_device_train_batch_size": args.batch,
            "per_device_eval_batch_size": 32,
            "learning_rate": args.learning_rate,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 20,
            "logging_steps": 10,
            "save_strategy": "no",
        },
        "launch": {"resume": "never"},
        "sample": None,
        "diloco": {
            "num_islands": sum(presence.first_round == 0 for presence in case.islands),
            "max_islands": 5,
            "min_islands": 1,
            "grace": 60.0,
            "rendezvous": f"file://{folder}/store",
            "sync_every": args.sync_every,
            "outer_lr": args.outer_lr,
            "outer_momentum": args.outer_momentum,
        },
    }


def run_case(args: argparse.Namespace, number: int, case: Case) -> dict[str, Any]:
    """Runs a case, unless an earlier call has finished it; returns its row."""
    folder = (args.work / f"{args.what}-{number}-seed{args.seed}").resolve()
    done = folder / "row.json"
    if done.is_file():
        return dict(json.loads(done.read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run_file(args, case, folder)))
    processes = [start_island(path, case, presence, args) for presence in case.islands]
    codes = [process.wait() for process in processes]
    if any(code not in (FINISHED, STOPPED) for code in codes):
        raise SystemExit(f"{case.name}: exit codes {codes}; see {folder}/run/island-*/benchmark.txt")
    row = {"name": case.name, "island_rounds": case.island_rounds, **read_row(folder / "run", len(case.islands))}
    done.write_text(json.dumps(row))
    return row


def start_island(path: Path, case: Case, presence: Presence, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Starts one island as a process of its own."""
    log = path.parent / "run" / f"island-{presence.island}" / "benchmark.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        _ENV: json.dumps({**asdict(presence), "drop_rate": case.drop_rate, "seed": args.seed}),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, __file__, "island", path, f"diloco.island={presence.island}"]
    with log.open("wb") as output:
        return subprocess.Popen(list(map(str, command)), env=environment, stdout=output, stderr=subprocess.STDOUT)


def read_row(run: Path, num_islands: int) -> dict[str, Any]:
    """Loss of the final outer model, and how many rounds islands took part in."""
    records = [
        json.loads(line)
        for island in range(num_islands)
        for line in (run / f"island-{island}" / "metrics.jsonl").read_text().splitlines()
    ]
    plans = {record["round"]: record["participants"] for record in records if record["event"] == "sync"}
    summary = json.loads((run / "island-0" / "summary.json").read_text())
    return {
        "eval_loss": summary["eval_loss"],
        "eval_weights": summary["eval_weights"],
        "rounds": len(plans),
        "parts": sum(map(len, plans.values())),
    }


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints the table."""
    rounds = f"{args.rounds} rounds of {args.sync_every} steps, batch {args.batch} an island"
    table = Table(title=f"{args.start or args.model}, {rounds}, seed {args.seed}")
    for column in ("", "evaluation loss", "against the first", "rounds", "parts taken", "island-rounds"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['eval_loss']:.4f}" + ("" if row["eval_weights"] == "outer" else " (inner)"),
            f"{row['eval_loss'] / rows[0]['eval_loss'] - 1:+.2%}",
            str(row["rounds"]),
            str(row["parts"]),
            str(row["island_rounds"]),
        )
    Console(width=110).print(table)


# One island's process


def run_island(argv: list[str]) -> None:
    """As `python -m hf_diloco.apps.lm`, but this island joins late, leaves and misses rounds, as told."""
    from hf_diloco.apps.lm.train import main as train
    from hf_diloco.errors import MissedRoundError
    from hf_diloco.membership.candidates import Candidates
    from hf_diloco.rounds.elastic import ElasticSession
    from hf_diloco.rounds.joining import Pace

    plan = json.loads(os.environ[_ENV])
    join, sync = ElasticSession.join, ElasticSession.sync
    numbers = itertools.count(1)

    def join_late(session: ElasticSession, *args: Any, **kwargs: Any) -> bool:
        if session.config.island:  # island 0 begins the run: it is there in all rounds
            wait_for(session, "run.json")
        if plan["first_round"]:
            wait_for(session, f"rounds/{plan['first_round']:08d}/00/outcome.json")
        return join(session, *args, **kwargs)

    def leave_early(session: ElasticSession) -> Any:
        try:
            return sync(session)
        finally:
            if session.outer.round >= plan["first_round"] + plan["num_rounds"] and not session.is_over:
                os.kill(os.getpid(), signal.SIGTERM)

    def miss_some(session: ElasticSession) -> Any:
        number = next(numbers)
        if session.config.island not in who_misses(plan, number) or number == session.num_rounds:
            return sync(session)
        skip_to_snapshot(session, number)
        raise MissedRoundError("missed on purpose")

    ElasticSession.join = join_late  # type: ignore[method-assign,assignment]
    ElasticSession.sync = leave_early  # type: ignore[method-assign,assignment]
    if plan["drop_rate"]:
        ElasticSession.sync = miss_some  # type: ignore[method-assign,assignment]
        # All stay in step: nobody shifts its rounds to where the others are, and all wait for those that are behind.
        Pace.align = lambda pace: False  # type: ignore[method-assign,assignment]
        Candidates.awaited = lambda own, attempt, alive, waited: set(alive)  # type: ignore[method-assign,assignment]
    train(argv)


def who_misses(plan: dict[str, Any], round_number: int) -> set[int]:
    """The islands that miss a round; never all of them."""
    chance = random.Random(f"{plan['seed']} {round_number}")
    while True:
        missing = {island for island in range(4) if chance.random() < plan["drop_rate"]}
        if len(missing) < 4:
            return missing


def wait_for(session: Any, path: str, seconds: float = 3600.0) -> None:
    """Returns once a record is in the store."""
    deadline = time.monotonic() + seconds
    while session.store.get(path, 4 << 20) is None and time.monotonic() < deadline:
        time.sleep(0.05)


def skip_to_snapshot(session: Any, number: int) -> None:
    """Lets a round take place without this island: nobody waits for one that has left."""
    outer, members = session.outer, session.members
    members.set_phase("left")
    wait_for(session, f"rounds/{number:08d}/00/plan.json")
    members.set_phase("training")
    outer.current.due_at = outer.steps + session.config.sync_every


def main() -> None:
    """Runs the benchmark."""
    if sys.argv[1:2] == ["island"]:
        run_island(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["drops", "pools"])
    parser.add_argument("--data", required=True, help="training documents: C4's *.json.gz files, a glob")
    parser.add_argument("--eval-data", required=True, help="held-out documents, a glob")
    parser.add_argument("--work", type=Path, default=Path("runs/unreliable"), help="finished cases are kept here")
    parser.add_argument("--start", type=Path, help="folder of a model to start from; default: fresh weights")
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sync-every", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens a step and island")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    cases = drop_cases(args.rounds) if args.what == "drops" else pool_cases(args.rounds)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        rows.append(run_case(args, number, case))
        show(rows, args)


if __name__ == "__main__":
    main()
