"""The dashboard's data: a run folder, the store where its islands meet, or both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hf_diloco.errors import DiLoCoError, StoreError
from hf_diloco.report import Report, Run, load_run, summarise
from hf_diloco.report.progress import Progress, read_progress
from hf_diloco.status.models import RunStatus
from hf_diloco.status.observer import Observer, observe
from hf_diloco.utils.files import METRICS_FILE, PROGRESS_FILE, SUMMARY_FILE
from hf_diloco.utils.urls import is_object_store

NUM_ROUNDS = 100  # the last rounds, read from a store

Signature = frozenset[tuple[str, int, int]]


@dataclass(frozen=True)
class Now:
    """The progress that an island or node last wrote, and its age in seconds by this machine's clock."""

    progress: Progress
    age: float


@dataclass(frozen=True)
class Look:
    """The data found at one moment.

    Attributes:
        run, report: of the run folder; None without one.
        now: progress of the folder's islands that have written any.
        status: of the store; None without one.
        problems: what could not be read, with the reason.
    """

    name: str
    run: Run | None = None
    report: Report | None = None
    now: Mapping[int, Now] = field(default_factory=dict)
    status: RunStatus | None = None
    problems: tuple[str, ...] = ()


class Source:
    """Reads a run each time it is asked, and once at the start: its folder, the store where its islands meet, or both.

    For one thread at a time. `where` is a run folder, or where islands meet; `key` the run's, empty for none.

    Raises:
        ConfigError: the folder is not a run folder.
        RendezvousError: there is no run in the store, or it has another key.
        StoreError: the store does not answer.
    """

    def __init__(self, where: str, key: bytes) -> None:
        is_store = "://" in where
        self._folder = None if is_store else Path(where)
        self._url = where if is_store else None
        self._key = key
        self._observer: Observer | None = None
        self._signature: Signature = frozenset()
        self._last = Look(where)
        if is_store:
            self.read_store()
        else:
            self.read_folder()

    def look(self) -> Look:
        """Returns the current data. A part that cannot be read keeps its last value, and is among the problems."""
        problems = []
        for read in (self.read_folder, self.read_store):
            try:
                read()
            except (DiLoCoError, OSError) as error:
                problems.append(str(error))
        return replace(self._last, problems=tuple(problems))

    def read_folder(self) -> None:
        """Reads the folder's records only if one has changed, because those of a long run are large."""
        if self._folder is None:
            return
        signature = _signature(self._folder, self._last.run)
        if self._last.run is None or signature != self._signature:
            run = load_run(self._folder)
            self._last = replace(self._last, name=run.name, run=run, report=summarise(run, is_live=True))
            self._signature = signature
            if run.rendezvous and is_object_store(run.rendezvous) and run.rendezvous != self._url:
                self._url, self._observer = run.rendezvous, None
                self._last = replace(self._last, status=None)
        assert self._last.run is not None
        found = {island.island: _now(island.folder / PROGRESS_FILE) for island in self._last.run.islands}
        now = {number: entry for number, entry in found.items() if entry is not None}
        self._last = replace(self._last, now=now)

    def read_store(self) -> None:
        if self._url is None:
            return
        if self._observer is None:
            self._observer = observe(self._url, self._key, NUM_ROUNDS)
        try:
            status = self._observer.look()
        except StoreError:
            if self._url.startswith("file:"):  # another folder may be mounted there by now
                self._observer = None
            raise
        self._last = replace(self._last, status=status)


def _now(path: Path) -> Now | None:
    try:
        written = path.stat().st_mtime
    except OSError:
        return None
    return Now(read_progress(path), max(0.0, time.time() - written))


def _signature(folder: Path, run: Run | None) -> Signature:
    """Returns a signature that changes with any record or progress file; `run` is the last run read."""
    files = [*folder.glob(f"island-*/{METRICS_FILE}"), *folder.glob(f"island-*/{SUMMARY_FILE}")]
    files += [folder / METRICS_FILE, folder / "model"]
    for island in run.islands if run else ():
        files.append(island.record)
        progress = island.folder / PROGRESS_FILE  # names a script's record, and at the end says how the island ended
        if not island.sections or read_progress(progress).is_ending:
            files.append(progress)
    found = set()
    for file in files:
        with suppress(OSError):  # absent, or replaced at this moment, as `model` is
            stat = file.stat()
            found.add((str(file), stat.st_size, stat.st_mtime_ns))
    return frozenset(found)
