"""Identities: nobody who holds the run's key speaks for an island whose own key it does not hold."""

from __future__ import annotations

import base64
import json
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from hf_diloco.cli.main import app
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, DuplicateIslandError, ForgedError, RendezvousError, UnknownIdentityError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import IncarnationRecord, incarnation_path
from hf_diloco.sealing.channel import ISLANDS, Agreement, Parties
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.credentials import ENV_IDENTITY, Credentials, find_credentials, make_identity
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES, MEETING, Seal
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.public_keys import show_public
from tests.clocks import StillClock
from tests.tcp_stores import Port

KEY = b"0123456789abcdef"
PRIVATE = [Ed25519PrivateKey.generate() for _ in range(4)]
PUBLIC = [show_public(private.public_key().public_bytes_raw()) for private in PRIVATE]
KEYS = {island: [PUBLIC[island]] for island in range(3)}


def signer(island: int, private: int | None = None, listed: dict[int, list[str]] | None = None) -> Signer:
    """Of an island, with its own key or another; `listed`: other keys for some islands."""
    return Signer(PRIVATE[island if private is None else private], island, Roster({**KEYS, **(listed or {})}))


def config(**settings: Any) -> DiLoCoConfig:
    return DiLoCoConfig(**{"num_islands": 3, "rendezvous": "tcp://127.0.0.1:29400", **settings})


# Records in an object store


def seal(island: int, listed: dict[int, list[str]] | None = None) -> Seal:
    return Seal(KEY, "run", signer(island, listed=listed))


OFFER, VOTE, PLAN = (
    "rounds/7/00/offers/00001-000001-000000.json",
    "rounds/7/00/votes/00001.json",
    "rounds/7/00/plan.json",
)


@pytest.mark.parametrize(
    ("path", "body", "others"),
    [
        (OFFER, {"island": 1}, False),
        (OFFER, {"island": 2}, False),
        ("incarnations/1/000001.json", {"pid": 3}, False),
        ("heartbeats/1/000001.json", {"count": 3}, False),
        ("snapshots/00000007/00001-000001/rank-00000.json", {"round": 7}, False),
        (VOTE, {"island": 1, "mean": "ab"}, False),
        (VOTE, {"island": 1, "mean": ""}, True),
        ("rounds/7/00/missing/00001-000001.json", {"island": 1, "mean": ""}, False),
        (PLAN, {"by": 1}, False),
        (PLAN, {"by": 2}, True),
        ("rounds/7/00/mean/rank-00000.json", {"rank": 0}, True),
        ("start.json", {"folder": "x"}, True),
    ],
)
def test_an_island_signs_only_what_bears_its_name(path: str, body: dict[str, Any], others: bool) -> None:
    data = seal(2).wrap(path, body)
    if others:
        assert seal(0).open(path, data) == body
        return
    with pytest.raises(UnknownIdentityError, match=rf"island 2 has signed {path} in the name of island 1"):
        seal(0).open(path, data)


def test_what_an_island_signed_is_its_own_and_opens_for_all() -> None:
    data = seal(1).wrap(OFFER, {"island": 1})
    assert json.loads(data)["by"] == 1
    assert seal(0).open(OFFER, data) == Seal(KEY, "run").open(OFFER, data) == {"island": 1}
    with pytest.raises(UnknownIdentityError, match="is not signed, and this run's islands have identities"):
        seal(0).open(OFFER, Seal(KEY, "run").wrap(OFFER, {"island": 1}))


def test_a_signature_that_was_altered_or_taken_from_elsewhere_is_refused() -> None:
    record = json.loads(seal(1).wrap(OFFER, {"island": 1}))
    good = base64.b64decode(record["signature"])
    elsewhere = base64.b64decode(json.loads(seal(1).wrap(PLAN, {"by": 1}))["signature"])
    draw = random.Random(1)
    tried: list[bytes] = [elsewhere, b"", good[:-1], good + b"\0"]
    for _ in range(300):
        changed = bytearray(good)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        tried.append(bytes(changed))
    for bad in tried:
        with pytest.raises(ForgedError):
            seal(0).open(OFFER, json.dumps(record | {"signature": base64.b64encode(bad).decode()}).encode())
    for by in (0, 2, 9, -1, "1", None, True):
        with pytest.raises(ForgedError):
            seal(0).open(OFFER, json.dumps(record | {"by": by}).encode())


def test_keys_are_replaced_and_taken_away() -> None:
    old = seal(1).wrap(OFFER, {"island": 1})
    heartbeat = seal(1).wrap("heartbeats/1/000001.json", {})
    new = Seal(KEY, "run", signer(1, 3, {1: [PUBLIC[1], PUBLIC[3]]})).wrap(OFFER, {"island": 1})
    both = seal(0, {1: [PUBLIC[1], PUBLIC[3]]})
    assert both.open(OFFER, old) == both.open(OFFER, new)
    retired = seal(0, {1: [f"{PUBLIC[1]} until 7", PUBLIC[3]]})
    assert retired.open(OFFER, old) == {"island": 1}
    for path in ("incarnations/1/000001.json", "start.json", "start-2.json"):  # which stay as the run goes on
        assert retired.open(path, seal(1).wrap(path, {"pid": 3})) == {"pid": 3}
    with pytest.raises(UnknownIdentityError, match=r"island 1 shows .* which counts until round 7 only"):
        retired.open("heartbeats/1/000001.json", heartbeat)
    with pytest.raises(ConfigError, match="which counts until round 7 only"):
        signer(1, listed={1: [f"{PUBLIC[1]} until 7", PUBLIC[3]]})
    with pytest.raises(UnknownIdentityError, match="until round 6 only"):
        seal(0, {1: [f"{PUBLIC[1]} until 6", PUBLIC[3]]}).open(OFFER, old)
    with pytest.raises(
        UnknownIdentityError, match=rf"island 1 shows the identity {PUBLIC[1]}, .* on all islands"
    ) as caught:
        seal(0, {1: [PUBLIC[3]]}).open(OFFER, old)
    assert caught.value.island == 1


def test_who_has_a_replaced_key_takes_no_number_over() -> None:
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    old = Members(RunLog(store, seal(1)), 1)
    old.enter()
    replaced = {1: [f"{PUBLIC[1]} until 7", PUBLIC[3]]}
    island = Members(RunLog(store, Seal(KEY, "run", signer(1, 3, replaced))), 1, clock=StillClock())
    assert island.enter() == 2
    assert island.newest_incarnation(1) == 2
    record = old.log.read(incarnation_path(1, 1), IncarnationRecord)
    assert record is not None
    old.log.put(incarnation_path(1, 3), record)
    assert island.check_incarnation()
    island.log.put(incarnation_path(1, 4), record)
    with pytest.raises(DuplicateIslandError, match="has taken over as island 1"):
        island.check_incarnation()


# Encrypted records


def test_who_keeps_the_store_reads_nothing_of_a_record() -> None:
    sealed = Seal(KEY, "run", signer(1), encrypt=True)
    body = {"island": 1, "folder": "/home/somebody/secret"}
    data = sealed.wrap(OFFER, body)
    assert json.loads(data).keys() == {"sealed"}
    assert b"secret" not in base64.b64decode(json.loads(data)["sealed"])
    assert seal(0).open(OFFER, data) == Seal(KEY, "run").open(OFFER, data) == body
    for other, path in (
        (Seal(KEY, "another run"), OFFER),
        (Seal(b"another key, as long", "run"), OFFER),
        (Seal(b"", "run"), OFFER),
        (Seal(KEY, "run"), VOTE),
    ):
        with pytest.raises(ForgedError):
            other.open(path, data)


# Connections


def shake(one: LinkKey, other: LinkKey, parties: Parties = ISLANDS) -> None:
    """Both ends of a handshake; raises what either does."""
    here, there = Agreement(one, "lane", 0, 0, 1, parties), Agreement(other, "lane", 0, 1, 0, parties)
    said, answer = here.confirm(there.public), there.confirm(here.public)
    place, sealed = (1, 0), here.finish(answer).seal((1, 0), b"hello")
    assert there.finish(said).open(place, sealed) == b"hello"


def test_a_handshake_shows_which_island_is_there() -> None:
    link = [LinkKey(KEY, signer=signer(island)) for island in range(3)]
    shake(link[0], link[1])
    shake(link[1], link[2], Parties((1, 2)))
    with pytest.raises(UnknownIdentityError, match=r"data in the name of island 1|island 1 shows the identity"):
        shake(link[0], link[2])  # island 2 answers where island 1 should
    with pytest.raises(UnknownIdentityError, match=f"island 1 shows the identity {PUBLIC[3]}, which is not listed"):
        shake(link[0], LinkKey(KEY, signer=signer(1, 3, {1: [PUBLIC[3]]})))
    retired = LinkKey(KEY, signer=signer(0, listed={1: [f"{PUBLIC[1]} until 9", PUBLIC[3]]}))
    with pytest.raises(UnknownIdentityError, match="until round 9 only"):
        shake(retired, link[1])
    for one, other in ((link[0], LinkKey(KEY)), (LinkKey(KEY), link[1])):
        with pytest.raises(ForgedError, match="or no identity where the others have some"):
            shake(one, other)


def test_a_signature_of_one_handshake_is_worth_nothing_in_another() -> None:
    link = [LinkKey(KEY, signer=signer(island)) for island in range(2)]
    here, there = Agreement(link[0], "lane", 0, 0, 1), Agreement(link[1], "lane", 0, 1, 0)
    seen = there.confirm(here.public)
    here.confirm(there.public)
    again, stranger = Agreement(link[0], "lane", 0, 0, 1), Agreement(LinkKey(KEY, signer=signer(0)), "lane", 0, 1, 0)
    again.confirm(stranger.public)
    answer = stranger.confirm(again.public)
    for forged in (seen, answer[:32] + seen[32:], seen[:32] + answer[32:], answer):
        with pytest.raises(ForgedError):
            again.finish(forged)


# The rendezvous at tcp://


@pytest.fixture
def port() -> Port:
    return Port()


def enter(port: Port, who: Signer | None, number: int) -> ValueStore:
    return port.enter(number, Credentials(KEY, who)).store


def test_a_value_in_the_name_of_another_counts_as_absent(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    stores = [enter(port, signer(island), island) for island in range(3)]
    graph = ("waits/1", "share/x/0/1", "greet/0/2/1", "entry/0/2/at/1", "entry/0/2/3/1", "again/0-1/1.1/1/2/1")
    returning = ("entry/1/2/company", "entry/1/2/proposal", "entry/1/2/asks/0", "again/1-2/1.1/4/proposal")
    for key in ("join/1", "training-2/state/1", *(f"graph/{key}" for key in (*graph, *returning))):
        stores[2].set(key, "from island 2")
        assert stores[0].find(key) is None, key
        stores[1].set(key, "from island 1")
        assert stores[0].find(key) == b"from island 1"
    assert "island 2 has signed values/join/1.json in the name of island 1" in caplog.text
    for key in ("entry/1/2/3/decision", "again/1-2/1.1", "lost/1"):
        stores[2].set(f"graph/{key}", "anybody's")
        assert stores[0].find(f"graph/{key}") == b"anybody's"
    assert stores[2].create("mesh/lane0", "late 1") == stores[0].create("mesh/lane0", "") == b"late 1"
    Members(stores[1].log, 1).enter(may_return=False)


@pytest.mark.parametrize(
    ("host", "guest", "message"),
    [
        (signer(0), None, "island 1 gives no identity, and the run at .* has a list .*hf-diloco keys make"),
        (None, signer(1), "island 1 has an identity, and the run at .* lists nobody's: set the same"),
        (
            signer(0, listed={1: [PUBLIC[3]]}),
            signer(1),
            rf"island 1 shows the identity {PUBLIC[1]}, which is not listed",
        ),
        (
            signer(0, listed={1: [f"{PUBLIC[1]} until 4"]}),
            signer(1),
            "island 1 shows the identity .*, which counts until round 4 only",
        ),
        (
            signer(0),
            signer(1, listed={0: [PUBLIC[3]]}),
            rf"island 0 shows the identity {PUBLIC[0]}, which is not listed",
        ),
        (
            signer(0),
            signer(1, listed={2: [PUBLIC[3]]}),
            r"another list of identities .*: identities\.2 differs. Give all",
        ),
    ],
    ids=["none", "only one's", "unknown", "replaced", "the host's is unknown", "another list"],
)
def test_who_does_not_fit_is_told_at_the_start(
    port: Port, host: Signer | None, guest: Signer | None, message: str
) -> None:
    keeps = enter(port, host, 0)
    with pytest.raises(RendezvousError, match=message):
        enter(port, guest, 1)
    assert keeps.add("claim/0", 1) == 1


@pytest.mark.parametrize("other", [{"version": 4}, {"more": 1}, {"size": {}}])
def test_another_version_is_told_at_the_start(port: Port, other: dict[str, Any]) -> None:
    keeps, seal = enter(port, None, 0), Credentials(KEY).seal("-")
    mark = port.bare.get(MEETING, MAX_RECORD_BYTES)
    assert mark is not None
    port.bare.put(MEETING, seal.wrap(MEETING, {**seal.open(MEETING, mark), **other}))
    with pytest.raises(RendezvousError, match=r"island 1 has another version of hf_diloco .* install one on all"):
        enter(port, None, 1)
    assert keeps.add("claim/0", 1) == 1


# Settings and files


def test_the_command_makes_and_shows_identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_IDENTITY, raising=False)
    file, shared = tmp_path / "island-1.pem", tmp_path / "run.key"
    run = CliRunner().invoke
    made, shown = run(app, ["keys", "make", str(file)]), run(app, ["keys", "show", str(file)])
    assert made.output == shown.output
    assert run(app, ["keys", "make", "--shared", str(shared)]).exit_code == 0
    assert [path.stat().st_mode & 0o777 for path in (file, shared)] == [0o600, 0o600]
    assert isinstance(run(app, ["keys", "make", str(file)]).exception, ConfigError), "nothing is overwritten"
    keys = {0: PUBLIC[0], 1: made.output.strip()}
    for kind, number in ((DiLoCoConfig, {"island": 1}), (GossipConfig, {"node": 1})):
        pattern = "{island}" if kind is DiLoCoConfig else "{node}"
        settings = {"key_file": shared, "identities": keys, "identity_file": tmp_path / f"island-{pattern}.pem"}
        count = {"num_islands" if kind is DiLoCoConfig else "num_nodes": 2, "rendezvous": "tcp://127.0.0.1:29400"}
        found = find_credentials(kind(**settings, **number, **count), 1)
        assert found.signer is not None
        assert show_public(found.signer.public) == keys[1]
        assert "PRIVATE" not in repr(found) + repr(found.signer)
    file.chmod(0o640)
    assert "other users of this machine can read it: chmod 600" in str(run(app, ["keys", "show", str(file)]).exception)
    assert "no Ed25519 private key" in str(run(app, ["keys", "show", str(shared)]).exception)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"identities": {0: PUBLIC[0]}}, "island 0 has no identity: make one by"),
        ({"identity_file": "{tmp}"}, "identities lists nobody: list every island's public key"),
        ({"identity_file": "{tmp}", "identities": {0: PUBLIC[0]}}, r"identities\.0 does not list it"),
        ({"identities": {0: "ssh-ed25519 AAAA"}}, "is no public key: paste what `hf-diloco keys show FILE` prints"),
        ({"identities": {0: []}}, r"identities\.0"),
        ({"encrypt_store": True, "rendezvous": "memory://x"}, "encrypt_store needs the run's key as well"),
    ],
)
def test_settings_that_do_not_go_together(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_IDENTITY, raising=False)
    monkeypatch.delenv("HF_DILOCO_KEY", raising=False)
    make_identity(tmp_path / "own.pem")
    given = {name: tmp_path / "own.pem" if value == "{tmp}" else value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        find_credentials(DiLoCoConfig(**given), 0)
