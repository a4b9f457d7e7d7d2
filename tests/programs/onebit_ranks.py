"""One rank of a 1-bit all-reduce, or of a training by a 1-bit optimizer under DDP. Settings, as JSON:

rank, num_ranks, store (port), result (file); either `sizes` (values of each all-reduce, five calls each; rank 1 has a
NaN in the fourth) or `trainings`: list of [kind, steps, folder or null]: begins with the state in the folder if there
is one, and leaves its own there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_diloco import OneBitAdam, OneBitLamb
from hf_diloco.optimizers.onebit.all_reduce import OneBitAllReduce
from hf_diloco.optimizers.onebit.optimizer import average_gradients

FREEZE = 4
BYTES_SENT = slice(200, 208)  # in struct tcp_info


def draw(*seed: int, size: int) -> torch.Tensor:
    number = sum(one * 1000**place for place, one in enumerate(seed))
    return torch.randn(size, generator=torch.Generator().manual_seed(number))


def bytes_sent() -> int:
    """Of all TCP connections of this process, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as link:
                    if link.type == socket.SOCK_STREAM and link.family in (socket.AF_INET, socket.AF_INET6):
                        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += int.from_bytes(info[BYTES_SENT], "little")
        except OSError:
            continue
    return total


def reduce(size: int) -> dict[str, Any]:
    one = OneBitAllReduce(size)
    results = []
    begin = bytes_sent()
    for call in range(5):
        values = draw(call, one.rank, size=size)
        if call == 3 and one.rank == 1:
            values[0] = float("nan")
        num_finite = one.mean_(values)
        results.append((num_finite, values, one.errors))
    return {"calls": results, "said": 5 * one.bytes_sent, "counted": bytes_sent() - begin}


def train(kind: str, steps: int, folder: str | None) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Tanh(), torch.nn.Linear(100, 32))
    make = OneBitLamb if kind == "lamb" else OneBitAdam
    optimizer = make(model.parameters(), lr=0.01, freeze_step=FREEZE, weight_decay=0.01)
    path = Path(folder) / f"{rank}.pt" if folder else None
    if path and path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(optimizer, average_gradients)
    counted = []
    for step in range(optimizer.num_steps, optimizer.num_steps + steps):
        dist.barrier()
        begin = bytes_sent()
        x = draw(step, rank, size=16 * 64).view(16, 64)
        (ddp(x) - x[:, :32]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        counted.append(bytes_sent() - begin)
    if path:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"weights": weights, "counted": counted}


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", settings["store"], wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=settings["rank"], world_size=settings["num_ranks"])
    results: list[Any] = [reduce(size) for size in settings.get("sizes", [])]
    results += [train(*one) for one in settings.get("trainings", [])]
    torch.save(results, settings["result"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
