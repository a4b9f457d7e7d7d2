"""What an attacker can do to messages that pass through its hands, and to values that lie in its reach: nothing."""

from __future__ import annotations

import base64
import pickle
import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings, strategies as st

from hf_diloco.errors import ForgedError
from hf_diloco.sealing.channel import OVERHEAD, Agreement, Channel
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey, derive
from hf_diloco.sealing.stored import BlockSeal, ValueSeal
from hf_diloco.store.credentials import Credentials
from hf_diloco.utils.public_keys import show_public

KEY = b"0123456789abcdef"
OTHER_KEY = b"0123456789abcdeg"
PLACE = 7, 2
MODES = pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "authenticated"])


def channels(encrypt: bool = True) -> tuple[Channel, Channel]:
    """The two ends of one connection."""
    there, back = secrets.token_bytes(32), secrets.token_bytes(32)
    return Channel(there, back, encrypt), Channel(back, there, encrypt)


# Messages


@MODES
@given(message=st.binary(max_size=300), tag=st.integers(0, 2**31 - 1), number=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_what_is_sealed_opens_at_the_other_end_for_its_place(
    encrypt: bool, message: bytes, tag: int, number: int
) -> None:
    here, there = channels(encrypt)
    sealed = here.seal((tag, number), message)
    assert len(sealed) == len(message) + OVERHEAD
    assert there.open((tag, number), sealed) == message
    assert there.open((tag + 1, number), sealed) is None
    assert there.open((tag, number + 1), sealed) is None
    assert here.open((tag, number), sealed) is None, "sent back to who sent it"
    assert channels(encrypt)[1].open((tag, number), sealed) is None, "another connection"


def test_who_is_on_the_way_sees_ciphertext_alone() -> None:
    here, _ = channels()
    message = b"weights " * 64
    first, second = here.seal(PLACE, message), here.seal(PLACE, message)
    for sealed in (first, second):
        assert not any(message[start : start + 8] in sealed for start in range(8))
    assert first[: len(message)] != second[: len(message)], "the same message twice looks different"
    assert channels(encrypt=False)[0].seal(PLACE, message).startswith(message)


@MODES
def test_no_nonce_is_used_twice(encrypt: bool) -> None:
    here, _ = channels(encrypt)
    counters = [here.seal((n % 3, 0), b"x")[-8:] for n in range(1000)]
    assert len(set(counters)) == len(counters)


# Key agreement


def agree(
    keys: tuple[LinkKey, LinkKey] = (LinkKey(KEY), LinkKey(KEY)),
    names: tuple[str, str] = ("0", "0"),
    connections: tuple[int, int] = (0, 0),
    numbers: tuple[tuple[int, int], tuple[int, int]] = ((0, 1), (1, 0)),
) -> tuple[Channel, Channel]:
    """Both ends' channels, if each accepts the other."""
    here, there = (
        Agreement(key, name, connection, *ends)
        for key, name, connection, ends in zip(keys, names, connections, numbers, strict=True)
    )
    to_there, to_here = here.confirm(there.public), there.confirm(here.public)
    return here.finish(to_here), there.finish(to_there)


@MODES
def test_both_ends_come_to_the_same_keys_each_time_to_others(encrypt: bool) -> None:
    key = LinkKey(KEY, encrypt)
    here, there = agree((key, key))
    for one, other in ((here, there), (there, here)):
        assert other.open(PLACE, one.seal(PLACE, b"message")) == b"message"
    _, later = agree((key, key))
    assert later.open(PLACE, here.seal(PLACE, b"message")) is None


@pytest.mark.parametrize(
    "differs",
    [
        {"keys": (LinkKey(KEY), LinkKey(OTHER_KEY))},
        {"keys": (LinkKey(KEY), LinkKey(b""))},
        {"keys": (LinkKey(KEY), LinkKey(KEY, encrypt=False))},
        {"names": ("1/0", "2/0")},
        {"connections": (0, 1)},
        {"numbers": ((0, 1), (2, 0))},
        {"numbers": ((0, 1), (0, 1))},
    ],
    ids=["key", "no key", "encrypt", "name", "connection", "number", "same number"],
)
def test_ends_that_differ_do_not_agree(differs: dict[str, tuple[object, object]]) -> None:
    with pytest.raises(ForgedError, match=r"island \d does not hold the run's key.*give all islands one key"):
        agree(**differs)  # type: ignore[arg-type]


def test_what_was_said_is_worth_nothing_said_again_or_sent_back() -> None:
    first, honest = (Agreement(LinkKey(KEY), "0", 0, *ends) for ends in ((0, 1), (1, 0)))
    said = honest.public, honest.confirm(first.public)
    again = Agreement(LinkKey(KEY), "0", 0, 0, 1)
    for public, confirmation in (said, (again.public, again.confirm(again.public))):
        again.confirm(public)
        with pytest.raises(ForgedError):
            again.finish(confirmation)


def test_who_swaps_public_keys_on_the_way_is_found() -> None:
    """An attacker that has no key agrees with each end by itself."""
    here, there = (Agreement(LinkKey(KEY), "0", 0, *ends) for ends in ((0, 1), (1, 0)))
    attacker = Agreement(LinkKey(OTHER_KEY), "0", 0, 1, 0)
    to_there = here.confirm(attacker.public)
    there.confirm(attacker.public)
    with pytest.raises(ForgedError):
        there.finish(to_there)
    with pytest.raises(ForgedError):
        here.finish(attacker.confirm(here.public))


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_public_key_that_gives_everybody_the_same_secret_is_refused(point: bytes) -> None:
    with pytest.raises(ForgedError):
        Agreement(LinkKey(KEY), "0", 0, 0, 1).confirm(point)


def test_keys_say_nothing_of_each_other_and_are_not_shown() -> None:
    kinds = [derive(KEY, purpose, run) for purpose in ("a", "b") for run in ("1", "2")]
    assert len(set(kinds)) == 4
    assert Credentials().link_key("1") is None
    link_key = Credentials(KEY).link_key("1")
    assert link_key is not None
    assert link_key.secret not in (KEY, derive(KEY, "encrypted records", "1"))
    assert repr(link_key.secret) not in repr(link_key)
    private = Ed25519PrivateKey.generate()
    roster = Roster({0: [show_public(private.public_key().public_bytes_raw())]})
    for secret in (link_key, BlockSeal(KEY, "1"), Signer(private, 0, roster), Credentials(KEY)):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            pickle.dumps(secret)


# Values in a store


def test_a_value_opens_for_its_key_and_run_alone() -> None:
    seal = ValueSeal(KEY, "run 1")
    sealed = seal.wrap("claim/1", b"value").encode()
    assert seal.open("claim/1", sealed) == b"value"
    assert (b"value" in sealed) is False
    strangers = [ValueSeal(KEY, "run 2"), ValueSeal(OTHER_KEY, "run 1")]
    for other, path in ((strangers[0], "claim/1"), (strangers[1], "claim/1"), (seal, "claim/2")):
        assert other.open(path, sealed) is None
    for length in range(len(base64.b64decode(sealed))):
        assert seal.open("claim/1", base64.b64encode(base64.b64decode(sealed)[:length])) is None
