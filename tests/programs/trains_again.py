"""An island whose trainings end in an error of the user's own, then by `stop`, and then finish; twice.

After the stop, island 0 first waits for the file `go` beside the output folder. Arguments: the island's number, the
rendezvous, the output folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from hf_diloco import DiLoCoCallback
from tests.trainers import SAVING, make_trainer


class Ends(TrainerCallback):
    """Ends training in its third step, in the ways given, one a training."""

    def __init__(self, callback: DiLoCoCallback) -> None:
        self.ways = ["error", "stop"]
        self._callback = callback

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2 and self.ways:
            if self.ways.pop(0) == "error":
                raise ValueError("of the user's own")
            self._callback.stop()


def main() -> None:
    island, rendezvous, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    callback = DiLoCoCallback(
        island=island, num_islands=2, rendezvous=rendezvous, sync_every=2, join_timeout=60.0, sync_timeout=60.0
    )
    trainer = make_trainer(folder, callback, Ends(callback), **SAVING)
    try:
        trainer.train()
    except ValueError as error:
        print("ended by", error, flush=True)
    trainer.train(resume_from_checkpoint=True)
    assert (callback.stopped, callback.round, trainer.state.global_step) == (True, 1, 3)
    print("stopped", flush=True)
    while island == 0 and not (folder.parent / "go").exists():
        time.sleep(0.05)
    trainer.train(resume_from_checkpoint=True)
    assert (callback.stopped, callback.round, trainer.state.global_step) == (False, 2, 4)
    trainer.train()
    assert (callback.stopped, callback.round, trainer.state.global_step) == (False, 2, 4)
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()
