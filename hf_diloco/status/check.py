"""Checks every object in a run's store: finds damaged, forged, abandoned and foreign ones.

    damaged     a record that is empty, cut short or no JSON; values that are absent or shorter than announced
    forged      a record that was not sealed with the run's key for its path; a symbolic link
    abandoned   left by a process that was killed, or by a round that did not take place; nobody needs it
    foreign     a name that this package gives to no object
    settled     a damaged or forged decision that the islands have passed over: it stays where it is

Objects of rounds in progress are none of these.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from hf_diloco.errors import ForgedError, PayloadError, StoreError
from hf_diloco.membership.decisions import is_outcome
from hf_diloco.membership.member_records import HeartbeatRecord, IncarnationRecord
from hf_diloco.membership.round_records import (
    OfferRecord,
    OutcomeRecord,
    PlanRecord,
    SnapshotRecord,
    StartRecord,
    VoteRecord,
    assemble,
    round_of,
)
from hf_diloco.membership.run import open_run
from hf_diloco.store.failures import TruncatedError
from hf_diloco.store.folder import Entry
from hf_diloco.store.log import Record
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES, RUN_PATH, is_wrapped
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.urls import is_object_path

R = TypeVar("R", bound=Record)

Kind = Literal["damaged", "forged", "abandoned", "foreign", "settled"]

DAMAGED_FOLDER = "damaged"
_NUM_READERS = 16
_MAX_TARGET = 480
STILL_SECONDS = 3.0  # a file that stays unfinished, or unnamed by any record, for so long counts as abandoned
_AUTHOR = r"\d{5,6}-\d{6,9}"
_ATTEMPT = r"rounds/\d{8,12}/\d{2}"
_SEALED = Record  # only the seal is checked
_RECORDS: Sequence[tuple[str, type[Record]]] = (
    (r"start(-[2-9])?\.json", StartRecord),
    (r"incarnations/\d{1,6}/\d{6,9}\.json", IncarnationRecord),
    (r"heartbeats/\d{1,6}/\d{6,9}\.json", HeartbeatRecord),
    (rf"{_ATTEMPT}/offers/{_AUTHOR}-\d{{6,12}}\.json", OfferRecord),
    (rf"{_ATTEMPT}/plan\.json", PlanRecord),
    (rf"{_ATTEMPT}/(votes/\d{{5}}|missing/{_AUTHOR})\.json", VoteRecord),
    (rf"{_ATTEMPT}/(outcome(-[2-9])?|revoked)\.json", OutcomeRecord),
    (rf"{_ATTEMPT}/mean/rank-\d{{5,6}}\.json", _SEALED),
    (r"links/.*\.json", _SEALED),
    (rf"snapshots/\d{{8,12}}/{_AUTHOR}/rank-\d{{5,6}}\.json", SnapshotRecord),
)
_VALUES = re.compile(
    rf"payloads/\d{{8,12}}/(?:mean-)?{_AUTHOR}(?:-\d+)?/rank-\d{{5,6}}\.bin"
    rf"|snapshots/\d{{8,12}}/{_AUTHOR}/rank-\d{{5,6}}-[a-z0-9-]+\.bin"
)


class Finding(BaseModel):
    """One object with a problem, of a kind of this module's docstring.

    Attributes:
        path: one with a trailing slash is an empty folder.
        stays: it must not be set aside: islands pass over it by themselves.
        moved_to: where it was set aside.
    """

    path: str
    kind: Kind
    reason: str
    num_bytes: int = 0
    stays: bool = False
    moved_to: str | None = None


class CheckReport(BaseModel):
    """The result of a check; findings are in the order of their paths."""

    url: str
    run: str
    num_objects: int
    num_bytes: int
    findings: list[Finding]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left to do: every finding is settled or was set aside."""
        return all(finding.kind == "settled" or finding.moved_to for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(finding.kind for finding in self.findings))


def check_store(store: ObjectStore, key: bytes, is_deep: bool = False, clock: Clock = REAL) -> CheckReport:
    """Checks every object once; deletes and moves nothing.

    Args:
        key: the run's; empty for none.
        is_deep: also read values, and compare them with their digests.
        clock: for the wait that shows whether an object stays abandoned.

    Raises:
        RendezvousError: there is no run, its `run.json` is damaged or gone, or it has another key.
        StoreError: the store does not answer.
    """
    return _Check(store, key, clock).run(is_deep)


def set_aside(store: ObjectStore, report: CheckReport) -> CheckReport:
    """Moves the findings of `check_store` to `damaged/`, and removes empty folders; deletes nothing else.

    Settled decisions, decisions of a round that may be in progress, and foreign objects stay where they are. Raises
    `StoreError` if the store does not answer, or is read-only.
    """
    taken = {entry.path for entry in store.entries(DAMAGED_FOLDER)}
    findings = [_move(store, finding, taken) for finding in report.findings]
    return report.model_copy(update={"findings": findings})


def _move(store: ObjectStore, finding: Finding, taken: set[str]) -> Finding:
    if finding.stays or finding.kind not in ("damaged", "forged", "abandoned"):
        return finding
    if finding.path.endswith("/"):
        store.drop([entry for entry in store.unfinished() if entry.path == finding.path])
        return finding.model_copy(update={"moved_to": "(an empty folder: removed)"})
    name = f"{DAMAGED_FOLDER}/{re.sub(r'[^A-Za-z0-9._=+/-]', '+', finding.path)}"[:_MAX_TARGET]
    target = next(path for path in (name, *(f"{name}.{n}" for n in range(2, 1 << 20))) if path not in taken)
    taken.add(target)
    try:
        store.move(finding.path, target)
    except TruncatedError:
        target = "(nowhere: it is gone by now)"
    return finding.model_copy(update={"moved_to": target})


class _Check:
    def __init__(self, store: ObjectStore, key: bytes, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._run, self._log = open_run(store, key)
        self._found: dict[str, Finding] = {}
        self._entries: dict[str, Entry] = {}
        self._records: dict[str, Record] = {}  # those that could be read
        self._named: dict[str, dict[str, Any]] = {}  # objects that offers, averages and snapshots announce, by path
        self._newest_snapshot = -1

    def run(self, is_deep: bool) -> CheckReport:
        unfinished = set(self._store.unfinished())
        entries = [entry for entry in self._store.entries() if not _is_aside(entry.path)]
        self._entries = {entry.path: entry for entry in entries}
        self._read(entries)
        self._check_decisions()
        broken = self._check_snapshots()
        self._check_payloads()
        if is_deep:
            self._check_digests()
        for link in self._store.links():
            if not _is_aside(link):
                self._note(
                    link, "forged", "is a symbolic link, a device or a folder too deep, which islands do not follow"
                )
        self._check_left_over(unfinished, broken)
        return CheckReport(
            url=self._store.url,
            run=self._run.run,
            num_objects=len(entries),
            num_bytes=sum(entry.size for entry in entries),
            findings=[self._found[path] for path in sorted(self._found)],
        )

    def _note(self, path: str, kind: Kind, reason: str, size: int = 0, stays: bool = False) -> None:
        size = self._entries[path].size if path in self._entries else size
        self._found.setdefault(path, Finding(path=path, kind=kind, reason=reason, num_bytes=size, stays=stays))

    # Single objects

    def _read(self, entries: Sequence[Entry]) -> None:
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            list(pool.map(self._look_at, entries))
        announced = [info for record in self._records.values() for info in _announced(record)]
        self._named = {info["path"]: info for info in announced if isinstance(info.get("path"), str)}

    def _look_at(self, entry: Entry) -> None:
        if entry.path == RUN_PATH or _VALUES.fullmatch(entry.path):
            return
        if entry.path.startswith("checks/"):
            reason = "a test of the store, by an island that was killed as it began the run"
            self._note(entry.path, "abandoned", reason)
            return
        kind = next((kind for pattern, kind in _RECORDS if re.fullmatch(pattern, entry.path)), None)
        if kind is None:
            self._note(entry.path, "foreign", "no island gives this name")
            return
        try:
            record = self._open(entry.path, kind)
        except ForgedError as error:
            self._note(entry.path, self._kind_of(entry), str(error))
            return
        if record is not None:
            self._records[entry.path] = record

    def _open(self, path: str, kind: type[Record]) -> Record | None:
        if kind is not _SEALED:
            return self._log.read(path, kind)
        data = self._store.get(path, MAX_RECORD_BYTES)
        return None if data is None else _Announcement(body=self._log.seal.open(path, data))

    def _kind_of(self, entry: Entry) -> Kind:
        """Whether an unreadable object has the form of a sealed record ("forged") or not ("damaged")."""
        try:
            data = json.loads(self._store.get(entry.path, MAX_RECORD_BYTES) or b"")
        except (ValueError, RecursionError):
            return "damaged"
        except StoreError:  # too large
            return "forged"
        return "forged" if is_wrapped(data) else "damaged"

    # Objects that refer to each other

    @property
    def _newest_round(self) -> int:
        """The newest round that any island has completed."""
        heartbeats = [heartbeat.round for heartbeat in self._of(HeartbeatRecord).values()]
        snapshots = [snapshot.round for snapshot in self._of(SnapshotRecord).values()]
        committed = [_numbers(path)[0] for path, it in self._of(OutcomeRecord).items() if it.kind == "commit"]
        return max([0, *heartbeats, *snapshots, *committed])

    def _of(self, kind: type[R]) -> dict[str, R]:
        return {path: record for path, record in self._records.items() if isinstance(record, kind)}

    def _check_decisions(self) -> None:
        """Marks broken decisions that islands pass over by themselves: these must not be set aside."""
        decided = {path.rpartition("/")[0] for path in self._of(OutcomeRecord)}
        reached = self._newest_round + 1
        for path, finding in list(self._found.items()):
            if not path.startswith("rounds/") or finding.kind not in ("damaged", "forged"):
                continue
            round_number, attempt = _numbers(path)
            is_decision = path.endswith("/plan.json") or is_outcome(path)
            if is_decision and attempt in decided:
                reason = f"the attempt was decided all the same; {finding.reason}"
                self._found[path] = finding.model_copy(update={"kind": "settled", "reason": reason})
            elif round_number <= reached and (is_decision or ("/votes/" in path and attempt not in decided)):
                self._found[path] = finding.model_copy(update={"stays": True})

    def _check_snapshots(self) -> list[str]:
        """Returns what lies in incomplete snapshots that are older than the newest complete one."""
        folders: dict[str, list[SnapshotRecord]] = {}
        for path, record in self._of(SnapshotRecord).items():
            folders.setdefault(path.rpartition("/")[0], []).append(record)
        whole = [folder for folder in sorted(folders) if self._is_whole(folder, folders[folder])]
        newest = self._newest_snapshot = round_of(whole[-1]) if whole else -1
        parts = [path for path in self._entries.keys() - self._found if path.startswith("snapshots/")]
        return [path for path in parts if path.rpartition("/")[0] not in whole and round_of(path) < newest]

    def _is_whole(self, folder: str, parts: list[SnapshotRecord]) -> bool:
        in_order = sorted(parts, key=lambda part: part.rank)
        try:
            snapshot = assemble(folder, in_order)
        except PayloadError as error:
            self._note(f"{folder}/rank-00000.json", "damaged", str(error))
            return False
        if snapshot is None:
            return False
        infos = [info for part in parts for info in _announced(part)]
        return len([info for info in infos if self._is_there(info, f"the snapshot {folder}")]) == len(infos)

    def _is_there(self, info: Mapping[str, Any], who: str) -> bool:
        path, size = str(info.get("path")), info.get("num_bytes")
        if not size:
            return True
        if path not in self._entries:
            if not self._is_under_way(path):
                self._note(path, "damaged", f"{who} names it, and it is absent", stays=True)
            return False
        if self._entries[path].size != size:
            self._note(path, "damaged", f"has {self._entries[path].size} bytes, and {who} says {size}")
            return False
        return True

    def _is_under_way(self, path: str) -> bool:
        """Whether an object appeared, or became obsolete, while the store was being checked."""
        if not is_object_path(path):
            return False
        if path in {name for name, _ in self._store.list(path.rpartition("/")[0])}:
            return True
        newest = max((round_of(name) for name, _ in self._store.list("snapshots")), default=-1)
        return newest > self._newest_snapshot and round_of(path) <= newest

    def _check_payloads(self) -> None:
        """Checks that the payloads exist which plans after the newest snapshot name."""
        offers = self._of(OfferRecord)
        for path, plan in self._of(PlanRecord).items():
            attempt = path.rpartition("/")[0]
            outcomes = [it for name, it in self._of(OutcomeRecord).items() if name.startswith(f"{attempt}/")]
            is_aborted = any(outcome.kind == "abort" for outcome in outcomes)
            if _numbers(path)[0] <= self._newest_snapshot or is_aborted:
                continue
            for participant in plan.participants:
                for info in _announced(offers[participant.offer]) if participant.offer in offers else ():
                    self._is_there(info, path)

    def _check_digests(self) -> None:
        from hf_diloco.transport.objects import digest_of, read_info

        for path in sorted((self._named.keys() & self._entries) - self._found.keys()):
            try:
                info = read_info(self._named[path])
                for number, digest in enumerate(info.digests):
                    start, end = info.offset(number), info.offset(number + 1)
                    if digest_of(self._store.get_range(path, start, end)) != digest:
                        raise PayloadError(f"the bytes {start} to {end} do not have the digest announced", path)
            except (PayloadError, StoreError) as error:
                self._note(path, "damaged", str(error))

    # Abandoned objects

    def _check_left_over(self, unfinished: set[Entry], broken: Sequence[str]) -> None:
        """Finds unnamed payloads, parts of snapshots and unfinished files that are still there after a wait."""
        unnamed = self._unnamed_payloads()
        if not unfinished and not unnamed and not broken:
            return
        self._clock.sleep(STILL_SECONDS)
        there = {entry.path: entry for entry in self._store.entries()}
        self._read([there[path] for path in there.keys() - self._entries if path.startswith("rounds/")])
        for path in (there.keys() & unnamed) - self._named.keys():
            self._note(path, "abandoned", "no island has offered it: its writer was lost, or missed the round")
        for path in there.keys() & broken:  # else islands have just cleared it up
            self._note(path, "abandoned", "of a snapshot that was never whole, before the newest one")
        for entry in sorted(unfinished & set(self._store.unfinished())):
            if not _is_aside(entry.path):
                what = "an empty folder" if entry.path.endswith("/") else "a file that its writer did not finish"
                self._note(entry.path, "abandoned", f"{what}, and that does not change", entry.size)

    def _unnamed_payloads(self) -> list[str]:
        """Returns payloads of past rounds that no record names; an average is written before its record."""
        payloads = (path for path in self._entries if path.startswith("payloads/") and _VALUES.fullmatch(path))
        return [path for path in payloads if round_of(path) <= self._newest_round and path not in self._named]


class _Announcement(Record):
    """The body of a record of which only the seal was checked."""

    body: dict[str, Any]


def _announced(record: Record) -> Iterator[dict[str, Any]]:
    """Yields the objects that a record announces."""
    infos: Iterable[Any] = ()
    if isinstance(record, OfferRecord):
        infos = record.objects
    elif isinstance(record, SnapshotRecord):
        infos = record.tensors.values()
    elif isinstance(record, _Announcement):
        infos = [record.body.get("object")]
    yield from (info for info in infos if isinstance(info, dict))


def _numbers(path: str) -> tuple[int, str]:
    """Returns the round of a path below rounds/, and the folder of its attempt."""
    _, number, attempt, *_ = path.split("/")
    return int(number), f"rounds/{number}/{attempt}"


def _is_aside(path: str) -> bool:
    return path.startswith(f"{DAMAGED_FOLDER}/")
