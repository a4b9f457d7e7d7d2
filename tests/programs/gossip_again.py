"""A node that trains twice in one process, with another callback each time.

Before the second training, node 0 waits for the file `go` beside the output folder. Arguments: the node's number, the
rendezvous, the output folder, and whether the first training is "finished", or "refused" because nodes have different
settings.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from transformers import Trainer, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.errors import FingerprintError
from tests.programs.trainer_island import Tokens, make_model

NUM_NODES = 2


def train(node: int, rendezvous: str, folder: Path, momentum: float = 0.9) -> int:
    callback = GossipCallback(
        node=node, num_nodes=NUM_NODES, rendezvous=rendezvous, join_timeout=60.0, momentum=momentum
    )
    model = make_model(lora=False, tied=True, seed=1)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=4, disable_tqdm=True)
    optimizers = callback.make_optimizer(model, args), None
    trainer = Trainer(model, args, train_dataset=Tokens(node), callbacks=[callback], optimizers=optimizers)
    trainer.train()
    with callback.mean_weights():
        pass
    return trainer.state.global_step


def main() -> None:
    node, rendezvous, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if sys.argv[4] == "finished":
        assert train(node, rendezvous, folder / "first") == 4
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
