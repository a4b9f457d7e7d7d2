"""Islands with a key, over sockets: what is on the wire, and what becomes of who interferes there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hf_diloco.codecs import CODECS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DamagedTransferError, ForgedError, IslandLostError, RendezvousError
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.mesh.edges import Edge, Endpoint
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.membership.all_gather import AllGather
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.topology import make_topology
from hf_diloco.sealing.channel import OVERHEAD, Agreement, Channel
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.values import ValueStore
from hf_diloco.transport import meeting
from hf_diloco.transport.base import Lane
from hf_diloco.transport.connections import Connections, Sealer
from hf_diloco.transport.handshake import PLACE, End, Line
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.transport.open import MeshTransport
from hf_diloco.transport.transfers import Deadline, Transfers
from hf_diloco.utils.public_keys import show_public
from tests.clocks import LONG
from tests.gossip_meshes import join, talk_together
from tests.islands import run_islands, try_islands
from tests.processes import find_free_port
from tests.tcp_stores import KeptStore

KEY = LinkKey(b"0123456789abcdef")
PRIVATE = [Ed25519PrivateKey.generate() for _ in range(3)]
LISTED = {node: [show_public(key.public_key().public_bytes_raw())] for node, key in enumerate(PRIVATE)}
LOCALHOST = "127.0.0.1"
MODES = pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "authenticated"])


def make_values(island: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(island))


def averages(num_islands: int, key: LinkKey | None, payload: str, connections: int) -> list[list[torch.Tensor]]:
    """What each island has after each of two exchanges."""
    store, size = ValueStore.in_memory(), 300_001

    def run(island: int) -> list[torch.Tensor]:
        mesh = MeshExchange(Lane(store, "0", island, num_islands, LOCALHOST, LONG, key, num_connections=connections))
        kept = []
        for number in range(2):
            values = make_values(10 * number + island, size)
            mesh.average(values, [1.0] * num_islands, CODECS[payload])
            kept.append(values)
        mesh.close()
        return kept

    return run_islands(num_islands, run)


@MODES
@pytest.mark.parametrize(("num_islands", "payload", "connections"), [(2, "fp32", 1), (3, "int8", 2)])
def test_a_key_changes_no_bit_of_what_is_averaged(
    encrypt: bool, num_islands: int, payload: str, connections: int
) -> None:
    bare = averages(num_islands, None, payload, connections)
    sealed = averages(num_islands, LinkKey(KEY.secret, encrypt), payload, connections)
    for one, other in zip(bare, sealed, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_broadcasts_and_messages_are_sealed_too() -> None:
    store = ValueStore.in_memory()

    def run(island: int) -> tuple[torch.Tensor, dict[int, bytes]]:
        heard = threading.Event()
        mesh = MeshExchange(Lane(store, "0", island, 2, LOCALHOST, LONG, KEY))
        values = make_values(island, 1000)
        mesh.broadcast(values, source=1)
        mesh.send_message(b"from %d" % island, heard.set)
        assert heard.wait(LONG)
        said = mesh.messages()
        mesh.close()
        return values, said

    for island, (values, said) in enumerate(run_islands(2, run)):
        assert torch.equal(values, make_values(1, 1000))
        assert said == {1 - island: b"from %d" % (1 - island)}


def test_memory_of_a_message_serves_the_next_though_that_has_another_length() -> None:
    end = End(1, 0)
    sealer = Sealer({end: Channel(bytes(32), bytes(32))})

    def seal(num_values: int) -> tuple[torch.Tensor, Transfers]:
        transfers = Transfers()
        (sealed,) = sealer.seal(torch.ones(num_values), end, 1, transfers)
        assert len(sealed) == 4 * num_values + OVERHEAD
        return sealed, transfers

    first, under_way = seal(20_000)
    second, _ = seal(20_000)
    assert second.data_ptr() != first.data_ptr(), "the first may still be read"
    under_way.check()
    assert seal(30_000)[0].data_ptr() == first.data_ptr()


class Wire:
    """All that Gloo is given to send, as whoever sits on the way sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, bytes]] = []
        start = Connections._start

        def tapped(
            links: Connections, operation: str, tensor: torch.Tensor, peer: int, tag: int, number: int
        ) -> object:
            if operation == "send":
                self.seen.append((tag, bytes(tensor.view(torch.uint8).numpy())))
            return start(links, operation, tensor, peer, tag, number)

        monkeypatch.setattr(Connections, "_start", tapped)


@pytest.mark.parametrize("payload", ["fp32", "int8"])
def test_the_wire_carries_ciphertext_alone(monkeypatch: pytest.MonkeyPatch, payload: str) -> None:
    wire = Wire(monkeypatch)
    store, values = ValueStore.in_memory(), torch.arange(4096, dtype=torch.float32)
    code = torch.empty(CODECS[payload].num_bytes(values.numel()), dtype=torch.uint8)
    CODECS[payload].encode(values, code)

    def run(island: int) -> None:
        heard = threading.Event()
        mesh = MeshExchange(Lane(store, "0", island, 2, LOCALHOST, LONG, KEY))
        mesh.average(values.clone(), [1.0, 1.0], CODECS[payload])
        mesh.send_message(b"a secret of this run", heard.set)
        heard.wait(LONG)
        mesh.close()

    run_islands(2, run)
    carried = b"".join(data for _, data in wire.seen)
    plain = bytes(code.numpy())
    assert len(carried) > 2 * len(plain)
    assert b"secret" not in carried
    assert not any(plain[start : start + 16] in carried for start in range(0, len(plain) - 16, 16))
    assert KEY.secret not in carried


def exchanges_under(
    attack: Callable[[int, int, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, encrypt: bool
) -> list[object]:
    """What island 0 gets of island 1's three exchanges; `attack` sees each message and says what arrives instead."""
    seal, store = Sealer.seal, ValueStore.in_memory()

    def attacked(self: Sealer, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        wires = seal(self, part, end, tag, transfers)
        return [attack(tag, number, wire) for number, wire in enumerate(wires)] if end.peer == 0 else wires

    monkeypatch.setattr(Sealer, "seal", attacked)

    def run(island: int) -> list[object]:
        mesh = MeshExchange(Lane(store, "0", island, 2, LOCALHOST, LONG, LinkKey(KEY.secret, encrypt)))
        outcomes: list[object] = []
        for number in range(3):
            values = make_values(10 * number + island, 3000)
            try:
                mesh.average(values, [1.0, 1.0], CODECS["fp32"])
            except DamagedTransferError as error:
                outcomes.append(error)
            else:
                outcomes.append(values)
        mesh.close()
        return outcomes

    return run_islands(2, run)[0]


def alter(tag: int, number: int, wire: torch.Tensor) -> torch.Tensor:
    if tag == 2:
        wire = wire.clone()
        wire.view(torch.uint8)[5] ^= 1
    return wire


class Replay:
    """What was sent first is sent for each later place."""

    def __init__(self) -> None:
        self._first: dict[int, torch.Tensor] = {}

    def __call__(self, tag: int, number: int, wire: torch.Tensor) -> torch.Tensor:
        return self._first.setdefault(number, wire.clone()) if tag <= 2 else wire


@MODES
@pytest.mark.parametrize("attack", [alter, Replay()], ids=["altered", "replayed"])
def test_what_was_tampered_with_is_refused_and_the_next_round_goes_well(
    monkeypatch: pytest.MonkeyPatch, attack: Callable[[int, int, torch.Tensor], torch.Tensor], encrypt: bool
) -> None:
    if isinstance(attack, Replay):
        attack = Replay()
    first, second, third = exchanges_under(attack, monkeypatch, encrypt)
    assert isinstance(second, DamagedTransferError)
    assert second.islands == (1,)
    said = "island 1 sent arrived damaged (it was altered in transit, or sent before or for another place"
    assert said in str(second)
    for number, values in ((0, first), (2, third)):
        expected = (make_values(10 * number, 3000) + make_values(10 * number + 1, 3000)) / 2
        assert isinstance(values, torch.Tensor)
        assert torch.allclose(values, expected)


def test_a_node_loses_a_neighbour_whose_messages_are_altered(monkeypatch: pytest.MonkeyPatch) -> None:
    seal, store = Sealer.seal, ValueStore.in_memory()
    monkeypatch.setattr(Sealer, "seal", lambda *arguments: [wire.bitwise_not() for wire in seal(*arguments)])

    def run(node: int) -> None:
        edge = Edge(Endpoint(store, node, LOCALHOST, LONG, key=KEY), "gossip", 1 - node, "1.1", LONG)
        transfers, received = edge.begin(), torch.empty(10)
        edge.receive(received, transfers)
        edge.send(torch.ones(10), transfers)
        try:
            edge.wait(transfers, Deadline(LONG))
        finally:
            assert torch.equal(received, torch.zeros(10))
            edge.close()

    for node, outcome in enumerate(try_islands(2, run)):
        assert isinstance(outcome, IslandLostError), outcome
        assert f"node {1 - node} sent arrived damaged (it was altered in transit" in str(outcome)


def publish(store: ValueStore, node: int, key: LinkKey) -> MeshPublished:
    """One of two nodes that take what the other one published."""
    end = MeshPublished(Endpoint(store, node, LOCALHOST, LONG, key=key), [1 - node])
    end.connect(1 - node, "1.1", LONG)
    end.publish(torch.full((1000,), node, dtype=torch.uint8))
    return end


def test_a_node_takes_nothing_more_from_another_once_that_was_altered(monkeypatch: pytest.MonkeyPatch) -> None:
    seal, store = Sealer.seal, ValueStore.in_memory()
    ends = run_islands(2, lambda node: publish(store, node, KEY))
    assert ends[0].pull(1)[0] is not None

    def altered(self: Sealer, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        wires = seal(self, part, end, tag, transfers)
        return [wire.bitwise_not() for wire in wires] if end.peer == 0 else wires

    monkeypatch.setattr(Sealer, "seal", altered)
    assert ends[0].pull(1)[0] is None
    assert ends[0].take_lost() == {1: "its connection broke"}
    for end in ends:
        end.close()


# Connecting


def test_connecting_takes_two_messages_each_way_and_a_round_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for key in (None, KEY):
        said: list[bytes] = []
        send = Line.send

        def tapped(line: Line, message: bytes, send: Callable[..., None] = send, said: list[bytes] = said) -> None:
            said.append(message)
            send(line, message)

        monkeypatch.setattr(Line, "send", tapped)
        wire = Wire(monkeypatch)
        averages(2, key, "int8", 3)
        counts.append((len(said), len(wire.seen)))
        monkeypatch.undo()
    bare, sealed = counts
    assert sealed[0] - bare[0] == 2 * 2, "two messages of each end: two round trips, however many connections"
    assert sealed[1] <= bare[1]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FORGED_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("num_connections", "unproved"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("liar", [0, 1])
def test_a_connection_without_proof_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_connections: int, unproved: int, liar: int
) -> None:
    """One end holds the key, but cannot prove it for one of its connections. It does not wait for who has left."""
    confirm = Agreement.confirm

    def wrong(part: Agreement, public: bytes) -> bytes:
        answer = confirm(part, public)
        is_wrong = part._own == liar and part._connection == unproved
        return bytes(32) if is_wrong else answer

    monkeypatch.setattr(Agreement, "confirm", wrong)
    store = ValueStore.in_memory()

    def run(end: int) -> None:
        Connections(Lane(store, "0", end, 2, LOCALHOST, LONG, KEY, num_connections=num_connections))

    outcomes = try_islands(2, run)
    assert isinstance(outcomes[1 - liar], ForgedError)
    assert isinstance(outcomes[liar], IslandLostError)


@pytest.mark.usefixtures("impatient")
def test_an_end_whose_addresses_are_altered_on_their_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow the proof of the key, and Gloo would connect to whatever they say."""
    seal, store = Channel.seal, ValueStore.in_memory()

    def altered(channel: Channel, place: tuple[int, int], message: bytes) -> bytes:
        first, *rest = seal(channel, place, message)
        return bytes([first ^ 1 if place[0] == PLACE else first, *rest])

    monkeypatch.setattr(Channel, "seal", altered)
    outcomes = try_islands(2, lambda end: Connections(Lane(store, "0", end, 2, LOCALHOST, LONG, KEY)))
    assert {type(outcome) for outcome in outcomes} <= {ForgedError, IslandLostError}
    told = [f"in the name of island {1 - end}, a message was altered in transit, or sent before" for end in range(2)]
    assert any(text in str(outcome) for text, outcome in zip(told, outcomes, strict=True)), outcomes


def test_a_node_takes_nothing_from_another_that_holds_another_key() -> None:
    store, keys = ValueStore.in_memory(), [KEY, LinkKey(b"another key, too")]
    for outcome in try_islands(2, lambda node: publish(store, node, keys[node])):
        assert isinstance(outcome, ForgedError)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (None, "island 1 connects without a key, and this one with a key, encrypted: give all the same key"),
        (
            LinkKey(KEY.secret, encrypt=False),
            "island 1 connects with a key and encrypt: false, and this one with a key",
        ),
    ],
)
def test_an_end_in_another_mode_is_named_at_once(other: LinkKey | None, told: str) -> None:
    store = ValueStore.in_memory()
    outcomes = try_islands(
        2, lambda end: Connections(Lane(store, "0", end, 2, LOCALHOST, LONG, other if end else KEY))
    )
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    assert told in str(outcomes[0])


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (b'{"version": 3, "way": "by magic", "host": "127.0.0.1", "port": 1}', "protocol 3, where this one"),
        (b"rubbish", "island 1 has another version of hf_diloco (it published an invalid address"),
        (b'{"version": 4, "way": "", "host": "127.0.0.1", "port": 1e999}', "it published an invalid address"),
        (b'{"version": 4, "way": "", "host": "127.0.0.1", "port": 65536}', "it published an invalid address"),
        (b"[" * 100_000, "it published an invalid address"),
    ],
)
def test_an_end_of_another_version_is_named_at_once(key: LinkKey | None, shown: bytes, told: str) -> None:
    store = ValueStore.in_memory()
    store.set("mesh/0/at/1", shown.decode())
    with pytest.raises(RendezvousError, match="install the same version on all") as caught:
        Connections(Lane(store, "0", 0, 2, LOCALHOST, LONG, key))
    assert told in str(caught.value)


def test_who_does_not_come_is_lost() -> None:
    with pytest.raises(IslandLostError, match="did not publish where to connect") as caught:
        Connections(Lane(ValueStore.in_memory(), "0", 0, 2, LOCALHOST, 0.5, KEY))
    assert caught.value.islands == (1,)


def test_sealed_and_in_memory_are_equal() -> None:
    network, size = MemoryNetwork(2), 300_001

    def run(island: int) -> torch.Tensor:
        values = make_values(island, size)
        network.lane("0", island).average(values, [1.0, 1.0], CODECS["fp32"])
        return values

    assert torch.equal(run_islands(2, run)[0], averages(2, KEY, "fp32", 1)[0][0])


# Whole runs


def test_islands_of_fixed_membership_seal_all_that_goes_over_tcp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY.secret)
    key_file.chmod(0o600)
    url = f"tcp://{LOCALHOST}:{find_free_port()}"
    wire = Wire(monkeypatch)
    transports = []  # they last until both islands are done: the other one's store is island 0's

    def run(island: int) -> torch.Tensor:
        config = DiLoCoConfig(num_islands=2, island=island, rendezvous=url, key_file=key_file, join_timeout=LONG)
        transport, values = MeshTransport(config, is_leader=True), torch.full((5000,), float(island))
        transports.append(transport)
        all_gather = AllGather(transport.store, island, 2)
        Members(transport.store.log, island).enter(may_return=False)
        assert all_gather.share("topic", {"island": island}, LONG) == [{"island": 0}, {"island": 1}]
        lane = transport.open(0)
        lane.average(values, [1.0, 1.0], CODECS["fp32"])
        all_gather.share("done", {}, LONG)
        lane.close()
        return values

    for values in run_islands(2, run):
        assert torch.equal(values, torch.full((5000,), 0.5))
    carried = b"".join(data for _, data in wire.seen)
    assert len(carried) > 2 * 4 * 5000
    assert bytes(64) not in carried, "the zeros of island 0"


@MODES
def test_nodes_seal_all_that_goes_between_them(monkeypatch: pytest.MonkeyPatch, encrypt: bool) -> None:
    store, wire = KeptStore(), Wire(monkeypatch)
    secret = torch.full((500,), 7.0)

    def enter(node: int) -> MeshNeighbours:
        signer = Signer(PRIVATE[node], node, Roster(LISTED, "node")) if encrypt else None
        return join(store, make_topology("full", 3), node, key=LinkKey(KEY.secret, encrypt, signer))

    def talk(node: int, neighbours: MeshNeighbours) -> None:
        mixed = torch.empty_like(secret)
        neighbours.mix([secret], [mixed], 0)
        assert torch.allclose(mixed, secret)
        mean = torch.full((500,), float(node))
        neighbours.average(mean)
        assert torch.allclose(mean, torch.ones(500))
        published = neighbours.published()
        published.publish(secret.view(torch.uint8))
        neighbours.share("published", {})
        for peer in neighbours.peers * 2:
            payload, _ = published.pull(peer)
            assert payload is not None
            assert torch.equal(payload.view(torch.float32), secret)
        neighbours.share("pulled", {})

    talk_together(3, enter, talk)
    carried = b"".join(data for _, data in wire.seen)
    assert (secret[:4].numpy().tobytes() in carried) is not encrypt
