"""Outer state on disk, inside the Trainer's checkpoint that it belongs to.

    checkpoint-N/diloco/rank-00000.safetensors   one rank's part: flat fp32 tensors ("anchor", "momentum", "residual")
                                                 and, in fp64, numbers that are the same on all ranks
    checkpoint-N/diloco/fragment-00001-rank-...  its part of a further fragment, where the model is cut into fragments
    checkpoint-N/diloco/outer.json               round, steps since it, each file's intervals; size and digest of every
                                                 file of the checkpoint, the Trainer's and DeepSpeed's too

Each file is written under a temporary name, flushed, then renamed. `outer.json` is written last, when everything else
is on disk: a checkpoint is complete if it has `outer.json` and all files listed there. For each file of the outer
state, `outer.json` lists its intervals of the canonical index space, so that any number of ranks can read it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Interval
from hf_diloco.outer.manifest import (
    FileRecord,
    check_sizes,
    first_sound,
    read_record,
    record_files,
    recover_replaced,
    write_record,
)
from hf_diloco.utils.files import flush, telling

logger = logging.getLogger("hf_diloco")

FOLDER = "diloco"
RECORD = f"{FOLDER}/outer.json"
"""The record, which is written last into a checkpoint."""
_FORMAT = 5

_NUMBERED = re.compile(r"checkpoint-(\d+)")


class OuterFile(BaseModel):
    """One rank's file: its name, size in bytes, digest, and the canonical (start, length) runs of its tensors."""

    model_config = ConfigDict(extra="forbid")

    name: str
    num_bytes: int
    digest: str
    intervals: list[Interval]


class FragmentIndex(BaseModel):
    """The progress of one fragment: `steps` and `weight` since its last round.

    `due_at`: inner steps after which its next round is due; None: the default, or set by peers. `install_in`: inner
    steps until the masters take the outer parameters of the last round; None: they have. `digest`: compared among
    islands; cannot be recomputed where their outer parameters differ. `parameters`: digest of their names and sizes.
    `anticipated_of`: number of islands in the average of which this island has applied its own part in advance.
    `distances`: from `OuterState.distances`; empty if not finite.
    """

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(ge=0)
    weight: float
    due_at: int | None = None
    install_in: int | None = None
    digest: str
    parameters: str
    anticipated_of: int | None = Field(default=None, ge=1)
    distances: list[float] = []


class OuterPart(NamedTuple):
    """One fragment's tensors on one rank, each 1-D fp32, and the intervals of the canonical index space in them."""

    tensors: Mapping[str, torch.Tensor]
    intervals: Sequence[Interval]


class OuterIndex(BaseModel):
    """The contents of `outer.json`.

    Attributes:
        round: rounds completed.
        steps_since_sync: inner steps since the last round; `sync_every` means that the next was due but failed.
        weight_since_sync: examples or tokens behind the next pseudo-gradient.
        global_step: optimizer steps of the Trainer.
        num_parameters: trainable parameters of the whole model.
        model: digest of the trainable parameters' names and sizes.
        parameters: shape of each trainable parameter by name, in the model's order.
        outer_digest: digest of the outer parameters of the island.
        run: id of the run in its object store; empty without one.
        settings: the outer loop's settings when the checkpoint was written.
        data: the island's position in its data.
        fragments: progress of each fragment; the values above repeat those of the fragment whose round is next.
        files: the files that the ranks wrote.
        checkpoint: every file of the checkpoint; empty where others write it, around a loop's `save_state`.
    """

    model_config = ConfigDict(extra="forbid")

    format: int = _FORMAT
    round: int
    steps_since_sync: int
    weight_since_sync: float
    global_step: int
    num_parameters: int
    model: str
    parameters: dict[str, list[int]]
    outer_digest: str
    run: str = ""
    settings: dict[str, Any]
    data: dict[str, Any]
    fragments: list[FragmentIndex]
    files: list[OuterFile] = []
    checkpoint: list[FileRecord] = []


def save_outer(
    checkpoint: Path, island: IslandGroup, parts: Sequence[OuterPart], index: OuterIndex, is_last: bool = True
) -> None:
    """Writes outer state into the folder of a checkpoint. Collective over the island's ranks.

    Args:
        checkpoint: the Trainer's `checkpoint-N`.
        parts: this rank's outer state, one a fragment.
        index: everything but `files` and `checkpoint`.
        is_last: everything else is in the checkpoint already, so its files are recorded, too.

    Raises:
        CheckpointError: a rank cannot write, or the disk is full; on every rank. The checkpoint is incomplete.
    """
    folder = checkpoint / FOLDER
    parts_files = island.on_all(lambda: _write_parts(folder, island.rank, parts))
    files = island.gather([file.model_dump() for file in parts_files])  # replaces no old file before all have written
    island.on_leader(lambda: _forget_index(checkpoint))
    island.on_all(lambda: _give_names(checkpoint, parts_files))
    everything = record_files(checkpoint, island, RECORD) if is_last else []
    all_files = [OuterFile(**file) for rank in files for file in rank]
    whole = index.model_copy(update={"files": all_files, "checkpoint": everything})
    island.on_leader(lambda: _write_index(checkpoint, whole))


def _write_parts(folder: Path, rank: int, parts: Sequence[OuterPart]) -> list[OuterFile]:
    """Writes one rank's files under their temporary names."""
    paths = [folder / _file_name(number, rank) for number in range(len(parts))]
    try:
        with telling(folder.parent):
            folder.mkdir(parents=True, exist_ok=True)
            return [_write_part(path, part) for path, part in zip(paths, parts, strict=True)]
    except CheckpointError:
        for path in paths:
            with suppress(OSError):  # there may be no such folder
                _temporary(path).unlink()  # frees its disk space
        raise


def _forget_index(checkpoint: Path) -> None:
    """Deletes the index: the checkpoint counts as incomplete until `_write_index`."""
    with telling(checkpoint):
        (checkpoint / RECORD).unlink(missing_ok=True)


def _give_names(checkpoint: Path, files: Sequence[OuterFile]) -> None:
    with telling(checkpoint):
        for file in files:
            path = checkpoint / FOLDER / file.name
            os.replace(_temporary(path), path)


def _write_index(checkpoint: Path, index: OuterIndex) -> None:
    with telling(checkpoint):
        write_record(checkpoint / RECORD, index)


def _file_name(fragment: int, rank: int) -> str:
    return f"{f'fragment-{fragment:05d}-' if fragment else ''}rank-{rank:05d}.safetensors"


def _temporary(path: Path) -> Path:
    return path.with_suffix(".partial")


def _write_part(path: Path, part: OuterPart) -> OuterFile:
    """Writes one file under its temporary name."""
    temporary = _temporary(path)
    save_file(dict(part.tensors), temporary)
    flush(temporary)
    return OuterFile(
        name=path.name,
        num_bytes=temporary.stat().st_size,
        digest=_digest(part.tensors),
        intervals=list(part.intervals),
    )


def read_index(checkpoint: Path) -> OuterIndex:
    """Returns the index of a checkpoint's outer state.

    Raises:
        CheckpointError: the index or a file that it lists is missing, cut short or cannot be read.
    """
    path = checkpoint / RECORD
    absent = f"{checkpoint} has no outer state ({path.name} is missing): it was not written by this package"
    index = read_record(path, OuterIndex, absent)
    if index.format != _FORMAT:
        has = f"{path} has format {index.format}, and this version of hf_diloco reads {_FORMAT}"
        raise CheckpointError(f"{has}: resume with the version that wrote it")
    for file in index.files:
        part = checkpoint / FOLDER / file.name
        if not part.is_file() or part.stat().st_size != file.num_bytes:
            raise CheckpointError(f"{part} is missing or cut short: resume from an earlier checkpoint")
    check_sizes(checkpoint, index.checkpoint)
    return index


def files_of(checkpoint: Path) -> list[FileRecord]:
    """Returns all files that a checkpoint's index lists; raises as `read_index`."""
    return read_index(checkpoint).checkpoint


def newest_sound(checkpoints: Sequence[Path], island: IslandGroup) -> Path | None:
    """Returns the last of `checkpoints` whose files are all intact, None if there is none. Warns about corrupt ones.

    Collective over the island's ranks; uses the leader's argument.
    """
    return first_sound(checkpoints[::-1], files_of, island)


def load_outer(
    checkpoint: Path, index: OuterIndex, intervals: Sequence[Interval], only: str | None = None
) -> dict[str, torch.Tensor]:
    """Reads this rank's outer state, from whichever files hold its intervals.

    Args:
        intervals: the part of the canonical index space to read.
        only: the only tensor to read, such as "anchor"; None: all.

    Raises:
        CheckpointError: a file is corrupt, or the files do not cover the intervals.
    """
    folder = checkpoint / FOLDER
    mine = list(intervals)
    for file in index.files:
        if file.intervals == mine:
            # A copy: the tensors are mapped from the file, which is deleted when newer checkpoints are written.
            found = _read_file(folder / file.name, file).items()
            return {name: stored.clone() for name, stored in found if only in (None, name)}
    return _assemble(folder, index, mine, only)


def complete_checkpoints(output_dir: Path) -> list[tuple[Path, OuterIndex]]:
    """Returns all complete checkpoints of a run, oldest first. Checks that files exist with their recorded size."""
    found = []
    for path in Path(output_dir).glob("checkpoint-*"):
        with suppress(CheckpointError, OSError):
            index = read_index(path)
            if index.checkpoint or (path / "trainer_state.json").is_file():
                found.append((path, index))
    return sorted(found, key=lambda item: item[1].global_step)


def find_complete(folder: Path) -> list[Path]:
    """Returns the folders of `complete_checkpoints`."""
    return [path for path, _ in complete_checkpoints(folder)]


def last_of_earlier_round(begun_at: int, folder: Path, written: Collection[Path]) -> list[Path]:
    """Returns the newest checkpoint of an earlier round than the newest one's: all islands can return to it.

    Other islands may have stopped before they wrote a checkpoint of the newest round. Checkpoints of later steps that
    an earlier training left behind are ignored: all islands went back past them, and peers may never have had them. So
    are a user's copies and links, under names of their own.

    Args:
        begun_at: the step at which this training began.
        folder: of the checkpoints.
        written: checkpoints that this training has written.
    """
    found = [
        (path, index.round)
        for path, index in complete_checkpoints(folder)
        if _NUMBERED.fullmatch(path.name) and (index.global_step <= begun_at or path in written)
    ]
    return [path for path, number in found if number < found[-1][1]][-1:]


def whole_checkpoints(output_dir: Path, island: IslandGroup) -> list[tuple[Path, tuple[int, str]]]:
    """Returns the complete checkpoints that a run can resume from, with round and outer digest, oldest first.

    As `complete_checkpoints`, on every rank; warns about newer checkpoints that are incomplete.
    """

    def look() -> list[tuple[str, int, str]]:
        recover_replaced(output_dir, find_complete)
        complete = complete_checkpoints(output_dir)
        for text in _broken_after(output_dir, complete[-1][1].global_step if complete else -1):
            logger.warning("%s", text)
        return [(str(path), index.round, index.outer_digest) for path, index in complete]

    return [(Path(path), (number, digest)) for path, number, digest in island.on_leader(look)]


def _broken_after(output_dir: Path, step: int) -> Iterator[str]:
    """Yields a warning for each incomplete checkpoint of a later step."""
    for path in output_dir.glob("checkpoint-*"):  # a user's copy or link may have a name without a step
        if (numbered := _NUMBERED.fullmatch(path.name)) and int(numbered[1]) > step:
            try:
                read_index(path)
                reason = f"{path} holds outer state alone"
            except CheckpointError as error:
                reason = str(error).partition(": ")[0]
            yield f"{reason}: {path.name} is skipped"


def _read_file(path: Path, file: OuterFile) -> dict[str, torch.Tensor]:
    """Returns one rank's tensors, after checking their digest."""
    try:
        with safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an earlier checkpoint") from None
    if _digest(tensors) != file.digest:
        raise CheckpointError(f"{path} does not hold what was written to it: resume from an earlier checkpoint")
    return tensors


def _assemble(folder: Path, index: OuterIndex, intervals: list[Interval], only: str | None) -> dict[str, torch.Tensor]:
    """Assembles `intervals` from files that are cut in another way."""
    length = sum(size for _, size in intervals)
    tensors: dict[str, torch.Tensor] = {}
    covered = 0
    for file in index.files:
        matches = match_intervals(file.intervals, intervals)
        if not matches and tensors:
            continue
        for name, stored in _read_file(folder / file.name, file).items():
            if only not in (None, name):
                continue
            if stored.dtype == torch.float64:  # a few numbers that are equal on all ranks, not part of a vector
                tensors[name] = stored.clone()
                continue
            if name not in tensors:
                tensors[name] = torch.empty(length)
            for source, target, count in matches:
                tensors[name][target : target + count] = stored[source : source + count]
        covered += sum(count for _, _, count in matches)
    if covered != length:
        raise CheckpointError(
            f"{folder} holds {covered:,} of the {length:,} outer values that this rank needs: it belongs to another "
            "model, or to one with other frozen parameters"
        )
    return tensors


def match_intervals(stored: Sequence[Interval], wanted: Sequence[Interval]) -> list[tuple[int, int, int]]:
    """Returns (position in the stored vector, position in the wanted one, length) of each run that both contain."""
    found = []
    source = 0
    for stored_start, stored_length in stored:
        target = 0
        for start, length in wanted:
            low, high = max(start, stored_start), min(start + length, stored_start + stored_length)
            if low < high:
                found.append((source + low - stored_start, target + low - start, high - low))
            target += length
        source += stored_length
    return found


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
