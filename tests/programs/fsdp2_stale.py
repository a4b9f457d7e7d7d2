"""One of two ranks that writes FSDP2's shards after an evaluation, with and without resharding.

    torchrun --nproc_per_node 2 ... -m tests.programs.fsdp2_stale RESULT.json

Rank 0 writes how far the next forward pass was from what the new weights give, after each way to write.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_diloco.inner import open_shards

INPUTS = torch.linspace(-1, 1, 15).view(3, 5)


def small_model() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    return model


def evaluate(model: nn.Module) -> torch.Tensor:
    """A forward pass without a backward, after which the root's parameters stay whole."""
    with torch.no_grad():
        return model(INPUTS)


def expected(value: float) -> torch.Tensor:
    model = small_model()
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return evaluate(model)


def main() -> None:
    atexit.register(time.sleep, 0.2)  # Gloo's threads may abort an interpreter that shuts down
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shards = open_shards(model, torch.optim.AdamW(model.parameters()), 2)
    evaluate(model)
    found: dict[str, float | bool] = {
        "is_whole": not any(isinstance(one, DTensor) for one in model.parameters()),
    }
    segments = shards.segments()
    found["is_cut_to_be_read"] = all(isinstance(one, DTensor) for one in model.parameters())
    evaluate(model)  # leaves whole copies again, which what is written now does not reach
    for segment in segments:
        segment.values.fill_(0.25)
    found["without_commit"] = float((evaluate(model) - expected(0.25)).norm())
    shards.commit()
    found["with_commit"] = float((evaluate(model) - expected(0.25)).norm())
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
