"""What nodes take from each other without waiting: from memory, and over real connections on this machine."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch

from hf_diloco.errors import ConfigError, IslandLostError, PayloadError
from hf_diloco.gossip.mesh.edges import Endpoint
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.published import Published, VersionedBuffer
from hf_diloco.methods.topology import make_topology
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Traffic
from tests.clocks import AT_ONCE, LONG
from tests.islands import run_islands, try_islands

LOCALHOST = "127.0.0.1"


def payload(fill: int, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), fill, dtype=torch.uint8)


def memory(num_nodes: int) -> list[Published]:
    graph = MemoryGraph(make_topology("full", num_nodes))
    return [graph.node(number).published() for number in range(num_nodes)]


def connected(
    store: ValueStore, node: int, neighbours: Collection[int], exchange_timeout: float = LONG
) -> MeshPublished:
    end = MeshPublished(Endpoint(store, node, LOCALHOST, exchange_timeout), neighbours)
    try:
        for peer in neighbours:
            end.connect(peer, "1.1", LONG)
    except IslandLostError:
        end.close()
        raise
    return end


def mesh(num_nodes: int, exchange_timeout: float = LONG) -> list[MeshPublished]:
    store = ValueStore.in_memory()

    def join(node: int) -> MeshPublished:
        return connected(store, node, [other for other in range(num_nodes) if other != node], exchange_timeout)

    return run_islands(num_nodes, join)


@pytest.fixture(params=[memory, mesh])
def ends(request: pytest.FixtureRequest) -> Iterator[list[Published]]:
    nodes = request.param(3)
    yield nodes
    for node in nodes:
        node.close()


# What every transport does


def test_the_last_one_is_taken_again_and_again(ends: list[Published]) -> None:
    for number, end in enumerate(ends):
        end.publish(payload(number))
    for _ in range(3):
        received, traffic = ends[0].pull(2)
        assert received is not None
        assert torch.equal(received, payload(2))
        assert traffic.bytes_received == 1000
    ends[2].publish(payload(9))
    received, _ = ends[0].pull(2)
    assert received is not None
    assert torch.equal(received, payload(9))


def test_nothing_was_published_yet(ends: list[Published]) -> None:
    ends[0].publish(payload(1))
    assert ends[0].pull(1) == (None, Traffic())
    ends[1].publish(payload(2))
    assert ends[0].pull(1)[0] is not None


def test_a_payload_is_copied(ends: list[Published]) -> None:
    mine = payload(1)
    ends[0].publish(mine)
    ends[1].publish(payload(2))
    mine.zero_()
    received, _ = ends[1].pull(0)
    assert received is not None
    assert torch.equal(received, payload(1))
    own = ends[0].own()
    assert own is not None
    assert torch.equal(own, payload(1))
    assert ends[2].own() is None


def test_what_was_taken_stays_while_the_other_goes_on(ends: list[Published]) -> None:
    ends[0].publish(payload(0))
    ends[1].publish(payload(1))
    received, _ = ends[0].pull(1)
    for fill in range(2, 6):
        ends[1].publish(payload(fill))
    assert received is not None
    assert torch.equal(received, payload(1))


def test_bytes_that_others_take_count_as_sent(ends: list[Published]) -> None:
    for end in ends:
        end.publish(payload(1))
    ends[1].pull(0)
    ends[2].pull(0)
    deadline, sent = time.monotonic() + AT_ONCE, 0
    while sent < 2000 and time.monotonic() < deadline:  # a mesh counts when the last byte has gone
        sent += ends[0].pull(1)[1].bytes_sent
    assert sent == 2000
    assert ends[0].pull(1)[1] == Traffic(0, 1000)


def test_another_length_is_refused(ends: list[Published]) -> None:
    ends[0].publish(payload(1, size=999))
    ends[1].publish(payload(1))
    with pytest.raises(PayloadError, match=r"node 1 published 1,000 bytes, this node \(0\) 999"):
        ends[0].pull(1)


def test_who_takes_has_published_and_names_another_node(ends: list[Published]) -> None:
    with pytest.raises(ConfigError, match="publish first"):
        ends[0].pull(1)
    ends[0].publish(payload(1))
    for node in (0, 3, -1):
        with pytest.raises(ConfigError, match=f"node {node}"):
            ends[0].pull(node)


def test_what_is_taken_is_never_torn(ends: list[Published]) -> None:
    """While all publish and take as fast as they can, each payload is one that was published."""
    size, num_rounds, num_expected = 300_000, 60, 5
    seen: list[set[int]] = [set() for _ in range(3)]

    def run(node: int) -> None:
        """As long as any has seen too little: one alone may be through with all its rounds before the others begin."""
        number, deadline = 0, time.monotonic() + LONG
        while number < num_rounds or (min(map(len, seen)) < num_expected and time.monotonic() < deadline):
            ends[node].publish(payload(number % 256, size))
            received, _ = ends[node].pull((node + 1) % 3)
            if received is not None:
                assert (received == received[0]).all()
                seen[node].add(int(received[0]))
            number += 1

    run_islands(3, run)
    assert all(len(one) >= num_expected for one in seen)


def test_memory_is_used_again() -> None:
    versioned = VersionedBuffer()
    places = set()
    for fill in range(10):
        versioned.put(payload(fill))
        with versioned.newest() as newest:
            assert newest is not None
            places.add(newest.data_ptr())
    assert len(places) == 2


# Between processes


def test_large_payloads_and_many_neighbours() -> None:
    size, num_nodes = 9_000_001, 4
    nodes = mesh(num_nodes)
    contents = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        for number in range(num_nodes)
    ]

    def run(node: int) -> None:
        nodes[node].publish(contents[node])
        while (received := nodes[node].pull((node + 1) % num_nodes)[0]) is None:
            time.sleep(0.01)
        assert torch.equal(received, contents[(node + 1) % num_nodes])

    run_islands(num_nodes, run)
    for end in nodes:
        end.close()


def test_a_node_that_computes_is_not_waited_for() -> None:
    """Node 1 does nothing at all while node 0 takes from it."""
    nodes = mesh(2)
    for end in nodes:
        end.publish(payload(3))
    begin = time.monotonic()
    for _ in range(20):
        assert nodes[0].pull(1)[0] is not None
    assert time.monotonic() - begin < AT_ONCE
    for end in nodes:
        end.close()


def test_a_node_that_is_gone_is_reported_once_and_left_out() -> None:
    nodes = mesh(3)
    for end in nodes:
        end.publish(payload(3))
    assert nodes[0].pull(1)[0] is not None
    nodes[1].close()
    begin = time.monotonic()
    for _ in range(3):
        assert nodes[0].pull(1)[0] is None
    assert time.monotonic() - begin < AT_ONCE
    assert nodes[0].take_lost() == {1: "it has ended"}
    assert nodes[0].take_lost() == {}
    assert nodes[0].lost == {1}
    assert nodes[0].pull(2)[0] is not None, "the others are still there"
    assert nodes[1].pull(0)[0] is None, "who has left gets nothing"
    for end in nodes:
        end.close()


def test_who_asks_nothing_notices_that_a_node_is_gone() -> None:
    nodes = mesh(2)
    nodes[1].close()
    deadline, lost = time.monotonic() + LONG, nodes[0].take_lost()
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
        lost = nodes[0].take_lost()
    assert lost == {1: "it has ended"}
    nodes[0].close()


def test_both_notice_when_one_lets_go_of_the_other_and_may_connect_again() -> None:
    store = ValueStore.in_memory()
    nodes = run_islands(2, lambda node: connected(store, node, [1 - node]))
    for number in range(3):
        for end in nodes:
            end.publish(payload(10 * number + end.node))
        for end in nodes:
            received, _ = end.pull(1 - end.node)
            assert received is not None
            assert torch.equal(received, payload(10 * number + 1 - end.node))
        nodes[1].drop(0)
        assert nodes[1].pull(0)[0] is None
        assert nodes[0].pull(1)[0] is None
        assert nodes[0].take_lost() == {1: "its connection broke"}
        assert nodes[1].take_lost() == {}, "it was this one that let go"
        run_islands(2, lambda node, life=f"1.{number + 2}": nodes[node].connect(1 - node, life, LONG))  # type: ignore[misc]
        assert nodes[0].lost == nodes[1].lost == set()
    for end in nodes:
        end.close()


def test_waiting_for_a_neighbour_may_be_ended() -> None:
    end = MeshPublished(Endpoint(ValueStore.in_memory(), 0, LOCALHOST, LONG), [1])

    def stop() -> None:
        raise IslandLostError("gone again")

    with pytest.raises(IslandLostError, match="nodes 0 and 1 did not connect"):
        end.connect(1, "1.1", 1000 * LONG, stop)
    end.close()


def test_who_has_closed_connects_no_more() -> None:
    store = ValueStore.in_memory()
    nodes = run_islands(2, lambda node: connected(store, node, [1 - node]))
    nodes[1].close()
    outcomes = try_islands(2, lambda node: nodes[node].connect(1 - node, "1.2", LONG))
    assert outcomes[0] is None
    assert isinstance(outcomes[1], IslandLostError)
    assert nodes[1].lost == {0}
    nodes[0].close()


def test_a_node_whose_answers_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = mesh(2, exchange_timeout=0.5)
    for end in nodes:
        end.publish(payload(3))
    held = threading.Lock()
    held.acquire()
    monkeypatch.setattr(nodes[1]._versioned, "_lock", held)  # its machine hangs
    begin = time.monotonic()
    assert nodes[0].pull(1)[0] is None
    assert 0.4 < time.monotonic() - begin < AT_ONCE
    assert nodes[0].take_lost() == {1: "it did not answer within 0.5 s"}
    assert nodes[0].lost == {1}
    held.release()
    for end in nodes:
        end.close()


def test_who_does_not_come_is_named() -> None:
    store = ValueStore.in_memory()

    def join(node: int) -> None:
        if node != 2:
            end = connected(store, node, [1 - node])
            try:
                end.connect(2, "1.1", 1.0)
            finally:
                end.close()

    for error in try_islands(3, join)[:2]:
        assert isinstance(error, IslandLostError)
        assert error.islands == (2,)


def test_only_neighbours_are_connected() -> None:
    store, neighbours = ValueStore.in_memory(), [[1], [0, 2], [1]]
    nodes = run_islands(3, lambda node: connected(store, node, neighbours[node]))
    for end in nodes:
        end.publish(payload(end.node))
    with pytest.raises(ConfigError, match=r"node 2.*\[1\]"):
        nodes[0].pull(2)
    assert nodes[1].pull(2)[0] is not None
    for end in nodes:
        end.close()


def test_who_leaves_first_waits_for_nobody() -> None:
    """Its threads end although the others ask nothing, and stay."""

    def served() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("hf-diloco-published")]

    before = len(served())
    nodes = mesh(3)
    assert len(served()) == before + 6
    nodes[0].close()
    assert len([name for name in served() if name.endswith("-0")]) <= 2
    assert len(served()) <= before + 4
    for end in nodes:
        end.close()
    assert len(served()) == before


def test_threads_and_sockets_are_closed() -> None:
    def drain(count: Callable[[], int], limit: int) -> int:
        deadline = time.monotonic() + AT_ONCE
        while count() > limit and time.monotonic() < deadline:
            time.sleep(0.05)
        return count()

    def files() -> int:
        gc.collect()
        descriptors = Path("/proc/self/fd").iterdir()
        # A port that a test was given stays locked by a file: see `find_free_port`.
        return sum("test-ports" not in str(one.readlink()) for one in descriptors if one.is_symlink())

    def use() -> None:
        nodes = mesh(3)
        for end in nodes:
            end.publish(payload(1))
        nodes[0].pull(1)
        for end in nodes:
            end.close()
            end.close()

    use()
    threads, opened = threading.active_count(), files()
    uses = 3
    for _ in range(uses):
        use()
    # One left open each time would be found; what tests before this one have left may come and go.
    assert drain(threading.active_count, threads + uses - 1) < threads + uses
    assert drain(files, opened + uses - 1) < opened + uses
