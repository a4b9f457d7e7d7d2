"""What an exchange behind the inner steps costs them: seconds of a step while a round is under way, over one without.

    python -m benchmarks.background

Two islands, each a process with a network of its own, stream fragments of one model over a link on which a round takes
about `--seconds`. Island 0 trains, on one thread. The other one has

    idle    nothing to compute, so that a machine of two cores has a free one for what goes on in the background
    busy    the same training, so that it has none

between, under way   median seconds of a step of island 0 without and with a round under way all the time
ratio                of the two

Cores share caches and memory, and virtual ones even a core. So first comes what any process on the other core costs
the same steps: one that

    computes   small matrix products, in its own cache
    copies     100 MB of memory, as fast as it can

Needs what `benchmarks/links.py` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.links import Links, enter_network
from tests.processes import Processes, find_free_port

BITS = {"fp32": 32, "bf16": 16, "int8": 8.125, "fp4": 4.125}
NUM_FRAGMENTS = 3
WIDTH = 2048
RTT = 20.0
WARM_STEPS = 20


def make_model() -> Any:
    """As many equal blocks as fragments, 12.6 million parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_FRAGMENTS))
    return model


def make_step(model: Any, batch: int) -> Callable[[], None]:
    """One inner step, on one thread."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(batch, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        values = data
        for layer in model.layers:
            values = layer(values)
        (values - data).square().mean().backward()
        optimizer.step()

    return step


def disturb(how: str) -> None:
    """Keeps a core busy until it is killed."""
    import torch

    torch.set_num_threads(1)
    size = (256, 256) if how == "computes" else (12_500_000,)
    source, target = torch.ones(size), torch.empty(size)
    print("up", flush=True)
    while True:
        if how == "computes":
            torch.mm(source, source, out=target)
        else:
            target.copy_(source)


def measure_control(how: str, batch: int, num_turns: int, processes: Processes) -> tuple[list[float], list[float]]:
    """Seconds of steps alone, and beside a process that has nothing to do with them; in turns."""
    import torch

    torch.set_num_threads(1)
    step = make_step(make_model(), batch)
    for _ in range(WARM_STEPS):
        step()
    command = [sys.executable, "-m", "benchmarks.background", "--disturb", how]
    other = processes.spawn(command, env={"OMP_NUM_THREADS": "1"})
    other.wait_for("up")
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(num_turns):
        for times, order in ((alone, signal.SIGSTOP), (beside, signal.SIGCONT)):
            os.kill(other.pid, order)
            for _ in range(10):
                begin = time.monotonic()
                step()
                times.append(time.monotonic() - begin)
    os.kill(other.pid, signal.SIGKILL)
    return alone, beside


def run_island(order: dict[str, Any]) -> None:
    """Trains, and prints what the steps took."""
    import torch

    from hf_diloco import DiLoCoConfig
    from hf_diloco.inner import open_shards
    from hf_diloco.inner.island import IslandGroup
    from hf_diloco.rounds.open import open_session

    torch.set_num_threads(1)
    wait_for_link()
    model, number = make_model(), order["config"]["island"]
    step = make_step(model, order["batch"])
    session = open_session(DiLoCoConfig(**order["config"]), IslandGroup())
    session.join(open_shards(model, None, 1), Path(order["folder"]) / str(number))
    ends: list[float] = [time.monotonic()]
    starts: list[float] = []
    flights: list[tuple[float, float]] = []
    for _ in range(order["num_steps"]):
        if number == 0 or order["peer"] == "busy":
            step()
        session.outer.count_step()
        ends.append(time.monotonic())
        if session.is_due():
            for report in session.advance():
                start = starts[report.round - 1]
                flights.append((start, start + report.seconds_waiting + report.seconds_exchanging))
            if session.outer.num_begun > len(starts):
                starts.append(time.monotonic())
            ends[-1] = time.monotonic()  # what capture and landing take is no part of a step
    session.drain()
    session.leave(finished=True)
    print(json.dumps({"ends": ends, "flights": flights}), flush=True)


def wait_for_link() -> None:
    """This process has a network of its own, which the other one joins to the rest."""
    print("up", flush=True)
    while True:
        try:
            socket.create_connection((Links.host, int(os.environ["PROBE"])), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)


def measure(
    payload: str, peer: str, args: argparse.Namespace, folder: Path, links: Links, processes: Processes
) -> tuple[list[float], list[float]]:
    """Seconds of the steps between rounds, and of those with one under way."""
    values = NUM_FRAGMENTS * WIDTH * (WIDTH + 1)
    rate = BITS[payload] * values / NUM_FRAGMENTS / args.seconds / 1e6
    config = {
        "num_islands": 2,
        "rendezvous": f"tcp://{Links.address(0)}:{find_free_port()}",
        "sync_every": NUM_FRAGMENTS * args.steps_between,
        "num_fragments": NUM_FRAGMENTS,
        "fragment_sync_delay": args.steps_between - 1,
        "payload": payload,
    }
    order = {"folder": str(folder), "peer": peer, "batch": args.batch}
    order["num_steps"] = WARM_STEPS + args.rounds * args.steps_between
    with socket.create_server((Links.host, 0)) as probe:
        env = {"OMP_NUM_THREADS": "1", "PROBE": probe.getsockname()[1]}
        islands = []
        for island in range(2):
            given = json.dumps({**order, "config": {**config, "island": island}})
            command = ["unshare", "--net", sys.executable, "-m", "benchmarks.background", "--island", given]
            islands.append(processes.spawn(command, env={**env, "GLOO_SOCKET_IFNAME": f"in{island}"}))
        for island, process in enumerate(islands):
            process.wait_for("up")
            links.join(island, process.pid)
            links.shape(island, rate, RTT)
        for process in islands:
            process.wait(timeout=1200)
        links.clear()
        found = json.loads(islands[0].output.strip().splitlines()[-1])
    return tell_apart(found["ends"], found["flights"])


def tell_apart(ends: list[float], flights: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Steps without, and with, a round under way from their beginning to their end."""
    between, under_way = [], []
    for begin, end in list(pairwise(ends))[WARM_STEPS:]:
        if any(start <= begin and end <= stop for start, stop in flights):
            under_way.append(end - begin)
        elif all(end <= start or stop <= begin for start, stop in flights):
            between.append(end - begin)
    return between, under_way


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload", nargs="+", default=["fp32", "int8", "fp4"], choices=list(BITS))
    parser.add_argument("--peer", nargs="+", default=["idle", "busy"], choices=["idle", "busy"])
    parser.add_argument("--seconds", type=float, default=2.0, help="that a round takes")
    parser.add_argument("--steps-between", type=int, default=25, help="inner steps from one round to the next")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--island", help=argparse.SUPPRESS)
    parser.add_argument("--disturb", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.island:
        run_island(json.loads(args.island))
        return
    if args.disturb:
        disturb(args.disturb)
        return
    enter_network("benchmarks.background", sys.argv[1:])
    table = Table(title=f"a step of {NUM_FRAGMENTS * WIDTH * (WIDTH + 1) / 1e6:.1f}M parameters")
    for column in ("on the other core", "payload", "between, s", "under way, s", "ratio", "steps"):
        table.add_column(column, justify="left" if column in ("on the other core", "payload") else "right")
    with Processes() as processes:
        for how in ("computes", "copies"):
            add_row(table, f"a process that {how}", "", *measure_control(how, args.batch, args.rounds, processes))
        links = Links(processes)
        for peer, payload in product(args.peer, args.payload):
            with tempfile.TemporaryDirectory() as folder:
                times = measure(payload, peer, args, Path(folder), links, processes)
            add_row(table, f"island, {peer}", payload, *times)


def add_row(table: Table, other: str, payload: str, alone: list[float], beside: list[float]) -> None:
    """Shows the table with one more row."""
    before, after = statistics.median(alone), statistics.median(beside)
    counts = f"{len(alone)} / {len(beside)}"
    table.add_row(other, payload, f"{before:.3f}", f"{after:.3f}", f"{after / before:.3f}", counts)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
