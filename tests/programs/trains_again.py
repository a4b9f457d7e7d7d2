"""An island whose trainings end in an error of the user's own, then by `stop`, and then finish; twice.

After the stop, island 0 first waits for the file `go` beside the output folder. Arguments: the island's number, the
rendezvous, the output folder, and whether each training has a callback of its own ("new") or all have the "same".
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

from hf_diloco import DiLoCoCallback
from tests.trainers import SAVING, make_trainer


class Ends(TrainerCallback):
    """Ends training in its third step: in an error, then by `callback`."""

    callback: DiLoCoCallback

    def __init__(self) -> None:
        self.ways = ["error", "stop"]

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2 and self.ways:
            if self.ways.pop(0) == "error":
                raise ValueError("of the user's own")
            self.callback.stop()


def main() -> None:
    island, rendezvous, folder, are_new = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "new"
    ends = Ends()
    trainers: list[Trainer] = []  # all are kept, as a notebook does

    def train(resume: bool) -> tuple[bool, int, int]:
        if are_new or not trainers:
            ends.callback = DiLoCoCallback(
                island=island, num_islands=2, rendezvous=rendezvous, sync_every=2, join_timeout=60.0, sync_timeout=60.0
            )
            trainers.append(make_trainer(folder, ends.callback, ends, **SAVING))
        trainers[-1].train(resume_from_checkpoint=resume)
        return ends.callback.stopped, ends.callback.round, trainers[-1].state.global_step

    try:
        train(resume=False)
    except ValueError as error:
        print("ended by", error, flush=True)
    assert train(resume=True) == (True, 1, 3)
    print("stopped", flush=True)
    while island == 0 and not (folder.parent / "go").exists():
        time.sleep(0.05)
    assert train(resume=True) == (False, 2, 4)
    assert train(resume=False) == (False, 2, 4)
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()
