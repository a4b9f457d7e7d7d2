"""The rendezvous at tcp:// of a run with a key: what strangers who reach its port can do, and who is let in."""

from __future__ import annotations

import itertools
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import ConfigError, RendezvousError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.membership.ledger import Ledger
from hf_diloco.store import sealed_store
from hf_diloco.store.credentials import Credentials, find_key
from hf_diloco.store.sealed_store import MARK, SealedStore, seal_store
from hf_diloco.transport.peer_failures import LossNotes
from tests.islands import run_islands

KEY = b"0123456789abcdef"
OTHER_KEY = b"0123456789abcdeg"
LOCALHOST = "127.0.0.1"


@pytest.fixture
def bare() -> TCPStore:
    """What a stranger has who reaches the port."""
    return TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def config(**settings: Any) -> DiLoCoConfig:
    return DiLoCoConfig(**{"num_islands": 2, "rendezvous": "tcp://127.0.0.1:29400", **settings})


def held(key: bytes, **settings: Any) -> Credentials:
    return Credentials(key, **settings)


def enter(bare: TCPStore, island: int, key: bytes = KEY, **settings: Any) -> SealedStore:
    own = TCPStore(LOCALHOST, bare.port, wait_for_workers=False, timeout=timedelta(seconds=20))
    store, link_key = seal_store(own, held(key, **settings), config(), is_host=island == 0, who=f"island {island}")
    assert isinstance(store, SealedStore)
    assert link_key is not None
    return store


@pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "authenticated"])
def test_values_are_there_for_those_who_hold_the_key(bare: TCPStore, encrypt: bool) -> None:
    here, there = enter(bare, 0, encrypt=encrypt), enter(bare, 1, encrypt=encrypt)
    here.set("a", "one")
    there.set("b", b"\x00\xff")
    assert (there.get("a"), here.get("b")) == (b"one", b"\x00\xff")
    assert there.multi_get(["a", "b"]) == [b"one", b"\x00\xff"]
    assert here.compare_set("first", "", "mine") == there.compare_set("first", "", "theirs") == b"mine"
    assert [here.add("n", 1), there.add("n", 2), here.add("n", 0), here.add("none", 0)] == [1, 3, 3, 0]
    assert (here.check(["a", "b"]), here.check(["a", "c"])) == (True, False)
    assert b"one" not in bare.get("a")
    there.delete_key("a")
    assert not here.check(["a"])
    assert here.compare_set("a", "", "again") == b"again"
    below = PrefixStore("training-2", here)
    below.set("a", "two")
    assert (below.get("a"), below.compare_set("a", "", "three"), below.add("n", 5)) == (b"two", b"two", 5)
    assert (below.check(["a"]), below.multi_get(["a"])) == (True, [b"two"])


def test_what_strangers_write_is_as_good_as_absent(bare: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    store = enter(bare, 0)
    store.set("good", "good")
    for key, forged in (("a", b"made up"), ("b", bare.get("good")), ("n", b"7")):
        bare.set(key, forged)  # type: ignore[arg-type]  # bytes too
        assert bare.get(key) == forged  # torch's `set` does not wait, and another client may be faster
        assert not store.check([key])
    assert store.add("n", 1) == 1
    assert store.compare_set("a", "", "mine") == b"mine"
    assert store.get("a") == b"mine"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("the record b was not sealed with this run's key for this place" in text for text in warnings) == 1


def test_several_count_at_once(bare: TCPStore) -> None:
    stores = [enter(bare, island) for island in range(3)]
    sums = run_islands(3, lambda island: [stores[island].add("n", 1) for _ in range(20)])
    assert sorted(itertools.chain(*sums)) == list(range(1, 61))


def test_records_of_an_earlier_run_do_not_open_in_this_one(bare: TCPStore) -> None:
    enter(bare, 0).set("claim/1", "1")
    assert not enter(bare, 0).check(["claim/1"]), "another run begins in the same place"


def test_islands_share_records_and_count_their_starts(bare: TCPStore) -> None:
    stores = [enter(bare, island) for island in range(2)]

    def share(island: int) -> list[dict[str, Any]]:
        ledger = Ledger(stores[island], island, 2)
        ledger.claim()
        return ledger.share("topic", {"island": island}, timeout=20)

    assert run_islands(2, share) == [[{"island": 0}, {"island": 1}]] * 2
    assert b"island" not in bare.get("topic/0")
    notes = [LossNotes(stores[island], "lane0", island) for island in range(2)]
    assert notes[1].find_first(0, timed_out=False) == 0


def test_nodes_leave_each_other_sealed_records(bare: TCPStore) -> None:
    board = Board(enter(bare, 0), "gossip")
    board.put("a", {"x": 1})
    board.put_first("a", {"x": 2})
    assert board.read("a") == {"x": 1}
    assert (board.count("starts/0"), board.count("starts/0", 1), board.count("starts/0")) == (0, 1, 1)
    board.remove("a")
    assert (board.has("a"), board.read("a")) == (False, None)
    assert b'"x"' not in bare.get("gossip/a")


@pytest.mark.parametrize(
    ("host", "guest", "message"),
    [
        ((KEY, {}), (OTHER_KEY, {}), r"island 1 has another key than the run at tcp://.*give all one key \(key_file"),
        ((KEY, {}), (b"", {}), r"island 1 has no key, and the run at tcp://.* has one: give it the key of the others"),
        ((b"", {}), (KEY, {}), r"island 1 has a key, and the run at tcp://.* has none.*give all one key \(key_file"),
        (
            (KEY, {}),
            (KEY, {"encrypt": False}),
            r"island 1 has encrypt=False, and .* encrypt=True: set the same on all",
        ),
    ],
    ids=["another key", "no key", "a key where there is none", "encrypt"],
)
def test_who_does_not_fit_is_told_at_the_start(
    bare: TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    host: tuple[bytes, dict[str, Any]],
    guest: tuple[bytes, dict[str, Any]],
    message: str,
) -> None:
    monkeypatch.setattr(sealed_store, "MARK_SECONDS", 0.5)
    seal_store(bare, held(host[0], **host[1]), config(), is_host=True, who="island 0")
    with pytest.raises(RendezvousError, match=message):
        seal_store(bare, held(guest[0], **guest[1]), config(), is_host=False, who="island 1")


def test_a_mark_that_strangers_write_lets_nobody_in(bare: TCPStore) -> None:
    seal_store(bare, held(OTHER_KEY), config(), is_host=True, who="a stranger")
    assert MARK in bare.list_keys()
    with pytest.raises(RendezvousError, match="island 1 has another key"):
        seal_store(bare, held(KEY), config(), is_host=False, who="island 1")


@pytest.mark.parametrize("kind", [DiLoCoConfig, GossipConfig])
def test_a_key_can_be_required(
    monkeypatch: pytest.MonkeyPatch, kind: type[DiLoCoConfig] | type[GossipConfig], tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_DILOCO_KEY", raising=False)
    assert find_key(kind()) == b""
    with pytest.raises(
        ConfigError, match=r"require_key=true, and there is no key: make one by `hf-diloco keys.*as key_file or"
    ):
        find_key(kind(require_key=True))
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    assert find_key(kind(require_key=True, key_file=file)) == KEY
