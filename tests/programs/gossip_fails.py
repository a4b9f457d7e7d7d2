"""A node of three in a ring. An error ends the training of node 1, which returns in the same process.

Node 1 waits for the file `go` beside the output folder before it returns. Once it takes steps again, it asks all nodes
to end. Arguments: the node's number, the rendezvous, the output folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.errors import UnsupportedError
from tests.programs.trainer_island import Tokens, make_model

NUM_NODES, FAILING = 3, 1
MANY = 2000  # steps; nodes are asked to end long before


class Fails(TrainerCallback):
    """Raises an error of the user's own in the third step."""

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ValueError("of the user's own")


class Ends(TrainerCallback):
    """Asks all nodes to end after a step."""

    callback: GossipCallback

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.callback.stop()


class Slow(TrainerCallback):
    """Lets few steps pass until node 1 is back."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        time.sleep(0.02)


def make_trainer(node: int, rendezvous: str, folder: Path, other: TrainerCallback) -> Trainer:
    # Who waited for a node that failed would wait for longer than the test.
    callback = GossipCallback(
        node=node, num_nodes=NUM_NODES, rendezvous=rendezvous, join_timeout=60.0, exchange_timeout=3600.0
    )
    if isinstance(other, Ends):
        other.callback = callback
    model = make_model(lora=False, tied=True, seed=1)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=MANY, disable_tqdm=True)
    optimizers = callback.make_optimizer(model, args), None
    return Trainer(model, args, train_dataset=Tokens(node), callbacks=[callback, other], optimizers=optimizers)


def fail(rendezvous: str, folder: Path) -> None:
    trainer = make_trainer(FAILING, rendezvous, folder, Fails())
    for expected in (ValueError, UnsupportedError):
        try:
            trainer.train()
        except expected as error:
            print("ended by", error, flush=True)


def main() -> None:
    node, rendezvous, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if node == FAILING:
        fail(rendezvous, folder / "first")
        while not (folder.parent / "go").exists():
            time.sleep(0.05)
    trainer = make_trainer(node, rendezvous, folder / "second", Ends() if node == FAILING else Slow())
    trainer.train()
    assert trainer.state.global_step < MANY
    print("ended with the others", flush=True)


if __name__ == "__main__":
    main()
