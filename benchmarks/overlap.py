"""How busy does a slow link leave two islands? Whole training runs, each island in a network of its own.

    python -m benchmarks.overlap

The link is such that a synchronisation in fp32 takes about as long as its inner steps, so that an island that waits
for it trains half of the time; with --slack 1.5 there are half as many steps again. Every row is a run of the same
steps on the same data:

    utilisation     share of the islands' time in which inner steps ran: without what training stood still for rounds,
                    by their own records (waiting, exchanging, reading and writing weights); of all islands, and in
                    brackets of each. Where one is faster, it waits for the other, however fast the link is
    s a step        of that time, for one inner step of island 0; and how many times as long as without communication
    hidden          share of the seconds of waiting and exchanging that passed behind inner steps
    stalled         seconds that training stood still, on average
    at the end      and after the last step, for the last rounds of fragments: once a run, so not in what is above
    loss            of the outer parameters at the end
    to common loss  seconds until island 0 was as good as the worst of all rows is in the end
    MB              sent by one island in a round, measured

Evaluations are left out of all times but that to a common loss. "every step" is data-parallel training over the link;
it takes few steps, which is enough to see their time. Both islands and what delays their packets share this machine's
processors: on two, nothing is free for the background.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.links import Links, enter_network
from tests.processes import ROOT, Process, Processes, find_free_port

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
NUM_ISLANDS = 2
TCP_SHARE = 0.956
OVERLAP = "overlap-local-sgd"


@dataclass(frozen=True)
class Case:
    """A row: its name and what differs in the block `diloco`; None for data-parallel training."""

    name: str
    diloco: dict[str, Any] | None = field(default_factory=dict)


@dataclass
class Row:
    """One run, by island 0's record; and by those of all."""

    name: str
    seconds: float
    num_steps: int
    stalled: float
    settling: float
    eval_loss: float | None
    bytes_a_round: float | None
    num_parameters: int
    seconds_exchanging: float
    """Of all rounds but those at the end, waiting included; and how many of them were hidden."""
    seconds_hidden: float
    losses: list[tuple[float, float]]
    """(seconds since the start of training, evaluation loss)."""
    others: list[Row] = field(default_factory=list)
    to_common_loss: float | None = None

    @property
    def seconds_a_step(self) -> float:
        """Without what training stood still."""
        return (self.seconds - self.settling - self.stalled) / self.num_steps

    @property
    def utilisation(self) -> float:
        """Share of this island's time in which inner steps ran."""
        return 1 - self.stalled / (self.seconds - self.settling)

    @property
    def islands(self) -> list[Row]:
        """This one and the others."""
        return [self, *self.others]


def cases(delay: int) -> list[Case]:
    """The rows, but for the one without communication."""
    streaming = {"num_fragments": 3, "fragment_update_alpha": 0.5}
    return [
        Case("every step, data-parallel", None),
        Case("DiLoCo, fp32"),
        Case("DiLoCo, bf16", {"payload": "bf16"}),
        Case("DiLoCo, int8", {"payload": "int8"}),
        Case("DiLoCo, fp4", {"payload": "fp4"}),
        Case("streaming, fp32", {"num_fragments": 3}),
        Case(f"streaming, fp32, delay {delay}", {**streaming, "fragment_sync_delay": delay}),
        Case(f"streaming, int8, delay {delay}", {**streaming, "fragment_sync_delay": delay, "payload": "int8"}),
        Case(f"streaming, fp4, delay {delay}", {**streaming, "fragment_sync_delay": delay, "payload": "fp4"}),
        Case("eager, bf16", {"method": "eager", "payload": "bf16"}),
        Case("Overlap-Local-SGD, fp32", {"method": OVERLAP}),
        Case("Overlap-Local-SGD, int8", {"method": OVERLAP, "payload": "int8"}),
    ]


class Bench:
    """Runs cases on two linked islands.

    Args:
        args: the command line.
        folder: for runs.
        processes: where they are started.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, processes: Processes) -> None:
        self._args = args
        self._folder = folder
        self._processes = processes
        self._links = Links(processes)

    def run(self, case: Case, sync_every: int, num_steps: int, eval_steps: int | None = None) -> Row:
        """Trains, and reads what the run's record says.

        Args:
            case: what differs from other rows.
            sync_every: steps between rounds.
            num_steps: of the training.
            eval_steps: steps between evaluations, behind which a delayed round goes on; None: half of `sync_every`.
        """
        name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
        port = find_free_port()
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self._run_file(name, case, sync_every, num_steps, eval_steps, port)))
        islands = [self._start(island, case, path, port) for island in range(NUM_ISLANDS)]
        for island, process in enumerate(islands):
            self._links.join(island, process.pid)
            self._links.shape(island, self._args.rate, self._args.rtt)
        for process in islands:
            process.wait(timeout=3600)
        self._links.clear()
        row, *others = (read_row(case, folder) for folder in sorted((self._folder / name).glob("island-*")))
        row.others = others
        return row

    def _start(self, island: int, case: Case, path: Path, port: int) -> Process:
        waiting = f'until ip -4 addr show dev in{island} 2>/dev/null | grep -q inet; do sleep 0.05; done; exec "$@"'
        program = [sys.executable, str(ROOT / "train_lm.py"), str(path)]
        command = ["unshare", "--net", "bash", "-c", waiting, "bash", *program]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"in{island}"}
        if case.diloco is not None:
            return self._processes.spawn(command, env={**env, "HF_DILOCO_ISLAND": str(island)})
        world = {"RANK": str(island), "WORLD_SIZE": str(NUM_ISLANDS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return self._processes.spawn(
            command, env={**env, **world, "MASTER_ADDR": Links.address(0), "MASTER_PORT": port}
        )

    def _run_file(
        self, name: str, case: Case, sync_every: int, num_steps: int, eval_steps: int | None, port: int
    ) -> dict[str, Any]:
        diloco: dict[str, Any] = {"enabled": False}
        if case.diloco is not None:
            diloco = {
                "num_islands": NUM_ISLANDS,
                "rendezvous": f"tcp://{Links.address(0)}:{port}",
                "sync_every": sync_every,
                "outer_momentum": 0.5,
                "eval_weights": "inner",  # for the outer ones, training would wait for rounds under way
                **case.diloco,
            }
        evaluations = (
            {"eval_strategy": "steps", "eval_steps": eval_steps or max(1, sync_every // 2)} if case.diloco else {}
        )
        return {
            "name": name,
            "output": str(self._folder),
            "model": {"config": MODEL},
            "tokenizer": {"train": {"vocab_size": 2048}},
            "data": {"source": "embedded", "sequence_length": 32, "num_eval_sequences": 32},
            "training": {
                "max_steps": num_steps,
                "per_device_train_batch_size": self._args.batch,
                "learning_rate": 1e-3,
                "warmup_steps": 5,
                "logging_steps": 1,
                "save_strategy": "no",
                **evaluations,
            },
            "launch": {"use_cpu": True, "resume": "never"},
            "sample": None,
            "diloco": diloco,
        }


def read_row(case: Case, folder: Path) -> Row:
    """What an island's record says of a run."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start, end = (next(event for event in events if event["event"] == kind) for kind in ("start", "end"))
    syncs = [event for event in events if event["event"] == "sync"]
    losses = [(event["time"] - start["time"], event["eval_loss"]) for event in events if event["event"] == "eval"]
    evaluating = sum(event["eval_runtime"] for event in events if event["event"] == "eval")
    num_rounds = len(syncs) / (case.diloco or {}).get("num_fragments", 1)
    at_the_end = [sync for sync in syncs if sync["step"] == end["step"] and not sync["seconds_hidden"]]
    is_one_due = (case.diloco or {}).get("method") != OVERLAP  # whose last one would have gone on behind further steps
    last = at_the_end[is_one_due:]
    others = [sync for sync in syncs if sync not in last]
    return Row(
        name=case.name,
        seconds=end["seconds_total"] - evaluating,
        num_steps=end["step"],
        stalled=sum(stalled_for(sync) for sync in others),
        settling=sum(stalled_for(sync) for sync in last),
        eval_loss=losses[-1][1] if case.diloco is not None else None,
        bytes_a_round=end["bytes_sent"] / num_rounds if num_rounds else None,
        num_parameters=start["num_parameters"],
        seconds_exchanging=sum(sync["seconds_waiting"] + sync["seconds_exchanging"] for sync in others),
        seconds_hidden=sum(sync["seconds_hidden"] for sync in others),
        losses=losses,
    )


def stalled_for(sync: dict[str, float]) -> float:
    """Seconds that training stood still for a round."""
    under_way = sync["seconds_waiting"] + sync["seconds_exchanging"]
    return under_way - sync["seconds_hidden"] + sync["seconds_applying"]


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """All rows, the one without communication first."""
    with Processes() as processes:
        bench = Bench(args, folder, processes)
        probe = args.probe_steps
        alone = bench.run(Case("no communication", {"sync_every": 10 * probe}), probe, probe)
        sync_seconds = alone.num_parameters * 4 * 8 / (TCP_SHARE * args.rate * 1e6)
        sync_every = max(4, round(args.slack * sync_seconds / alone.seconds_a_step))
        delay = max(1, sync_every // 6)
        print(
            f"{alone.num_parameters / 1e6:.1f}M parameters, {alone.seconds_a_step:.2f} s a step, {sync_seconds:.1f} s "
            f"for fp32 at {args.rate:g} Mbit/s and {args.rtt:g} ms: sync_every {sync_every}",
            flush=True,
        )
        rows = [alone]
        for case in cases(delay):
            if args.only and not any(word in case.name for word in args.only):
                continue
            num_steps = args.rounds * sync_every if case.diloco is not None else 6
            row = bench.run(case, sync_every, num_steps)
            if case.diloco is None:  # which keeps no record of its all-reduces
                row.stalled = max(0.0, row.seconds - row.num_steps * alone.seconds_a_step)
            rows.append(row)
            show(rows, args)
    return rows


def compare(rows: list[Row]) -> None:
    """Fills in when each row was as good as all are in the end."""
    trained = [row for row in rows[1:] if row.eval_loss is not None]
    common = max((row.losses[-1][1] for row in trained), default=0.0)
    for row in trained:
        row.to_common_loss = next((seconds for seconds, loss in row.losses if loss <= common), None)


def show(rows: list[Row], args: argparse.Namespace) -> None:
    """Prints the table."""
    compare(rows)
    table = Table(title=f"2 islands, {args.rate:g} Mbit/s, {args.rtt:g} ms")
    for column in ("", "utilisation", "s a step", "hidden", "stalled", "at the end", "loss", "to common loss", "MB"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            row.name,
            utilisation_of(row.islands),
            f"{row.seconds_a_step:.3f} ({row.seconds_a_step / rows[0].seconds_a_step:.2f}x)",
            hidden_of(row.islands),
            f"{statistics.mean(island.stalled for island in row.islands):.1f} s",
            f"{row.settling:.1f} s",
            "" if row.eval_loss is None else f"{row.eval_loss:.3f}",
            "" if row.to_common_loss is None else f"{row.to_common_loss:.0f} s",
            "" if row.bytes_a_round is None else f"{row.bytes_a_round / 1e6:.1f}",
        )
    Console(width=110).print(table)


def utilisation_of(islands: list[Row]) -> str:
    """Of all, and of each where there are several."""
    stalled, seconds = sum(row.stalled for row in islands), sum(row.seconds - row.settling for row in islands)
    each = ", ".join(f"{row.utilisation:.1%}" for row in islands)
    return f"{1 - stalled / seconds:.1%}" + (f" ({each})" if len(islands) > 1 else "")


def hidden_of(islands: list[Row]) -> str:
    """Of all."""
    seconds = sum(row.seconds_exchanging for row in islands)
    return f"{sum(row.seconds_hidden for row in islands) / seconds:.1%}" if seconds else ""


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="Mbit/s of each island's link")
    parser.add_argument("--rtt", type=float, default=50.0, help="milliseconds between the islands and back")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 32 tokens a step and island")
    parser.add_argument("--slack", type=float, default=1.0, help="steps of a round over the time of an fp32 exchange")
    parser.add_argument("--rounds", type=int, default=4, help="synchronisations of the whole model")
    parser.add_argument("--probe-steps", type=int, default=30, help="steps of the run without communication")
    parser.add_argument("--only", nargs="*", default=[], help="run only rows whose names hold one of these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rows")
    args = parser.parse_args()
    enter_network("benchmarks.overlap", sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
