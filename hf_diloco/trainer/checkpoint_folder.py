"""The checkpoints of a training in their folder: completing or abandoning one, and deleting old ones.

No checkpoint is deleted before a newer one is complete. File times play no part.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.errors import CheckpointError
from hf_diloco.gossip.checkpoint import RECORD as GOSSIP_RECORD
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.checkpoint import FOLDER, RECORD
from hf_diloco.outer.manifest import FILES_RECORD, discard, recover_replaced, remove, set_aside_name

logger = logging.getLogger("hf_diloco")

_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")

_RECORDS = (RECORD, GOSSIP_RECORD, FILES_RECORD)
"""Files that are written last, of every kind of run."""

_LAST_WORD_SECONDS = 10.0
"""How long a failed rank waits for the other ranks, which may still be writing, to report its error to them."""


class CheckpointFolder:
    """The checkpoints of one training, each in `checkpoint-N` after N steps. Collective over the ranks.

    Args:
        folder: the folder of the checkpoints.
        ranks: the ranks that write.
        record: the file in a checkpoint that is written last. An unreadable checkpoint with this file may be complete.
        find_whole: returns the complete checkpoints in a folder; called on the leader only.
        find_needed: returns further complete checkpoints to keep, because other islands may have no newer ones yet;
            gets the folder and the checkpoints that this training has written.
        check_alone: raises a `DiLoCoError` if another process writes to the folder; called on the leader only.
        deletes: whether this rank deletes files.
        begins_anew: whether training starts from scratch: checkpoints found are then an earlier training's, are kept,
            and a warning is logged.
    """

    def __init__(
        self,
        folder: Path,
        ranks: IslandGroup,
        record: str,
        find_whole: Callable[[Path], Collection[Path]],
        find_needed: Callable[[Path, Collection[Path]], Collection[Path]] | None,
        check_alone: Callable[[], None],
        deletes: bool,
        begins_anew: bool,
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._record = record
        self._find_all = find_whole
        self._find_needed = find_needed
        self._check_alone = check_alone
        self._deletes = deletes
        self._written: set[Path] = set()
        self._num_begun = 0
        self._failure = ""  # why a rank could not write the present checkpoint's first part
        self._earlier = self._find_earlier() if begins_anew and ranks.is_leader else set()

    def _find_earlier(self) -> set[Path]:
        """Finds an earlier training's checkpoints, which this training must not delete."""
        whole = self._find_whole()
        found = {
            path
            for path in self._find_numbered()
            if not self._is_unfinished(path, whole) or _is_of_trainer_alone(path)
        }
        if found:
            logger.warning(
                "this training starts from scratch, but %s of an earlier one is there. It stays until this one saves "
                "the same step, and common_checkpoint() may find it. Resume from it, remove it, or take "
                "another output_dir",
                max(found, key=_step_of),
            )
        return found

    def path(self, step: int) -> Path:
        """Returns the path of a step's checkpoint."""
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def begin(self, checkpoint: Path, write: Callable[[list[str]], object]) -> None:
        """Writes the Trainer's or Accelerator's part of a checkpoint, replacing an earlier one of the same step.

        If a rank could not write, nothing is left of the checkpoint, and `complete` reports it.

        Args:
            write: writes the part, and appends this rank's write failures to its argument.

        Raises:
            CheckpointError: `write` raised another error on another rank, which the message names.
            DiLoCoError: another process writes to the folder; nothing has been changed there.
        """
        self._ranks.on_leader(self._check_alone)
        self._set_aside(checkpoint)
        self._num_begun += 1
        about = f"checkpoint {self._num_begun}"
        try:
            said = self._write(write, about)
        except RuntimeError as error:  # of PyTorch, if a rank that this one waited for has failed and exited
            first = self._ranks.find_word(about)
            if first is None or first[0] == self._ranks.rank:
                raise
            raise _not_whole(checkpoint, *first) from error
        for rank, one in enumerate(said):
            if one["error"]:
                raise _not_whole(checkpoint, rank, one["error"])
        met = [failure for one in said for failure in one["failures"]]
        if met:
            remove(checkpoint)
            self._ranks.barrier()  # callbacks must not see it any more
            self._failure = f"{checkpoint} cannot be written ({met[0]})"

    def _write(self, write: Callable[[list[str]], object], about: str) -> list[dict[str, Any]]:
        """Writes, and returns what all ranks say of it. If `write` raises, its error is left under `about`."""
        failures: list[str] = []
        try:
            write(failures)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._ranks.leave_word(about, text)  # for ranks that wait for this one within `write`
            self._ranks.gather_briefly({"failures": [], "error": text}, _LAST_WORD_SECONDS)
            raise
        return self._ranks.gather({"failures": failures[:1], "error": ""})

    def _set_aside(self, checkpoint: Path) -> None:
        """Sets a checkpoint of this step aside until the new one is complete; deletes it if it is unfinished."""
        if self._ranks.is_leader and (checkpoint.is_dir() or checkpoint.is_symlink()):
            is_earlier = checkpoint in self._earlier - self._written
            with suppress(OSError):
                if not is_earlier and self._is_unfinished(checkpoint, self._find_whole()):
                    discard(checkpoint)
                else:
                    discard(set_aside_name(checkpoint))
                    checkpoint.rename(set_aside_name(checkpoint))
        self._ranks.barrier()

    def complete(
        self, checkpoint: Path, write: Callable[[Path], object], limit: int, best: Collection[Path] = ()
    ) -> bool:
        """Completes a checkpoint, then deletes old ones; or logs that it could not be written.

        If it could not, an earlier checkpoint of the step is put back only here: callbacks that add files to this one
        must not find it.

        Args:
            write: writes the missing files, and last the record that marks the checkpoint as complete. Raises
                `CheckpointError` on all ranks if one rank fails.
            limit: how many complete checkpoints to keep; 0 keeps all.
            best: checkpoints to keep in any case.

        Returns:
            Whether the checkpoint is complete. If not, the failure has been logged.
        """
        failure, self._failure = self._failure, ""
        if failure:
            self._abandon(checkpoint, failure)
            return False
        self._ranks.barrier()  # or other callbacks of some rank may still write what belongs to it
        try:
            write(checkpoint)
        except CheckpointError as error:
            self._abandon(checkpoint, str(error))
            return False
        self._written.add(checkpoint)
        if self._ranks.is_leader:
            remove(set_aside_name(checkpoint))
        for path in self._ranks.from_leader(self._surplus(checkpoint, limit, best) if self._ranks.is_leader else []):
            if self._deletes:
                remove(Path(path), first=self._record)  # if killed here, the rest counts as unfinished
        return True

    def _abandon(self, checkpoint: Path, reason: str) -> None:
        """Logs that a checkpoint could not be written, and removes its files."""
        remove(checkpoint)
        self._ranks.barrier()
        if not self._ranks.is_leader:
            return
        try:
            recover_replaced(self._folder, lambda _: self._find_whole())
        except CheckpointError as error:  # training goes on, as without it
            logger.error("%s", error)
        newest = max(self._find_whole(), key=_step_of, default=None)
        logger.error(
            "%s: make room; the next save tries again. %s",
            reason,
            f"Meanwhile {newest.name} stays the newest checkpoint" if newest else "There is no checkpoint yet",
        )

    def _find_whole(self) -> set[Path]:
        return {path for path in self._find_all(self._folder) if _CHECKPOINT.fullmatch(path.name)}

    def _find_numbered(self) -> set[Path]:
        found = self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        return {path for path in found if _CHECKPOINT.fullmatch(path.name)}

    def _surplus(self, newest: Path, limit: int, best: Collection[Path]) -> list[str]:
        """Returns the checkpoints to delete: complete ones beyond the limit, and others older than all that are kept.

        Checkpoints of later steps than `newest` go first: training has resumed from a step before them. After these
        the lowest steps go. An unreadable checkpoint, perhaps complete, goes only if it is older than all that are
        kept. An unfinished one before `newest` goes at once.
        """
        if not limit:
            return []
        earlier = self._earlier - self._written
        whole = self._find_whole() - earlier
        needed = set(self._find_needed(self._folder, self._written)) if self._find_needed else {newest}
        kept = {newest, *needed, *best}
        last = _step_of(newest)
        ranked = sorted(whole, key=lambda path: (path in kept, _step_of(path) <= last, _step_of(path)), reverse=True)
        num_kept = max(limit, len(whole & kept))
        staying = [_step_of(path) for path in ranked[:num_kept] if path not in best]
        oldest = min(staying, default=0) if needed and len(whole) >= limit else 0
        others = [
            path
            for path in self._find_numbered() - whole - earlier
            if not self._is_of_another_kind(path)
            and (_step_of(path) < oldest or (_step_of(path) < _step_of(newest) and self._is_unfinished(path, whole)))
        ]
        return [str(path) for path in [*ranked[num_kept:], *others] if path not in kept]

    def _is_of_another_kind(self, checkpoint: Path) -> bool:
        """Whether a run of another kind, such as one without an outer loop, has completed it."""
        with suppress(OSError):
            return any((checkpoint / record).is_file() for record in _RECORDS if record != self._record)
        return False

    def _is_unfinished(self, checkpoint: Path, whole: Collection[Path]) -> bool:
        """Whether its writer was killed before completing it; False if it is unreadable, which may be temporary."""
        try:
            (checkpoint / self._record).stat()
        except FileNotFoundError:
            return checkpoint not in whole and not self._is_of_another_kind(checkpoint)
        except OSError:
            return False
        return False


def _is_of_trainer_alone(checkpoint: Path) -> bool:
    """Whether a Trainer completed it, and no island began to add its outer state."""
    return (checkpoint / "trainer_state.json").is_file() and not (checkpoint / FOLDER).exists()


def _not_whole(checkpoint: Path, rank: int, reason: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint} is not whole: rank {rank} failed to write it ({reason})")


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
