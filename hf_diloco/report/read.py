"""Reads a run folder as typed records; tolerates partial lines, resumed sections and islands that ran elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hf_diloco.errors import ConfigError
from hf_diloco.report.records import AnyRecord, End, Eval, Mix, Neighbour, Record, Refused, Start, Sync, parse_line
from hf_diloco.utils.files import METRICS_FILE, PROGRESS_FILE, SUMMARY_FILE, read_json
from hf_diloco.utils.redact import redact

_ISLAND_FOLDER = re.compile(r"island-(\d{1,9})")
_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True)
class Section:
    """The records of one stretch of training, from a start or resume to its end."""

    records: tuple[AnyRecord, ...]

    def of(self, kind: type[_R]) -> list[_R]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def start(self) -> Start | None:
        return next(iter(self.of(Start)), None)

    @property
    def end(self) -> End | None:
        return next(reversed(self.of(End)), None)

    @property
    def last_step(self) -> int:
        return max(record.step for record in self.records)


@dataclass(frozen=True)
class IslandRun:
    """The records of one island.

    Attributes:
        record: path of its record; a script may write it to a folder of its own.
        sections: all stretches of training, including parts that a resume discarded.
        num_bad_lines: unreadable lines, not counting a section's partial last line (which a killed process leaves).
        progress, summary: the last `progress.json`, and `summary.json`; empty if there is none.
    """

    island: int
    folder: Path
    record: Path
    sections: tuple[Section, ...]
    num_bad_lines: int = 0
    progress: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)

    def of(self, kind: type[_R]) -> list[_R]:
        """Returns the records of one kind, sorted by step, without those that a resume discarded."""
        return [record for record in self._standing if isinstance(record, kind)]

    @property
    def last_step(self) -> int | None:
        return self._standing[-1].step if self._standing else None

    @cached_property
    def _standing(self) -> list[AnyRecord]:
        """The records that count, sorted by step.

        A section that resumes at step s replaces earlier records after s, and rounds after the round it starts from:
        an island may join a run that others have restarted from an earlier round. Of several records with the same
        event and step, the last section's wins. Within a section they are merged, as a Trainer may log twice in a
        step. Several rounds may end at one step if they run in the background.
        """
        kept: dict[tuple[str, int], AnyRecord] = {}
        for section in self.sections:
            start = section.start
            if start is not None:
                kept = {key: record for key, record in kept.items() if _stands(record, start)}
            latest: dict[tuple[str, int], AnyRecord] = {}
            for record in section.records:
                key = _key(record)
                latest[key] = _complete(latest.pop(key), record) if key in latest else record
            kept.update(latest)
        return sorted(kept.values(), key=lambda record: record.step)

    @property
    def start(self) -> Start | None:
        """The settings of the last start."""
        return next((section.start for section in reversed(self.sections) if section.start), None)

    def evaluations(self, wanted: bool = True) -> list[Eval]:
        """Returns the evaluations of the wanted weights (see `Start.weights_wanted`), or of the other weights."""
        kind = self.start.weights_wanted if self.start else "outer"
        return [one for one in self.of(Eval) if one.weights is not None and (one.weights == kind) is wanted]


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        islands: the islands whose records are here, by number.
        settings: `run.json`, the resolved configuration; empty if there is none.
        model: the folder of the final model, if the run has written one.
    """

    name: str
    folder: Path
    islands: tuple[IslandRun, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None

    @property
    def rendezvous(self) -> str | None:
        """Where the islands or nodes meet: from the settings, or without settings (in scripts) from the record."""
        if not self.settings:
            starts = (island.start for island in self.islands)
            return next((start.rendezvous for start in starts if start and start.rendezvous), None)
        blocks = (self.settings.get(name) for name in ("diloco", "gossip"))
        return next((str(url) for one in blocks if isinstance(one, Mapping) and (url := one.get("rendezvous"))), None)


def load_run(path: str | Path) -> Run:
    """Reads a run folder (`runs/NAME`), or the folder of a single island that holds `metrics.jsonl`.

    Raises `ConfigError` if the folder is neither; the message says which folder to give.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"no run folder at {folder}: give the folder that the run wrote, such as runs/NAME")
    found = _island_folders(folder)
    if found:
        islands = [load_island(entry, number) for number, entry in sorted(found.items())]
        model = folder / "model"
        settings = redact(read_json(folder / "run.json"))
        return Run(folder.resolve().name, folder, tuple(islands), settings, model if model.is_dir() else None)
    if (folder / METRICS_FILE).is_file():
        return _single_island(folder)
    raise ConfigError(_not_a_run(folder))


def _single_island(folder: Path) -> Run:
    name, parent = folder.resolve().name, folder.resolve().parent
    match = _ISLAND_FOLDER.fullmatch(name)
    island = load_island(folder, int(match[1]) if match else None)
    if match is None:
        return Run(name, folder, (island,))
    return Run(f"{parent.name}/{name}", folder, (island,), redact(read_json(parent / "run.json")))


def _island_folders(folder: Path) -> dict[int, Path]:
    """Returns the `island-N` folders by number, including those of islands that have not recorded anything yet."""
    matches = ((_ISLAND_FOLDER.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir())
    return {int(match[1]): entry for match, entry in matches if match}


def _not_a_run(folder: Path) -> str:
    runs = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _island_folders(entry))
    if runs:
        shown = ", ".join(str(folder / name) for name in runs[:5]) + (", ..." if len(runs) > 5 else "")
        return f"{folder} is not a run folder but holds {len(runs)}: give one of them ({shown})"
    if (folder / "run.json").is_file():
        return f"{folder} holds no island's record yet: the run has not begun to train; try again when it has"
    return (
        f"{folder} is not a run folder: it holds neither island-0, island-1, ... nor {METRICS_FILE}; "
        "give the folder that the run wrote, such as runs/NAME"
    )


def load_island(folder: Path, number: int | None) -> IslandRun:
    """Reads an island's folder; with a `number` of None, takes the number from the record."""
    progress, summary = read_json(folder / PROGRESS_FILE), read_json(folder / SUMMARY_FILE)
    path = folder / METRICS_FILE
    records, num_bad_lines = _read_records(path)
    elsewhere = progress.get("record")  # set if a script writes its record to another folder
    if isinstance(elsewhere, str) and not records:
        with suppress(ConfigError, ValueError):  # it may be a path on another machine, or none
            found, num_bad = _read_records(Path(elsewhere) / METRICS_FILE)
            if _was_launched_in(folder, found):
                path, records, num_bad_lines = Path(elsewhere) / METRICS_FILE, found, num_bad
    sections = tuple(Section(tuple(part)) for part in _split(records))
    if number is None:  # not an island-N folder
        number = next((s.start.island for s in sections if s.start and s.start.island is not None), 0)
    return IslandRun(number, folder, path, sections, num_bad_lines, progress, summary)


def _was_launched_in(folder: Path, records: Iterable[AnyRecord]) -> bool:
    folders = {record.launched_in for record in records if isinstance(record, Start)}
    return any(Path(name).resolve() == folder.resolve() for name in folders if name)


def _read_records(path: Path) -> tuple[list[AnyRecord], int]:
    """Returns all readable records of a file, and the number of unreadable lines.

    Does not count a partial line that a killed process left: the last of the file, or the last before a new start.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; make it readable and try again") from None
    records: list[AnyRecord] = []
    num_bad_lines, torn = 0, False
    for line in filter(bytes.strip, lines):
        try:
            record = parse_line(line)
        except ValueError:
            num_bad_lines += torn
            torn = True
            continue
        num_bad_lines += torn and not isinstance(record, Start)
        torn = False
        if record is not None:
            records.append(record)
    return records, num_bad_lines


def _split(records: Iterable[AnyRecord]) -> Iterator[list[AnyRecord]]:
    section: list[AnyRecord] = []
    for record in records:
        if isinstance(record, Start) and section:
            yield section
            section = []
        section.append(record)
    if section:
        yield section


def _stands(record: AnyRecord, start: Start) -> bool:
    is_undone = isinstance(record, Sync) and start.round is not None and record.round > start.round
    return record.step <= start.step and not is_undone


def _key(record: AnyRecord) -> tuple[str, int]:
    """Returns the key by which later records replace earlier ones."""
    if isinstance(record, Sync):
        return record.event, record.round
    if isinstance(record, Neighbour | Refused):  # each is about other islands
        return str(record), record.step
    if isinstance(record, Eval):  # a step may have evaluations of several weights
        return f"{record.event} {record.weights} {record.name}", record.step
    return record.event, record.step


def _complete(earlier: AnyRecord, later: AnyRecord) -> AnyRecord:
    if isinstance(earlier, Mix) and isinstance(later, Mix):
        return earlier.plus(later)
    return earlier.model_copy(update=later.model_dump(exclude_none=True, exclude_unset=True))
