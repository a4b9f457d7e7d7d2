"""What saves islands from asking again and again: one request to a server of ours that writes, waits and reads.

    POST /changes/NAME     {"create": {PATH: DATA}, "replace": {PATH: [TAG, DATA]}, "put": {PATH: DATA},
                            "prefixes": [PATH], "paths": [PATH], "known": {PATH: TAG}, "seconds": 0.5,
                            "awaited": {"path": PATH, "linger": 0.25}}
                           {"created": {PATH: DATA}, "objects": {PATH: [TAG, DATA]}}

The server creates objects unless they exist, replaces others if they still are what the island has read, returns what
lies there then, and puts further ones in place of what is there. It looks at some paths, and at all objects below some
prefixes. If they are those that the island knows, it waits until one is written or deleted, at most so many seconds.
So who waits for others hears of what they write half a round trip later, and its own record goes with the question.
Where an object is `awaited` that somebody near the server is likely to write at once, other news are told only when it
is there, or after `linger` seconds: one answer then brings both.

DATA is in base64 (RFC 4648, of URLs), TAG a digest (xxh3_64) of it. Left out (null) are data that the island knows,
what is too large or cannot be read, and what would be too much together; the latter is asked for by itself.

Any other store answers questions one by one, and who waits asks it again and again. A `Watch` hides the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hf_diloco.utils.clock import Clock
from hf_diloco.utils.threads import ask_together
from hf_diloco.utils.urls import is_object_path

if TYPE_CHECKING:
    from hf_diloco.store.objects import ObjectStore

MAX_WAIT_SECONDS = 30.0
MAX_DATA_BYTES = 4 << 20
"""Of one object: as a record may have."""


def check_path(path: str) -> str:
    """Returns it; raises `ValueError` if it is no path of an object."""
    if not is_object_path(path):
        raise ValueError("no path of an object")
    return path


Path = Annotated[str, AfterValidator(check_path)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Awaited(_Message):
    """An object that is likely to be there soon, and how many seconds to wait for it when there is other news."""

    path: Path
    linger: float = Field(gt=0, le=MAX_WAIT_SECONDS)


class Question(_Message):
    """What an island asks. Where it knows nothing (`known` is None) all that is there is news.

    What is put is flushed to the disk if `is_lasting`.
    """

    create: dict[Path, bytes] = Field(default_factory=dict, max_length=16)
    replace: dict[Path, tuple[str, bytes]] = Field(default_factory=dict, max_length=16)
    put: dict[Path, bytes] = Field(default_factory=dict, max_length=16)
    is_lasting: bool = True
    prefixes: list[Path] = Field(default_factory=list, max_length=16)
    paths: list[Path] = Field(default_factory=list, max_length=4096)
    known: dict[str, str] | None = Field(default=None, max_length=100_000)
    seconds: float = Field(default=0.0, ge=0, le=MAX_WAIT_SECONDS)
    awaited: Awaited | None = None

    @model_validator(mode="after")
    def _shows_what_is_awaited(self) -> Self:
        if self.awaited and not any(self.awaited.path.startswith(f"{prefix}/") for prefix in self.prefixes):
            raise ValueError("what is awaited lies below none of the prefixes")
        return self


class Answer(_Message):
    """What it is told; what lies where something was to be created or replaced is under `created`."""

    created: dict[Path, bytes | None]
    objects: dict[Path, tuple[str, bytes | None]]


MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 0.5


@dataclass(frozen=True)
class Sight:
    """All objects below some prefixes at one moment.

    Attributes:
        prefixes: where was looked.
        paths: likewise.
        objects: their data by path; None for what was not told, as it is too large or cannot be read.
        tags: tell versions of an object apart.
        created: what lies where something was to be created; None if that was not told.
    """

    prefixes: tuple[str, ...] = ()
    objects: Mapping[str, bytes | None] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    created: Mapping[str, bytes | None] = field(default_factory=dict)
    paths: frozenset[str] = frozenset()

    def covers(self, path: str) -> bool:
        """Whether it shows what lies at a path, or below it."""
        return path in self.paths or any(path == prefix or path.startswith(f"{prefix}/") for prefix in self.prefixes)

    def below(self, prefix: str) -> list[tuple[str, int]]:
        """Paths below a prefix that it covers, and sizes, where they were told; in order."""
        found = (item for item in self.objects.items() if item[0].startswith(f"{prefix}/"))
        return sorted((path, len(data or b"")) for path, data in found)


class Sights(threading.local):
    """From which sight this thread's questions are answered, until it writes something."""

    current: Sight | None = None

    @contextmanager
    def answer_from(self, sight: Sight) -> Iterator[None]:
        """What this thread asks is answered from a sight, as far as that covers it."""
        self.current = sight
        try:
            yield
        finally:
            self.current = None


def look(
    store: ObjectStore,
    prefixes: Sequence[str],
    before: Sight | None = None,
    seconds: float = 0.0,
    create: Mapping[str, bytes] | None = None,
    awaited: Awaited | None = None,
    paths: Collection[str] = (),
) -> Sight:
    """All objects below some prefixes, in one request, as soon as there is something new.

    Args:
        store: one that `tells_changes`.
        prefixes: where to look.
        before: what was seen the last time; None: this does not wait.
        seconds: to wait at most for anything else than that.
        create: objects to create before, unless they exist.
        awaited: an object below one of the prefixes that other news wait for.
        paths: further objects.

    Raises:
        StoreError: no answer, or a refusal.
    """
    known = None if before is None else dict(before.tags)
    answer = store.ask(
        Question(
            create=dict(create or {}),
            prefixes=list(prefixes),
            paths=list(paths),
            known=known,
            seconds=seconds,
            awaited=awaited,
        )
    )
    seen = {(path, tag): before.objects[path] for path, tag in before.tags.items()} if before else {}
    return Sight(
        tuple(prefixes),
        {path: seen.get((path, tag)) if data is None else data for path, (tag, data) in answer.objects.items()},
        {path: tag for path, (tag, _) in answer.objects.items()},
        answer.created,
        frozenset(paths),
    )


@contextmanager
def looking_once(store: ObjectStore, prefixes: Sequence[str], paths: Collection[str] = ()) -> Iterator[None]:
    """What this thread asks of some places, before it writes, is answered by one request if the store can.

    What it sees already is not asked for again.
    """
    sight = store.sights.current if store.tells_changes else None
    if not store.tells_changes or (sight and all(map(sight.covers, [*prefixes, *paths]))):
        yield
        return
    with store.sights.answer_from(look(store, prefixes, paths=paths)):
        yield


@dataclass(eq=False, repr=False)
class Watch:
    """Asks the same questions again and again, each time once there may be another answer.

    Attributes:
        prefixes: below which the answers lie.
        create: objects that the first look creates unless they exist; only for a store that `tells_changes`.
        when_taken: called if there was something else.
        awaited: see `look`; ignored where the store is asked again and again.
        paths: where the answers lie beside that.
    """

    store: ObjectStore
    prefixes: Sequence[str]
    clock: Clock
    create: Mapping[str, bytes] | None = None
    when_taken: Callable[[], None] = lambda: None
    awaited: Awaited | None = None
    paths: Collection[str] = ()

    def __post_init__(self) -> None:
        self._create = dict(self.create or {})
        self._sight: Sight | None = None
        self._pause = 0.0

    def ask(self, *questions: Callable[[], Any]) -> list[Any]:
        """The answers. From the second time on this waits before: at most half a second, less if there is news."""
        if self.store.tells_changes:
            return self._ask_at_once(questions)
        self._rest()
        return [question() for question in questions] if self.store.is_near else ask_together(*questions)

    def _ask_at_once(self, questions: Sequence[Callable[[], Any]]) -> list[Any]:
        before, begun = self._sight, self.clock.now()
        self._sight = look(
            self.store, self.prefixes, before, MAX_PAUSE_SECONDS, self._create, self.awaited, self.paths
        )
        if before and before.tags == self._sight.tags and self.clock.now() - begun < MAX_PAUSE_SECONDS / 2:
            self._rest()  # the server has too many that wait, and did not
        if self._create and dict(self._sight.created) != self._create:
            self.when_taken()
        self._create = {}
        with self.store.sights.answer_from(self._sight):
            return [question() for question in questions]

    def _rest(self) -> None:
        self.clock.sleep(self._pause)
        self._pause = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, 1.3 * self._pause))
