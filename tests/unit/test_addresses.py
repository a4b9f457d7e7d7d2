"""Addresses that are refused before anything is started, and warnings where traffic is not protected."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

import hf_diloco
from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, RendezvousError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.open import open_node
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from hf_diloco.rounds.open import open_session
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.rendezvous import StoreHost, find_address, find_store, warn_if_exposed
from hf_diloco.store.tcp_store import meet
from hf_diloco.transport.open import MeshTransport
from hf_diloco.utils.urls import check_specific, is_loopback, is_public
from hf_diloco.utils.waiting import WaitNotes
from tests.processes import find_free_port

ROOT = Path(__file__).parents[2]
PUBLIC = "tcp://8.8.8.8:29400"
EVERYWHERE = ["0.0.0.0", "::", "0", "::ffff:0.0.0.0", "::ffff:0:0"]


@pytest.mark.parametrize("address", EVERYWHERE)
def test_every_interface_is_refused_in_every_form(address: str) -> None:
    with pytest.raises(ValueError, match=r"every interface of the machine.*the one address that the others reach"):
        check_specific(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "::1", "localhost", "node-0", "::ffff:10.0.0.1"])
def test_one_address_is_taken(address: str) -> None:
    assert check_specific(address) == address


def test_kinds_of_addresses() -> None:
    assert all(is_public(address) for address in ("8.8.8.8", "::ffff:8.8.8.8", "2001:4860:4860::8888"))
    assert not any(is_public(address) for address in ("10.0.0.1", "fe80::1%eth0", "127.0.0.1", "node-0"))
    assert [is_loopback(address) for address in ("127.0.0.9", "::1", "10.0.0.1")] == [True, True, False]


@pytest.mark.parametrize("kind", ["DiLoCoConfig", "GossipConfig", "DiLoCoCallback", "GossipCallback"])
@pytest.mark.parametrize(
    "settings",
    [
        {"rendezvous": "tcp://0.0.0.0:29400"},
        {"rendezvous": "tcp://[::]:29400", "allow_public_address": True},
        {"rendezvous": "tcp://10.0.0.1:29400", "bind_address": "0.0.0.0"},
        {"rendezvous": "tcp://10.0.0.1:29400", "bind_address": "::"},
    ],
    ids=str,
)
def test_settings_and_callbacks_refuse_every_interface(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(0\.0\.0\.0|::) stands for every interface"):
        getattr(hf_diloco, kind)(**{"num_nodes" if "Gossip" in kind else "num_islands": 2}, **settings)


@pytest.mark.parametrize("setting", ["diloco.rendezvous=tcp://0.0.0.0:29400", "diloco.bind_address='::'"])
def test_the_run_file_refuses_every_interface(setting: str) -> None:
    with pytest.raises(ConfigError, match="stands for every interface"):
        read_run_file(RunFile, ROOT / "configs" / "quickstart.yaml", [setting])


def test_nodes_are_not_sent_to_an_object_store() -> None:
    """Which they refuse, as it is too slow for an exchange after every step."""
    islands, nodes = DiLoCoConfig(rendezvous=PUBLIC), GossipConfig(rendezvous=PUBLIC)
    with pytest.raises(RendezvousError, match=r"is a public address.*or meet in an object store\. Where"):
        find_store(islands, WaitNotes(1))
    for meet_there in (lambda: find_store(nodes, WaitNotes(1, "node")), lambda: StoreHost(nodes, unit="node")):
        with pytest.raises(RendezvousError, match=r"is a public address.*has a recipe\)\. Where a firewall"):
            meet_there()


def test_a_name_for_every_interface_is_refused_where_it_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("0.0.0.0", 1))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    settings = DiLoCoConfig(rendezvous="memory://here", exchange="mesh", bind_address="anywhere.example")
    with pytest.raises(RendezvousError, match=r"anywhere\.example: 0\.0\.0\.0 stands for every interface"):
        find_address(settings)
    with pytest.raises(RendezvousError, match="stands for every interface"):
        meet(
            DiLoCoConfig(rendezvous="tcp://anywhere.example:29400"),
            Credentials(),
            is_host=True,
            who="island 0",
            size={"num_islands": 1},
            silent_for=1.0,
            notes=WaitNotes(0),
        )


def test_who_is_alone_has_an_address_of_this_machine_too() -> None:
    """The setting has no use there, but is of use when others come."""
    with pytest.raises(ConfigError, match=r"bind_address: '192\.0\.2\.1' is no address of this machine"):
        open_session(DiLoCoConfig(num_islands=1, bind_address="192.0.2.1"), IslandGroup())
    topology = make_topology("ring", 1)
    with pytest.raises(ConfigError, match=r"bind_address: '192\.0\.2\.1' is no address of this machine"):
        open_node(GossipConfig(num_nodes=1, bind_address="192.0.2.1"), topology, IslandGroup())
    open_node(GossipConfig(num_nodes=1, bind_address="127.0.0.1"), topology, IslandGroup()).close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("unit", ["island", "node"])
def test_islands_and_nodes_that_find_nobody_or_no_place_are_told_in_their_terms(unit: str) -> None:
    port = find_free_port()

    def try_to_meet(host: str, is_host: bool) -> str:
        config = DiLoCoConfig(num_islands=2, island=1, rendezvous=f"tcp://{host}:{port}", join_timeout=0.1)
        with pytest.raises(RendezvousError) as caught:
            meet(config, Credentials(), is_host, f"{unit} 1", {}, 1.0, WaitNotes(1, unit))
        return str(caught.value)

    assert f"Is {unit} 0 running there" in try_to_meet("127.0.0.1", False)
    assert f"{unit} 0 keeps the rendezvous: start {unit} 0 on" in try_to_meet("192.0.2.1", True)
    with socket.create_server(("127.0.0.1", port)):
        told = try_to_meet("127.0.0.1", True)
    assert f"or {unit} 0 of this run is running already" in told
    assert f"another port for all {unit}s" in told


def test_talking_over_a_network_without_authentication_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for address in ("127.0.0.1", "::1", "localhost"):
        warn_if_exposed(address)
    assert warnings_of(caplog) == []
    warn_if_exposed("10.0.0.1")
    (warning,) = warnings_of(caplog)
    assert "10.0.0.1 is neither encrypted nor authenticated" in warning
    assert "read the weights, change them, or end the run" in warning


def test_islands_that_meet_over_tcp_without_a_key_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_diloco.store.rendezvous.is_loopback", lambda address: False)
    for key, is_told in (("", True), ("k" * 32, False)):
        monkeypatch.setenv("HF_DILOCO_KEY", key)
        caplog.clear()
        config = DiLoCoConfig(num_islands=2, rendezvous=f"tcp://127.0.0.1:{find_free_port()}")
        MeshTransport(config, is_leader=True)
        assert len(warnings_of(caplog)) == is_told
        assert all("Give all one key (key_file or HF_DILOCO_KEY)" in text for text in warnings_of(caplog))
