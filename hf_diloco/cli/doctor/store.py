"""The store in which islands meet: rights, whether it keeps its one promise, and how fast it is."""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from hf_diloco.cli.doctor import Finding, judge
from hf_diloco.errors import DiLoCoError, RendezvousError
from hf_diloco.planning.quantities import bit_rate, duration
from hf_diloco.store.objects import ObjectStore, open_object_store
from hf_diloco.utils import text

NUM_WRITERS = 8
NUM_CONTESTS = 4
_TIMEOUT = 15.0
_NUM_TRIPS = 5
_PROBE = 8 << 20
"""Bytes that are written and read, to see how fast that is."""

_FAR = 0.5


def check_store(url: str) -> Iterator[Finding]:
    """Writes, reads, lists and deletes a few objects below `checks/`, which other islands pass over.

    Args:
        url: of the store.
    """
    try:
        store = open_object_store(url, _TIMEOUT)
    except RendezvousError as error:
        yield Finding("store", "problem", str(error), "see docs/launching.md and docs/security.md (rights)")
        return
    name = f"checks/doctor-{uuid.uuid4().hex}"
    try:
        yield from _rights(store, name)
        yield _contests(store, name)
        yield _speed(store, name)
    except DiLoCoError as error:
        yield Finding("store", "problem", str(error), "give this machine the right to read, write, list and delete")
    finally:
        _clear(store, name)


def _rights(store: ObjectStore, name: str) -> Iterator[Finding]:
    store.check_creation()  # raises, with its own remedy, if a second creation overwrites
    path = f"{name}-rights"
    store.put(path, b"first")
    store.put(path, b"second")
    if store.get(path, 100) != b"second" or path not in {entry.path for entry in store.entries("checks")}:
        yield Finding(
            "store", "problem", f"{store.url} does not show what was just written", "use a store that is consistent"
        )
        return
    store.delete([path])
    if store.get(path, 100) is not None:
        yield Finding("store", "problem", f"{store.url} still shows what was deleted", "give the right to delete")
        return
    yield Finding("store", "ok", f"{store.url} can be read, written, listed and cleared")


def _contests(store: ObjectStore, name: str) -> Finding:
    """Several create the same object at once, again and again: one of them must win, and what it wrote stay."""
    for contest in range(NUM_CONTESTS):
        path = f"{name}-contest-{contest}"

        def create(writer: int, path: str = path) -> bool:
            return store.create(path, f"writer {writer}".encode())

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            won = [writer for writer, wins in enumerate(pool.map(create, range(NUM_WRITERS))) if wins]
        kept = store.get(path, 100)
        if len(won) != 1 or kept != f"writer {won[0]}".encode():
            return Finding(
                "create if absent",
                "problem",
                f"of {NUM_WRITERS} that created one object at once, {len(won)} were told that they had",
                "islands cannot agree there: use another store, or a newer version of this one",
            )
    return Finding(
        "create if absent", "ok", f"of {NUM_WRITERS} at once exactly one wins, {NUM_CONTESTS} times of {NUM_CONTESTS}"
    )


def _speed(store: ObjectStore, name: str) -> Finding:
    trip = statistics.median(_seconds(lambda: store.get(f"{name}-none", 100)) for _ in range(_NUM_TRIPS))
    values = memoryview(uuid.uuid4().bytes * (_PROBE // 16))
    writing = _seconds(lambda: store.put(f"{name}-probe", values))
    reading = _seconds(lambda: store.get(f"{name}-probe", _PROBE))
    found = (
        f"a request takes {duration(trip)}; {text.size(_PROBE)} are written at {bit_rate(8 * _PROBE / writing)}, "
        f"read at {bit_rate(8 * _PROBE / reading)}"
    )
    return judge("speed of the store", trip < _FAR, found, "use a store nearer by, or a larger diloco.sync_every")


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return max(time.perf_counter() - begin, 1e-9)


def _clear(store: ObjectStore, name: str) -> None:
    with contextlib.suppress(DiLoCoError):  # what it may not delete was said
        store.delete(
            [f"{name}-{what}" for what in ("rights", "probe", *(f"contest-{n}" for n in range(NUM_CONTESTS)))]
        )
