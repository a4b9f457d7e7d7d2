"""Who is there: processes claim an island's number, or a node's, and give signs of life.

No clock of another machine is ever read: an island lives as long as its heartbeat *changes*, by this machine's own.
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
from hf_diloco.store.question import Watch, looking_once
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import Wait, WaitNotes

logger = logging.getLogger("hf_diloco")

HEARTBEAT_SECONDS = 2.0
LEASE_SECONDS = 12.0
"""An island whose heartbeat has not changed for so long counts as gone."""
_LOOK_SECONDS = 0.5

UNDER_WAY: Collection[Phase] = ("training", "syncing")
"""What an island does that holds the run's state."""

_HEARTBEAT_PATH = re.compile(r"heartbeats/(0|[1-9]\d{0,5})/(\d{6,9})\.json")
_INCARNATION_NAME = re.compile(r"(\d{6}|[1-9]\d{6,8})\.json")


@dataclass
class Standing:
    """Where this island stands: what its next heartbeat will say."""

    phase: Phase = "joining"
    round: int = 0
    steps: int = 0
    num_ranks: int = 1
    tokens_per_second: float = 0.0
    misses: list[int] = field(default_factory=list)


class Members:
    """The islands as this one sees them; used by the island's leader only.

    Args:
        folder: where it writes.
        lease: seconds after which an island whose heartbeat stands still counts as gone.
        unit: what the run calls one that takes part.

    Attributes:
        lease: seconds, as given or by default.
        incarnation: which process of this island this is, from 1, once it has entered.
        standing: what the next heartbeat says.
        refresh: called before each heartbeat of the thread, to bring `standing` up to date.
        heard: islands that have given a sign of life since the first look, which may see those of processes long gone.
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
        self.standing = Standing()
        self.refresh: Callable[[], None] = lambda: None
        self._unit = unit
        self.log = log
        self._folder = folder
        self.lease = LEASE_SECONDS if lease is None else lease
        self._clock = clock
        self._seen: dict[int, tuple[int, HeartbeatRecord, float]] = {}
        self.heard: set[int] = set()
        self._has_looked = False
        self._incarnations: dict[str, bool] = {}  # by path: whether its writer may take part now
        self._count = 0
        self._is_cut_off = False
        self._reached_at = -math.inf
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._nudged = clock.event()
        self._thread: threading.Thread | None = None

    # This island

    def enter(self, may_return: bool = True) -> int:
        """Claims this island's number for this process; returns how often it has been claimed.

        Args:
            may_return: an earlier process of this island may have ended; otherwise there must have been none.

        Raises:
            DuplicateIslandError: the process that claimed it before is alive; or has been.
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
            folder=self._folder,
            identities=self.log.seal.identities,
            nonce=secrets.token_hex(8),
        )

    def newest_incarnation(self, island: int, is_of_now: bool = False) -> int:
        """The number of the newest process of an island; 0 if there was none. Other records do not count; if
        `is_of_now`, nor do those of an identity that was replaced, whose holder could end this process otherwise."""
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
        """Whether the record by which this process has claimed the island's number is there.

        Raises:
            DuplicateIslandError: a newer process has taken this island's number.
        """
        newest = self.newest_incarnation(self.island, is_of_now=True)
        if newest > self.incarnation:
            raise DuplicateIslandError(
                f"another process ({self._where(newest)}) has taken over as {self._unit} {self.island} while this one "
                "did not answer: this one ends; nothing of it is lost that was synchronised"
            )
        return newest == self.incarnation

    def heartbeat(self) -> None:
        """Gives one sign of life."""
        with self._lock:
            self._count += 1
            refused = {str(island): reason for island, reason in sorted(self.log.refused_islands.items())}
            record = HeartbeatRecord(count=self._count, refused=refused, **asdict(self.standing))
            # Not flushed to the disk: it is worth nothing after a loss of power, and a busy disk would delay it.
            self.log.put(f"heartbeats/{self.island}/{self.incarnation:06d}.json", record, is_lasting=False)

    def start_heartbeats(self) -> None:
        """Gives heartbeats in a thread until `leave`. A store that does not answer is tried again at the next one."""
        self.heartbeat()
        self._forget_earlier()
        args = weakref.ref(self), self._nudged, self._ended
        self._thread = threading.Thread(target=_beat, args=args, name="hf-diloco-heartbeat", daemon=True)
        self._thread.start()

    def _forget_earlier(self) -> None:
        """Deletes the signs of life of this island's earlier processes: all others would list them at every look."""
        with suppress(StoreError):
            found = ((_HEARTBEAT_PATH.fullmatch(path), path) for path in self.log.list(f"heartbeats/{self.island}"))
            numbers = {int(match[2]): path for match, path in found if match and int(match[2]) < self.incarnation}
            old = [
                path for number, path in numbers.items() if self._is_incarnation(incarnation_path(self.island, number))
            ]
            self.log.store.delete(old)

    def try_heartbeat(self) -> None:
        """Gives one sign of life, if the store answers."""
        try:
            self.refresh()
            self.heartbeat()
        except StoreError as error:
            if not self._is_cut_off:
                logger.info("no sign of life could be given: %s", error)
            self._is_cut_off = True
            return
        if self._is_cut_off:
            self._reached_at = self._clock.now()
            self._is_cut_off = False

    def stand(self, phase: Phase) -> None:
        """What heartbeats say from now on; the next one comes at once, because others may wait to hear it."""
        self.standing.phase = phase
        self._nudged.set()

    def stop_heartbeats(self) -> None:
        """Gives no further sign of life by itself."""
        self._ended.set()
        self._nudged.set()
        if self._thread:
            self._thread.join(timeout=5)

    def leave(self, phase: Phase) -> None:
        """Stops beating and says so, so that nobody waits."""
        self.stop_heartbeats()
        self.standing.phase = phase
        try:
            if self.incarnation:  # else nobody has heard of this process
                self.heartbeat()
        except StoreError as error:
            logger.info("left without a last word: %s", error)

    @property
    def num_heartbeats(self) -> int:
        """How many signs of life this process has given, one on its way included: a later one has a higher count."""
        return self._count

    # All islands

    def newest_incarnations(self, islands: Collection[int]) -> dict[int, int]:
        """As `newest_incarnation`, of several islands in one question."""
        with looking_once(self.log.store, ["incarnations"]):
            return {island: self.newest_incarnation(island) for island in islands}

    def await_all(self, islands: Collection[int], seconds: float, wait: Wait) -> list[int]:
        """Waits until each of these islands has had a process; returns those that have not after `seconds`.

        Args:
            wait: says who is missing.
        """
        deadline, watch = self._clock.now() + seconds, Watch(self.log.store, ["incarnations"], self._clock)
        while True:
            missing: list[int] = watch.ask(lambda: [one for one in islands if not self.newest_incarnation(one)])[0]
            if not missing or self._clock.now() >= deadline:
                return missing
            wait.look(missing)

    def look(self) -> dict[int, HeartbeatRecord]:
        """The newest heartbeat of every island that has given one."""
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
                if heartbeat is not None:  # else an earlier process may have given a sign of life
                    if not known or known[:2] != (incarnation, heartbeat):
                        if self._has_looked:
                            self.heard.add(island)
                        self._seen[island] = incarnation, heartbeat, self._clock.now()
                    break
        self._has_looked = True
        return {island: heartbeat for island, (_, heartbeat, _) in self._seen.items()}

    def alive(self) -> dict[int, HeartbeatRecord]:
        """The heartbeats of islands that take part or are about to; this one always among them.

        While the store did not answer, no other island could give a sign of life either: their lease begins anew.
        """
        now, heartbeats = self._clock.now(), self.look()
        if self._clock.now() - now >= self.lease / 2:  # it was silent, but answered before asking it counted as failed
            self._reached_at = self._clock.now()
        return {
            island: heartbeat
            for island, heartbeat in heartbeats.items()
            if heartbeat.phase not in ("left", "finished")
            and (island == self.island or self._is_cut_off or now - self._last_chance(island) < self.lease)
        }

    def is_over(self, round_number: int) -> bool:
        """Whether another island that lives had completed a round when this one looked last.

        Not one that joins: its checkpoint may be of another run, or of a later time than the store.
        """
        now = self._clock.now()
        return any(
            heartbeat.round >= round_number and heartbeat.phase in UNDER_WAY
            for island, (_, heartbeat, _) in self._seen.items()
            if island != self.island and now - self._last_chance(island) < self.lease
        )

    def are_under_way(self) -> bool:
        """Whether another island takes inner steps, or synchronises."""
        others = (heartbeat for island, heartbeat in self.alive().items() if island != self.island)
        return any(heartbeat.phase in UNDER_WAY for heartbeat in others)

    def _last_chance(self, island: int) -> float:
        """When an island's last sign of life was seen; or when the store answered again, if that was later."""
        return max(self._seen[island][2], self._reached_at)

    def incarnation_of(self, island: int) -> int:
        """The newest process of an island that has given a sign of life; 0 if none has."""
        return self._seen[island][0] if island in self._seen else 0

    def process_of(self, island: int, incarnation: int) -> IncarnationRecord | None:
        """What a process of an island has said of itself; None if that is gone or cannot be read."""
        return self.log.read_or_refuse(incarnation_path(island, incarnation), IncarnationRecord)

    def _lives(self, incarnation: int) -> bool:
        """Whether the process of an earlier incarnation gives signs of life; may take as long as the lease."""
        record = self.process_of(self.island, incarnation)
        if record and record.machine and record.machine == _machine() and not _runs(record.pid):
            return False
        path = f"heartbeats/{self.island}/{incarnation:06d}.json"
        first = self.log.read_or_refuse(path, HeartbeatRecord)
        if first and first.phase in ("left", "finished"):
            return False
        logger.info(
            "%s %d was taken before: looking for %g s whether that process lives", self._unit, self.island, self.lease
        )
        deadline = self._clock.now() + self.lease
        wait = WaitNotes(self.island, self._unit, clock=self._clock).begin(self.lease, "start")
        while self._clock.now() < deadline:
            wait.look(f"a sign of life of the process that had this number before ({self._where(incarnation)})")
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
    """Gives heartbeats until they are ended, or nobody has what gives them any more."""
    while True:
        nudged.wait(HEARTBEAT_SECONDS)
        nudged.clear()
        members = of()
        if members is None or ended.is_set():
            return
        members.try_heartbeat()
        del members  # or it would last as long as this


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _machine() -> str:
    """Equal exactly for processes that see each other's numbers: one boot of one kernel, one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
