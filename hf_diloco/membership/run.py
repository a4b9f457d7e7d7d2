"""The first record of a run in an object store, shared by all its islands."""

from __future__ import annotations

import secrets
from typing import Literal

from pydantic import Field

from hf_diloco.errors import ExchangeError, FingerprintError, ForgedError, RendezvousError, StoreError
from hf_diloco.membership.facts import Facts, differ, remedy_for
from hf_diloco.membership.heartbeats import Members
from hf_diloco.store.log import Number, Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES, MEETING, NO_RUN, ORIGIN, RUN_PATH, Seal
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.public_keys import show_public
from hf_diloco.utils.threads import call_behind

_PARTS = ("start.json", "incarnations", "heartbeats", "rounds", "links", "snapshots", "payloads")
_LOOKS, _LOOK_SECONDS = 5, 1.0
_BRING_BACK = (
    f"Bring {RUN_PATH} back from a copy; or stop all islands and start them with an empty rendezvous: they go on from "
    "their checkpoints"
)


class RunRecord(Record):
    """The identity and settings of a run.

    Attributes:
        run: random id; seals all other records, so that records of other runs are rejected.
        by: the island that wrote it.
        parent: the run that its first state comes from; "" if it began from fresh weights or another rendezvous.
        num_rounds: rounds after which the run is over; None: each island ends by itself.
        fingerprint: facts that must be equal on all islands.
        waits_for_all: membership is fixed: each round needs all islands.
        unit: "island" or "node".
    """

    run: str = Field(pattern="^[0-9a-f]{32}$")
    by: Number
    parent: str
    num_rounds: Number | None
    fingerprint: dict[str, str | int | float | bool | None]
    waits_for_all: bool = False
    unit: Literal["island", "node"] = "island"


def enter_run(
    store: ObjectStore,
    seal: Seal,
    island: int,
    parent: str,
    num_rounds: int | None,
    fingerprint: Facts,
    clock: Clock,
) -> tuple[RunRecord, bool]:
    """Finds the run in the store, or begins one.

    Args:
        seal: this island's, of any run.
        parent, num_rounds, fingerprint: see `RunRecord`.

    Returns:
        The run's record, and whether this island began the run.

    Raises:
        FingerprintError: the run trains something else, or in another way.
        RendezvousError: the store holds a run that was begun with another key, whose `run.json` is gone, or of fixed
            membership; or the store does not support create-if-absent.
    """
    log = RunLog(store, seal.of(NO_RUN))
    mine = RunRecord(
        run=secrets.token_hex(16), by=island, parent=parent, num_rounds=num_rounds, fingerprint=dict(fingerprint)
    )
    found = find_run(log) or _find_again(log, clock)
    if found is None and not _has_begun(store):
        store.check_creation()
        try:
            found = log.decide(RUN_PATH, mine)
        except ForgedError as error:
            raise _not_ours(store, error) from None
    if found is None or found.waits_for_all:
        raise RendezvousError(
            f"the islands of the run at {store.url} wait for each other, and this one may come and go: give all the "
            "same settings (min_islands, max_islands, exchange)"
        )
    _check(found, fingerprint, island, store.url)
    return found, found == mine


def announce_run(
    log: RunLog, num_rounds: int | None, fingerprint: Facts, unit: Literal["island", "node"] = "island"
) -> None:
    """Writes the record of a run of fixed membership, in the background. Only tools that show the run read it."""
    record = RunRecord(
        run=log.seal.run_id,
        by=0,
        parent="",
        num_rounds=num_rounds,
        fingerprint=dict(fingerprint),
        waits_for_all=True,
        unit=unit,
    )
    names_run = RunLog(log.store, log.seal.of(NO_RUN))
    call_behind(lambda: names_run.put(RUN_PATH, record), StoreError)


def find_run(log: RunLog) -> RunRecord | None:
    """Returns the record of the run, or None before it has begun.

    Raises:
        RendezvousError: there is one that was begun with another key.
    """
    try:
        return log.read(RUN_PATH, RunRecord)
    except ForgedError as error:
        raise _not_ours(log.store, error) from None


def _find_again(log: RunLog, clock: Clock) -> RunRecord | None:
    """Reads `run.json` again if other records of a run exist; None if there are none, or membership is fixed.

    `run.json` is written before all other records, unless membership is fixed. A reader that sees others, but not it,
    was too early, or a network file system has cached its absence.

    Raises:
        RendezvousError: `run.json` is gone.
    """
    paths = [path for path, _ in log.store.list()]
    others = [path for path in paths if path.partition("/")[0] in _PARTS]
    if not others:
        return None
    for look in range(_LOOKS):
        if found := find_run(log):
            return found
        if RUN_PATH not in paths:
            break
        clock.sleep(_LOOK_SECONDS * (look < _LOOKS - 1))
    if _has_begun(log.store):
        return None
    raise RendezvousError(
        f"{log.store.url} holds records of a run ({others[0]} and {len(others) - 1} more), but {RUN_PATH}, which "
        f"names that run, is gone: a second run in the same place would mix with them. {_BRING_BACK}"
    )


def _has_begun(store: ObjectStore) -> bool:
    """Whether a run of fixed membership has begun; its `run.json` may come later than other records."""
    return store.get(MEETING, MAX_RECORD_BYTES) is not None


def check_run(log: RunLog) -> str:
    """Checks that no other run has begun in the store of this one.

    Returns:
        What to tell the user if `run.json` is gone or damaged; else "".

    Raises:
        ExchangeError: another run has begun there.
    """
    found = RunLog(log.store, log.seal.of(NO_RUN)).read_or_refuse(RUN_PATH, RunRecord)
    if found is None:
        return (
            f"{log.store.url} has lost records of this run, also {RUN_PATH}, which names it: training goes on, but "
            "no island can be started there any more. Keep others, and rules that delete old objects, away. "
            f"{_BRING_BACK}"
        )
    if found.run != log.seal.run_id:
        raise ExchangeError(
            f"{log.store.url} has lost this run, and island {found.by} has begun another one there. This island ends; "
            "started again, it joins that run, if that goes on from a checkpoint of this one. Otherwise stop all "
            "islands, and start them with an empty rendezvous: they go on from their checkpoints"
        )
    return ""


def open_run(store: ObjectStore, key: bytes, clock: Clock = REAL) -> tuple[RunRecord, RunLog]:
    """Opens the run in a store for reading.

    Raises:
        RendezvousError: there is none, or it was begun with another key.
    """
    log = RunLog(store, Seal(key, NO_RUN))
    found = find_run(log) or _find_again(log, clock)
    if found is None and _has_begun(store):
        raise RendezvousError(f"the run at {store.url} has just begun: look again in a moment")
    if found is None:
        raise RendezvousError(f"there is no run at {store.url}: correct the rendezvous, or start an island")
    return found, RunLog(store, log.seal.of(found.run))


def _check(run: RunRecord, fingerprint: Facts, island: int, url: str) -> None:
    # In this island's order, as records are sorted: the number of trainable parameters comes before digests.
    for name in dict.fromkeys([*fingerprint, *run.fingerprint]):
        theirs, mine = run.fingerprint.get(name), fingerprint.get(name)
        if differ(name, theirs, mine):
            raise FingerprintError(
                f"this island does not train what the run at {url} trains: {name} differs (the run, begun by island "
                f"{run.by}: {theirs}; island {island}: {mine}); {remedy_for(name)}, or choose another rendezvous"
            )


def _not_ours(store: ObjectStore, error: ForgedError) -> RendezvousError:
    what = str(error).removesuffix(f": {ORIGIN}")
    return RendezvousError(
        f"the run at {store.url} was begun with another key, or is not of hf_diloco ({what}): give the run's key "
        "to all islands (HF_DILOCO_KEY or key_file) and to commands that look at it (--key-file); if run.json is "
        "damaged, bring it back from a copy; or choose another rendezvous"
    )


def check_welcome(members: Members, clock: Clock) -> None:
    """If islands have identities, checks that all live islands list this island's identity.

    Raises:
        RendezvousError: an island does not list it, or has replaced it; names that island.
    """
    signer, number = members.log.seal.signer, members.island
    if signer is None:
        return
    own = show_public(signer.public)
    for island in sorted(members.others()):
        while not _lists(members, island, own):
            if island in members.heard:
                raise RendezvousError(
                    f"island {island} rejects island {number}, whose identity {own} is not listed there "
                    f"(identities.{number}), or only until a round, as it was replaced, or this island removed. "
                    "Give this island the identity_file whose key is listed; or list its key on all islands, and "
                    f"start island {island} again"
                )
            clock.sleep(_LOOK_SECONDS)  # the record may be of a process killed long ago
            if island not in members.alive():
                break


def _lists(members: Members, island: int, own: str) -> bool:
    """Whether the newest process of `island` lists this island's identity `own`, or has left no record."""
    process = members.process_of(island, members.incarnation_of(island))
    return process is None or own in process.identities.get(str(members.island), ())
