"""One island of a tiny regression, as a thread with the memory transport or as a process with the mesh.

python tests/programs/session_island.py ISLAND NUM_ISLANDS RENDEZVOUS PAYLOAD
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.transport.open import Transport


def train(config: DiLoCoConfig, transport: Transport | None = None, num_steps: int = 12) -> list[str]:
    """Trains on this island's own data; returns the digest of the outer parameters after every round."""
    generator = torch.Generator().manual_seed(100 + config.island)
    inputs, targets = (
        torch.randn(num_steps, 8, 24, generator=generator),
        torch.randn(num_steps, 8, 3, generator=generator),
    )
    start = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=start) / 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = FixedSession(config, IslandGroup(), transport=transport)
    session.join(open_shards(model, optimizer), Path(f"island-{config.island}"))
    hashes = [session.outer.outer_hash]
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if session.outer.count_step():
            hashes.append(session.sync().outer_hash)
    session.leave(finished=True)
    return hashes


def settings(island: int, num_islands: int, rendezvous: str, payload: str, **more: Any) -> DiLoCoConfig:
    common = {"num_islands": num_islands, "rendezvous": rendezvous, "sync_every": 3, "join_timeout": 60}
    return DiLoCoConfig(island=island, payload=payload, **common, **more)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("hashes", json.dumps(train(settings(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))))
