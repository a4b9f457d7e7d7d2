"""Two islands, each a process with a network of its own, and between the two an attacker, which is their router.

Whatever one sends to the other comes here, as addresses of packets are rewritten. The first connection of a meeting
is answered, and the other island called, by somebody with another identity; Gloo's connections are attacked as
`tests/attackers.py` can; all else goes on as it is.

Settings, as JSON: folder (with run.key, island-0.pem, island-1.pem, and the stranger's stranger.pem), identities,
num_steps, script (by the number of an exchange the name of an attack). Leaves in the folder "wire", all that came
here, and of each island "island-K.json" (hashes and log) and "plain-K", all that it has sealed.

Needs Linux, iproute2, iptables, util-linux, and to be allowed networks of its own; no root.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cryptography.utils import Buffer

from hf_diloco.sealing.channel import Agreement, Channel
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.store.credentials import Credentials, load_identity, load_key
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import url_of
from hf_diloco.store.signing import MEETING
from hf_diloco.transport import connections, meeting
from hf_diloco.utils.public_keys import show_public
from tests.attackers import Attack, Attacker, at, attacks, read
from tests.clocks import LONG
from tests.programs.session_island import settings, train

ADDRESSES = ["10.77.0.1", "10.77.1.1"]
RENDEZVOUS, PORT = 29_400, 9_000
PARTS, PART_BYTES, LEAST_BYTES = 2, 2048, 1024
"""Payloads of an exchange, each way; what each may have, and has at least."""
_NEW_USER, _NEW_NETWORK = 0x1000_0000, 0x4000_0000  # CLONE_NEWUSER, CLONE_NEWNET
_SO_ORIGINAL_DST = 80
_MEETING = (meeting._HELLO.size).to_bytes(4, "big") + meeting._MAGIC[:4]
"""How a connection of a meeting begins; one of Gloo's does with a small number."""


# An island


class Island(NamedTuple):
    """A process with a network of its own.

    Attributes:
        pid: of the process.
        line: over which it is told that its network has a link.
    """

    pid: int
    line: socket.socket


def start_island(island: int, order: dict[str, Any]) -> Island:
    """Forks an island, which waits for its link."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        assert ours.recv(1), f"island {island} has no network"
        return Island(pid, ours)
    code = 1
    try:
        _unshare(_NEW_NETWORK)
        theirs.send(b"1")
        theirs.recv(1)
        _run_island(island, order)
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(code)


def _run_island(island: int, order: dict[str, Any]) -> None:
    folder, records = Path(order["folder"]), list[str]()
    plain = (folder / f"plain-{island}").open("wb", buffering=0)
    seal_into = Channel.seal_into

    def tapped(channel: Channel, place: tuple[int, int], message: Buffer, sealed: memoryview) -> None:
        plain.write(message)
        seal_into(channel, place, message, sealed)

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("hf_diloco").addHandler(Log())
    Channel.seal_into = tapped  # type: ignore[method-assign,assignment]
    connections.MAX_PART_BYTES = PART_BYTES
    meeting.FORGED_SECONDS = LONG
    torch.set_num_threads(1)
    secrets = {
        "key_file": folder / "run.key",
        "identity_file": folder / "island-{island}.pem",
        "identities": order["identities"],
    }
    config = settings(island, 2, f"tcp://{ADDRESSES[0]}:{RENDEZVOUS}", "fp32", **secrets)
    hashes = train(config, num_steps=order["num_steps"])
    (folder / f"island-{island}.json").write_text(json.dumps({"hashes": hashes, "log": records}))


# The attacker's network


def enter_network() -> None:
    """Gives this process, which has one thread, a network of its own, in which it may do all."""
    user, group = os.geteuid(), os.getegid()
    _unshare(_NEW_NETWORK if user == 0 else _NEW_NETWORK | _NEW_USER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def join(number: int, island: Island) -> None:
    """Links an island's network to this one, to which all that it sends goes."""
    near, router = f"near{number}", f"10.77.{number}.254"
    inside = f"nsenter --net --target {island.pid} ip"
    for command in (
        f"ip link add {near} type veth peer name eth0 netns {island.pid}",
        f"ip addr add {router}/24 dev {near}",
        f"ip link set {near} up",
        f"iptables -w -t nat -A PREROUTING -i {near} -p tcp -j REDIRECT --to-ports {PORT}",
        f"iptables -w -t nat -A POSTROUTING -o {near} -p tcp -j SNAT --to-source {ADDRESSES[1 - number]}",
        f"{inside} link set lo up",
        f"{inside} link set eth0 up",
        f"{inside} addr add {ADDRESSES[number]}/24 dev eth0",
        f"{inside} route add 10.77.0.0/16 via {router}",
    ):
        subprocess.run(command.split(), check=True)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


# The attacker


class Router:
    """Receives all connections between the islands.

    Args:
        attacker: of those of Gloo's.
        folder: with the keys that it has come by.
    """

    def __init__(self, attacker: Attacker, folder: Path) -> None:
        self.attacker = attacker
        self._folder = folder
        self._has_met = False

    def serve(self) -> None:
        """Never returns."""
        listener = socket.create_server(("0.0.0.0", PORT))
        while True:
            near, _ = listener.accept()
            threading.Thread(target=self._route, args=(near,), daemon=True).start()

    def _route(self, near: socket.socket) -> None:
        raw = near.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        port, host = int.from_bytes(raw[2:4], "big"), socket.inet_ntoa(raw[4:8])
        try:
            far = socket.create_connection((host, port))
        except OSError:
            near.close()
            return
        is_gloos = False
        if port != RENDEZVOUS:
            start = near.recv(8, socket.MSG_PEEK | socket.MSG_WAITALL)
            if start == _MEETING and not self._has_met:
                self._has_met = True
                self._impersonate(near, far)
                return
            is_gloos = start != _MEETING
        (self.attacker.relay if is_gloos else self.attacker.relay_as_it_is)(near, far)

    def _impersonate(self, near: socket.socket, far: socket.socket) -> None:
        """Tells each island that this is the other one, by the run's key and an identity that is not the other's."""
        far.sendall(read(near, 4 + meeting._HELLO.size))
        mark = ObjectStore(url_of(f"tcp://{ADDRESSES[0]}:{RENDEZVOUS}")).get(MEETING, 1 << 20)
        found = re.search(rb"run\W+([0-9a-f]{32})", mark or b"")
        assert found, "the mark of the run is in clear"
        private = load_identity(self._folder / "stranger.pem", 0)
        assert private is not None
        shown, shared = show_public(private.public_key().public_bytes_raw()), load_key(self._folder / "run.key")
        for end, line in ((0, near), (1, far)):
            key = Credentials(shared, Signer(private, end, Roster({end: [shown]}))).link_key(found[1].decode())
            assert key is not None
            part = Agreement(key, "lane0", 0, end, 1 - end)
            _say(line, part.public)
            _say(line, part.confirm(_hear(line)))
            _hear(line)  # the island's proof, in return
            line.close()


def _say(line: socket.socket, part: bytes) -> None:
    line.sendall((4 + len(part)).to_bytes(4, "big") + len(part).to_bytes(4, "big") + part)


def _hear(line: socket.socket) -> bytes:
    return read(line, int.from_bytes(read(line, 4), "big"))[4:]


def script_of(names: Mapping[Any, str]) -> Attack:
    """The attacks on the exchanges with these numbers."""
    known = attacks(PARTS)
    return at(
        {PARTS * int(number) + part: attack for number, name in names.items() for part, attack in known[name].items()}
    )


def main() -> None:
    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    attacker = Attacker(script_of(order["script"]), LEAST_BYTES)
    enter_network()
    islands = [start_island(number, order) for number in range(2)]
    threading.Thread(target=Router(attacker, folder).serve, daemon=True).start()
    for number, island in enumerate(islands):
        join(number, island)
    for island in islands:
        island.line.send(b"1")
    ended = [os.waitstatus_to_exitcode(os.waitpid(island.pid, 0)[1]) for island in islands]
    (folder / "wire").write_bytes(attacker.seen)
    sys.exit(max(map(abs, ended)))


if __name__ == "__main__":
    main()
