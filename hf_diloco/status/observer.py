"""Observes a run from outside, reading only. Uses no clocks but this machine's and the store's."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TypeVar

from hf_diloco.errors import ForgedError, PayloadError, RendezvousError
from hf_diloco.membership import heartbeats as members
from hf_diloco.membership.decisions import is_outcome
from hf_diloco.membership.member_records import HeartbeatRecord, IncarnationRecord
from hf_diloco.membership.round_records import (
    OfferRecord,
    OutcomeRecord,
    PlanRecord,
    Snapshot,
    SnapshotRecord,
    assemble,
    payload_bytes,
    round_of,
    why_unusable,
)
from hf_diloco.membership.run import RunRecord, open_run
from hf_diloco.status.models import IslandStatus, Presence, RoundStatus, RunStatus, SnapshotStatus, StoredBytes
from hf_diloco.store.folder import Entry
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import GONE_SECONDS, url_of
from hf_diloco.store.signing import MAX_RECORD_BYTES, RUN_PATH
from hf_diloco.utils.clock import REAL, Clock

R = TypeVar("R", bound=Record)

TIMEOUT = 15.0  # seconds without an answer after which the store counts as lost
_ENDED = ("left", "finished")
_OF_INCARNATION = {"host", "pid", "folder"}  # shown unchanged
_OF_HEARTBEAT = {"phase", "round", "steps", "tokens_per_second", "num_ranks"}
_POLL_SECONDS = 0.5
_USUAL_ROUNDS = 5  # fewest rounds from which the usual time of a round is computed
_PATH = re.compile(r"rounds/(\d{8,12})/(\d{2})/(?:offers/[0-9-]+|plan|outcome(?:-[2-9])?|revoked)\.json")

ByIsland = Mapping[int, Mapping[int, Entry]]
"""Incarnations or heartbeats, by island and number of the process."""

Attempts = Mapping[int, Mapping[str, Entry]]
"""The objects of a round, by attempt and path."""


@dataclass
class _Life:
    """The last heartbeat that this observer saw of an island's newest process, and since when it is unchanged."""

    incarnation: int
    heartbeat: HeartbeatRecord | None
    since: float
    has_changed: bool


class Observer:
    """Reads the state of the run in a store, each time it is asked.

    Args:
        key: the run's; empty for none.
        num_rounds: how many of the last rounds to describe.
        url: the store's address as shown to users; default: its own.

    Attributes:
        is_of_tcp: island 0 hosts the store, for as long as it takes part.

    Raises:
        RendezvousError: there is no run, or it was begun with another key.
        StoreError: the store does not answer.
    """

    def __init__(
        self, store: ObjectStore, key: bytes, num_rounds: int = 10, clock: Clock = REAL, url: str = ""
    ) -> None:
        self._store = store
        self._url = url or store.url
        self.is_of_tcp = self._url.startswith("tcp:")
        self._key = key
        self._num_rounds = num_rounds
        self._clock = clock
        self._refused: dict[str, str] = {}
        self._named_at: datetime | None = None  # modification time of the run's record
        self._begin(*open_run(store, key, clock))

    def _begin(self, run: RunRecord, log: RunLog) -> None:
        self._run, self._log = run, log
        self._lives: dict[int, _Life] = {}
        # Caches of what no longer changes.
        self._incarnations: dict[str, IncarnationRecord] = {}
        self._rounds: dict[int, tuple[int, RoundStatus]] = {}
        self._snapshots: dict[tuple[str, ...], Snapshot] = {}

    def _follow(self, entries: Sequence[Entry]) -> None:
        """Switches to a new run that replaced the old one, as happens at tcp:// whenever all islands restart."""
        named_at = next((entry.modified for entry in entries if entry.path == RUN_PATH), None)
        if named_at not in (None, self._named_at):
            run, log = open_run(self._store, self._key, self._clock)
            if run.run != self._run.run:
                self._begin(run, log)
            self._named_at = named_at

    def look_until_known(self) -> RunStatus:
        """Looks until it knows which islands are alive: at most a little longer than two heartbeats."""
        status = self.look()
        while any(island.presence == "unknown" for island in status.islands):
            self._clock.sleep(_POLL_SECONDS)
            self._refused = {}
            entries = [*self._store.entries("incarnations"), *self._store.entries("heartbeats")]
            if all(island.presence != "unknown" for island in self._islands(entries, newest_round=0)):
                status = self.look()
        return status

    def look(self) -> RunStatus:
        """Looks once; raises `StoreError` if the store does not answer. Only a second look can show who is alive."""
        self._refused = {}
        entries = self._store.entries()
        self._follow(entries)
        rounds = self._last_rounds(_group_rounds(entries))
        snapshot = self._newest_snapshot(entries)
        committed = [status.round for status in rounds if status.state == "committed"]
        newest = max([*committed, snapshot.round if snapshot else 0])
        islands = self._islands(entries, newest)
        begun = self._incarnation(_by_island(entries, "incarnations").get(self._run.by, {}).get(1))
        num_rounds = self._run.num_rounds
        known = [status.seconds for status in rounds if status.seconds is not None]
        return RunStatus(
            url=self._url,
            run=self._run.run,
            begun_by=self._run.by,
            begun_on=begun.host if begun else "",
            has_key=bool(self._key),
            settings=self._run.fingerprint,
            unit=self._run.unit,
            waits_for_all=self._run.waits_for_all,
            num_rounds=num_rounds,
            round=newest,
            seconds_per_round=round(statistics.median(known), 3) if known else None,
            is_over=self._is_over(islands, newest),
            islands=islands,
            rounds=rounds[: self._num_rounds],
            snapshot=snapshot,
            stored=StoredBytes.of(entries),
            refused=dict(sorted(self._refused.items())),
        )

    def _is_over(self, islands: Sequence[IslandStatus], newest_round: int) -> bool:
        presences = {island.presence for island in islands}
        if self._run.waits_for_all and presences == {"ended"}:
            return True
        num_rounds = self._run.num_rounds
        return num_rounds is not None and newest_round >= num_rounds and presences <= {"ended", "silent"}

    # Islands

    def _islands(self, entries: Sequence[Entry], newest_round: int) -> list[IslandStatus]:
        incarnations, heartbeats = _by_island(entries, "incarnations"), _by_island(entries, "heartbeats")
        found = []
        for island in sorted(incarnations.keys() | heartbeats.keys()):
            of_island, its_heartbeats = incarnations.get(island, {}), heartbeats.get(island, {})
            number = max([*of_island, *its_heartbeats])
            incarnation = self._incarnation(of_island.get(number))
            entry = its_heartbeats.get(number)
            heartbeat = self._read(entry, HeartbeatRecord) if entry else None
            if not incarnation and not heartbeat:
                continue
            life = self._life(island, number, heartbeat)
            status = IslandStatus(
                island=island,
                incarnation=number,
                **(incarnation.model_dump(include=_OF_INCARNATION) if incarnation else {}),
                **(heartbeat.model_dump(include=_OF_HEARTBEAT) if heartbeat else {}),
                presence=self._presence(life),
                seconds_silent=round(self._clock.now() - life.since, 1),
                lag=max(0, newest_round - heartbeat.round) if heartbeat else None,
                refuses=heartbeat.refused if heartbeat else {},
            )
            found.append(status)
        return found

    def _life(self, island: int, number: int, heartbeat: HeartbeatRecord | None) -> _Life:
        known = self._lives.get(island)
        if known is None or (known.incarnation, known.heartbeat) != (number, heartbeat):
            self._lives[island] = _Life(number, heartbeat, self._clock.now(), has_changed=known is not None)
        return self._lives[island]

    def _presence(self, life: _Life) -> Presence:
        if life.heartbeat and life.heartbeat.phase in _ENDED:
            return "ended"
        patience = 2 * members.HEARTBEAT_SECONDS + 0.5  # tolerates one late heartbeat, and a slow store
        if self._clock.now() - life.since >= patience:
            return "silent"
        return "alive" if life.has_changed else "unknown"

    def _incarnation(self, entry: Entry | None) -> IncarnationRecord | None:
        if entry and entry.path not in self._incarnations:
            record = self._read(entry, IncarnationRecord)
            if record:
                self._incarnations[entry.path] = record
        return self._incarnations.get(entry.path) if entry else None

    # Rounds and snapshots

    def _last_rounds(self, rounds: Mapping[int, Attempts]) -> list[RoundStatus]:
        """Returns the last rounds, newest first: those to be shown, and enough for the usual time of one."""
        found = (self._round(number, rounds[number]) for number in sorted(rounds, reverse=True))
        wanted = max(self._num_rounds, _USUAL_ROUNDS)
        last = list(islice((status for status in found if status is not None), wanted))
        for number, status in enumerate(last):
            before = _decided_at(rounds[status.round - 1]) if status.round - 1 in rounds else None
            if status.committed_at and before:
                seconds = (status.committed_at - before).total_seconds()
                last[number] = status.model_copy(update={"seconds": seconds})
        return last

    def _round(self, number: int, attempts: Attempts) -> RoundStatus | None:
        num_objects = sum(map(len, attempts.values()))
        known = self._rounds.get(number)
        if known and known[0] == num_objects:
            return known[1]
        num_refused = len(self._refused)
        status = self._read_round(number, attempts)
        if status and status.state == "committed" and len(self._refused) == num_refused:
            self._rounds[number] = num_objects, status
        return status

    def _read_round(self, number: int, attempts: Attempts) -> RoundStatus | None:
        """Returns the state of a round; None if none of its records can be read."""
        offers: dict[str, OfferRecord] = {}
        aborted: list[str] = []
        plan: PlanRecord | None = None
        outcome: OutcomeRecord | None = None
        newest: list[OfferRecord] = []
        for attempt in sorted(attempts):
            records = attempts[attempt]
            plan = self._find([path for path in records if path.endswith("/plan.json")], records, PlanRecord)
            names = sorted(filter(is_outcome, records), key=len)  # outcome.json before outcome-2.json
            revoked = [path for path in records if path.endswith("/revoked.json")]
            outcome = self._find([*revoked, *names], records, OutcomeRecord)
            of_attempt = self._read_offers(records)
            offers |= of_attempt
            newest = list(of_attempt.values())
            if outcome is None or outcome.kind == "commit":
                break
            aborted.append(f"island {outcome.by} says: {outcome.reason}")
            plan, newest = None, []
        # an island that leaves aborts the next round before it begins
        if not offers and plan is None and (outcome is None or outcome.lost):
            return None
        is_committed = outcome is not None and outcome.kind == "commit"
        return RoundStatus(
            round=number,
            state="committed" if is_committed else "planned" if plan else "gathering",
            attempts=max(attempts) + 1,
            offered=sorted({offer.island for offer in newest}),
            participants=[participant.island for participant in plan.participants] if plan else [],
            left_out=_left_out(plan, newest) if plan else {},
            aborted=aborted,
            payload_bytes=payload_bytes(offers.values()),
            committed_at=_decided_at(attempts) if is_committed else None,
        )

    def _find(self, paths: Iterable[str], records: Mapping[str, Entry], kind: type[R]) -> R | None:
        """Returns the first record that can be read."""
        return next((found for path in paths if (found := self._read(records[path], kind)) is not None), None)

    def _read_offers(self, records: Mapping[str, Entry]) -> dict[str, OfferRecord]:
        """Reads the offers of one attempt; skips those under another island's name, as islands do."""
        found = {path: self._read(entry, OfferRecord) for path, entry in records.items() if "/offers/" in path}
        return {
            path: offer
            for path, offer in found.items()
            if offer and path.endswith(f"/{offer.author}-{offer.serial:06d}.json")
        }

    def _newest_snapshot(self, entries: Sequence[Entry]) -> SnapshotStatus | None:
        folders: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry.path.startswith("snapshots/"):
                folders.setdefault(entry.path.rpartition("/")[0], []).append(entry)
        for folder in sorted(folders, reverse=True):
            parts = [entry for entry in folders[folder] if entry.path.endswith(".json")]
            found = self._snapshot(folder, parts) if round_of(f"{folder}/") >= 0 else None
            if found:
                author = folder.rpartition("/")[2].partition("-")[0]
                return SnapshotStatus(
                    round=found.round,
                    island=int(author) if author.isdecimal() else None,
                    num_parts=len(found.parts),
                    num_bytes=sum(entry.size for entry in folders[folder]),
                )
        return None

    def _snapshot(self, folder: str, parts: Sequence[Entry]) -> Snapshot | None:
        paths = tuple(entry.path for entry in parts)
        if paths not in self._snapshots:
            try:
                found = assemble(folder, [self._read(entry, SnapshotRecord) for entry in parts])
            except PayloadError as error:
                self._refused[folder] = str(error)
                return None
            if found is None:
                return None
            self._snapshots[paths] = found
        return self._snapshots[paths]

    def _read(self, entry: Entry, kind: type[R]) -> R | None:
        """Reads a record; None if it is gone. Notes it as refused if it is not of this run."""
        if entry.size > MAX_RECORD_BYTES:
            self._refused[entry.path] = f"{entry.size} bytes are more than a record may have ({MAX_RECORD_BYTES})"
            return None
        try:
            return self._log.read(entry.path, kind)
        except ForgedError as error:
            self._refused[entry.path] = str(error)
            return None


def observe(rendezvous: str, key: bytes, num_rounds: int, timeout: float = TIMEOUT) -> Observer:
    """Opens an observer of the run at a checked rendezvous: an object store, or tcp://HOST:PORT.

    For the rest see `Observer` and `TIMEOUT`; also raises `RendezvousError` if the store cannot be opened.
    """
    if not rendezvous.startswith("tcp:"):
        return Observer(ObjectStore(rendezvous, timeout, read_only=True), key, num_rounds)
    try:
        store = ObjectStore(url_of(rendezvous), timeout, read_only=True, gone_after=GONE_SECONDS)
    except RendezvousError as error:
        why = "nobody listens there" if "nobody listens there" in str(error) else str(error)
        raise RendezvousError(
            f"no run can be seen at {rendezvous} ({why}): island 0, or node 0, which keeps its records, has not "
            "started, has ended, or cannot be reached from this machine"
        ) from None
    return Observer(store, key, num_rounds, url=rendezvous)


def _by_island(entries: Sequence[Entry], folder: str) -> ByIsland:
    """Groups entries such as incarnations/I/N.json."""
    found: dict[int, dict[int, Entry]] = {}
    for entry in entries:
        if match := re.fullmatch(rf"{folder}/(\d{{1,6}})/(\d{{1,9}})\.json", entry.path):
            found.setdefault(int(match[1]), {})[int(match[2])] = entry
    return found


def _group_rounds(entries: Iterable[Entry]) -> dict[int, dict[int, dict[str, Entry]]]:
    rounds: dict[int, dict[int, dict[str, Entry]]] = {}
    for entry in entries:
        if match := _PATH.fullmatch(entry.path):
            rounds.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[entry.path] = entry
    return rounds


def _decided_at(attempts: Attempts) -> datetime | None:
    """Returns when a round's last attempt was decided, by the store's clock."""
    outcomes = [entry for path, entry in attempts[max(attempts)].items() if is_outcome(path)]
    return max(entry.modified for entry in outcomes) if outcomes else None


def _left_out(plan: PlanRecord, offers: Sequence[OfferRecord]) -> dict[int, str]:
    """Returns the islands that offered but do not take part, whether the plan names them or not, with the reason.

    If their offers do not show the reason, it names the island that wrote the plan.
    """
    shown = {str(offer.island): why_unusable(offer) for offer in offers}
    left_out = {
        int(island): reason if reason == shown.get(island) else f"{reason}, says island {plan.by}"
        for island, reason in plan.left_out.items()
    }
    known = {participant.island for participant in plan.participants} | left_out.keys()
    for offer in offers:
        if offer.island not in known:
            same = offer.state == plan.state
            late = f"came after the plan, which island {plan.by} wrote"
            left_out[offer.island] = late if same else "starts from other outer parameters"
    return dict(sorted(left_out.items()))
