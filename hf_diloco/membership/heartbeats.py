"""Membership: processes claim an island's number, or a node's, and send heartbeats.

No clock of another machine is ever read: an island is alive while its heartbeat *changes*, by this machine's clock.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from hf_diloco.errors import DuplicateIslandError, StoreError, UnknownIdentityError
from hf_diloco.membership.member_records import HeartbeatRecord, IncarnationRecord, Phase, incarnation_path
from hf_diloco.store.log import RunLog
from hf_diloco.store.long_poll import Watch, looking_once
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import Wait, WaitNotes

logger = logging.getLogger("hf_diloco")

HEARTBEAT_SECONDS = 2.0
LEASE_SECONDS = 12.0
"""An island counts as gone after its heartbeat has not changed for this long."""
_LOOK_SECONDS = 0.5

UNDER_WAY: Collection[Phase] = ("training", "syncing")
"""Phases of an island that holds the run's state."""

_HEARTBEAT_PATH = re.compile(r"heartbeats/(0|[1-9]\d{0,5})/(\d{6,9})\.json")
_INCARNATION_NAME = re.compile(r"(\d{6}|[1-9]\d{6,8})\.json")


@dataclass
class MemberStatus:
    """This island's progress: the contents of its next heartbeat."""

    phase: Phase = "joining"
    round: int = 0
    steps: int = 0
    num_ranks: int = 1
    tokens_per_second: float = 0.0
    misses: list[int] = field(default_factory=list)


class Members:
    """The islands as this one sees them; used by the island's leader only.

    Args:
        folder: where this island writes.
        lease: seconds without a changed heartbeat after which an island counts as gone; default: `LEASE_SECONDS`.
        unit: "island" or "node".

    Attributes:
        incarnation: number of this process among the island's processes, from 1; 0 before `enter`.
        standing: the contents of the next heartbeat.
        refresh: called before each heartbeat of the thread, to update `standing`.
        heard: islands with a new heartbeat since the first look, which may have seen those of dead processes.
    """

    def __init__(
        self,
        log: RunLog,
        island: int,
        folder: str = "",
        lease: float | None = None,
        clock: Clock = REAL,
        unit: str = "island",
    ) -> None:
        self.island = island
        self.incarnation = 0
        self.standing = MemberStatus()
        self.refresh: Callable[[], None] = lambda: None
        self._unit = unit
        self.log = log
        self.folder = folder
        self.lease = LEASE_SECONDS if lease is None else lease
        self._clock = clock
        self._seen: dict[int, tuple[int, HeartbeatRecord, float]] = {}
        self.heard: set[int] = set()
        self._has_looked = False
        self._incarnations: dict[str, bool] = {}  # by path: whether its identity is still valid
        self._count = 0
        self._is_cut_off = False
        self._reached_at = -math.inf
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._nudged = clock.event()
        self._thread: threading.Thread | None = None

    # This island

    def enter(self, may_return: bool = True) -> int:
        """Claims this island's number for this process; returns the incarnation, from 1.

        Args:
            may_return: whether there may have been an earlier process of this island, which has ended.

        Raises:
            DuplicateIslandError: an earlier process is alive; or, unless `may_return`, has existed.
        """
        while True:
            newest = self.newest_incarnation(self.island, is_of_now=True)
            if newest and not may_return:
                raise DuplicateIslandError(
                    f"another process has already joined this run as {self._unit} {self.island} "
                    f"({self._where(newest)}): {self._own_number()}; if that process has ended, start all "
                    f"{self._unit}s again"
                )
            if newest and self._lives(newest):
                raise DuplicateIslandError(
                    f"another process runs as {self._unit} {self.island} of this run ({self._where(newest)}): "
                    f"{self._own_number()}, or end that process first"
                )
            record, number = self._record(), newest + 1
            while not self.log.create(path := incarnation_path(self.island, number), record):
                if self._is_incarnation(path, is_of_now=True):  # another process was faster
                    break
                number += 1
            else:
                self.incarnation = number
                return number

    def _own_number(self) -> str:
        return f"give every {self._unit} its own number ({self._unit}, --{self._unit} or HF_DILOCO_ISLAND)"

    def _record(self) -> IncarnationRecord:
        return IncarnationRecord(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            folder=self.folder,
            identities=self.log.seal.identities,
            nonce=secrets.token_hex(8),
        )

    def newest_incarnation(self, island: int, is_of_now: bool = False) -> int:
        """Returns the incarnation of an island's newest process; 0 if there was none. Ignores invalid records.

        If `is_of_now`, also ignores those of a replaced identity: its holder could end this process otherwise."""
        names = [path.rpartition("/")[2] for path in self.log.list(f"incarnations/{island}/")]
        numbers = sorted((int(name[:-5]) for name in names if _INCARNATION_NAME.fullmatch(name)), reverse=True)
        paths = ((number, incarnation_path(island, number)) for number in numbers)
        return next((number for number, path in paths if self._is_incarnation(path, is_of_now)), 0)

    def _is_incarnation(self, path: str, is_of_now: bool = False) -> bool:
        if path not in self._incarnations and self.log.read_or_refuse(path, IncarnationRecord) is not None:
            self._incarnations[path] = self._counts_now(path)
        return self._incarnations.get(path, False) if is_of_now else path in self._incarnations

    def _counts_now(self, path: str) -> bool:
        if self.log.seal.signer is None:
            return True
        try:
            return self.log.read(path, IncarnationRecord, is_of_now=True) is not None
        except UnknownIdentityError:
            return False

    def check_incarnation(self) -> bool:
        """Whether this process's claim of the island's number is still in the store.

        Raises:
            DuplicateIslandError: a newer process has claimed this island's number.
        """
        newest = self.newest_incarnation(self.island, is_of_now=True)
        if newest > self.incarnation:
            raise DuplicateIslandError(
                f"another process ({self._where(newest)}) has taken over as {self._unit} {self.island} while this one "
                "did not answer: this one ends; nothing that was synchronised is lost"
            )
        return newest == self.incarnation

    def heartbeat(self) -> None:
        """Sends one heartbeat."""
        with self._lock:
            self._count += 1
            refused = {str(island): reason for island, reason in sorted(self.log.refused_islands.items())}
            record = HeartbeatRecord(count=self._count, refused=refused, **asdict(self.standing))
            # Not flushed to disk: it is worthless after a power loss, and a busy disk would delay it.
            self.log.put(f"heartbeats/{self.island}/{self.incarnation:06d}.json", record, is_lasting=False)

    def start_heartbeats(self) -> None:
        """Sends heartbeats in a thread until `leave`. If the store does not answer, retries at the next heartbeat."""
        self.heartbeat()
        self._forget_earlier()
        args = weakref.ref(self), self._nudged, self._ended
        self._thread = threading.Thread(target=_beat, args=args, name="hf-diloco-heartbeat", daemon=True)
        self._thread.start()

    def _forget_earlier(self) -> None:
        """Deletes the heartbeats of this island's earlier processes, which others would list at every look."""
        with suppress(StoreError):
            found = ((_HEARTBEAT_PATH.fullmatch(path), path) for path in self.log.list(f"heartbeats/{self.island}"))
            numbers = {int(match[2]): path for match, path in found if match and int(match[2]) < self.incarnation}
            old = [
                path for number, path in numbers.items() if self._is_incarnation(incarnation_path(self.island, number))
            ]
            self.log.store.delete(old)

    def try_heartbeat(self) -> None:
        """Sends one heartbeat, if the store answers."""
        try:
            self.refresh()
            self.heartbeat()
        except StoreError as error:
            if not self._is_cut_off:
                logger.info("could not send a heartbeat: %s", error)
            self._is_cut_off = True
            return
        if self._is_cut_off:
            self._reached_at = self._clock.now()
            self._is_cut_off = False

    def set_phase(self, phase: Phase) -> None:
        """Sets the phase in heartbeats, and sends one at once, because other islands may wait for it."""
        self.standing.phase = phase
        self._nudged.set()

    def stop_heartbeats(self) -> None:
        """Stops the thread that sends heartbeats."""
        self._ended.set()
        self._nudged.set()
        if self._thread:
            self._thread.join(timeout=5)

    def leave(self, phase: Phase) -> None:
        """Stops the heartbeats; the last one says so, so that no island waits for this one."""
        self.stop_heartbeats()
        self.standing.phase = phase
        try:
            if self.incarnation:  # else no other island knows of this process
                self.heartbeat()
        except StoreError as error:
            logger.info("left without announcing it: %s", error)

    @property
    def num_heartbeats(self) -> int:
        """Number of heartbeats of this process, including one in flight; later ones have a higher count."""
        return self._count

    # All islands

    def newest_incarnations(self, islands: Collection[int]) -> dict[int, int]:
        """Returns `newest_incarnation` of several islands, with one request."""
        with looking_once(self.log.store, ["incarnations"]):
            return {island: self.newest_incarnation(island) for island in islands}

    def await_all(self, islands: Collection[int], seconds: float, wait: Wait) -> list[int]:
        """Waits until each of these islands has had a process; returns those without one after `seconds`.

        Args:
            wait: logs the missing islands.
        """
        deadline, watch = self._clock.now() + seconds, Watch(self.log.store, ["incarnations"], self._clock)
        while True:
            missing: list[int] = watch.ask(lambda: [one for one in islands if not self.newest_incarnation(one)])[0]
            if not missing or self._clock.now() >= deadline:
                return missing
            wait.look(missing)

    def look(self) -> dict[int, HeartbeatRecord]:
        """Reads the newest heartbeat of every island that has sent one."""
        paths: dict[int, list[tuple[int, str]]] = {}
        for path in self.log.list("heartbeats"):
            if match := _HEARTBEAT_PATH.fullmatch(path):
                paths.setdefault(int(match[1]), []).append((int(match[2]), path))
        newest = {island: max(of_island) for island, of_island in paths.items()}
        read = self.log.read_all([path for _, path in newest.values()], HeartbeatRecord)
        for island, of_island in paths.items():
            known = self._seen.get(island)
            for incarnation, path in sorted(of_island, reverse=True):
                if known and incarnation < known[0]:
                    break
                is_newest = path == newest[island][1]
                heartbeat = read.get(path) if is_newest else self.log.read_or_refuse(path, HeartbeatRecord)
                if heartbeat is not None:  # else try an earlier process's heartbeat
                    if not known or known[:2] != (incarnation, heartbeat):
                        if self._has_looked:
                            self.heard.add(island)
                        self._seen[island] = incarnation, heartbeat, self._clock.now()
                    break
        self._has_looked = True
        return {island: heartbeat for island, (_, heartbeat, _) in self._seen.items()}

    def alive(self) -> dict[int, HeartbeatRecord]:
        """Returns the heartbeats of live islands, including this one, without those that have left or finished.

        After an outage of the store all leases restart, because no island could send heartbeats meanwhile.
        """
        now, heartbeats = self._clock.now(), self.look()
        if self._clock.now() - now >= self.lease / 2:  # slow, but no failure
            self._reached_at = self._clock.now()
        return {
            island: heartbeat
            for island, heartbeat in heartbeats.items()
            if heartbeat.phase not in ("left", "finished")
            and (island == self.island or self._is_cut_off or now - self._last_chance(island) < self.lease)
        }

    def is_over(self, round_number: int) -> bool:
        """Whether another live island had completed this round at the last `look`.

        Ignores a joining island: its checkpoint may be of another run, or newer than the store.
        """
        now = self._clock.now()
        return any(
            heartbeat.round >= round_number and heartbeat.phase in UNDER_WAY
            for island, (_, heartbeat, _) in self._seen.items()
            if island != self.island and now - self._last_chance(island) < self.lease
        )

    def spent(self) -> set[int]:
        """Islands that had finished at the last `look`, with all of their steps in rounds: they bring nothing more."""
        return {island for island, (_, last, _) in self._seen.items() if last.phase == "finished" and not last.steps}

    def others(self) -> dict[int, HeartbeatRecord]:
        """Returns `alive` without this island."""
        return {island: heartbeat for island, heartbeat in self.alive().items() if island != self.island}

    def others_under_way(self) -> list[HeartbeatRecord]:
        """Returns the heartbeats of other islands that are training or synchronising."""
        return [heartbeat for heartbeat in self.others().values() if heartbeat.phase in UNDER_WAY]

    def _last_chance(self, island: int) -> float:
        """Returns when an island's last heartbeat was seen, or when the store answered again, if that was later."""
        return max(self._seen[island][2], self._reached_at)

    def incarnation_of(self, island: int) -> int:
        """Returns the incarnation of an island's newest process that has sent a heartbeat; 0 if none has."""
        return self._seen[island][0] if island in self._seen else 0

    def process_of(self, island: int, incarnation: int) -> IncarnationRecord | None:
        """Returns the record of an island's process; None if it is gone or cannot be read."""
        return self.log.read_or_refuse(incarnation_path(island, incarnation), IncarnationRecord)

    def _lives(self, incarnation: int) -> bool:
        """Whether the process of an earlier incarnation sends heartbeats; may take as long as the lease."""
        record = self.process_of(self.island, incarnation)
        if record and record.machine and record.machine == _machine() and not _runs(record.pid):
            return False
        path = f"heartbeats/{self.island}/{incarnation:06d}.json"
        first = self.log.read_or_refuse(path, HeartbeatRecord)
        if first and first.phase in ("left", "finished"):
            return False
        logger.info(
            "%s %d ran before: checking for %g s whether that process is alive", self._unit, self.island, self.lease
        )
        deadline = self._clock.now() + self.lease
        wait = WaitNotes(self.island, self._unit, clock=self._clock).begin(self.lease, "start")
        while self._clock.now() < deadline:
            wait.look(f"a heartbeat of the process that had this number before ({self._where(incarnation)})")
            self._clock.sleep(_LOOK_SECONDS)
            heartbeat = self.log.read_or_refuse(path, HeartbeatRecord)
            if heartbeat and heartbeat.phase in ("left", "finished"):
                return False
            if heartbeat != first:
                return True
        return False

    def _where(self, incarnation: int) -> str:
        record = self.process_of(self.island, incarnation)
        return f"process {record.pid} on {record.host}" if record else "unknown"


def _beat(of: weakref.ref[Members], nudged: threading.Event, ended: threading.Event) -> None:
    """Sends heartbeats until stopped, or until its `Members` object is garbage-collected."""
    while True:
        nudged.wait(HEARTBEAT_SECONDS)
        nudged.clear()
        members = of()
        if members is None or ended.is_set():
            return
        members.try_heartbeat()
        del members  # else this thread would keep it alive


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _machine() -> str:
    """Identifies the PID namespace: equal for processes of the same boot of a kernel and the same container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
