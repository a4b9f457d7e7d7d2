"""Islands of this process with an attacker between them: nothing that it does to a message is accepted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.codecs import CODECS
from hf_diloco.errors import DamagedTransferError, IslandLostError
from hf_diloco.rounds.elastic_rounds import MAX_IN_A_ROW
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.credentials import make_key
from hf_diloco.store.values import ValueStore
from hf_diloco.transport import connections
from hf_diloco.transport.base import Lane
from hf_diloco.transport.mesh import MeshExchange
from tests.attackers import (
    ADDRESSES,
    Attack,
    Attacker,
    Way,
    at,
    attackers,
    attacks,
    cut,
    drop,
    flip,
    have_64_bytes_in_common,
    of_another_island,
    pass_on,
)
from tests.clocks import LONG
from tests.islands import run_islands
from tests.meetings import Meeting, Member
from tests.streaming_meetings import Streams, train_all
from tests.streaming_reference import NUM_STEPS, expected_weights

__all__ = ["attackers"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has one loopback address only")

KEY = LinkKey(b"0123456789abcdef")
SIZE = 6000  # values
PARTS = 3  # messages that two islands send each other in an exchange; three islands send two of the same length


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_PART_BYTES", 4 * SIZE // PARTS)


def make_values(island: int, number: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * number + island))


def averages(
    key: LinkKey | None, num_rounds: int = 4, payload: str = "fp32", num_islands: int = 2, patience: float = LONG
) -> list[list[object]]:
    """What each island has after each exchange: the average, or the error."""
    store = ValueStore.in_memory()

    def run(island: int) -> list[object]:
        mesh = MeshExchange(Lane(store, "lane", island, num_islands, ADDRESSES[island], LONG, key))
        mesh._timeout = patience
        outcomes: list[object] = []
        for number in range(num_rounds):
            values = make_values(island, number)
            try:
                mesh.average(values, [1.0] * num_islands, CODECS[payload])
            except (DamagedTransferError, IslandLostError) as error:
                outcomes.append(error)
                if isinstance(error, IslandLostError):
                    break
            else:
                outcomes.append(values)
        mesh.close()
        return outcomes

    return run_islands(num_islands, run)


def test_the_wire_carries_nothing_of_a_payload(attackers: list[Attacker]) -> None:
    for payload in ("fp32", "int8"):
        attackers.insert(0, Attacker(pass_on))
        assert all(isinstance(kept, torch.Tensor) for kept in averages(KEY, 2, payload)[0])
        seen = bytes(attackers[0].seen)
        assert len(seen) > 2 * SIZE
        for number in range(2):
            for island in range(2):
                code = torch.empty(CODECS[payload].num_bytes(SIZE), dtype=torch.uint8)
                CODECS[payload].encode(make_values(island, number), code)
                assert not have_64_bytes_in_common(seen, bytes(code.numpy()))


def test_the_same_proxy_sees_all_where_there_is_no_key(attackers: list[Attacker]) -> None:
    attackers.append(Attacker(pass_on))
    averages(None, 1)
    assert have_64_bytes_in_common(attackers[0].seen, make_values(0, 0).numpy().tobytes())


@pytest.mark.parametrize(
    ("name", "encrypt"),
    [
        *((name, True) for name in attacks(PARTS)),
        *((name, False) for name in attacks(PARTS) if name != "reordered"),  # each has a shorter one behind it
    ],
)
def test_what_was_done_to_a_message_is_refused_and_the_next_round_goes_well(
    attackers: list[Attacker], name: str, encrypt: bool
) -> None:
    attack = {PARTS + number: what for number, what in attacks(PARTS)[name].items()}
    check_second_round_is_refused(attackers, at(attack), LinkKey(KEY.secret, encrypt), num_islands=2)


def test_what_another_island_sent_in_the_same_round_is_refused(attackers: list[Attacker]) -> None:
    check_second_round_is_refused(attackers, at({2: of_another_island}), KEY, num_islands=3)


def check_second_round_is_refused(attackers: list[Attacker], attack: Attack, key: LinkKey, num_islands: int) -> None:
    attackers.append(Attacker(attack))
    for island, found in enumerate(averages(key, num_islands=num_islands)):
        for number in (0, 2, 3):
            values = found[number]
            assert isinstance(values, torch.Tensor), values
            assert torch.allclose(
                values, torch.stack([make_values(other, number) for other in range(num_islands)]).mean(0)
            )
        error = found[1]
        assert isinstance(error, DamagedTransferError)
        assert error.islands == ((0,) if island else tuple(range(1, num_islands)))
        assert "altered in transit, or sent before or for another place" in str(error)
    assert attackers[0].num_changed >= 2 * (num_islands - 1), "both ways of each connection"


@pytest.mark.parametrize(("attack", "patience"), [(cut, LONG), (drop, 4.0)])
def test_whose_messages_do_not_come_is_lost_by_name(
    attackers: list[Attacker], attack: Attack, patience: float
) -> None:
    attackers.append(Attacker(at({PARTS: attack})))
    for island, found in enumerate(averages(KEY, patience=patience)):
        assert isinstance(found[0], torch.Tensor)
        assert isinstance(found[-1], IslandLostError)
        assert found[-1].islands == (1 - island,)


def of_another_fragment_then_attempt(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    """Connections come one after the other: one a fragment, then two for more attempts at the fourth's round. Another
    island's messages each time: one whose messages are bad twice stays out of the round."""
    if number == 0 and way in (Way(3, is_answer=False), Way(4, is_answer=True)):
        return [attacker.kept[way._replace(connection=way.connection - 1)][0]]
    return [attacker.kept[way][number]]


def test_what_belongs_to_another_fragment_or_attempt_is_refused_and_the_round_is_taken_again(
    attackers: list[Attacker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_key(tmp_path / "run.key")
    attackers.append(Attacker(of_another_fragment_then_attempt, least_bytes=100))
    config: dict[str, Any] = {"sync_every": 8, "num_fragments": 4}
    patient: dict[str, Any] = {"grace": LONG, "sync_timeout": LONG}
    meeting = Streams(tmp_path, 2, exchange="mesh", key_file=tmp_path / "run.key", **config, **patient)
    islands = run_islands(2, lambda island: meeting.join(island, bind_address=ADDRESSES[island]))
    found = train_all(islands, NUM_STEPS, NUM_STEPS)
    for member, expected in zip(found, expected_weights(2, config), strict=True):
        assert torch.equal(member.weights, expected), "the equations without anybody on the way"
    assert attackers[0].num_changed == 2
    for island in range(2):
        assert f"retrying round 4: what island {island} sent arrived damaged (it was altered in" in caplog.text


def to_one_end(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    """Each attempt has a connection of its own."""
    is_attacked = way.is_answer and way.connection < MAX_IN_A_ROW
    return flip(0)(attacker, way, number) if is_attacked else pass_on(attacker, way, number)


def test_islands_of_which_one_receives_nothing_sound_miss_the_round_together(
    attackers: list[Attacker], tmp_path: Path
) -> None:
    """Neither waits for the other, which trains on."""
    make_key(tmp_path / "run.key")
    attackers.append(Attacker(to_one_end, least_bytes=100))
    patient: dict[str, Any] = {"grace": LONG, "sync_timeout": LONG}
    meeting = Meeting(tmp_path, 2, exchange="mesh", key_file=tmp_path / "run.key", **patient)

    def train(island: int) -> Member:
        member = meeting.island(island, bind_address=ADDRESSES[island]).train(2)
        assert (member.missed, member.session.outer.round) == (1, 0)
        return member.train(4).leave()

    here, there = run_islands(2, train)
    assert attackers[0].num_changed == MAX_IN_A_ROW
    assert [report.participants for report in here.reports] == [[0, 1]] * 2
    assert here.hash == there.hash
