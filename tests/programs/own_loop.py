"""A user's loop, as `hf-diloco launch -- python` starts it: who it is comes from the environment.

python -m tests.programs.own_loop FOLDER NUM_STEPS [--asks] [--resume] [--fails-on=RANK]

With --asks it saves when it is asked to stop; with --resume it goes on from there. RANK fails at the fifth step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from hf_diloco import DiLoCoConfig, OuterLoop

SECONDS_A_STEP = 0.01  # so that a launcher sees it train


def main(folder: str, num_steps: int, asks: bool, resume: bool) -> None:
    config = DiLoCoConfig(sync_every=4, outer_momentum=0.5)
    torch.manual_seed(config.island)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    own = Path(folder, str(config.island))
    checkpoint = own / "checkpoint"
    if resume:
        accelerator.load_state(checkpoint)
    resume_from = checkpoint if resume else None
    with OuterLoop(
        accelerator, model, optimizer, config, output_dir=own, resume_from=resume_from, num_steps=num_steps
    ) as outer:
        print(f"begins at step {outer.global_step}", flush=True)
        while outer.global_step < num_steps:
            accelerator.backward(model(torch.randn(4, 3)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            time.sleep(SECONDS_A_STEP)
            if outer.global_step == 5 and f"--fails-on={accelerator.process_index}" in sys.argv:
                raise OSError("no space left for the log")
            if asks and outer.should_stop():
                accelerator.save_state(checkpoint)
                outer.save_state(checkpoint)
                break
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    print(f"stopped {outer.stopped}, round {outer.round}, weights {weights}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "--asks" in sys.argv, "--resume" in sys.argv)
