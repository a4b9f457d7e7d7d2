"""Messages that somebody has altered, one after the other by the thousand: each is refused as the package says."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hf_diloco.errors import DiLoCoError
from hf_diloco.sealing.channel import Agreement, Channel
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.sealing.stored import BLOCK_OVERHEAD, BlockSeal
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.store.values import BytesRecord, ValueStore
from hf_diloco.transport import meeting
from hf_diloco.transport.base import Lane
from hf_diloco.transport.meeting import Meeting
from hf_diloco.utils.public_keys import show_public

KEY, RUN = b"0123456789abcdef", "run 1"
PRIVATE = [Ed25519PrivateKey.generate() for _ in range(2)]
ROSTER = Roster({island: [show_public(one.public_key().public_bytes_raw())] for island, one in enumerate(PRIVATE)})
SIGNERS = [Signer(private, island, ROSTER) for island, private in enumerate(PRIVATE)]


@dataclass
class Target:
    """What opens messages of one kind.

    Attributes:
        messages: genuine ones, each for a place of its own.
        open: what opens a message in the place of the one with a number: None, or an error, if that is refused.
        refusals: errors by which it refuses; those of the package, but for what only closes the line that it came by.
        has_meaning: whether two different texts may be the same message, as in JSON.
    """

    messages: Sequence[bytes]
    open: Callable[[int, bytes], object]
    refusals: tuple[type[Exception], ...] = (DiLoCoError,)
    has_meaning: bool = False


def mutate(draw: random.Random, messages: Sequence[bytes], at: int) -> bytes:
    """What an attacker may hand over in the place of the message with a number, out of all that it has seen."""
    changed = bytearray(messages[at])
    other = messages[(at + draw.randrange(1, len(messages))) % len(messages)]
    where = draw.randrange(len(changed) + 1)
    match draw.randrange(9):
        case 0:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        case 1:
            for _ in range(draw.randrange(2, 20)):
                changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
        case 2:  # cut short, at either end
            changed = changed[:where] if draw.randrange(2) else changed[where:]
        case 3:
            changed[where:where] = draw.randbytes(draw.randrange(1, 40))
        case 4:  # sent before, for another place, by another end
            return other
        case 5:  # halves of two
            changed[where:] = other[where:]
        case 6:  # another end, such as a counter or a tag
            length = draw.choice([4, 8, 16, 24])
            changed[-length:] = draw.randbytes(length)
        case 7:  # another text
            text = draw.choice([b"{", b"}", b'"', b"\\", b"\\u0000", b"NaN", b"[[[[", b"1e999", b"-", b"\0", b"\xff"])
            changed[where : where + draw.randrange(3)] = text
        case _:
            return draw.randbytes(draw.randrange(200))
    return bytes(changed)


def channel(encrypt: bool) -> Target:
    there, back = secrets.token_bytes(32), secrets.token_bytes(32)
    one, other = Channel(there, back, encrypt), Channel(back, there, encrypt)
    places = [(tag, part) for tag in range(1, 9) for part in range(4)]
    sealed = [one.seal(place, secrets.token_bytes(64)) for place in places]
    return Target(sealed, lambda at, data: other.open(places[at], data))


def handshake(signed: bool) -> Target:
    """The second message: proof that the other end has the key, and its identity."""
    keys = [LinkKey(KEY, signer=signer) if signed else LinkKey(KEY) for signer in SIGNERS]
    parts = [(Agreement(keys[0], f"{n}", 0, 0, 1), Agreement(keys[1], f"{n}", 0, 1, 0)) for n in range(8)]
    for here, there in parts:
        here.confirm(there.public)
    said = [there.confirm(here.public) for here, there in parts]
    return Target(said, lambda at, data: parts[at][0].finish(data))


def public_keys() -> Target:
    """The first message, when the second is genuine."""
    parts = [(Agreement(LinkKey(KEY), f"{n}", 0, 0, 1), Agreement(LinkKey(KEY), f"{n}", 0, 1, 0)) for n in range(8)]
    said = [there.confirm(here.public) for here, there in parts]

    def open_both(at: int, data: bytes) -> object:
        parts[at][0].confirm(data)
        return parts[at][0].finish(said[at])

    return Target([there.public for _, there in parts], open_both)


def greetings() -> Target:
    """Who calls whom in which lane: the first message of a line, before Gloo listens."""
    calls = [("lane", 1, 0), ("other", 1, 0), ("lane", 2, 1), ("lane", 3, 0)]
    hellos = [meeting._HELLO.pack(meeting._MAGIC, meeting._digest(lane), own, called) for lane, own, called in calls]
    meetings = [Meeting.__new__(Meeting) for _ in calls]  # without a port
    for one, (lane, own, called) in zip(meetings, calls, strict=True):
        one._lane = Lane(ValueStore.in_memory(), lane, called, 4, "127.0.0.1", 1.0)
        one._own, one._peers = called, [own]
    return Target(hellos, lambda at, data: meetings[at]._identify(data), refusals=(ValueError,))


def records(signed: bool, encrypt: bool) -> Target:
    seal = Seal(KEY, RUN, SIGNERS[0] if signed else None, encrypt)
    paths = [f"rounds/{n}/00/plan.json" for n in range(8)]
    bodies = [{"by": 0, "round": n, "weights": [1.5, 2.0]} for n in range(8)]
    data = [seal.wrap(path, body) for path, body in zip(paths, bodies, strict=True)]
    return Target(data, lambda at, data: seal.open(paths[at], data), has_meaning=True)


def values(signed: bool, encrypt: bool) -> Target:
    """What fixed islands and nodes leave for each other at tcp://, read as they read it."""
    log = RunLog(ObjectStore("memory://values"), Seal(KEY, RUN, SIGNERS[0] if signed else None, encrypt))
    paths = [f"values/round/{n}/plan.json" for n in range(8)]
    data = [log.seal.wrap(path, {"value": f"round {n}"}) for n, path in enumerate(paths)]

    def read(at: int, data: bytes) -> object:
        log.store.put(paths[at], data)
        return log.read(paths[at], BytesRecord)

    return Target(data, read, has_meaning=True)


def blocks() -> Target:
    seal, places = BlockSeal(KEY, RUN), [(path, number) for path in ("a", "b") for number in range(4)]
    sealed = []
    for place in places:
        sealed.append(bytearray(100 + BLOCK_OVERHEAD))
        seal.seal_into(*place, secrets.token_bytes(100), memoryview(sealed[-1]))
    return Target([bytes(one) for one in sealed], lambda at, data: seal.open(*places[at], memoryview(data)))


TARGETS: dict[str, tuple[int, Callable[[], Target]]] = {
    "encrypted": (25_000, lambda: channel(encrypt=True)),
    "authenticated": (15_000, lambda: channel(encrypt=False)),
    "handshake": (10_000, lambda: handshake(signed=False)),
    "signed handshake": (5_000, lambda: handshake(signed=True)),
    "public keys": (4_000, public_keys),
    "greetings": (10_000, greetings),
    "records": (6_000, lambda: records(signed=False, encrypt=False)),
    "signed records": (5_000, lambda: records(signed=True, encrypt=False)),
    "encrypted records": (5_000, lambda: records(signed=False, encrypt=True)),
    "values": (5_000, lambda: values(signed=False, encrypt=True)),
    "authenticated values": (5_000, lambda: values(signed=False, encrypt=False)),
    "signed values": (5_000, lambda: values(signed=True, encrypt=True)),
    "blocks": (10_000, blocks),
}
"""How many of each kind are tried, 110,000 in all, and what opens them."""


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_altered_is_refused_by_one_of_the_packages_errors(name: str) -> None:
    (count, make), draw = TARGETS[name], random.Random(name)
    target, num_tried = make(), 0
    while num_tried < count:
        at = draw.randrange(len(target.messages))
        changed = mutate(draw, target.messages, at)
        if changed != target.messages[at] and not (target.has_meaning and mean_the_same(changed, target.messages[at])):
            num_tried += 1
            with contextlib.suppress(*target.refusals):
                assert target.open(at, changed) is None, (at, changed)
    for at, message in enumerate(target.messages):
        assert target.open(at, message) is not None


def mean_the_same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False
