"""One island with a small model and no Trainer: a session in a process of its own.

Settings, as JSON: config (DiLoCoConfig fields), folder, steps, pause (seconds a step), answer_seconds (how long
the store may take), die_in ("steps" or "vote": the process ends there, in the second round). Prints "joined",
"round N HASH" and "done", or a DiLoCoError as "NAME: text" and exits with 1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DiLoCoError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.unanimity import Unanimity
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.transport import open as transports


def train(settings: dict[str, Any]) -> None:
    config = DiLoCoConfig(**settings["config"])
    session = FixedSession(config, IslandGroup())
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    generator = torch.Generator().manual_seed(config.island)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.join(open_shards(model, optimizer), settings["folder"])
    print("joined", flush=True)
    die_in = settings.get("die_in")
    try:
        for step in range(settings["steps"]):
            batch = torch.randn(8, 10, generator=generator)
            optimizer.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            time.sleep(settings.get("pause", 0))
            if die_in == "steps" and step == config.sync_every:
                os._exit(9)
            if die_in == "vote" and session.outer.round == 1:
                Unanimity.commit = lambda *_: os._exit(9)  # type: ignore[method-assign]
            if session.outer.count_step():
                report = session.sync()
                print(f"round {report.round} {report.outer_hash}", flush=True)
    except DiLoCoError:
        session.leave(finished=False)
        raise
    session.leave(finished=True)
    print("done", flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    if "answer_seconds" in settings:
        transports.SILENT_SECONDS = settings["answer_seconds"]
    try:
        train(settings)
    except DiLoCoError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
