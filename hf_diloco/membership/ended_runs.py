"""Runs that this process has taken part in to their end, at a store that island 0 keeps.

Island 0 ends the store a little later. Another training in this process, which writes to another folder, must not take
the run there for its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.run import RunRecord
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import NO_RUN, RUN_PATH, Seal

_folders: dict[tuple[int, str], str] = {}
"""By this process's island and the run: where the island wrote."""


def note_end(members: Members) -> None:
    """Notes that this process has taken part in a run to its end."""
    _folders[members.island, members.log.seal.run_id] = members.folder


def has_noted_ends(island: int) -> bool:
    """Whether this process has taken part in any run to its end, as `island`."""
    return any(of == island for of, _ in _folders)


def is_of_ended_run(store: ObjectStore, seal: Seal, island: int, folder: Path) -> bool:
    """Whether a store is that of a run that this process has taken part in to its end, as `island`, in another folder.

    `seal` is of any run.
    """
    run = RunLog(store, seal.of(NO_RUN)).read_or_refuse(RUN_PATH, RunRecord)
    before = _folders.get((island, run.run)) if run else None
    return before is not None and before != os.path.realpath(folder)
