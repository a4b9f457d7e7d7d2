"""How long hf-diloco, torchft and Accelerate take to synchronise the same parameters over the same link.

    python -m benchmarks.others
    python -m benchmarks.others --link 1000,10 --islands 2 4 --only fp32 torchft --json FILE

Every island is a process with a network of its own (`benchmarks/links.py`), and holds `--values` fp32 parameters in
tensors of the sizes that a Llama of `--layers` layers has. Each row synchronises by what a training loop would call,
with the settings that it has by itself:

    hf-diloco             `OuterLoop`: pseudo-gradient, exchange in the payload named, vote, outer step
    torchft DiLoCo        `DiLoCo` with a `Manager`, a lighthouse on island 0, and Gloo; the same steps in fp32, one
                          tensor at a time or all of them in one bucket
    accelerate LocalSGD   `LocalSGD` with an `Accelerator` over Gloo: the mean of the parameters in fp32, no outer step

A synchronisation begins when the last island's inner step is done, and ends when the last one holds the new
parameters. The first of each row, in which connections are made, does not count. After each, the program sees to it
that all islands hold the same parameters, and other ones than before.

best, median   seconds
of fp32        the median, over that of hf-diloco in fp32 on the same link
MB sent        by one island, as its network device counts: with headers, acknowledgements and all else that is said

torchft is needed for this benchmark only; without it, its rows are left out. Needs what `benchmarks/links.py` needs.
Islands share the machine's processors, as they would not elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import TCPStore

from benchmarks.exchange import Link, describe_machine
from benchmarks.links import Links, enter_network
from tests.processes import Process, Processes

BASELINE = "hf-diloco fp32"
INSTALL = "pip install torchft"
PORT = 29400
TIMEOUT = timedelta(seconds=600)

Step = Callable[[], object]
"""What a training loop calls for an inner step and the synchronisation after it."""


@dataclass
class Measurement:
    """Synchronisations that differ in nothing. Rates in Mbit/s, times in seconds but for `rtt`, in milliseconds."""

    rate: float
    rtt: float
    islands: int
    name: str
    version: str
    values: int
    tensors: int
    seconds: list[float]
    bytes_sent: list[int]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


# One island's process


def open_hf_diloco(
    island: int, num_islands: int, model: nn.Module, payload: Any, rendezvous: str = "", **settings: Any
) -> Step:
    """Meets the other islands: at island 0, or at `rendezvous`."""
    from accelerate import Accelerator

    from hf_diloco import DiLoCoConfig, OuterLoop

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    config = DiLoCoConfig(
        sync_every=1,
        payload=payload,
        num_islands=num_islands,
        island=island,
        rendezvous=rendezvous or f"tcp://{Links.address(0)}:{PORT}",
        **settings,
    )
    outer = OuterLoop(accelerator, prepared, optimizer, config).__enter__()

    def step() -> None:
        optimizer.step()
        outer.step()

    return step


def open_torchft(island: int, num_islands: int, model: nn.Module, use_bucketization: bool) -> Step:
    """Meets the other islands. The synchronisation is a hook of the optimizer's."""
    torchft, local_sgd, coordination = map(import_module, ("torchft", "torchft.local_sgd", "torchft.coordination"))
    keep: list[Any] = []
    if island == 0:
        keep.append(coordination.LighthouseServer(bind=f"[::]:{PORT}", min_replicas=num_islands))
    store = TCPStore(Links.address(island), 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=num_islands,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=Links.address(island),
        store_port=store.port,
        lighthouse_addr=f"http://{Links.address(0)}:{PORT}",
        replica_id=f"island_{island}",
    )
    inner = torch.optim.SGD(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=1, use_bucketization=use_bucketization)
    keep += [store, diloco.__enter__()]

    def step() -> None:
        assert keep
        inner.step()

    return step


def open_local_sgd(island: int, num_islands: int, model: nn.Module) -> Step:
    """Meets the other islands."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    world = {"RANK": island, "WORLD_SIZE": num_islands, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meeting = {"MASTER_ADDR": Links.address(0), "MASTER_PORT": PORT}
    os.environ.update({name: str(value) for name, value in {**world, **meeting}.items()})
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    local_sgd = LocalSGD(accelerator, prepared, local_sgd_steps=1).__enter__()

    def step() -> None:
        optimizer.step()
        local_sgd.step()

    return step


TORCHFT = {
    "torchft DiLoCo": functools.partial(open_torchft, use_bucketization=False),
    "torchft DiLoCo, one bucket": functools.partial(open_torchft, use_bucketization=True),
}
CANDIDATES: dict[str, Callable[[int, int, nn.Module], Step]] = {
    BASELINE: functools.partial(open_hf_diloco, payload="fp32"),
    "hf-diloco bf16": functools.partial(open_hf_diloco, payload="bf16"),
    "hf-diloco int8": functools.partial(open_hf_diloco, payload="int8"),
    "hf-diloco fp4": functools.partial(open_hf_diloco, payload="fp4"),
    **TORCHFT,
    "accelerate LocalSGD": open_local_sgd,
}


def sizes_of_tensors(values: int, layers: int) -> list[int]:
    """Of a Llama, four fifths of it in its layers."""
    width = math.isqrt(values // (15 * layers))
    sizes = [*([width**2] * 4 + [8 * width**2 // 3] * 3 + [width] * 2) * layers, width]
    rest = values - sum(sizes)
    return [rest // 2, *sizes, rest - rest // 2]


def run_island(args: argparse.Namespace, candidate: Callable[[int, int, nn.Module], Step]) -> None:
    """Synchronises at the moments that the store says, until the program that asks kills this process."""
    device = f"in{args.island}"
    socket.sethostname(Links.address(args.island))  # torchft tells it to the other islands
    os.environ["GLOO_SOCKET_IFNAME"] = device
    torch.set_num_threads(1)
    print("up", flush=True)  # from now on this process has a network of its own, which waits for its link
    while True:
        try:
            socket.create_connection((Links.host, args.port), timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    store = TCPStore(Links.host, args.port, wait_for_workers=False, timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(args.island)
    sizes = sizes_of_tensors(args.values, args.layers)
    model = nn.ParameterList([torch.full((size,), 0.02) for size in sizes])
    step = candidate(args.island, args.islands[0], model)
    for count in itertools.count():
        with torch.no_grad():  # instead of inner steps: there are no gradients, and an optimizer then does nothing
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
        store.set(f"ready/{count}/{args.island}", "")
        start = float(store.get(f"start/{count}"))
        time.sleep(max(0.0, start - time.monotonic()))
        before, begin = bytes_sent(device), time.monotonic()
        step()
        end, after = time.monotonic(), bytes_sent(device)
        total = sum(float(parameter.detach().sum(dtype=torch.float64)) for parameter in model.parameters())
        answer = {"begin": begin, "end": end, "bytes": after - before, "parameters": total}
        store.set(f"answer/{count}/{args.island}", json.dumps(answer))


def bytes_sent(device: str) -> int:
    """By a network device of this process' network."""
    devices = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)
    return int({name.strip(): counters for name, counters in devices.items()}[device].split()[8])


# All islands


def synchronise(
    islands: Sequence[Process], store: TCPStore, repeats: int, rtt: float, first: int = 0, pause: float = 0.0
) -> Iterator[tuple[float, int]]:
    """Seconds of each synchronisation but the first, and bytes that one island sent.

    Args:
        islands: processes that `run_island`.
        store: kept by this program.
        repeats: how many count.
        rtt: milliseconds.
        first: those that these islands did before.
        pause: seconds at least before each.
    """

    def gather(topic: str) -> list[bytes]:
        keys = [f"{topic}/{island}" for island in range(len(islands))]
        while not store.check(keys):
            if any(process.popen.poll() is not None for process in islands):
                fail("an island ended")
            time.sleep(0.02)
        return [store.get(key) for key in keys]

    def fail(what: str) -> None:
        raise SystemExit("\n".join([f"error: {what}", *(process.output[-3000:] for process in islands)]))

    before = math.nan
    for count in range(first, first + 1 + repeats):
        gather(f"ready/{count}")
        store.set(f"start/{count}", repr(time.monotonic() + max(pause, 0.3 + 2e-3 * rtt)))
        answers = [json.loads(answer) for answer in gather(f"answer/{count}")]
        parameters = {answer["parameters"] for answer in answers}
        if len(parameters) > 1 or before in parameters:
            fail(f"the islands hold {parameters}, before {before}: not synchronised")
        (before,) = parameters
        if count > first:
            seconds = max(answer["end"] for answer in answers) - max(answer["begin"] for answer in answers)
            yield seconds, max(answer["bytes"] for answer in answers)


def measure(args: argparse.Namespace, names: Sequence[str]) -> Iterator[Measurement]:
    """All measurements, in the order of the table."""
    with Processes() as processes:
        links = Links(processes)
        for link, num_islands, name in itertools.product(args.link, args.islands, names):
            store = TCPStore(Links.host, 0, is_master=True, wait_for_workers=False)
            command = ["unshare", "--net", "--uts", sys.executable, "-m", "benchmarks.others", "--only", name]
            numbers = {"islands": num_islands, "port": store.port, "values": args.values, "layers": args.layers}
            command += [f"--{option}={number}" for option, number in numbers.items()]
            env = {"OMP_NUM_THREADS": "1"}
            islands = [processes.spawn([*command, f"--island={island}"], env=env) for island in range(num_islands)]
            for island, process in enumerate(islands):
                process.wait_for("up")
                links.join(island, process.pid)
                links.shape(island, *link)
            seconds, sent = zip(*synchronise(islands, store, args.repeats, link.rtt, pause=args.pause), strict=True)
            links.clear()
            for process in islands:
                process.kill()
            yield Measurement(
                rate=link.rate,
                rtt=link.rtt,
                islands=num_islands,
                name=name,
                version=find_version(name),
                values=args.values,
                tensors=len(sizes_of_tensors(args.values, args.layers)),
                seconds=list(seconds),
                bytes_sent=list(sent),
            )


def find_version(name: str) -> str:
    """Of the package that a row is about; none for this one."""
    packages = metadata.packages_distributions().get(name.split()[0], [])
    return metadata.version(packages[0]) if packages else ""


def make_table(measurements: Sequence[Measurement]) -> Table:
    """One row a measurement."""
    table = Table()
    for column in ("Mbit/s, ms", "islands", "", "best", "median", "of fp32", "MB sent"):
        table.add_column(column, justify="right" if column else "left")
    baseline = {(row.rate, row.rtt, row.islands): row.median for row in measurements if row.name == BASELINE}
    for row in measurements:
        fp32 = baseline.get((row.rate, row.rtt, row.islands))
        table.add_row(
            f"{row.rate:g}, {row.rtt:g}",
            str(row.islands),
            f"{row.name} ({row.version})" if row.version else row.name,
            f"{min(row.seconds):.3f}",
            f"{row.median:.3f}",
            f"{row.median / fp32:.2f}" if fp32 else "",
            f"{statistics.median(row.bytes_sent) / 1e6:.1f}",
        )
    return table


def available(names: Sequence[str]) -> list[str]:
    """Those that can run here; says what the others lack."""
    try:
        import_module("torchft.local_sgd")
    except ImportError as error:
        if set(names) & set(TORCHFT):
            print(f"torchft's rows are left out ({error}): {INSTALL}", file=sys.stderr, flush=True)
        return [name for name in names if name not in TORCHFT]
    return list(names)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=Link.parse, action="append", metavar="RATE,RTT", help="Mbit/s, ms; repeatable")
    parser.add_argument("--islands", type=int, nargs="+", default=[2])
    parser.add_argument("--only", nargs="*", default=[], help="run only rows whose names hold one of these words")
    parser.add_argument("--values", type=int, default=25_000_000, help="fp32 parameters")
    parser.add_argument("--layers", type=int, default=8, help="of 9 tensors each, beside 3 more")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each, after which TCP begins slowly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all measurements")
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.island is not None:
        run_island(args, CANDIDATES[args.only[0]])
        return
    names = [name for name in CANDIDATES if not args.only or any(word in name for word in args.only)]
    if not names:
        parser.error(f"no row holds {' or '.join(args.only)}; there are {', '.join(CANDIDATES)}")
    enter_network("benchmarks.others", sys.argv[1:])
    names = available(names)
    args.link = args.link or [Link(1000, 10), Link(200, 50)]
    print(describe_machine())
    measurements = []
    for measurement in measure(args, names):
        measurements.append(measurement)
        print(f"{measurement.name}: {measurement.median:.3f} s", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in measurements], indent=1) + "\n")
    Console(width=119).print(make_table(measurements))


if __name__ == "__main__":
    main()
