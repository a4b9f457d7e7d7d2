"""Outer state in the object store, from which islands join: written now and then by one island, rank by rank.

    snapshots/R/I-N/rank-K-anchor.bin, rank-K-momentum.bin   rank K's part, fp32; of several fragments, each's, as
                                                             rank-K-fragment-F-anchor.bin
    snapshots/R/I-N/rank-K.json                              what they hold; a snapshot that has all ranks' is whole
    start.json                                               create if absent: which of them the run starts from

Writing needs no copy: the outer state changes only at the end of a round, and a snapshot is written between two.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from hf_diloco.agreement.log import Record, RunLog
from hf_diloco.agreement.snapshot_records import Snapshot, SnapshotRecord, assemble, round_of
from hf_diloco.codecs import CODECS
from hf_diloco.errors import DiLoCoError, PayloadError
from hf_diloco.exchange.bucket import BucketExchange
from hf_diloco.exchange.object_info import read_info

logger = logging.getLogger("hf_diloco")

_KEPT = 2


class StartRecord(Record):
    """The snapshot that a run starts from: its folder."""

    folder: str


class Snapshots:
    """One rank's access to the run's snapshots.

    Args:
        log: of the run.
        buckets: this rank's range of each fragment.
        author: names the island and its process, as "00001-000002".
        rank, num_ranks: of the island.
    """

    def __init__(self, log: RunLog, buckets: Sequence[BucketExchange], author: str, rank: int, num_ranks: int) -> None:
        self._log = log
        self._buckets = buckets
        self._author = author
        self._rank = rank
        self._num_ranks = num_ranks
        self._thread: threading.Thread | None = None

    def folder(self, round_number: int) -> str:
        """Where this island's snapshot of a round is."""
        return f"snapshots/{round_number:08d}/{self._author}"

    def start(self) -> str | None:
        """The folder of the snapshot that the run starts from, once that is decided."""
        found = self._log.read("start.json", StartRecord)
        return found.folder if found else None

    def decide_start(self, round_number: int) -> None:
        """Lets the run start from this island's snapshot, unless it starts from another's."""
        self._log.decide("start.json", StartRecord(folder=self.folder(round_number)))

    def write(self, round_number: int, state: str, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Writes this rank's part.

        Args:
            round_number: rounds completed.
            state: digest of the outer parameters.
            parts: this rank's part of each fragment's tensors, by name.

        Raises:
            StoreError: the store did not take it.
        """
        folder = self.folder(round_number)
        infos = {}
        for number, (bucket, tensors) in enumerate(zip(self._buckets, parts, strict=True)):
            for name, tensor in tensors.items():
                path = f"{folder}/rank-{self._rank:05d}-{self._prefix(number)}{name}.bin"
                info, _ = bucket.publish(tensor, path, CODECS["fp32"])
                infos[self._prefix(number) + name] = info.model_dump()
        record = SnapshotRecord(
            round=round_number, rank=self._rank, num_ranks=self._num_ranks, state=state, tensors=infos
        )
        self._log.put(f"{folder}/rank-{self._rank:05d}.json", record)

    def write_behind(
        self, round_number: int, state: str, parts: Sequence[Mapping[str, torch.Tensor]], keep_rounds: int
    ) -> None:
        """Writes this rank's part in a thread; `wait` before the tensors change. The first rank clears up what is old.

        Args:
            round_number, state, parts: see `write`.
            keep_rounds: rounds before the newest whole snapshot whose pseudo-gradients stay.
        """

        def run() -> None:
            try:
                self.write(round_number, state, parts)
                if self._rank == 0:
                    self.clear_up(keep_rounds)
            except DiLoCoError as error:
                logger.warning("no snapshot of round %d: %s", round_number, error)

        self._thread = threading.Thread(target=run, name="hf-diloco-snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def newest(self, after: int = -1) -> Snapshot | None:
        """The newest whole snapshot of a round later than `after`.

        Raises:
            StoreError: the store does not answer.
        """
        for folder in sorted(self._folders(), reverse=True):
            if round_of(folder) <= after:
                return None
            found = self._read(folder)
            if found:
                return found
        return None

    def at(self, folder: str) -> Snapshot:
        """The whole snapshot in a folder.

        Raises:
            PayloadError: it is gone.
            StoreError: the store does not answer.
        """
        found = self._read(folder)
        if found is None:
            raise PayloadError(f"the snapshot {folder} is gone: start again", folder)
        return found

    def fetch(self, snapshot: Snapshot) -> list[dict[str, torch.Tensor]]:
        """This rank's range of every tensor of every fragment.

        Raises:
            PayloadError, StoreError: an object is gone or damaged, or the store does not answer.
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
        return state

    def _prefix(self, number: int) -> str:
        return f"fragment-{number:05d}-" if len(self._buckets) > 1 else ""

    def clear_up(self, keep_rounds: int) -> None:
        """Deletes what nobody needs to catch up: older snapshots but one, and pseudo-gradients before the newest.

        Raises:
            StoreError: the store does not answer.
        """
        whole = [folder for folder in sorted(self._folders()) if self._read(folder)]
        if not whole:
            return
        newest = round_of(whole[-1])
        kept = {round_of(folder) for folder in whole[-_KEPT:]}
        old = [path for path in self._log.list("snapshots") if round_of(path) < min(kept)]
        last_needless = newest - keep_rounds
        payloads = [path for path in self._log.list("payloads") if round_of(path) <= last_needless]
        self._log.store.delete(old + payloads)

    def _folders(self) -> set[str]:
        return {path.rpartition("/")[0] for path in self._log.list("snapshots") if path.endswith(".json")}

    def _read(self, folder: str) -> Snapshot | None:
        """The snapshot in a folder, if it is whole."""
        paths = [path for path in self._log.list(folder) if path.endswith(".json")]
        return assemble(folder, [self._log.read_or_refuse(path, SnapshotRecord) for path in paths])
