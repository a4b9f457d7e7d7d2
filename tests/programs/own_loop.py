"""A user's loop, as `hf-diloco launch -- python` starts it: who it is comes from the environment.

With --asks it saves when it is asked to stop, with --save-every after so many steps; with --resume it goes on from
there. A rank may fail at the fifth step, or in a write of its own that is collective; an island be killed at a step.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_diloco import DiLoCoConfig, OuterLoop
from hf_diloco.trainer import checkpoint_folder

SECONDS_A_STEP = 0.01  # so that a launcher sees it train


def write_together(failing: int, folder: Path) -> None:
    if dist.get_rank() == failing:
        raise KeyError("no such tensor")
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_steps", type=int)
    for flag in ("--asks", "--resume"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--fails-on", type=int, help="rank")
    parser.add_argument("--fails-to-write", type=int, help="rank")
    parser.add_argument("--killed", type=int, nargs=2, help="island and step")
    given = parser.parse_args()

    config = DiLoCoConfig(sync_every=4, outer_momentum=0.5)
    torch.manual_seed(config.island)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    own = given.folder / str(config.island)
    outer = OuterLoop(accelerator, model, optimizer, config, output_dir=own, num_steps=given.num_steps)
    if given.resume and (checkpoint := outer.common_checkpoint()):
        accelerator.load_state(checkpoint)
    with outer:
        print(f"begins at step {outer.global_step}", flush=True)
        while outer.global_step < given.num_steps:
            accelerator.backward(model(torch.randn(4, 3)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            time.sleep(SECONDS_A_STEP)
            if outer.global_step == 5 and accelerator.process_index == given.fails_on:
                raise OSError("no space left for the log")
            if [config.island, outer.global_step] == given.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            must_stop = given.asks and outer.should_stop()
            if outer.global_step == 3 and given.fails_to_write is not None:
                checkpoint_folder._LAST_WORD_SECONDS = 0.5  # in which the other rank waits within `write`
                try:
                    outer.save_checkpoint(write=partial(write_together, given.fails_to_write))
                except KeyError:
                    os._exit(0)  # after an error torchrun ends the other rank
            if must_stop or (given.save_every and outer.global_step % given.save_every == 0):
                outer.save_checkpoint(limit=1)
            if must_stop:
                break
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    print(f"stopped {outer.stopped}, round {outer.round}, weights {weights}", flush=True)


if __name__ == "__main__":
    main()
