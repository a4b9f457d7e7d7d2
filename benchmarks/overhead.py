"""What the outer loop costs: training between synchronisations, a synchronisation, and memory.

    python benchmarks/overhead.py            # all five
    python benchmarks/overhead.py sync --islands 4
    python benchmarks/overhead.py one-island --every 20

training   tokens/s of a Trainer with the callback, no synchronisation in reach, over the same Trainer without it; the
           two take turns in one process.
one-island what an outer step every `--every` steps costs one island that trains alone (SNOO): its step time
           over that of a plain Trainer, the median of pairs of turns; the share of the time that the callback
           itself takes; and the host memory that it keeps, in bytes a parameter.
sync       seconds of a synchronisation of `--values` fp32 parameters between processes on loopback, over one bare
           chunked Gloo all-reduce of as many values by the same processes, taking turns. Also the least that it could
           take where the all-reduce leaves no core idle: the all-reduce, and moving through memory what the outer step
           must read and write (masters, outer parameters and momentum, each once), as fast as a copy does.
standstill seconds that training stands still where a round of `--values` parameters begins behind the inner steps,
           over reading them and making the pseudo-gradient, with which a round that training waits for begins.
memory     host memory that the outer loop adds, in bytes a parameter: at rest and at its peak in a synchronisation.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = [sys.executable, __file__]


WARM_UP = 3
"""Steps that begin a turn, and are not counted."""


@dataclass(frozen=True)
class Shape:
    """A small Llama and its batches; on a CUDA device it trains in bf16."""

    device: str = "cpu"
    hidden_size: int = 128
    num_layers: int = 4
    length: int = 128
    batch: int = 8


def make_turn(steps: int, shape: Shape = Shape()) -> tuple[Callable[[list[Any]], list[float]], int]:
    """What trains a small Llama for so many steps and returns the seconds of all but the first few; its size."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    on_cuda = shape.device == "cuda"
    if not on_cuda:
        torch.set_num_threads(1)
    tokens = torch.randint(4096, (4096, shape.length))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    layers: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.hidden_size * 43 // 16,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": max(4, shape.hidden_size // 64),
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **layers))

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if on_cuda:  # which is given work ahead of time
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    def turn(callbacks: list[Any]) -> list[float]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
            settings |= {"bf16": True} if on_cuda else {"use_cpu": True}
            training_args = TrainingArguments(
                folder, max_steps=steps, per_device_train_batch_size=shape.batch, logging_steps=5, **settings
            )
            trainer = Trainer(model, training_args, train_dataset=dataset, callbacks=[clock, *callbacks])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        # From one step's begin to the next, so that all that callbacks do in between counts; the first few warm up.
        return [after - before for before, after in zip(clock.ends[2:], clock.ends[3:], strict=False)]

    return turn, model.num_parameters()


def training(args: argparse.Namespace) -> dict[str, float]:
    """Turns of a few steps each, with and without the callback; the median step time of each."""
    from hf_diloco import DiLoCoCallback

    turn, _ = make_turn(args.steps)
    plain: list[float] = []
    outer: list[float] = []
    for number in range(args.turns):
        order = [(plain, []), (outer, [DiLoCoCallback(sync_every=10**6)])]
        for times, callbacks in order if number % 2 else reversed(order):
            times += turn(callbacks)
    per_step = Shape().batch * Shape().length
    without, with_callback = per_step / statistics.median(plain), per_step / statistics.median(outer)
    return {"tokens/s without": without, "tokens/s with": with_callback, "ratio": with_callback / without}


def one_island(args: argparse.Namespace) -> dict[str, float]:
    """Pairs of turns of whole periods, with and without an outer step at the end of each period."""
    from hf_diloco import DiLoCoCallback

    settings: dict[str, Any] = {"sync_every": args.every, "num_islands": 1, "outer_lr": 0.7, "outer_momentum": 0.5}

    class Timed(DiLoCoCallback):
        seconds = 0.0

        def on_step_end(self, *given: Any, **named: Any) -> None:
            begin = time.perf_counter()
            super().on_step_end(*given, **named)
            self.seconds += time.perf_counter() - begin

    class Weighed(DiLoCoCallback):
        kept = 0

        def on_train_begin(self, *given: Any, **named: Any) -> None:
            before = tensor_bytes()
            super().on_train_begin(*given, **named)
            self.kept += tensor_bytes() - before

        def on_step_end(self, *given: Any, **named: Any) -> None:
            before = tensor_bytes()
            super().on_step_end(*given, **named)
            self.kept += tensor_bytes() - before

    steps = args.every * max(1, args.steps // args.every)
    turn, size = make_turn(steps + WARM_UP)
    weighed = Weighed(**settings)
    turn([weighed])
    ratios, shares = [], []
    for number in range(args.turns):
        timed = Timed(**settings)
        seconds: dict[bool, float] = {}
        for with_outer in (True, False) if number % 2 else (False, True):
            seconds[with_outer] = sum(turn([timed] if with_outer else []))
        ratios.append(seconds[True] / seconds[False])
        shares.append(timed.seconds / seconds[True])
    return {
        "parameters": size,
        "step time with / without": statistics.median(ratios),
        "  lowest pair": min(ratios),
        "  highest pair": max(ratios),
        "share of the time in the callback": statistics.median(shares),
        "host memory kept, bytes a parameter": weighed.kept / size,
    }


def tensor_bytes() -> int:
    """Bytes of all tensors of this process; storages count once."""
    import gc

    import torch

    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def sync(args: argparse.Namespace) -> dict[str, float]:
    """A synchronisation and a bare all-reduce of as many values, in turns."""
    return run_islands(args, args.islands)


def standstill(args: argparse.Namespace) -> dict[str, float]:
    """Rounds of one island that begin behind its inner steps, and between them what would begin them before these."""
    import torch
    from torch import nn

    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.inner import open_shards
    from hf_diloco.inner.island import IslandGroup
    from hf_diloco.rounds.open import open_session
    from hf_diloco.rounds.round import SyncClock, capture

    torch.set_num_threads(1)
    model = nn.ParameterList([nn.Parameter(torch.ones(args.values // 100)) for _ in range(100)])
    island = IslandGroup()
    session = open_session(DiLoCoConfig(num_islands=1, sync_every=2, fragment_sync_delay=1), island)
    before: list[float] = []
    behind: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        session.join(open_shards(model, torch.optim.SGD(model.parameters())), Path(folder))
        for _ in range(args.repeats + 1):
            begin = time.perf_counter()
            capture(session.outer, SyncClock()).complete(island)
            before.append(time.perf_counter() - begin)
            while not session.outer.is_due:
                session.outer.count_step()
            begin = time.perf_counter()
            session.advance()
            behind.append(time.perf_counter() - begin)
            session.drain()
            session.outer.count_step()
            session.advance()
        session.leave(finished=False)
    in_time, hidden = statistics.median(before[1:]), statistics.median(behind[1:])
    return {"in training s": in_time, "behind the inner steps s": hidden, "ratio": hidden / in_time}


def memory(args: argparse.Namespace) -> dict[str, float]:
    """What the outer loop adds to an island of one rank."""
    result = run_islands(args, 2)
    return {name: value for name, value in result.items() if "bytes" in name}


def run_islands(args: argparse.Namespace, num_islands: int) -> dict[str, float]:
    """Starts one process an island; returns what island 0 measured."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        ports = {"port": first.getsockname()[1], "bare_port": second.getsockname()[1]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    settings = json.dumps({"num_islands": num_islands, "values": args.values, "repeats": args.repeats, **ports})
    workers = [
        subprocess.Popen(
            [*WORKER, "_island", settings, str(island)],
            env=environment,
            stdout=subprocess.PIPE if island == 0 else None,
            text=True,
        )
        for island in range(num_islands)
    ]
    try:
        output, _ = workers[0].communicate()
        failed = [island for island, worker in enumerate(workers) if worker.wait()]
    finally:
        for worker in workers:
            worker.kill()
    if failed:
        raise SystemExit(f"islands {failed} failed")
    return json.loads(output.splitlines()[-1])


def island(settings: dict[str, Any], number: int) -> None:
    """One island: bare all-reduces and whole synchronisations of as many values, in turns."""
    import psutil
    import torch
    from torch import nn
    from torch.distributed import ProcessGroupGloo, TCPStore

    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.inner import open_shards
    from hf_diloco.inner.island import IslandGroup
    from hf_diloco.rounds.fixed import FixedSession
    from hf_diloco.transport.mesh import CHUNK_VALUES
    from hf_diloco.transport.open import MeshTransport

    torch.set_num_threads(1)
    num_islands, values = settings["num_islands"], settings["values"]
    config = DiLoCoConfig(
        num_islands=num_islands, island=number, rendezvous=f"tcp://127.0.0.1:{settings['port']}", sync_every=1
    )
    transport = MeshTransport(config, is_leader=True)
    bare_store = TCPStore("127.0.0.1", settings["bare_port"], is_master=number == 0, wait_for_workers=False)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._threads = 8
    bare_group = gloo(bare_store, number, num_islands, options)
    model = nn.ParameterList([nn.Parameter(torch.ones(values // 100)) for _ in range(100)])
    shards = open_shards(model, torch.optim.SGD(model.parameters()))
    process = psutil.Process()
    before = process.memory_info().rss
    session = FixedSession(config, IslandGroup(), transport=transport)
    session.join(shards, Path(f"island-{number}"))

    def change_and_sync() -> tuple[float, float]:
        for parameter in model:
            parameter.data.sub_(0.01 * (number + 1))
        session.outer.count_step()
        bare_group.barrier().wait()
        begin = time.perf_counter()
        report = session.sync()
        return time.perf_counter() - begin, report.seconds_exchanging

    with Peak(process) as peak:
        first = change_and_sync()
    rest = process.memory_info().rss
    buffer = torch.ones(values)

    def bare() -> tuple[float, float]:
        """Seconds of an all-reduce, and the seconds of processor time that it took here."""
        buffer.fill_(1.0)
        bare_group.barrier().wait()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        works = [bare_group.allreduce([chunk]) for chunk in buffer.split(CHUNK_VALUES)]
        for work in works:
            work.wait()
        return time.perf_counter() - begin, time.process_time() - cpu_begin

    other = torch.empty_like(buffer)

    def move() -> float:
        """Three vectors read and three written, all processes at once."""
        bare_group.barrier().wait()
        begin = time.perf_counter()
        for _ in range(3):
            other.copy_(buffer)
        return time.perf_counter() - begin

    bare(), move()
    turns = [(*bare(), *change_and_sync(), move()) for _ in range(settings["repeats"])]
    session.leave(finished=True)
    if number == 0:
        bare_seconds, bare_cpu, whole, exchange, moving = (min(column) for column in zip(*turns, strict=True))
        result = {
            "bare all-reduce s": bare_seconds,
            "cores busy in it, a process": bare_cpu / bare_seconds,
            "whole sync s": whole,
            "exchange s": exchange,
            "first sync s": first[0],
            "whole sync / bare": whole / bare_seconds,
            "exchange / bare": exchange / bare_seconds,
            "memory traffic of the outer step s": moving,
            "least (all-reduce + memory) / bare": (bare_seconds + moving) / bare_seconds,
            "outer state, bytes a parameter": 4
            * sum(t.numel() for t in session.outer.current.method.state_dict().values())
            / values,
            "at rest, bytes a parameter": (rest - before) / values,
            "peak in a sync, bytes a parameter": (peak.value - before) / values,
        }
        print(json.dumps(result), flush=True)


class Peak:
    """The largest resident size of a process while the context lasts, sampled every millisecond."""

    def __init__(self, process: Any) -> None:
        self._process, self._done, self.value = process, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.value = max(self.value, self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()


def main() -> None:
    """Runs what the command line names."""
    if sys.argv[1:2] == ["_island"]:
        island(json.loads(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", choices=["training", "one-island", "sync", "standstill", "memory", []], help="default: all"
    )
    parser.add_argument("--islands", type=int, default=2, help="of the sync benchmark")
    parser.add_argument("--values", type=int, default=100_000_000, help="fp32 parameters to synchronise")
    parser.add_argument("--repeats", type=int, default=10, help="synchronisations; the fastest counts, on both sides")
    parser.add_argument("--turns", type=int, default=8, help="turns of the training benchmark, each with and without")
    parser.add_argument("--steps", type=int, default=15, help="steps of a turn")
    parser.add_argument("--every", type=int, default=20, help="steps between the outer steps of one island")
    args = parser.parse_args()
    parts = {
        "training": training,
        "one-island": one_island,
        "sync": sync,
        "standstill": standstill,
        "memory": memory,
    }
    for name in args.what or parts:
        print(name)
        for label, value in parts[name](args).items():
            print(f"  {label:36} {value:12,.4f}", flush=True)


if __name__ == "__main__":
    main()
