"""A node that trains twice in one process, with another callback each time.

Before the second training, node 0 waits for the file `go` beside the output folder. Arguments: the node's number, the
rendezvous, the output folder, and whether the first training is "finished", "refused" because nodes have different
settings, or has "failed" on both in the same step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.errors import FingerprintError
from tests.programs.trainer_island import Tokens, make_model

NUM_NODES = 2


class Fails(TrainerCallback):
    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ValueError("of the user's own")


def train(node: int, rendezvous: str, folder: Path, *callbacks: TrainerCallback, momentum: float = 0.9) -> int:
    callback = GossipCallback(
        node=node, num_nodes=NUM_NODES, rendezvous=rendezvous, join_timeout=60.0, momentum=momentum
    )
    model = make_model(lora=False, tied=True, seed=1)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=4, disable_tqdm=True)
    optimizers = callback.make_optimizer(model, args), None
    trainer = Trainer(model, args, train_dataset=Tokens(node), callbacks=[callback, *callbacks], optimizers=optimizers)
    trainer.train()
    with callback.mean_weights():
        pass
    return trainer.state.global_step


def main() -> None:
    node, rendezvous, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if sys.argv[4] == "finished":
        assert train(node, rendezvous, folder / "first") == 4
    elif sys.argv[4] == "failed":
        try:
            train(node, rendezvous, folder / "first", Fails())
            raise AssertionError("no error ended training")
        except ValueError as error:
            print("failed:", error)
    else:
        try:
            train(node, rendezvous, folder / "first", momentum=0.5 + 0.1 * node)
            raise AssertionError("different settings were not refused")
        except FingerprintError as error:
            print("refused:", error)
    print("first ended", flush=True)
    while node == 0 and not (folder.parent / "go").exists():
        time.sleep(0.05)
    assert train(node, rendezvous, folder / "second") == 4
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()
