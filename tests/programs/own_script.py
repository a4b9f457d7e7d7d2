"""A user's script, as `hf-diloco launch -- python` starts it: who it is comes from the environment.

python -m tests.programs.own_script FOLDER MAX_STEPS
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import Trainer, TrainingArguments

from hf_diloco import DiLoCoCallback, DiLoCoConfig
from tests.programs.trainer_island import Tokens, make_model


def main(folder: str, max_steps: int) -> None:
    config = DiLoCoConfig(sync_every=2, outer_momentum=0.5)
    if max_steps < 0:
        raise ValueError("these are no steps")
    args = TrainingArguments(
        output_dir=f"{folder}/{config.island}",
        max_steps=max_steps,
        per_device_train_batch_size=2,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    model = make_model(lora=False, tied=False, seed=config.island)
    trainer = Trainer(model, args, train_dataset=Tokens(config.island), callbacks=[DiLoCoCallback(config)])
    trainer.train()
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    if os.environ.get("RANK", "0") == "0":
        print(
            f"I am {config.island} of {config.num_islands}, {torch.get_num_threads()} threads, "
            f"{args.world_size} ranks, weights {weights:.12f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
