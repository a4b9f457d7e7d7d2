"""One of two ranks of an island, of which one fails while the model shows the outer parameters.

    torchrun --nproc_per_node 2 ... -m tests.programs.fails_within LOG

Rank 1 logs to the file. Rank 0 goes on as soon as the error is told there. Both must have their own weights back.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel

from hf_diloco import DiLoCoConfig, OuterLoop


def wait_for(text: str, file: Path) -> None:
    deadline = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, f"{text} is not told"
        time.sleep(0.05)


def main() -> None:
    log = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if accelerator.process_index == 1:
        logging.getLogger("hf_diloco").addHandler(logging.FileHandler(log))
    with OuterLoop(accelerator, model, optimizer, DiLoCoConfig(num_islands=1, sync_every=3)) as outer:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        outer.step()
        weight = extract_model_from_parallel(model).weight
        own = weight.detach().clone()
        try:
            with outer.outer_weights():
                assert not torch.equal(weight, own)
                if accelerator.process_index == 1:
                    raise ValueError("of one rank")
                wait_for("ValueError: of one rank", log)
        except ValueError:
            assert accelerator.process_index == 1
        assert torch.equal(weight, own)
    accelerator.end_training()


if __name__ == "__main__":
    main()
