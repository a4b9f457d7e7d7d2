"""The rendezvous at tcp:// with fixed membership, and for nodes: island 0, or node 0, hosts the store.

    hf-diloco/run         names the run: signed with the run's key, so that others can tell whose run it is
    hf-diloco/unfit       who came last and did not fit, as with another key: unsigned, for people only
    values/KEY.json       each value, sealed for its path; see `store.signing`

A value that was not sealed with the run's key counts as absent, and is replaced when an island writes it. Anyone who
reaches the port can still remove values, or replay an older value of the same key, and so stop a run: see
docs/security.md.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from hf_diloco.errors import ForgedError, RendezvousError, StopRequested, StoreError, UnknownIdentityError
from hf_diloco.sealing.identity import Roster
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import GONE_SECONDS, Place, StoreHost, address_towards, find_store, url_of
from hf_diloco.store.signing import ENV_KEY, MAX_RECORD_BYTES, MEETING, NO_RUN, RUN_PATH, Seal
from hf_diloco.store.values import ValueStore, run_at
from hf_diloco.utils.waiting import WaitNotes

MARK_SECONDS = 20.0
"""How long the record that names the run may take to appear: the host writes it right after it opens the store."""
_GREETING_SECONDS = 20.0
_LOOK_TIMEOUT = 5.0
_POLL_SECONDS = 0.05
_UNFIT = "hf-diloco/unfit"
_MAX_UNFIT_BYTES = 1000


class _RunMarker(Record):
    """Names a run, and holds the settings in which every participant must equal the host."""

    version: Literal[5]
    run: str
    size: dict[str, int] = Field(min_length=1, max_length=1)
    encrypt: bool
    identities: dict[str, list[str]]


class _Unfit(Record):
    """A process that tried to join with another key or other settings, and ended."""

    who: str = Field(pattern=r"^(island|node) \d{1,6}$")
    address: str = Field(pattern=r"^[0-9a-fA-F.:]{2,45}$")


class Rendezvous(NamedTuple):
    """What one rank got from the rendezvous: the key seals connections between participants (None without the run's
    key), and this rank listens at the address for others.

    `end` stops the store if this process hosts it; otherwise it runs until `store` is garbage-collected.
    """

    store: ValueStore
    key: LinkKey | None
    address: str
    end: Callable[[], object]


def meet(
    config: Place,
    credentials: Credentials,
    is_host: bool,
    who: str,
    size: Mapping[str, int],
    silent_for: float,
    notes: WaitNotes,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rendezvous:
    """Connects to the rendezvous; the rank with `is_host` also opens the store, which lives as long as the result.

    Args:
        is_host: this process hosts the store, and begins the run; others wait until it does.
        who: this island, for messages.
        size: the setting that gives the number of participants, with its value.
        silent_for: seconds without an answer until the store counts as gone; its process may stall for a while.
        should_stop: polled while waiting for the host; true ends the wait with `StopRequested`.

    Raises:
        RendezvousError: the port is in use, HOST is not this machine, nobody answers within `join_timeout`, or traffic
            would cross a public network; or the key (also its absence), `encrypt`, the identities or the size differ
            from the run's.
    """
    host = StoreHost(config, unit=notes.unit) if is_host else None
    try:
        if host is None:
            find_store(config, notes, should_stop)
        store = _open(config, silent_for)
        if is_host:
            run = _begin_run(store, credentials, size)
        else:
            run = _find_fitting_run(store, credentials, config, who, size, should_stop)
    except BaseException:
        if host:
            host.close()
        raise
    end = weakref.finalize(store, host.close) if host else lambda: None
    seal = Seal(credentials.key, run, credentials.signer, credentials.encrypt)
    values = ValueStore(RunLog(store, seal), is_hosted=True)
    return Rendezvous(values, credentials.link_key(run), address_towards(config), end)


def who_did_not_fit(store: ObjectStore) -> str:
    """Describes who came last and left, because of another key or other settings; "" if nobody has."""
    try:
        found = store.get(_UNFIT, _MAX_UNFIT_BYTES)
        unfit = _Unfit.model_validate_json(found or b"")
    except (StoreError, ValidationError):
        return ""
    return (
        f"{unfit.who} came from {unfit.address} and ended, as it has another key or other settings than this run: its "
        "error says which"
    )


def has_other_run(config: Place, seal: Seal) -> bool:
    """Whether the store at the rendezvous is that of another run than `seal`'s, perhaps of another key."""
    assert config.rendezvous is not None
    return run_at(look_at(url_of(config.rendezvous)), seal) not in (None, seal.run_id)


def is_still_there(config: Place, seal: Seal) -> bool:
    """Whether the store at the rendezvous answers, and is that of `seal`'s run."""
    assert config.rendezvous is not None
    try:
        return run_at(look_at(url_of(config.rendezvous)), seal) == seal.run_id
    except (RendezvousError, StoreError):
        return False


def look_at(url: str) -> ObjectStore:
    """Opens a store that may be about to shut down, with a short timeout."""
    return ObjectStore(url, _LOOK_TIMEOUT, gone_after=0.0)


def _open(config: Place, silent_for: float) -> ObjectStore:
    """Connects to the listener at the rendezvous, which may be any program."""
    assert config.rendezvous is not None
    url = url_of(config.rendezvous)
    try:
        ObjectStore(url, min(config.join_timeout, _GREETING_SECONDS))
        return ObjectStore(url, silent_for, gone_after=GONE_SECONDS)
    except RendezvousError as error:
        raise RendezvousError(
            f"what answers at {config.rendezvous} is not the rendezvous of a run ({error}): another program has the "
            "port, or a proxy stands in between. Correct rendezvous, or choose another port for all"
        ) from None


def _begin_run(store: ObjectStore, credentials: Credentials, size: Mapping[str, int]) -> str:
    run, seal = secrets.token_hex(16), credentials.seal(NO_RUN)
    mark = _RunMarker(version=5, run=run, size=dict(size), encrypt=credentials.encrypt, identities=seal.identities)
    store.put(MEETING, seal.wrap(MEETING, mark.model_dump()))
    return run


def _find_fitting_run(
    store: ObjectStore,
    credentials: Credentials,
    config: Place,
    who: str,
    size: Mapping[str, int],
    should_stop: Callable[[], bool],
) -> str:
    there = f"the run at {config.rendezvous}"
    found = _await_mark(store, there, who, should_stop)
    try:
        return _check_mark(found, credentials, there, who, size)
    except RendezvousError:
        with suppress(StoreError):  # so that those who wait for it learn why it does not come
            unfit = _Unfit(who=who, address=address_towards(config))
            store.put(_UNFIT, unfit.model_dump_json().encode())
        raise


def _check_mark(found: bytes, credentials: Credentials, there: str, who: str, size: Mapping[str, int]) -> str:
    """Returns the run that a mark names; raises `RendezvousError` if this process does not fit it."""
    try:
        mark = _RunMarker.model_validate(_open_mark(found, credentials, there, who))
    except ValidationError:
        raise RendezvousError(f"{who} has another version of hf_diloco than {there}: install one on all") from None
    if mark.size != size:  # each would wait for a different set of peers
        mine, theirs = (f"{name}={value}" for one in (size, mark.size) for name, value in one.items())
        raise RendezvousError(f"{who} has {mine}, and {there} {theirs}: set the same on all")
    if credentials.key and mark.encrypt is not credentials.encrypt:
        raise RendezvousError(
            f"{who} has encrypt={credentials.encrypt}, and {there} encrypt={mark.encrypt}: set the same on all"
        )
    if credentials.signer or mark.identities:
        _check_identities(credentials, found, mark.identities, who, there)
    return mark.run


def _await_mark(store: ObjectStore, there: str, who: str, should_stop: Callable[[], bool]) -> bytes:
    deadline, has_run = time.monotonic() + MARK_SECONDS, False
    try:
        while True:
            if (found := store.get(MEETING, MAX_RECORD_BYTES)) is not None:
                return found
            if has_run:
                raise RendezvousError(
                    f"{who} waits for all islands, and those of {there} may come and go: give all the same settings "
                    "(min_islands, max_islands, exchange)"
                )
            if has_run := store.get(RUN_PATH, MAX_RECORD_BYTES) is not None:
                continue  # a mark of this run would have been written before: look once more
            if time.monotonic() >= deadline:
                raise RendezvousError(f"{there} has not begun {MARK_SECONDS:g} s after its store was opened: {_AGAIN}")
            if should_stop():
                raise StopRequested
            time.sleep(_POLL_SECONDS)
    except StoreError as error:
        raise RendezvousError(f"{there} cannot be read ({error}): {_AGAIN}") from None


_AGAIN = "start all again, or choose another port"


def _open_mark(found: bytes, credentials: Credentials, there: str, who: str) -> Mapping[str, object]:
    """Opens the mark of a run; `_check_identities` checks later who signed it."""
    try:
        return Credentials(credentials.key).seal(NO_RUN).open(MEETING, found)
    except ForgedError:
        pass
    if not credentials.key:
        raise RendezvousError(
            f"{who} has no key, and {there} has one: give it the key of the others (key_file or {ENV_KEY})"
        )
    try:
        Credentials().seal(NO_RUN).open(MEETING, found)
    except ForgedError:
        raise RendezvousError(
            f"{who} has another key than {there}: give all one key (key_file or {ENV_KEY})"
        ) from None
    raise RendezvousError(
        f"{who} has a key, and {there} has none: give all one key (key_file or {ENV_KEY}), or start {who} without it"
    )


def _check_identities(
    credentials: Credentials, found: bytes, theirs: Mapping[str, list[str]], who: str, there: str
) -> None:
    """Checks that the host and this island list each other, and that both have the same list of identities."""
    signer = credentials.signer
    if signer is None:
        raise RendezvousError(
            f"{who} gives no identity, and {there} has a list of who may take part: make an identity for it "
            "(`hf-diloco keys make FILE`), add it to identities on all, and give it as identity_file"
        )
    if not theirs:
        raise RendezvousError(
            f"{who} has an identity, and {there} lists nobody's: set the same identities on all, or on none"
        )
    try:
        credentials.seal(NO_RUN).open(MEETING, found)
        Roster({int(number): texts for number, texts in theirs.items()}, signer.roster.unit).find_current(signer)
    except UnknownIdentityError as error:
        raise RendezvousError(f"{who} cannot take part in {there}: {error}") from None
    mine = signer.roster.texts
    for number in sorted(mine.keys() | theirs.keys(), key=int):
        if mine.get(number) != theirs.get(number):
            unit = signer.roster.unit
            raise RendezvousError(
                f"{who} has another list of identities than {there}: identities.{number} differs. Give all "
                f"{unit}s the same list, and start {unit} {number} again where it had another key"
            )
