"""Islands that are processes with networks of their own, on links of a given rate and delay, on this machine.

A program that uses them calls `enter_network` first, starts every island with `unshare --net`, and joins it:

    enter_network("benchmarks.cuts", sys.argv[1:])
    with Processes() as processes:
        links = Links(processes)
        island = processes.spawn(["unshare", "--net", sys.executable, ...])
        links.join(0, island.pid)       # once the program in it runs
        links.shape(0, rate=200, rtt=50)

Needs Linux, util-linux' `unshare` and `nsenter`, iproute2 and iptables; no root, though with it delays are more exact.
The networks, and all that is in them, go when their processes do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from tests.processes import Process, Processes

_NETWORK = "10.77.0"
_INSIDE = "HF_DILOCO_BENCHMARK_NETWORK"
_SEGMENT = 66_000
"""Bytes: a bucket that does not hold the longest packet has the kernel cut it."""


class Links:
    """A bridge and one link an island. The bridge has an address too, which all islands reach.

    Args:
        processes: where those that delay packets are started.
        congestion: islands' TCP congestion control, of those in net.ipv4.tcp_allowed_congestion_control; default: the
            machine's.
    """

    host = f"{_NETWORK}.254"

    def __init__(self, processes: Processes, congestion: str | None = None) -> None:
        self._processes = processes
        self._congestion = congestion
        self._pids: dict[int, int] = {}
        self._looped: list[int] = []
        self._delays: dict[int, Process] = {}
        _run("ip link set lo up")
        _run("ip link add bridge0 type bridge")
        _run(f"ip addr add {self.host}/24 dev bridge0")
        _run("ip link set bridge0 up")

    @staticmethod
    def address(island: int) -> str:
        """Of an island."""
        return f"{_NETWORK}.{island + 1}"

    def join(self, island: int, pid: int) -> None:
        """Links the network of a process to the bridge."""
        self._pids[island] = pid
        _run(f"ip link add out{island} type veth peer name in{island}")
        _run(f"ip link set in{island} netns {pid}")
        _run(f"ip link set out{island} master bridge0 up")
        for command in (
            f"addr add {self.address(island)}/24 dev in{island}",
            f"link set in{island} up",
            "link set lo up",
        ):
            self._inside(island, f"ip {command}")
        if self._congestion:
            self._inside(island, f"sysctl -qw net.ipv4.tcp_congestion_control={self._congestion}")

    def loop_back(self, island: int) -> None:
        """Gives an island that has no network of its own its address on the loopback interface that all share."""
        self._looped.append(island)
        _run(f"ip addr add {self.address(island)}/32 dev lo")

    def shape(self, island: int, rate: float, rtt: float = 0.0) -> None:
        """Gives an island's link a rate, in each direction.

        Args:
            island: its number.
            rate: Mbit/s.
            rtt: milliseconds to another island of the same `rtt` and back. Queues at both ends of the link hold the
                bytes of one round trip, and at least of 20 ms; without one, of 400 ms.
        """
        per_second = rate * 1e6 / 8
        limit = max(300_000, per_second * max(20.0, rtt) / 1e3) if rtt else per_second * 0.4 + _SEGMENT
        burst = max(_SEGMENT, per_second / 1e3)
        bucket = f"root tbf rate {rate:g}mbit burst {burst:.0f} limit {limit:.0f}"
        _run(f"tc qdisc replace dev out{island} {bucket}")
        self._inside(island, f"tc qdisc replace dev in{island} {bucket}")
        if rtt:
            self._delay(island, rtt / 2)

    def cut(self, island: int, peer: str) -> None:
        """Nothing from `peer` (an address) reaches the island."""
        self._inside(island, f"iptables -w -A INPUT -s {peer} -j DROP")

    def cut_out(self, island: int, peer: str) -> None:
        """Nothing from the island reaches `peer` (an address)."""
        self._inside(island, f"iptables -w -A OUTPUT -d {peer} -j DROP")

    def heal(self, rate: float) -> None:
        """No link is cut, and all have `rate`, in Mbit/s."""
        for island in self._pids:
            self._inside(island, "iptables -w -F")
            self.shape(island, rate)

    def clear(self) -> None:
        """Takes all islands' links away, so that other processes can join. The ones that have still run."""
        for process in self._delays.values():
            process.kill()
        for island in self._pids:  # a link has gone by itself where the network inside is no more
            subprocess.run(["ip", "link", "del", f"out{island}"], check=False, capture_output=True)
        for island in self._looped:
            _run(f"ip addr del {self.address(island)}/32 dev lo")
        self._pids.clear()
        self._looped.clear()
        self._delays.clear()

    def _delay(self, island: int, milliseconds: float) -> None:
        """Holds what arrives at the island, instead of the time before."""
        rule = f"PREROUTING -i in{island} -j NFQUEUE --queue-num 0"
        if before := self._delays.pop(island, None):
            self._inside(island, f"iptables -w -t mangle -D {rule}")
            before.kill()
            before.wait(expect=None)  # what it held is lost, and sent again
        command = f"nsenter --net --target {self._pids[island]} {sys.executable} -m benchmarks.delay"
        self._delays[island] = self._processes.spawn([*command.split(), str(round(milliseconds * 1e3))])
        self._delays[island].wait_for("ready")
        self._inside(island, f"iptables -w -t mangle -A {rule}")

    def _inside(self, island: int, command: str) -> None:
        _run(f"nsenter --net --target {self._pids[island]} {command}")


def _run(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: {command}: {error.stderr.strip()}") from None


def enter_network(module: str, argv: Sequence[str]) -> None:
    """Starts the program `module` again where it may make networks; returns there."""
    if os.environ.get(_INSIDE):
        return
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc", "iptables") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"error: {', '.join(missing)} not found: install util-linux, iproute2 and iptables")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *as_root, "--net", sys.executable, "-m", module, *argv]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
