"""An island joins while others train a model whose state takes longer than a round to transfer: how long they wait.

    python -m benchmarks.join                       # about three minutes on two cores
    python -m benchmarks.join --state-rounds 5 --step-seconds 0.5

Two islands synchronise through a bucket (moto's S3 server, the real protocol). After some rounds a third one starts.
It reads the run's state through a link so slow that this takes `--state-rounds` rounds, in which the others go on. The
others' pseudo-gradients it reads at full speed: an island that does not get those in a round cannot take part at all.

Islands are processes of their own, and an inner step takes the same time on each: it trains, and then sleeps until its
time is over. So what is measured is the outer loop, not how processes share this machine's cores.

Printed is what the first two islands spend a round on waiting for others and on the exchange: before the third one
starts, until its first round with it (included), and afterwards. The exit code is 1 if the join adds more than 5 % of
a round to it, or the third island takes part in no round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.processes import Process, Processes
from tests.s3 import FaultyProxy, Link, S3Server, Trouble

WARM_UP_ROUNDS = 2
SNAPSHOT_EVERY = 5
NEWCOMER = 2
BYTES_PER_PARAMETER = 8  # outer parameters and momentum, fp32
LIMIT = 0.05
PATIENCE = 600.0
_NICE = 10

Report = dict[str, Any]


# One island


def run_island(args: argparse.Namespace) -> None:
    """Trains until the run's last round; prints every round's report as a line of JSON."""
    import torch
    from accelerate import Accelerator

    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.trainer.loop import OuterLoop

    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    width = 500
    model = torch.nn.Sequential(
        torch.nn.Linear(args.parameters // width, width, bias=False), torch.nn.Linear(width, 1)
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    config = DiLoCoConfig(
        rendezvous=args.url,
        island=args.island,
        num_islands=NEWCOMER,
        max_islands=NEWCOMER + 1,
        min_islands=NEWCOMER,
        sync_every=args.sync_every,
        payload="bf16",
        snapshot_every=SNAPSHOT_EVERY,
        keep_rounds=args.rounds,  # by when its state has arrived, the newcomer has rounds to catch up with
    )
    generator = torch.Generator().manual_seed(args.island)
    with OuterLoop(accelerator, model, optimizer, config, output_dir=args.folder / f"island-{args.island}") as outer:
        print("joined", flush=True)
        ends = time.monotonic()
        while outer.round < args.rounds:
            ends += args.step_seconds
            inputs = torch.randn(4, args.parameters // width, generator=generator)
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, ends - time.monotonic()))
            if report := outer.step():
                print(json.dumps(asdict(report)), flush=True)
                ends = time.monotonic()


# All islands


class Islands:
    """The islands' processes, and what they report."""

    def __init__(self, processes: Processes, url: str, folder: Path, args: argparse.Namespace) -> None:
        self._processes = processes
        self._command = [sys.executable, "-m", "benchmarks.join", "--url", url, "--folder", str(folder)]
        for name in ("rounds", "sync_every", "step_seconds", "parameters"):
            self._command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self.started: list[Process] = []

    def start(self, environment: dict[str, str]) -> None:
        """Starts the next island."""
        command = [*self._command, "--island", str(len(self.started))]
        self.started.append(self._processes.spawn(command, env={**environment, "OMP_NUM_THREADS": "1"}))

    def reports(self, island: int) -> list[Report]:
        """The rounds it has reported so far."""
        lines = self.started[island].output.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    def wait_for_round(self, number: int) -> None:
        """Until the first island has completed a round."""
        deadline = time.monotonic() + PATIENCE
        while not any(report["round"] >= number for report in self.reports(0)):
            if self.started[0].popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"round {number} does not come:\n{self.started[0].output}")
            time.sleep(0.1)


def measure(args: argparse.Namespace) -> list[list[Report]]:
    """Runs the three islands; returns their reports."""
    round_seconds = args.sync_every * args.step_seconds
    link = Link(BYTES_PER_PARAMETER * args.parameters / (args.state_rounds * round_seconds))

    def decide(method: str, path: str) -> Trouble:
        return link if method == "GET" and "/snapshots/" in path and path.endswith(".bin") else None

    with (
        TemporaryDirectory() as folder,
        S3Server() as server,
        FaultyProxy(server, decide) as proxy,
        Processes() as processes,
    ):
        islands = Islands(processes, f"{server.url}/run", Path(folder), args)
        for _ in range(NEWCOMER):
            islands.start(server.environment())
        islands.wait_for_round(SNAPSHOT_EVERY)
        begun = time.monotonic()
        islands.start(proxy.environment())
        os.setpriority(os.PRIO_PROCESS, islands.started[NEWCOMER].pid, _NICE)  # its start is not what is measured
        islands.started[NEWCOMER].wait_for("joined", PATIENCE)
        print(f"the third island holds the state {time.monotonic() - begun:.1f} s after its start", flush=True)
        for island in islands.started:
            island.wait(timeout=PATIENCE)
        return [islands.reports(number) for number in range(NEWCOMER + 1)]


def show(reports: Sequence[Sequence[Report]]) -> bool:
    """Prints the figures; returns whether the join costs the others as little as it should."""
    taken = [report["round"] for report in reports[NEWCOMER] if NEWCOMER in report["participants"]]
    if not taken:
        print("violated: the third island took part in no round", file=sys.stderr)
        return False
    first = taken[0]
    spans = {
        "before": range(WARM_UP_ROUNDS + 1, SNAPSHOT_EVERY + 1),
        "during": range(SNAPSHOT_EVERY + 1, first + 1),
        "after": range(first + 1, 1 << 30),
    }
    shares = {}
    for name, span in spans.items():
        rounds = [report for found in reports[:NEWCOMER] for report in found if report["round"] in span]
        idle = [report["seconds_waiting"] + report["seconds_exchanging"] for report in rounds]
        whole = statistics.fmean(
            report["seconds_computing"] + report["seconds_applying"] + seconds
            for report, seconds in zip(rounds, idle, strict=True)
        )
        shares[name] = statistics.fmean(idle) / whole
        print(
            f"{name:7} {len(rounds) // NEWCOMER:3} rounds of {whole:5.2f} s: the others wait and exchange "
            f"{statistics.fmean(idle):.2f} s = {shares[name]:.1%} of a round (longest {max(idle):.2f} s)"
        )
    extra = shares["during"] - shares["before"]
    print(f"the third island starts after round {SNAPSHOT_EVERY}, and takes part from round {first} on")
    print(f"the join adds {extra:+.1%} of a round to what the others wait and exchange (at most {LIMIT:.0%})")
    return extra <= LIMIT


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--sync-every", type=int, default=40)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--state-rounds", type=float, default=3.0, help="rounds that the state takes to arrive")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.island is not None:
        run_island(args)
        return
    sys.exit(not show(measure(args)))


if __name__ == "__main__":
    main()
