"""CUDA devices, cores and free ports of this machine, without importing torch."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import counted
from hf_diloco.utils.urls import split_tcp_url

ANSWER_SECONDS = 60.0  # timeout of nvidia-smi, which hangs if the driver does
CONTROL_GROUP = Path("/sys/fs/cgroup")  # a container's limits, as seen from inside
_PORTS = range(20_000, 32_000)


def cuda_devices() -> list[str]:
    """Returns the CUDA devices that a process started here would see, by their names in CUDA_VISIBLE_DEVICES.

    Raises `ConfigError` if nvidia-smi does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = (device.strip() for device in visible.split(","))
        return [device for device in takewhile(lambda device: device != "-1", named) if device]  # -1 ends CUDA's list
    code, told = ask_driver()
    gpus = [line for line in told.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(gpus))] if code == 0 else []


def ask_driver() -> tuple[int, str]:
    """Returns exit code and output of `nvidia-smi -L`, 0 and "" without it; `ConfigError` if it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return 0, ""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"`nvidia-smi -L` does not answer within {ANSWER_SECONDS:g} s, so the GPUs here are unknown: restart the "
            "driver, or name devices in CUDA_VISIBLE_DEVICES (empty: none)"
        ) from None
    return listed.returncode, listed.stdout + listed.stderr


def share_devices(devices: Sequence[str], num_islands: int, num_processes: int) -> list[list[str]]:
    """Assigns `num_processes` devices to every island, in order: separate ones if there are enough.

    Otherwise islands share devices, which works because no NCCL communicator spans islands; ranks of one island never
    share. On a machine without devices each island gets none. Raises `ConfigError` if one island has too few.
    """
    if not devices:
        return [[] for _ in range(num_islands)]
    num_shares = len(devices) // num_processes
    if not num_shares:
        raise ConfigError(
            f"an island of {num_processes} processes needs {num_processes} CUDA devices, but this machine has "
            f"{len(devices)} ({', '.join(devices)}): lower launch.num_processes, or set launch.use_cpu=true"
        )
    shares = [list(devices[k * num_processes : (k + 1) * num_processes]) for k in range(num_shares)]
    return [shares[island % num_shares] for island in range(num_islands)]


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use; in a container, limited by its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _container_cores() or cores)


def _container_cores() -> int | None:
    """Returns the cores of the container's CPU quota (`docker run --cpus`, limits.cpu of a pod); None without one."""
    try:
        quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if not (quota.isdecimal() and period.isdecimal() and int(period)):  # "max" is no limit
        return None
    return max(1, int(quota) // int(period))


def fitting_threads(num_processes: int) -> int:
    """Returns OMP_NUM_THREADS, else cores / `num_processes`; raises `ConfigError` unless it is a positive integer."""
    given = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // num_processes))
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"OMP_NUM_THREADS={given}: give a number of threads from 1 on, or unset it")
    return int(given)


def describe_crowding(
    unit: str, num_islands: int, num_processes: int, threads: int, shares: Sequence[Sequence[str]]
) -> str:
    """Returns a warning if local islands or nodes share devices, or have more threads than there are cores; else "".

    Each has `num_processes` with `threads` each; `shares` has the devices of each.
    """
    lines = []
    if num_sharing(shares) > 1:
        used = sorted({device for share in shares for device in share})
        lines.append(
            f"{counted(len(shares), unit)} share {counted(len(used), 'CUDA device')} ({', '.join(used)}): they take "
            "turns there, and its memory must hold all of them; to each its own, start some on other machines with "
            f"--{unit}"
        )
    cores, needed = num_cores(), num_islands * num_processes * threads
    if needed > cores:
        processes = f" of {num_processes} processes" if num_processes > 1 else ""
        remedy = "set OMP_NUM_THREADS lower, or unset it" if threads > 1 else "start fewer of them here"
        lines.append(
            f"{counted(num_islands, unit)}{processes} with {counted(threads, 'thread')} each keep {needed} cores "
            f"busy, and this machine has {cores}: they slow each other down; {remedy}"
        )
    return "\n".join(lines)


def num_sharing(shares: Sequence[Sequence[str]]) -> int:
    """Returns how many islands use the most shared device; 1 if each has its own."""
    return max(Counter(device for share in shares for device in share).values(), default=1)


def free_ports(num_ports: int) -> list[int]:
    """Returns distinct TCP ports that nothing listens on.

    They are below the system's ephemeral ports (from 32768 on, on Linux), one of which any outgoing connection could
    take before its user listens.
    """
    candidates = random.sample(_PORTS, len(_PORTS))
    free = (port for port in candidates if bind_error("127.0.0.1", port, reuse=False) is None)
    return list(islice(free, num_ports))


def bind_error(host: str, port: int, reuse: bool = True) -> OSError | None:
    """Returns why this machine cannot listen there, else None; `reuse` allows ports with connections in TIME_WAIT."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            listener.bind((host, port))
        except OSError as error:
            return error
    return None


def check_port_is_free(rendezvous: str) -> None:
    """Raises `ConfigError` if another program on this machine listens on the port of a rendezvous, or its host is
    unknown here.

    Ignores an address that is not this machine's: island 0 reports it.
    """
    host, port = split_tcp_url(rendezvous)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as unknown:
        if unknown.errno != socket.EAI_AGAIN:  # the name service may be there again when island 0 asks
            text = f"rendezvous {rendezvous}: host {host!r} has no address ({unknown.strerror}): correct it"
            raise ConfigError(text) from None
    error = bind_error(host, port)
    if error is not None and error.errno == errno.EADDRINUSE:
        raise ConfigError(
            f"rendezvous {rendezvous}: port {port} is in use by another program, perhaps by another run: choose "
            "another port, or leave the rendezvous out when all islands run here"
        )
