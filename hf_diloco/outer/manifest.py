"""Size and digest of every file of a checkpoint, to detect corrupt checkpoints.

The ranks of an island share the work: each flushes its part of the files to disk and reads them back. Where the
machines share no disk, each rank sees its own machine's files, and the record lists the files of all machines.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.utils.files import flush, telling, write_whole

_CHUNK_BYTES = 1 << 22
_REPLACED = "replaced-"
_DISCARDED = "discarded-"

FILES_RECORD = "files.json"
"""The record of a checkpoint without outer state: it lists the files alone."""
_END = "\n}"
_OWN_DIGEST = re.compile(r',\s*"own_digest": "(\w*)"\s*\}\s*$')

M = TypeVar("M", bound=BaseModel)

ReadFiles: TypeAlias = "Callable[[Path], list[FileRecord]]"
"""Reads which files a checkpoint has; raises `CheckpointError` if it cannot."""

logger = logging.getLogger("hf_diloco")


class FileRecord(BaseModel):
    """One file of a checkpoint.

    Attributes:
        name: its path in the checkpoint, with "/".
        num_bytes: its size.
        digest: xxh3_128 of its contents.
        elsewhere: whether it is on the disk of another machine, where the island's leader does not see it.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    num_bytes: int = Field(ge=0)
    digest: str
    elsewhere: bool = False


def record_files(checkpoint: Path, ranks: IslandGroup, record: str) -> list[FileRecord]:
    """Flushes every file of a checkpoint to disk and records its size and digest, but not the file `record`.

    Collective over the ranks, which share the work.

    Raises:
        CheckpointError: a file cannot be flushed or read; on every rank.
    """

    def look() -> dict[str, int]:
        with telling(checkpoint):
            return {name: size for name, size in _sizes(checkpoint).items() if name != record}

    seen = _share_seen(ranks.on_all(look), ranks)
    mine = _share_out(seen)[ranks.rank]

    def take() -> list[FileRecord]:
        with telling(checkpoint):
            records = [_record(checkpoint, name, elsewhere=name not in seen[0][1]) for name in mine]
            for folder in [checkpoint.parent, checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]:
                flush(folder)
            return records

    taken = ranks.gather([record.model_dump() for record in ranks.on_all(take)])
    return sorted((FileRecord(**record) for part in taken for record in part), key=lambda record: record.name)


def write_record(path: Path, record: BaseModel) -> None:
    """Writes the record file of a checkpoint. Its last value is a digest of its other contents."""
    text = record.model_dump_json(indent=1)
    write_whole(path, f'{text.removesuffix(_END)},\n "own_digest": "{_digest_text(text)}"{_END}')


def read_record(path: Path, kind: type[M], absent: str) -> M:
    """Reads a record that `write_record` wrote.

    Args:
        absent: the start of the error message for a missing file, which says what is missing and what writes it.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is corrupt.
    """
    try:
        text = path.read_text(encoding="utf-8")
        sealed = _OWN_DIGEST.search(text)
        whole = text[: sealed.start()] + _END if sealed else ""
        if sealed is None or _digest_text(whole) != sealed[1]:
            raise CheckpointError(
                f"{path} does not hold what was written to it, or an earlier version of hf_diloco wrote it: resume "
                "from an earlier checkpoint, or with that version"
            )
        return kind.model_validate_json(whole)
    except FileNotFoundError:
        raise CheckpointError(
            f"{absent}, or the run was killed while writing it. Resume from an earlier checkpoint"
        ) from None
    except (OSError, ValueError) as error:  # no UTF-8, no JSON, or not of this kind
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): resume from an earlier checkpoint"
        ) from None


def check_sizes(checkpoint: Path, files: Sequence[FileRecord]) -> None:
    """Raises `CheckpointError` if the island's leader sees that a file is missing or cut short. Reads no contents."""
    for file in files:
        if not file.elsewhere and _size(checkpoint / file.name) != file.num_bytes:
            raise CheckpointError(f"{_describe_size(checkpoint / file.name, file)}: resume from an earlier checkpoint")


def check_contents(checkpoint: Path, read: ReadFiles, ranks: IslandGroup) -> None:
    """Reads every file of a checkpoint and checks its digest. Collective over the ranks.

    Raises:
        CheckpointError: a file is missing or corrupt; the message names it; on every rank.
    """
    if damage := find_damage(checkpoint, read, ranks):
        raise CheckpointError(f"{damage}: resume from an earlier checkpoint")


def first_sound(checkpoints: Sequence[Path], read: ReadFiles, ranks: IslandGroup) -> Path | None:
    """Returns the first of `checkpoints` whose files are intact, None if there is none. Warns about corrupt ones.

    Collective over the ranks, which share the work; uses the leader's `checkpoints`, which are in order of preference.
    """
    for name in ranks.from_leader([str(path) for path in checkpoints]):
        path = Path(name)
        damage = find_damage(path, read, ranks)
        if damage is None:
            return path
        if ranks.is_leader:
            logger.warning("%s: %s is skipped, an earlier checkpoint is used", damage, path.name)
    return None


def find_damage(checkpoint: Path, read: ReadFiles, ranks: IslandGroup) -> str | None:
    """Reads every file of a checkpoint; describes the damage of one corrupt file, or returns None if all are intact.

    Collective over the ranks, which share the work; returns the same on all of them, and raises if one cannot `read`.
    """
    files = ranks.on_all(lambda: read(checkpoint))
    right = {file.name: file.num_bytes for file in files if _size(checkpoint / file.name) == file.num_bytes}
    seen = _share_seen(right, ranks)
    mine = set(_share_out(seen)[ranks.rank])
    found = [describe_contents(checkpoint / file.name, file) for file in files if file.name in mine]
    if ranks.is_leader:
        anywhere = {name for _, sizes in seen for name in sizes}
        found += [_describe_size(checkpoint / file.name, file) for file in files if file.name not in anywhere]
    damages = [text for texts in ranks.gather([text for text in found if text]) for text in texts]
    return min(damages, default=None)


def describe_contents(path: Path, file: FileRecord) -> str | None:
    """Reads one file, and describes its damage; returns None if it is intact."""
    try:
        return None if _digest(path) == file.digest else f"{path} does not hold what was written to it"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"


def recover_replaced(folder: Path, find_whole: Callable[[Path], Collection[Path]]) -> None:
    """Restores checkpoints that were set aside for a replacement when the process was killed.

    Keeps the replacement instead where it is complete.

    Raises:
        CheckpointError: one cannot be restored; without it, training would go on from an earlier step.
    """
    for rubbish in folder.glob(f"{_DISCARDED}checkpoint-*"):
        remove(rubbish)
    for aside in folder.glob(f"{_REPLACED}checkpoint-*"):
        checkpoint = folder / aside.name.removeprefix(_REPLACED)
        if checkpoint in find_whole(folder):
            remove(aside)
            continue
        try:
            discard(checkpoint)
            aside.rename(checkpoint)
        except OSError as error:
            raise CheckpointError(
                f"{aside} is a whole checkpoint, and cannot be renamed to {checkpoint.name} "
                f"({error.strerror or error}): rename it, or move it away to go on from an earlier step"
            ) from None


def discard(checkpoint: Path) -> None:
    """Frees the name of an unfinished checkpoint, if there is one, and deletes what can be deleted of it.

    On a network file system, files that a process still has open stay. Raises `OSError` if the name stays taken.
    """
    if checkpoint.is_dir() or checkpoint.is_symlink():
        rubbish = checkpoint.with_name(f"{_DISCARDED}{checkpoint.name}-{secrets.token_hex(4)}")
        checkpoint.rename(rubbish)
        remove(rubbish)


def remove(checkpoint: Path, first: str = "") -> None:
    """Deletes a checkpoint, beginning with the file `first`, and ignores errors. Of a link, deletes only the link."""
    is_link = checkpoint.is_symlink()
    if is_link or first:
        with suppress(OSError):
            (checkpoint if is_link else checkpoint / first).unlink()
    if not is_link:
        shutil.rmtree(checkpoint, ignore_errors=True)


def set_aside_name(checkpoint: Path) -> Path:
    """Returns the path of a complete checkpoint while another one of the same step is written."""
    return checkpoint.with_name(_REPLACED + checkpoint.name)


# Sharing out the files

_Seen = list[tuple[str, dict[str, int]]]  # by rank: its machine, and the names and sizes of the files that it sees


def _share_seen(sizes: dict[str, int], ranks: IslandGroup) -> _Seen:
    return [(host, seen) for host, seen in ranks.gather([socket.gethostname(), sizes])]


def _share_out(seen: _Seen) -> list[list[str]]:
    """Returns the files that each rank reads: the largest first, each to the rank with the fewest bytes so far.

    A file that exists on several machines is read on the first of them, both to record and to check it.
    """
    shares: list[list[str]] = [[] for _ in seen]
    loads = [0] * len(seen)
    sizes = {name: size for _, of_rank in reversed(seen) for name, size in of_rank.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        host = next(host for host, of_rank in seen if name in of_rank)
        able = [rank for rank, (where, of_rank) in enumerate(seen) if where == host and name in of_rank]
        rank = min(able, key=lambda rank: loads[rank])
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return shares


# Files


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Returns name and size of all files below a folder, without temporary files that a killed process left."""
    paths = (p for p in checkpoint.rglob("*") if p.is_file() and p.suffix not in (".tmp", ".partial"))
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in paths}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _record(checkpoint: Path, name: str, elsewhere: bool) -> FileRecord:
    path = checkpoint / name
    flush(path)
    return FileRecord(name=name, num_bytes=path.stat().st_size, digest=_digest(path), elsewhere=elsewhere)


def _describe_size(path: Path, file: FileRecord) -> str:
    size = _size(path)
    if size is None:
        return f"{path} is missing"
    return f"{path} has {size:,} of the {file.num_bytes:,} bytes that were written"


def _digest_text(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(min(_CHUNK_BYTES, max(1, path.stat().st_size)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
