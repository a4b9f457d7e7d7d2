"""Snapshots of the outer state in the object store, from which islands join. One island writes them periodically.

    snapshots/R/I-N/rank-K-anchor.bin, rank-K-momentum.bin   rank K's part, fp32; of several fragments, each's, as
                                                             rank-K-fragment-F-anchor.bin
    snapshots/R/I-N/rank-K.json                              describes them; a snapshot is complete once it has this
                                                             record of all ranks
    start.json                                               create if absent: the snapshot that the run starts from
                                                             (start-2.json if start.json is corrupt)

Writing needs no copy: the outer state changes only at the end of a round, and a snapshot is written between two.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Mapping, Sequence

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.errors import DiLoCoError, ForgedError, PayloadError, StoreError, StoreFullError
from hf_diloco.membership.member_records import IncarnationRecord, incarnation_path
from hf_diloco.membership.round_records import Snapshot, SnapshotRecord, StartRecord, assemble, round_of
from hf_diloco.store.folder import Entry
from hf_diloco.store.log import RunLog
from hf_diloco.transport.bucket import BucketExchange
from hf_diloco.transport.objects import read_info

logger = logging.getLogger("hf_diloco")

_KEPT = 2
_STARTS = ("start.json", *(f"start-{number}.json" for number in range(2, 10)))
_SNAPSHOT = re.compile(r"snapshots/\d{8,12}/(\d{5,6})-(\d{6,9})/rank-\d{5,6}(?:-[a-z0-9-]+\.bin|\.json)")
_PAYLOAD = re.compile(r"payloads/\d{8,12}/(?:mean-)?(\d{5,6})-(\d{6,9})(?:-\d+)?/rank-\d{5,6}\.bin")


class Snapshots:
    """One rank's access to the run's snapshots. All methods raise `StoreError` if the store does not answer.

    Args:
        buckets: this rank's range of each fragment.
        author: names the island and its process, as "00001-000002".
    """

    def __init__(self, log: RunLog, buckets: Sequence[BucketExchange], author: str, rank: int, num_ranks: int) -> None:
        self._log = log
        self._buckets = buckets
        self._author = author
        self._rank = rank
        self._num_ranks = num_ranks
        self._thread: threading.Thread | None = None
        self._shunned: set[str] = set()
        self._is_known: dict[tuple[str, str], bool] = {}
        self._unfinished: set[Entry] = set()

    def folder(self, round_number: int) -> str:
        """Returns the folder of this process's snapshot of a round."""
        return f"snapshots/{round_number:08d}/{self._author}"

    def start(self) -> str | None:
        """Returns the folder of the snapshot that the run starts from; None before that is decided.

        If the decision is corrupt and has not been made again, returns the newest complete snapshot; if the newest is
        of round 0, the one of the lowest island.
        """
        for name in _STARTS:
            try:
                found = self._log.read(name, StartRecord)
            except ForgedError as error:
                self._log.refuse(name, error)
                continue
            if found is not None or name == _STARTS[0]:
                return found.folder if found else None
            break
        whole = self._whole()
        return (whole[-1] if round_of(whole[-1]) else whole[0]) if whole else None

    def decide_start(self, folder: str) -> None:
        """Makes the run start from the complete snapshot in a folder, unless another one has been chosen already."""
        for name in _STARTS:
            if self._log.create(name, StartRecord(folder=folder)) or self._log.read_or_refuse(name, StartRecord):
                return
        raise StoreError("all start.json are damaged: keep others away from the store")

    def write(
        self, round_number: int, state: str, parts: Sequence[Mapping[str, torch.Tensor]], folder: str = ""
    ) -> None:
        """Writes this rank's part.

        Args:
            state: digest of the outer parameters.
            parts: this rank's part of each fragment's tensors, by name; fp64 tensors are the same on all ranks.
            folder: default: this process's own.
        """
        folder = folder or self.folder(round_number)
        infos, numbers = {}, {}
        for number, (bucket, tensors) in enumerate(zip(self._buckets, parts, strict=True)):
            for name, tensor in tensors.items():
                if tensor.dtype == torch.float64:
                    numbers[self._prefix(number) + name] = tensor.tolist()
                    continue
                path = f"{folder}/rank-{self._rank:05d}-{self._prefix(number)}{name}.bin"
                info, _ = bucket.publish(tensor, path, CODECS["fp32"])
                infos[self._prefix(number) + name] = info.model_dump()
        record = SnapshotRecord(
            round=round_number,
            rank=self._rank,
            num_ranks=self._num_ranks,
            state=state,
            tensors=infos,
            numbers=numbers,
        )
        self._log.put(record_path(folder, self._rank), record)

    def write_behind(
        self, round_number: int, state: str, parts: Sequence[Mapping[str, torch.Tensor]], keep_rounds: int
    ) -> None:
        """Does `write` in a thread, and rank 0 then `clear_up`; call `wait` before the tensors change."""

        def run() -> None:
            try:
                self.write(round_number, state, parts)
            except DiLoCoError as error:
                logger.warning("no snapshot of round %d: %s", round_number, error)
                if isinstance(error, StoreFullError):
                    self.make_room(round_number)
                return
            try:
                if self._rank == 0:
                    self.clear_up(keep_rounds)
            except DiLoCoError as error:
                logger.warning("old snapshots and pseudo-gradients stay in the store: %s", error)

        self._thread = threading.Thread(target=run, name="hf-diloco-snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until `write_behind` has finished."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def newest(self, after: int = -1) -> Snapshot | None:
        """Returns the newest complete snapshot of a round later than `after`."""
        for folder in sorted(self._folders() - self._shunned, reverse=True):
            if round_of(folder) <= after:
                return None
            found = self._read(folder)
            if found:
                return found
        return None

    def shun(self, folder: str) -> bool:
        """Makes `newest` skip a snapshot with corrupt values; returns whether this is new."""
        is_new = folder not in self._shunned
        self._shunned.add(folder)
        return is_new

    def forgive(self, folder: str) -> None:
        """Stops skipping a snapshot, because it may have been rewritten."""
        self._shunned.discard(folder)

    def is_readable(self, folder: str) -> bool:
        """Whether a folder has a complete snapshot, which is not being skipped as corrupt."""
        return folder not in self._shunned and self._read(folder) is not None

    def own_start(self, round_number: int) -> str:
        """Returns the folder of the snapshot that the run starts from, if that is of round `round_number` and was
        written by any process of this island; otherwise ""."""
        start = self.start() or ""
        island = self._author.partition("-")[0]
        return start if start.startswith(f"snapshots/{round_number:08d}/{island}-") else ""

    def clear(self, folder: str) -> None:
        """Deletes another process's snapshot before it is rewritten: that process may have had more ranks."""
        if not folder.endswith(f"/{self._author}"):
            self._log.store.delete([path for path in self._log.list(folder) if self._is_ours(path)])

    def at(self, folder: str) -> Snapshot:
        """Returns the complete snapshot in a folder; raises `PayloadError` if there is none any more."""
        found = self._read(folder)
        if found is None:
            raise PayloadError(f"the snapshot {folder} is gone: start again", folder)
        return found

    def fetch(self, snapshot: Snapshot) -> list[dict[str, torch.Tensor]]:
        """Returns this rank's range of every tensor of every fragment.

        Raises:
            PayloadError, StoreError: an object is gone or corrupt, or the store does not answer.
        """
        return [self._fetch_part(snapshot, number) for number in range(len(self._buckets))]

    def _fetch_part(self, snapshot: Snapshot, number: int) -> dict[str, torch.Tensor]:
        bucket, prefix = self._buckets[number], self._prefix(number)
        state = {}
        for name in snapshot.parts[0].tensors:
            if name.startswith(prefix):
                infos = [read_info(part.tensors.get(name)) for part in snapshot.parts]
                tensor = state[name.removeprefix(prefix)] = torch.empty(bucket.length)
                bucket.fetch(infos, tensor)
        if "anchor" not in state or snapshot.parts[0].numbers.keys() & snapshot.parts[0].tensors:
            raise PayloadError(
                f"the snapshot {snapshot.folder} holds no outer parameters, or two of one", snapshot.folder
            )
        for name, numbers in snapshot.parts[0].numbers.items():
            if name.startswith(prefix):
                state[name.removeprefix(prefix)] = torch.tensor(numbers, dtype=torch.float64)
        return state

    def _prefix(self, number: int) -> str:
        return f"fragment-{number:05d}-" if len(self._buckets) > 1 else ""

    def clear_up(self, keep_rounds: int, num_kept: int = _KEPT) -> None:
        """Deletes objects that no island needs to catch up: old snapshots, and pseudo-gradients of old rounds.

        Keeps the newest `num_kept` snapshots, and payloads of the `keep_rounds` rounds before the newest one. Deletes
        only objects whose name and incarnation record show that a process of this run wrote them.

        Also deletes unfinished files of killed processes, if they have not changed since the last call. It searches
        only recent rounds for them, because the number of old ones is unbounded.
        """
        whole = self._whole()
        if not whole:
            return
        newest, oldest = round_of(whole[-1]), round_of(whole[-num_kept:][0])
        self._drop_unfinished(2 * oldest - newest - keep_rounds)  # so that each round is searched twice
        old = [path for path in self._log.list("snapshots") if round_of(path) < oldest]
        last_needless = newest - keep_rounds
        payloads = [path for path in self._log.list("payloads") if round_of(path) <= last_needless]
        self._log.store.delete([path for path in old + payloads if self._is_ours(path)])

    def make_room(self, unfinished_round: int | None = None) -> None:
        """Deletes all expendable objects, also this process's unfinished snapshot of a round, after the store has run
        full; ignores errors."""
        with contextlib.suppress(DiLoCoError):
            if unfinished_round is not None:
                self._log.store.delete(self._log.list(self.folder(unfinished_round)))
            self.clear_up(keep_rounds=0, num_kept=1)

    def _drop_unfinished(self, first_round: int) -> None:
        found = set(self._log.store.unfinished(f"rounds/{max(0, first_round):08d}"))
        self._log.store.drop(sorted(found & self._unfinished))
        self._unfinished = found

    def _is_ours(self, path: str) -> bool:
        match = _SNAPSHOT.fullmatch(path) or _PAYLOAD.fullmatch(path)
        if match is None:
            return False
        author = match[1], match[2]
        if author not in self._is_known:
            incarnation = self._log.read_or_refuse(incarnation_path(int(match[1]), int(match[2])), IncarnationRecord)
            self._is_known[author] = incarnation is not None
        return self._is_known[author]

    def _whole(self) -> list[str]:
        """Returns the folders of complete snapshots, in order."""
        return [folder for folder in sorted(self._folders()) if self._read(folder)]

    def _folders(self) -> set[str]:
        return {
            path.rpartition("/")[0]
            for path in self._log.list("snapshots")
            if path.endswith(".json") and _SNAPSHOT.fullmatch(path)
        }

    def _read(self, folder: str) -> Snapshot | None:
        """Returns the snapshot in a folder, if it is complete.

        Reads the records by name, because lists of some stores and network file systems lag behind what is written.
        """
        paths = [record_path(folder, 0)]
        if not _SNAPSHOT.fullmatch(paths[0]):
            return None
        first = self._log.read_or_refuse(paths[0], SnapshotRecord)
        if first is None:
            return None
        paths = [record_path(folder, rank) for rank in range(1, first.num_ranks)]
        others = self._log.read_all(paths, SnapshotRecord)
        try:
            return assemble(folder, [first, *(others.get(path) for path in paths)])
        except PayloadError as error:
            logger.warning("a snapshot is skipped: %s", error)
            return None


def record_path(folder: str, rank: int) -> str:
    """Returns the path of the record that describes one rank's part of the snapshot in a folder."""
    return f"{folder}/rank-{rank:05d}.json"
