"""The key-value store at tcp:// of a run that has a key: whoever reaches its port can neither make nor read a value.

    hf-diloco/run      names the run, in clear: signed with the run's key, so that others see whose run it is
    KEY                each value sealed for its key; see `sealing.values`

What was not sealed with the run's key counts as absent, and is replaced where an island writes. Who reaches the port
can still remove values, or bring back an older one of the same key, and so stop a run: see docs/security.md.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import DistStoreError, Store, TCPStore

from hf_diloco.errors import ForgedError, RendezvousError
from hf_diloco.sealing import LinkKey, ValueSeal
from hf_diloco.store.signing import ENV_KEY, Seal

logger = logging.getLogger("hf_diloco")

MARK = "hf-diloco/run"
MARK_SECONDS = 20.0
"""How long the mark of a run may take to come: whoever keeps the store sets it as soon as that is open."""

_VERSION = 1
_NO_RUN = "-"  # what seals the mark
_MAX_ATTEMPTS = 100
_POLL_SECONDS = 0.02


class Sealing(Protocol):
    """The settings that say what is sealed, and where; see `DiLoCoConfig`."""

    @property
    def rendezvous(self) -> str | None:
        """tcp://HOST:PORT."""

    @property
    def encrypt(self) -> bool:
        """Whether values are encrypted, or only authenticated."""


def seal_store(
    store: TCPStore, key: bytes, config: Sealing, is_host: bool, who: str
) -> tuple[TCPStore | SealedStore, LinkKey | None]:
    """The store as islands of a run with this key see it, and what seals their connections.

    Without a key the store is as it was.

    Args:
        store: at `config.rendezvous`.
        key: the run's; empty for none.
        config: see `Sealing`.
        is_host: this process keeps the store, and begins the run.
        who: this island, for messages.

    Raises:
        RendezvousError: the run has another key, or none, or this process has none; or another `encrypt`.
    """
    if not key:
        if not is_host and store.check([MARK]):
            raise RendezvousError(
                f"{who} has no key, and the run at {config.rendezvous} has one: give it the key of the others "
                f"(key_file or {ENV_KEY})"
            )
        return store, None
    run = _begin_run(store, key, config) if is_host else _find_run(store, key, config, who)
    return SealedStore(store, ValueSeal(key, run, config.encrypt)), LinkKey.of_run(key, run, config.encrypt)


def _begin_run(store: TCPStore, key: bytes, config: Sealing) -> str:
    run = secrets.token_hex(16)
    mark = {"version": _VERSION, "run": run, "encrypt": config.encrypt}
    store.set(MARK, Seal(key, _NO_RUN).wrap(MARK, mark).decode())
    return run


def _find_run(store: TCPStore, key: bytes, config: Sealing, who: str) -> str:
    try:
        store.wait([MARK], timedelta(seconds=MARK_SECONDS))
        mark = Seal(key, _NO_RUN).open(MARK, store.get(MARK))
    except RuntimeError:
        raise RendezvousError(
            f"{who} has a key, and the run at {config.rendezvous} has none, or another version of hf_diloco: give all "
            f"one key (key_file or {ENV_KEY}) and one version, or start {who} without a key"
        ) from None
    except ForgedError:
        raise RendezvousError(
            f"{who} has another key than the run at {config.rendezvous}: give all one key (key_file or {ENV_KEY})"
        ) from None
    run, encrypt = mark.get("run"), mark.get("encrypt")
    if mark.get("version") != _VERSION or not isinstance(run, str):
        raise RendezvousError(
            f"{who} has another version of hf_diloco than the run at {config.rendezvous}: install one on all"
        )
    if encrypt is not config.encrypt:
        raise RendezvousError(
            f"{who} has encrypt={config.encrypt}, and the run at {config.rendezvous} encrypt={encrypt}: set the same "
            "on all"
        )
    return run


class SealedStore(Store):
    """As much of a store as islands and nodes need, over one that strangers may reach.

    Args:
        store: what lies below.
        seal: of the run.
    """

    def __init__(self, store: TCPStore, seal: ValueSeal) -> None:
        super().__init__()
        self._store = store
        self._seal = seal
        self._timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        self._refused: set[str] = set()

    def clone(self, timeout: float) -> SealedStore:
        """A client of its own: who waits for a key of a TCP store keeps others from using the same one."""
        store = self._store
        own = TCPStore(store.host, store.port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        return SealedStore(own, self._seal)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal.wrap(key, _bytes(value)))

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
        self._store.set(key, self._seal.wrap(_removed(key), b""))
        return True

    def _swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        """Writes a value if `expected` is there; returns what lies there now, sealed, and whether it was written."""
        sealed = self._seal.wrap(key, desired)
        found = self._store.compare_set(key, expected, sealed)  # type: ignore[arg-type]  # bytes too
        if found == sealed.encode():
            return found, True
        return (b"" if found == expected else found), False  # torch returns `expected` where nothing is

    def _contested(self, key: str) -> DistStoreError:
        return DistStoreError(f"{key} is overwritten again and again: keep others away from the rendezvous")

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        """The value; None if it was removed, or nobody of this run has put it there."""
        try:
            return self._seal.open(key, sealed)
        except ForgedError as error:
            if not self._is_removed(key, sealed) and key not in self._refused:
                self._refused.add(key)
                logger.warning("refused a record at the rendezvous: %s", error)
            return None

    def _is_removed(self, key: str, sealed: bytes) -> bool:
        try:
            return self._seal.open(_removed(key), sealed) == b""
        except ForgedError:
            return False


def _removed(key: str) -> str:
    return f"{key} was removed"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
