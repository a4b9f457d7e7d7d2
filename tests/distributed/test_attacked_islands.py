"""Islands that train with an attacker on the way between them: they end with the weights that they have without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.store.credentials import make_identity, make_key
from hf_diloco.store.values import ValueStore
from hf_diloco.transport import connections
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.open import MemoryTransport
from hf_diloco.utils.public_keys import show_public
from tests.attackers import ADDRESSES, Attacker, attackers, attacks, have_64_bytes_in_common
from tests.islands import run_islands
from tests.processes import find_free_port, run
from tests.programs import attacked_islands
from tests.programs.attacked_islands import LEAST_BYTES, PART_BYTES, PARTS, script_of
from tests.programs.session_island import settings, train

__all__ = ["attackers"]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has one loopback address only"),
]

SCRIPT = {2 * number + 1: name for number, name in enumerate(attacks(PARTS))}
"""Every second exchange is attacked: a round is taken again once."""

NUM_STEPS = 3 * (len(SCRIPT) + 1)


def place_of_the_attacker() -> str:
    """In a network of its own, where this machine lets a program make some; else a proxy in the islands' process."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *user, "--net", "iptables", "-w", "-t", "nat", "-L"]
    tools = ("unshare", "nsenter", "ip", "iptables")
    allowed = (
        all(map(shutil.which, tools)) and not subprocess.run(command, check=False, capture_output=True).returncode
    )
    return "own network" if allowed else "plain proxy"


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Any]:
    """Settings of two islands; the stranger's identity was island 0's until round 3."""
    make_key(tmp_path / "run.key")
    first, second, stranger = (
        show_public(make_identity(tmp_path / f"{name}.pem").public_key().public_bytes_raw())
        for name in ("island-0", "island-1", "stranger")
    )
    return {
        "key_file": tmp_path / "run.key",
        "identity_file": tmp_path / "island-{island}.pem",
        "identities": {0: [first, f"{stranger} until 3"], 1: [second]},
    }


def hashes_without_attacker() -> list[list[str]]:
    network, store = MemoryNetwork(2), ValueStore.in_memory()
    return run_islands(
        2,
        lambda island: train(
            settings(island, 2, "tcp://unused:1", "fp32"), MemoryTransport(network, store, island), NUM_STEPS
        ),
    )


@pytest.mark.parametrize("place", [place_of_the_attacker()])
def test_islands_train_as_without_an_attacker_and_name_what_it_did(
    place: str,
    secrets: dict[str, Any],
    attackers: list[Attacker],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place == "own network":
        order = {
            "folder": str(tmp_path),
            "identities": secrets["identities"],
            "num_steps": NUM_STEPS,
            "script": SCRIPT,
        }
        run([sys.executable, "-m", attacked_islands.__name__, json.dumps(order)], timeout=180)
        left = [json.loads((tmp_path / f"island-{island}.json").read_text()) for island in range(2)]
        hashes, logs = ([one[name] for one in left] for name in ("hashes", "log"))
        wire = (tmp_path / "wire").read_bytes()
        for island in range(2):
            plain = (tmp_path / f"plain-{island}").read_bytes()
            assert len(plain) > len(SCRIPT) * PARTS * LEAST_BYTES
            assert not have_64_bytes_in_common(wire, plain)
        assert "island 1 shows the identity ed25519:" in logs[0][0]
        assert "which is not listed for it here (identities.1)" in logs[0][0]
        assert "which counts until round 3 only (identities.0)" in logs[1][0]
    else:
        monkeypatch.setattr(connections, "MAX_PART_BYTES", PART_BYTES)
        url = f"tcp://{ADDRESSES[0]}:{find_free_port()}"
        attackers.append(Attacker(script_of(SCRIPT), LEAST_BYTES))
        hashes = run_islands(
            2,
            lambda island: train(
                settings(island, 2, url, "fp32", bind_address=ADDRESSES[island], **secrets), num_steps=NUM_STEPS
            ),
        )
        logs = [caplog.messages] * 2
    assert hashes == hashes_without_attacker()
    for island, log in enumerate(logs):
        for number in range(2, len(SCRIPT) + 2):
            said = f"retrying round {number}: what island {1 - island} sent arrived damaged (it was altered in"
            assert sum(said in message for message in log) == 1
