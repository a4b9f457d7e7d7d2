"""Holds 1-bit LAMB against DeepSpeed 0.19.6's `OnebitLamb`, the last version that has it, on CPU, across the freeze.

    python -m venv reference && reference/bin/pip install wheel 'setuptools<81' torch numba numpy safetensors ...
    DS_BUILD_OPS=0 reference/bin/pip install --no-build-isolation deepspeed==0.19.6
    reference/bin/python benchmarks/onebit_reference.py            # 2 ranks, 200 steps, frozen after 49

DeepSpeed's runs on GPUs only. Here its bits are packed by PyTorch, and its scales, which have no dimension, travel as
vectors of one: Gloo takes no others. Its first step throws its gradient away, so that its step k + 1 is our step k and
its freeze_step is one more. Sizes are such that it pads nothing. Ours runs with `match_deepspeed`.

For each printed step: the relative distance of the weights, and how many values of the averaged momentum have another
sign.
"""

from __future__ import annotations

import argparse
import os
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hf_diloco.optimizers.onebit.lamb import OneBitLamb

SHAPES = ((16, 8), (48,), (32, 4))  # 304 values: a multiple of 16
PRINTED = 10


class Problem:
    """Least squares with noise, each rank its own: gradients by step and rank."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._rank = rank
        self._curvature = [0.5 + torch.rand(shape, generator=generator) for shape in SHAPES]
        self._solution = [torch.randn(shape, generator=generator) for shape in SHAPES]

    def give_gradients(self, tensors: list[torch.nn.Parameter], step: int, average: bool) -> None:
        generator = torch.Generator().manual_seed(1000 * step + self._rank)
        for tensor, h, s in zip(tensors, self._curvature, self._solution, strict=True):
            noise = 0.3 * torch.randn(tensor.shape, generator=generator)
            tensor.grad = h * (tensor.detach() - s) + noise
            if average:
                dist.all_reduce(tensor.grad)
                tensor.grad /= dist.get_world_size()


def make_tensors() -> list[torch.nn.Parameter]:
    """What both begin with."""
    generator = torch.Generator().manual_seed(99)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


class Packer:
    """What DeepSpeed's packbits extension does, in PyTorch."""

    def load(self) -> Packer:
        return self

    def packbits(self, values: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        places = 2 ** torch.arange(8)
        return ((values.view(-1, 8) >= 0) * places).sum(1).to(torch.uint8)

    def unpackbits(self, packed: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        bits = packed[:, None].to(torch.int32) >> torch.arange(8) & 1
        return 2.0 * bits.flatten() - 1.0


def make_deepspeeds(tensors: list[torch.nn.Parameter], settings: dict[str, Any], freeze_step: int) -> Any:
    """DeepSpeed's optimizer, as far as it must be helped to run here."""
    import deepspeed.comm
    from deepspeed.runtime.comm import compressed
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb

    deepspeed.comm.init_distributed("gloo", verbose=False)
    shim = types.SimpleNamespace(**{name: getattr(compressed.dist, name) for name in dir(compressed.dist)})
    shim.all_gather = lambda out, one, group: deepspeed.comm.all_gather(out, one.reshape(-1), group=group)
    compressed.dist, compressed.PackbitsBuilder = shim, Packer
    engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    return OnebitLamb(tensors, engine, freeze_step=freeze_step, comm_backend_name="compressed", **settings)


def run(rank: int, num_ranks: int, port: int, args: argparse.Namespace) -> None:
    """One rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    settings = {"lr": args.lr, "weight_decay": 0.01}
    problem, ours, theirs = Problem(rank), make_tensors(), make_tensors()
    optimizer = OneBitLamb(ours, freeze_step=args.freeze, match_deepspeed=True, **settings)
    reference = make_deepspeeds(theirs, settings, args.freeze + 1)
    problem.give_gradients(theirs, 0, average=True)
    reference.step()  # throws the gradient away
    has_differed = False
    for step in range(1, args.steps + 1):
        problem.give_gradients(ours, step, average=not optimizer.is_compressed)
        problem.give_gradients(theirs, step, average=not reference.lamb_freeze_key)
        assert optimizer.is_compressed == reference.lamb_freeze_key
        optimizer.step()
        reference.step()
        distance, flipped = compare(optimizer, ours, reference, theirs)
        is_first = flipped > 0 and not has_differed
        has_differed = has_differed or flipped > 0
        if rank == 0 and (step % (args.steps // PRINTED) == 0 or is_first or step in (args.freeze, args.freeze + 1)):
            note = "  frozen from here on" if step == args.freeze else "  the first that differ" if is_first else ""
            print(f"step {step:4}: distance {distance:.1e}, {flipped} of {numel()} signs{note}", flush=True)
    if rank == 0:
        start = torch.cat([one.detach().flatten() for one in make_tensors()])
        moved = (torch.cat([one.detach().flatten() for one in ours]) - start).norm() / start.norm()
        print(f"the weights have moved by {float(moved):.2f} of their length")
    dist.barrier()
    dist.destroy_process_group()


def compare(optimizer: Any, ours: Any, reference: Any, theirs: Any) -> tuple[float, int]:
    """Relative distance of the weights, and the signs of the momentum that differ."""
    a, b = (torch.cat([one.detach().flatten() for one in tensors]) for tensors in (ours, theirs))
    m, n = (
        torch.cat([owner.state[one]["exp_avg"].flatten() for one in tensors])
        for owner, tensors in ((optimizer, ours), (reference, theirs))
    )
    is_other = ((m < 0) != (n < 0)) & ((m - n).abs() > 1e-4 * m.abs().mean())
    return float((a - b).norm() / b.norm()), int(is_other.sum())


def numel() -> int:
    """Values that are trained."""
    return sum(int(torch.Size(shape).numel()) for shape in SHAPES)


def main() -> None:
    """Runs all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--freeze", type=int, default=49, help="steps of the warm-up")
    parser.add_argument("--lr", type=float, default=0.005)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    processes.spawn(run, (args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
