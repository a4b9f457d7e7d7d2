"""The key-value store at tcp:// of a run that has a key: whoever reaches its port can neither make nor read a value.

    hf-diloco/run      names the run, in clear: signed with the run's key, so that others see whose run it is
    KEY                each value sealed for its key; see `sealing.values`. Where islands have identities, before that
                       signed by its writer: ISLAND (4 bytes) | signature | value

What was not sealed with the run's key counts as absent, and is replaced where an island writes. Who reaches the port
can still remove values, or bring back an older one of the same key, and so stop a run: see docs/security.md.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import DistStoreError, Store, TCPStore

from hf_diloco.errors import ForgedError, RendezvousError, UnknownIdentityError
from hf_diloco.sealing import LinkKey, Roster, Signer, ValueSeal
from hf_diloco.sealing.identity import SIGNATURE_BYTES
from hf_diloco.store.authors import MEETING, owner_of_value, wrong_author
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.signing import ENV_KEY

logger = logging.getLogger("hf_diloco")

MARK = MEETING
MARK_SECONDS = 20.0
"""How long the mark of a run may take to come: whoever keeps the store sets it as soon as that is open."""

_VERSION = 2
_NO_RUN = "-"  # what seals the mark
_PURPOSE = "value"
_NUMBER_BYTES = 4
_MAX_ATTEMPTS = 100
_POLL_SECONDS = 0.02


class Place(Protocol):
    """The setting that says where to meet; see `DiLoCoConfig`."""

    @property
    def rendezvous(self) -> str | None:
        """tcp://HOST:PORT."""


def seal_store(
    store: TCPStore, credentials: Credentials, config: Place, is_host: bool, who: str
) -> tuple[TCPStore | SealedStore, LinkKey | None]:
    """The store as islands of a run with this key see it, and what seals their connections.

    Without a key the store is as it was.

    Args:
        store: at `config.rendezvous`.
        credentials: this island's.
        config: see `Place`.
        is_host: this process keeps the store, and begins the run.
        who: this island, for messages.

    Raises:
        RendezvousError: the run has another key, or none, or this process has none; or another `encrypt`, or other
            identities.
    """
    if not credentials.key:
        if not is_host and store.check([MARK]):
            raise RendezvousError(
                f"{who} has no key, and the run at {config.rendezvous} has one: give it the key of the others "
                f"(key_file or {ENV_KEY})"
            )
        return store, None
    run = _begin_run(store, credentials) if is_host else _find_run(store, credentials, config, who)
    seal = ValueSeal(credentials.key, run, credentials.encrypt)
    return SealedStore(store, seal, run, credentials.signer), credentials.link_key(run)


def _begin_run(store: TCPStore, credentials: Credentials) -> str:
    run, seal = secrets.token_hex(16), credentials.seal(_NO_RUN)
    mark = {"version": _VERSION, "run": run, "encrypt": credentials.encrypt, "identities": seal.identities}
    store.set(MARK, seal.wrap(MARK, mark).decode())
    return run


def _find_run(store: TCPStore, credentials: Credentials, config: Place, who: str) -> str:
    there = f"the run at {config.rendezvous}"
    seal = Credentials(credentials.key, encrypt=credentials.encrypt).seal(_NO_RUN)  # who signed it is looked at below
    try:
        store.wait([MARK], timedelta(seconds=MARK_SECONDS))
        found = store.get(MARK)
        mark = seal.open(MARK, found)
    except RuntimeError:
        raise RendezvousError(
            f"{who} has a key, and {there} has none, or another version of hf_diloco: give all one key (key_file or "
            f"{ENV_KEY}) and one version, or start {who} without a key"
        ) from None
    except ForgedError:
        raise RendezvousError(
            f"{who} has another key than {there}: give all one key (key_file or {ENV_KEY})"
        ) from None
    run, encrypt, identities = mark.get("run"), mark.get("encrypt"), mark.get("identities")
    if mark.get("version") != _VERSION or not isinstance(run, str) or not isinstance(identities, dict):
        raise RendezvousError(f"{who} has another version of hf_diloco than {there}: install one on all")
    if encrypt is not credentials.encrypt:
        raise RendezvousError(
            f"{who} has encrypt={credentials.encrypt}, and {there} encrypt={encrypt}: set the same on all"
        )
    if credentials.signer or identities:
        _check_identities(credentials, found, identities, who, there)
    return run


def _check_identities(
    credentials: Credentials, found: bytes, theirs: Mapping[str, list[str]], who: str, there: str
) -> None:
    """Makes sure that who keeps the store and this island list each other, and everybody else alike."""
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
        credentials.seal(_NO_RUN).open(MARK, found)
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


class SealedStore(Store):
    """As much of a store as islands and nodes need, over one that strangers may reach.

    Args:
        store: what lies below.
        seal: of the run.
        run: names the run.
        signer: this island's identity; then each value must be signed by who may write it. Default: none has one.
    """

    def __init__(self, store: TCPStore, seal: ValueSeal, run: str = "", signer: Signer | None = None) -> None:
        super().__init__()
        self._store = store
        self._seal = seal
        self._run = run
        self._signer = signer
        self._timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        self._refused: set[str] = set()

    def clone(self, timeout: float) -> SealedStore:
        """A client of its own: who waits for a key of a TCP store keeps others from using the same one."""
        store = self._store
        own = TCPStore(store.host, store.port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        return SealedStore(own, self._seal, self._run, self._signer)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._wrap(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            value = self._open(key, self._store.get(key))
            if value is not None:
                return value
            if time.monotonic() >= deadline:
                raise DistStoreError(f"{key} has not come")
            time.sleep(_POLL_SECONDS)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        known = list(keys)
        if not self._store.check(known):
            return False
        values = self._store.multi_get(known)
        return all(self._open(key, value) is not None for key, value in zip(known, values, strict=True))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = [self._open(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]
        return [self.get(key) if value is None else value for key, value in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Creates a value; returns that which is there now. Nothing else is asked of it."""
        assert not expected
        found = b""
        for _ in range(_MAX_ATTEMPTS):
            found, _ = self._swap(key, found, _bytes(desired))
            value = self._open(key, found) if found else None
            if value is not None:
                return value
        raise self._contested(key)

    def add(self, key: str, amount: int) -> int:
        """Counts. Unlike torch's, numbers are values as others are: a stranger cannot make one."""
        found = self._store.get(key) if self._store.check([key]) else b""
        for _ in range(_MAX_ATTEMPTS):
            total = int((self._open(key, found) if found else None) or 0) + amount
            if not amount:
                return total
            found, is_written = self._swap(key, found, b"%d" % total)
            if is_written:
                return total
        raise self._contested(key)

    def delete_key(self, key: str) -> bool:
        """Leaves word that it is gone: who has just seen that it was there must not wait for it."""
        self._store.set(key, self._wrap(_removed(key), b""))
        return True

    def _swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        """Writes a value if `expected` is there; returns what lies there now, sealed, and whether it was written."""
        sealed = self._wrap(key, desired)
        found = self._store.compare_set(key, expected, sealed)  # type: ignore[arg-type]  # bytes too
        if found == sealed.encode():
            return found, True
        return (b"" if found == expected else found), False  # torch returns `expected` where nothing is

    def _contested(self, key: str) -> DistStoreError:
        return DistStoreError(f"{key} is overwritten again and again: keep others away from the rendezvous")

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        """The value; None if it was removed, or nobody of this run has put it there."""
        try:
            return self._unwrap(key, sealed)
        except ForgedError as error:
            if not self._is_removed(key, sealed) and key not in self._refused:
                self._refused.add(key)
                logger.warning("refused a record at the rendezvous: %s", error)
            return None

    def _is_removed(self, key: str, sealed: bytes) -> bool:
        try:
            return self._unwrap(_removed(key), sealed) == b""
        except ForgedError:
            return False

    def _wrap(self, key: str, value: bytes) -> str:
        if self._signer:
            number = self._signer.number.to_bytes(_NUMBER_BYTES, "big")
            value = number + self._signer.sign(_PURPOSE, self._run.encode(), key.encode(), value) + value
        return self._seal.wrap(key, value)

    def _unwrap(self, key: str, sealed: bytes) -> bytes:
        """The value.

        Raises:
            ForgedError: it was not sealed for this place.
            UnknownIdentityError: it was, by somebody who may not write it.
        """
        value = self._seal.open(key, sealed)
        if not self._signer:
            return value
        number, signature = value[:_NUMBER_BYTES], value[_NUMBER_BYTES : _NUMBER_BYTES + SIGNATURE_BYTES]
        value, by = value[_NUMBER_BYTES + SIGNATURE_BYTES :], int.from_bytes(number, "big")
        self._signer.check(by, signature, _PURPOSE, self._run.encode(), key.encode(), value)
        owner = owner_of_value(key)
        if owner not in (None, by):
            raise wrong_author(key, owner, by, self._signer.roster.unit)
        return value


def _removed(key: str) -> str:
    return f"{key} was removed"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
