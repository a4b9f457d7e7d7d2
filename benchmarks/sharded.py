"""What a synchronisation costs a rank where an island shards its model: FSDP2 beside ZeRO-2, in one run.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --values 10000000 --ranks 3

One island, `--values` fp32 parameters on `--ranks` ranks. The two take turns: an evaluation, after which FSDP2 has
some parameters whole, and a synchronisation without other islands: masters are read, the outer step is taken, and
masters are written. Printed are the seconds of the fastest turn, on the slowest rank; and, of one rank, the bytes
of the outer state's vectors that one reading of the masters and one writing copy, as torch's dispatcher sees it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 2048
KINDS = ("FSDP2", "ZeRO-2")


class CopiedBytes(TorchDispatchMode):
    """Counts what `copy_` writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.total += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def _copied(call: Callable[[], object]) -> int:
    """The bytes that `call` copies."""
    with CopiedBytes() as counter:
        call()
    return counter.total


def _make_model(num_values: int) -> nn.Sequential:
    """Square layers, about so many parameters in all."""
    torch.manual_seed(1)
    layers = max(1, round(num_values / WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def _by_fsdp2(num_values: int) -> tuple[nn.Module, Any]:
    """Model and optimizer, a unit a layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _make_model(num_values)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _by_zero2(num_values: int) -> tuple[nn.Module, Any]:
    """Model and optimizer as the engine has them."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = _make_model(num_values)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine.module, engine.optimizer


def _work(args: argparse.Namespace) -> None:
    """One rank."""
    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.inner import open_shards
    from hf_diloco.inner.island import IslandGroup
    from hf_diloco.rounds.open import open_session

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    island = IslandGroup()
    runs = {}
    for kind, make in zip(KINDS, (_by_fsdp2, _by_zero2), strict=True):
        model, optimizer = make(args.values)
        shards = open_shards(model, optimizer, island.size)
        assert shards.description == kind
        session = open_session(DiLoCoConfig(num_islands=1, sync_every=1), island)
        session.join(shards, Path(args.work))
        runs[kind] = (model, session)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(args.turns):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            model, session = runs[kind]
            with torch.no_grad():
                model(torch.ones(1, WIDTH))
            session.outer.count_step()
            island.barrier()
            begin = time.perf_counter()
            session.advance()
            took = time.perf_counter() - begin
            seconds[kind].append(max(island.gather(took)))
    found: dict[str, Any] = {}
    for kind, (_, session) in runs.items():
        fragment = session.outer.fragments[0]
        vector = torch.empty(fragment.partition.numel)
        found[kind] = {
            "parameters": sum(island.gather(vector.numel())),
            "seconds": min(seconds[kind]),
            "bytes read": _copied(partial(fragment.partition.gather, vector)),
            "bytes written": _copied(partial(fragment.partition.scatter, vector)),
        }
    if island.is_leader:
        (Path(args.work) / "result.json").write_text(json.dumps(found))
    dist.barrier()
    time.sleep(0.2)  # Gloo's threads may abort an interpreter that shuts down
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ and args.work:
        _work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        subprocess.run([*launcher, __file__, *sys.argv[1:], "--work", folder], check=True)
        found = json.loads((Path(folder) / "result.json").read_text())
    for kind in KINDS:
        one = found[kind]
        model = 4 * one["parameters"]
        print(
            f"{kind:7} {one['parameters']:,} parameters, {args.ranks} ranks: {one['seconds']:.3f} s; a rank reads "
            f"{one['bytes read']:,} bytes ({one['bytes read'] / model:.3f} of the model) and writes "
            f"{one['bytes written']:,} ({one['bytes written'] / model:.3f})"
        )
    print(f"FSDP2 over ZeRO-2: {found['FSDP2']['seconds'] / found['ZeRO-2']['seconds']:.2f}x")


if __name__ == "__main__":
    main()
