"""Spares islands from polling: one request to a server of ours writes, waits for changes and reads.

    POST /changes/NAME     {"create": {PATH: DATA}, "replace": {PATH: [TAG, DATA]}, "put": {PATH: DATA},
                            "prefixes": [PATH], "paths": [PATH], "known": {PATH: TAG}, "seconds": 0.5,
                            "awaited": {"path": PATH, "linger": 0.25}}
                           {"created": {PATH: DATA}, "objects": {PATH: [TAG, DATA]}}

The server creates objects unless they exist, replaces others if they still have the given tag, and returns the data at
these paths; it writes `put` unconditionally. Then it looks at the given paths, and at all objects below the given
prefixes. If they equal those that the island knows, it waits until one is written or deleted, at most for `seconds`.
So an island that waits for others learns of their writes half a round trip later, and sends its own record in the same
request.

An `awaited` object is one that a participant near the server will probably write at once. The answer then waits for
it, at most `linger` seconds after other news: one answer brings both.

DATA is in base64 (RFC 4648, of URLs), TAG is a digest (xxh3_64) of it. DATA is null if the island knows it, if it is
too large or unreadable, or if it exceeds the limit of all answers; islands request the latter separately.

Any other store answers single requests only, and has to be polled. A `Watch` hides the difference.
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
"""Limit of one object, equal to that of a record."""


def check_path(path: str) -> str:
    """Returns the path; raises `ValueError` if no object may have it."""
    if not is_object_path(path):
        raise ValueError("no path of an object")
    return path


Path = Annotated[str, AfterValidator(check_path)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Awaited(_Message):
    """An object that will probably be there soon, and how many seconds to wait for it after other news."""

    path: Path
    linger: float = Field(gt=0, le=MAX_WAIT_SECONDS)


class PollRequest(_Message):
    """An island's request. If it knows nothing (`known` is None), every object is news. `put` objects are flushed to
    the disk if `is_lasting`."""

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


class PollResponse(_Message):
    """The server's answer; `created` has the data at the paths that the request creates or replaces."""

    created: dict[Path, bytes | None]
    objects: dict[Path, tuple[str, bytes | None]]


MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 0.5


@dataclass(frozen=True)
class Listing:
    """All objects below some prefixes, and at some single paths, at one moment.

    `tags` identify versions of `objects`; `created` has the data at paths that were to be created. Data is None if not
    sent, because it is too large or unreadable.
    """

    prefixes: tuple[str, ...]
    paths: frozenset[str]
    objects: Mapping[str, bytes | None]
    tags: Mapping[str, str]
    created: Mapping[str, bytes | None]

    def covers(self, path: str) -> bool:
        """Whether this shows all objects at and below a path."""
        return path in self.paths or any(path == prefix or path.startswith(f"{prefix}/") for prefix in self.prefixes)

    def below(self, prefix: str) -> list[tuple[str, int]]:
        """Lists paths and sizes (0 if the data was not sent) below a covered prefix, in order."""
        found = (item for item in self.objects.items() if item[0].startswith(f"{prefix}/"))
        return sorted((path, len(data or b"")) for path, data in found)


class ListingCache(threading.local):
    """The listing from which a thread's reads are answered, until the thread writes."""

    current: Listing | None = None

    @contextmanager
    def answer_from(self, listing: Listing) -> Iterator[None]:
        """Answers this thread's reads from a listing, as far as it covers them."""
        self.current = listing
        try:
            yield
        finally:
            self.current = None


def look(
    store: ObjectStore,
    prefixes: Sequence[str],
    before: Listing | None = None,
    seconds: float = 0.0,
    create: Mapping[str, bytes] | None = None,
    awaited: Awaited | None = None,
    paths: Collection[str] = (),
) -> Listing:
    """Returns all objects below some prefixes and at some paths, in one request, as soon as they differ from `before`.

    Args:
        store: one that `tells_changes`.
        before: the previous listing; None: do not wait, otherwise at most `seconds`.
        create: objects to create first, unless they exist.
        awaited: an object below one of the prefixes for which other news wait.
    """
    answer = store.poll(
        PollRequest(
            create=dict(create or {}),
            prefixes=list(prefixes),
            paths=list(paths),
            known=dict(before.tags) if before else None,
            seconds=seconds,
            awaited=awaited,
        )
    )
    seen = {(path, tag): before.objects[path] for path, tag in before.tags.items()} if before else {}
    return Listing(
        tuple(prefixes),
        frozenset(paths),
        {path: seen.get((path, tag)) if data is None else data for path, (tag, data) in answer.objects.items()},
        {path: tag for path, (tag, _) in answer.objects.items()},
        answer.created,
    )


@contextmanager
def looking_once(store: ObjectStore, prefixes: Sequence[str], paths: Collection[str] = ()) -> Iterator[None]:
    """Answers this thread's reads of some places, until it writes, from one request if the store supports that. Places
    that the current listing covers are not requested again."""
    listing = store.listings.current if store.tells_changes else None
    if not store.tells_changes or (listing and all(map(listing.covers, [*prefixes, *paths]))):
        yield
        return
    with store.listings.answer_from(look(store, prefixes, paths=paths)):
        yield


@dataclass(eq=False, repr=False)
class Watch:
    """Repeats the same reads, each time once their answers may have changed.

    Attributes:
        create: objects that the first look creates unless they exist; only for a store that `tells_changes`.
        when_taken: called if one of these objects existed with other data.
        awaited: see `look`; ignored by stores that are polled.
    """

    store: ObjectStore
    prefixes: Sequence[str]
    clock: Clock
    create: Mapping[str, bytes] | None = None
    when_taken: Callable[[], None] = lambda: None
    awaited: Awaited | None = None
    paths: Collection[str] = ()
    _listing: Listing | None = field(default=None, init=False)
    _pause: float = field(default=0.0, init=False)

    def ask(self, *reads: Callable[[], Any]) -> list[Any]:
        """Returns the answers. From the second call on first waits for news, at most half a second."""
        if not self.store.tells_changes:
            self._rest()
            return [read() for read in reads] if self.store.is_near else ask_together(*reads)
        before, create, begun = self._listing, self.create, self.clock.now()
        self._listing = look(self.store, self.prefixes, before, MAX_PAUSE_SECONDS, create, self.awaited, self.paths)
        if before and before.tags == self._listing.tags and self.clock.now() - begun < MAX_PAUSE_SECONDS / 2:
            self._rest()  # the server has too many waiting polls, and answered at once
        if create and self._listing.created != create:
            self.when_taken()
        self.create = None
        with self.store.listings.answer_from(self._listing):
            return [read() for read in reads]

    def _rest(self) -> None:
        self.clock.sleep(self._pause)
        self._pause = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, 1.3 * self._pause))
