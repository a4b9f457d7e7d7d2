"""`hf-diloco doctor`, `env` and `validate`: findings with remedies, exit codes, and what is measured."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import resource
import socket
import struct
import sys
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from hf_diloco.cli import devices, validate
from hf_diloco.cli.doctor import Finding, answer, machine, network, run_checks
from hf_diloco.cli.doctor.network import check_store
from hf_diloco.cli.main import app
from hf_diloco.cli.plan import LaunchOptions
from hf_diloco.cli.validate import run_validate
from hf_diloco.errors import ConfigError
from hf_diloco.store.objects import ObjectStore
from tests.processes import ROOT, Completed, Processes, find_free_port, run
from tests.tiny_nodes import run_of

PROGRAM = [sys.executable, "-m", "hf_diloco.cli"]
Device = namedtuple("Device", "total_memory")


def hf_diloco(*arguments: str | Path, expect: int = 0, **env: object) -> Completed:
    return run([*PROGRAM, *arguments], expect=expect, env={"NO_COLOR": "1", "COLUMNS": "100", **env})


def levels(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(one.check, one.level) for one in findings]


# Checks


def test_every_problem_and_warning_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    monkeypatch.setattr(machine, "LEAST_FILES", 1 << 40)
    monkeypatch.setattr(machine, "LEAST_MEMORY", 1 << 60)
    monkeypatch.setattr(machine, "LEAST_SHARED", 1 << 60)
    found = [
        *network.check_interfaces(),
        *machine.check_files(),
        *machine.check_memory(),
        *machine.check_disk(tmp_path / "runs", needed=1e30),
    ]
    assert [one.level for one in found] == ["problem", "warning", "warning", "warning", "warning"]
    assert (found[4].check, "--shm-size" in found[4].remedy) == ("shared memory", True)
    assert not [one for one in found if one.level != "ok" and not one.remedy]
    assert "nope0" in found[0].text


def test_a_check_that_fails_leaves_the_others_alone() -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("no such thing\nand more")
        yield

    found = list(run_checks([("first", broken), ("second", lambda: [Finding("second", "ok", "fine")])]))
    assert [(one.check, one.level) for one in found] == [("first", "warning"), ("second", "ok")]
    assert "no such thing" in found[0].text


def test_versions_that_are_known_to_be_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        "hf_diloco.utils.extras.version",
        lambda name: {"deepspeed": "0.19.7", "rich": "12.0"}.get(name, real(name)),
    )
    found = {one.check: one for one in machine.check_versions()}
    assert found["deepspeed"].level == "problem"
    assert "ZeRO-3" in found["deepspeed"].text
    assert found["rich"].level == "warning"
    assert "pip install 'rich>=" in found["rich"].remedy


def test_a_pytorch_for_cpus_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: ["0", "1"])
    monkeypatch.setattr(torch.version, "cuda", None)
    found = next(iter(machine.check_torch()))
    assert (found.level, "2 CUDA devices" in found.text) == ("problem", True)


def test_devices_that_pytorch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {"is_available": True, "device_count": 1, "is_bf16_supported": True}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    found = next(iter(machine.check_torch()))
    assert (found.level, "sees 1 of 2 CUDA devices" in found.text) == ("problem", True)


def test_a_driver_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not list(machine.check_driver()), "the environment says which devices there are"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert not list(machine.check_driver()), "there is no driver"
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    (failing,) = machine.check_driver()
    assert (failing.level, "(Failed to initialize NVML: Driver/library" in failing.text) == ("problem", True)
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(devices, "ANSWER_SECONDS", 0.1)
    (hanging,) = machine.check_driver()
    assert (hanging.level, "does not answer within 0.1 s" in hanging.text) == ("problem", True)
    assert devices.cuda_devices() == [], "the other checks do not ask again"


def test_gpus_that_only_pytorch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "cuda_devices", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = next(iter(machine.check_torch()))
    assert (found.level, "CUDA_VISIBLE_DEVICES=0,1" in found.remedy) == ("warning", True)


def test_what_deepspeed_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = machine.check_deepspeed_build()
    assert found.level == "warning"
    assert "a C++ compiler and ninja" in found.text


@pytest.mark.parametrize(
    ("built_for", "works", "in_hardware", "found"),
    [
        ("13.0", False, False, {"torch": ("problem", "cannot use the 2 CUDA devices"), "bf16": ("ok", "processor")}),
        ("13.0", True, False, {"torch": ("ok", "2 CUDA devices: H100"), "bf16": ("warning", "only emulate bf16")}),
        ("13.0", True, True, {"torch": ("ok", "2 CUDA devices: H100"), "bf16": ("ok", "compute in bf16")}),
    ],
)
def test_a_pytorch_for_gpus(
    built_for: str,
    works: bool,
    in_hardware: bool,
    found: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: ["0", "1"])
    monkeypatch.setattr(torch.version, "cuda", built_for)
    for name, value in {"is_available": works, "device_count": 2, "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: in_hardware)
    for one in machine.check_torch():
        level, text = found[one.check]
        assert (one.level, text in one.text, bool(one.remedy)) == (level, True, level != "ok")


@pytest.mark.parametrize(
    ("cpuinfo", "told"),
    [
        ("processor : 0\nflags : fpu avx512_bf16 sse\n", "the processor computes in bf16"),
        ("processor : 0\nFeatures : fp asimd\n", "the processor only emulates bf16"),
        ("", "the processor only emulates bf16"),
        (None, "the processor only emulates bf16"),
    ],
    ids=["x86", "Arm", "says nothing", "not Linux"],
)
def test_what_processors_say_of_bf16(cpuinfo: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_file(path: str, **_: str) -> io.StringIO:
        assert path == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return io.StringIO(cpuinfo)

    monkeypatch.setattr(machine, "cuda_devices", list)
    monkeypatch.setattr(machine, "open", open_file, raising=False)
    found = {one.check: one for one in machine.check_torch()}["bf16"]
    assert (found.level, told in found.text) == ("ok", True)


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGE", "hf-diloco-that-nobody-has-installed")
    (found,) = machine.check_versions()
    assert found.level == "warning"
    assert f"{ROOT} is not installed" in found.text
    assert found.remedy == f"pip install -e '{ROOT}'"


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the core is a problem, one of an extra is not."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("rich", "deepspeed"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("hf_diloco.utils.extras.version", version)
    found = {one.check: one for one in machine.check_versions()}
    assert (found["rich"].level, found["rich"].text) == ("problem", "not installed")
    assert found["rich"].remedy.startswith("pip install 'rich>=")
    assert "deepspeed" not in found


@pytest.mark.parametrize(("release", "level"), [("12.8", "warning"), ("13.1", "ok"), ("", "ok")])
def test_a_cuda_toolkit_beside_pytorchs(
    release: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed compiles if the first number is the same; a compiler that tells no number is not judged."""
    for name, text in {"nvcc": f"Cuda compilation tools, release {release}, V", "g++": "", "ninja": ""}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "cuda_devices", lambda: ["0"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (found,) = machine.check_deepspeed_build()
    assert found.level == level
    assert ("nvcc is of CUDA 12.8, PyTorch of 13.0" in found.text) == (level == "warning")
    (tmp_path / "nvcc").unlink()
    (found,) = machine.check_deepspeed_build()
    assert (found.level, "without nvcc" in found.text) == ("warning", True)


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda name: False)
    (found,) = machine.check_deepspeed_build()
    assert found.level == "ok"
    assert 'pip install "hf-diloco[deepspeed]"' in found.text


def test_a_host_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    (found,) = network.check_host_name()
    assert (found.level, "does not resolve" in found.text) == ("warning", True)


def test_a_machine_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    address = namedtuple("address", "family address")
    state = namedtuple("state", "isup")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [address(socket.AF_INET, "127.0.0.1")]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": state(True)})
    (found,) = network.check_interfaces()
    assert (found.level, found.text) == ("warning", "only loopback: no other machine is reached")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # which is there, so that this is no other problem
    assert list(network.check_interfaces()) == [found]


def test_where_a_host_name_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(address: str) -> Any:
        return lambda name, port, *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve("127.0.1.1"))
    assert levels(network.check_host_name()) == [("host name", "warning")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert levels(network.check_host_name()) == [("host name", "ok")]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for address in ("192.0.2.1", "2001:db8::1"):  # which no machine has
        monkeypatch.setattr(socket, "getaddrinfo", resolve(address))
        (found,) = network.check_host_name()
        assert (found.level, f"resolves to another machine ({address})" in found.text) == ("warning", True)
    monkeypatch.setattr(network, "is_loopback", lambda _: False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve("127.0.0.1"))
    assert levels(network.check_host_name()) == [("host name", "ok")]


def test_a_public_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    address = namedtuple("address", "family address")
    state = namedtuple("state", "isup")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [address(socket.AF_INET, "8.8.8.8")]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": state(True)})
    found = list(network.check_interfaces())
    assert levels(iter(found)) == [("interfaces", "ok"), ("interfaces", "warning")]
    assert found[1].text.endswith("without a key traffic between islands is neither encrypted nor authenticated")


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (found,) = network.check_port(taken.getsockname()[1])
    assert found.level == "problem"
    assert "another port" in found.remedy
    assert levels(network.check_port(find_free_port())) == [("port", "ok")]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    assert levels(machine.check_disk(Path("/proc/runs"))) == [("disk", "problem")]
    assert ("disk", "ok") in levels(machine.check_disk(tmp_path / "not" / "yet" / "there", needed=1))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("400000 100000\n", 4),
        ("50000 100000\n", 1),
        ("max 100000\n", 64),
        ("9900000 100000\n", 64),
        ("", 64),
        (None, 64),
    ],
)
def test_the_cores_of_a_container(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(devices, "CONTROL_GROUP", tmp_path)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert devices.num_cores() == expected


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("900000000\n")
    (tmp_path / "memory.current").write_text("897000000\n")
    (tmp_path / "memory.stat").write_text("anon 896000000\ninactive_file 600000\nactive_file 400000\n")
    (found,) = machine.check_memory()
    assert (found.level, "4.00 MB of 900 MB are free" in found.text) == ("warning", True)
    assert validate._host_memory(5e6).level == "problem"


@pytest.mark.parametrize(
    ("soft", "hard", "level", "told"),
    [
        (256, resource.RLIM_INFINITY, "ok", "any number"),  # islands raise the one to the other
        (1024, 1 << 20, "ok", "1,048,576"),
        (1024, 2048, "warning", "2,048"),
    ],
)
def test_open_files(soft: int, hard: int, level: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    (found,) = machine.check_files()
    assert (found.level, found.text) == (level, f"a process may open {told}")


# Stores


def test_a_store_that_keeps_its_promise(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    found = list(check_store(url))
    assert [one.level for one in found] == ["ok"] * 3
    assert "exactly one wins" in found[1].text
    assert re.search(r"\d+ Gbit/s|Mbit/s", found[2].text)
    assert not ObjectStore(url).list(), "nothing is left"


def test_a_store_that_lets_all_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "check_creation", lambda store: None)
    create = ObjectStore.create

    def careless(store: ObjectStore, path: str, data: bytes) -> bool:
        return "contest" in path or create(store, path, data)

    monkeypatch.setattr(ObjectStore, "create", careless)
    found = list(check_store(f"file://{tmp_path}/store"))
    assert ("create if absent", "problem") in [(one.check, one.level) for one in found]
    assert "8 were told" in found[1].text


def _old(store: ObjectStore, path: str, most: int) -> bytes | None:
    return b"first"


def _right_but_never_empty(store: ObjectStore, path: str, most: int) -> bytes | None:
    return b"second"


@pytest.mark.parametrize(
    ("get", "text"),
    [(_old, "does not show what was just written"), (_right_but_never_empty, "still shows what was deleted")],
)
def test_a_store_that_shows_what_was(get: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "get", get)
    monkeypatch.setattr(ObjectStore, "check_creation", lambda store: None)
    found, *_ = check_store(f"file://{tmp_path}/store")
    assert (found.level, text in found.text, bool(found.remedy)) == ("problem", True, True)


def test_a_store_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FAR", 0.0)
    found = list(check_store(f"file://{tmp_path}/store"))[-1]
    assert (found.level, "sync_every" in found.remedy) == ("warning", True)


def test_a_store_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "checks").write_text("a file, where the store has a folder")
    (found,) = check_store(f"file://{tmp_path}")
    assert (found.level, found.remedy) == ("problem", "give this machine the right to read, write, list and delete")


def test_a_store_that_is_not_there() -> None:
    (found,) = check_store("file:///proc/store")
    assert found.level == "problem"


# Another machine


@pytest.mark.parametrize("longest", [10.0, 0.0005, 0.0])
def test_the_way_to_another_machine(longest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a transfer is cut short, as it takes too long."""
    monkeypatch.setattr(network, "_LONGEST_SECONDS", longest)
    port = find_free_port()
    with Processes() as processes:
        listener = processes.spawn([*PROGRAM, "doctor", "--listen", f"127.0.0.1:{port}"])
        listener.wait_for("listening at")
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b"", "who speaks something else is let go"
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(network.MAGIC[:1])  # it keeps nobody out
            (found,) = network.check_peer("127.0.0.1", port)
        listener.interrupt()
        listener.wait(60, expect=0)
    assert found.level == "ok"
    assert re.search(r"there and back, [1-9][\d.]* [kMG]bit/s there, [1-9][\d.]* [kMG]bit/s back", found.text)


REQUEST = struct.Struct("<8scI")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (
            REQUEST.pack(network.MAGIC, b"E", 0)
            + REQUEST.pack(network.MAGIC, b"S", 5)
            + b"12345"
            + REQUEST.pack(network.MAGIC, b"R", 7),
            b"!!" + bytes(7),
        ),
        (b"GET / HTTP/1.1\r\n", b""),
        (REQUEST.pack(network.MAGIC, b"R", network.MOST_BYTES + 1), b""),
        (REQUEST.pack(network.MAGIC, b"S", 5) + b"12", b""),  # it goes in the middle
    ],
)
def test_only_requests_are_answered(sent: bytes, answer: bytes) -> None:
    def ask() -> bytes:
        answered = b""
        with contextlib.ExitStack() as stack:
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=30))
            client.sendall(sent)
            with contextlib.suppress(OSError):  # the other end has gone already
                client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # as not all was read
                while len(answered) < max(len(answer), 1) and (more := client.recv(100)):
                    answered += more
        return answered

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        with pytest.raises(OSError, match="Invalid argument"):  # what ends it here
            network.serve(listener)
        assert asked.result() == answer


def test_another_machine_that_does_not_answer() -> None:
    (found,) = network.check_peer("127.0.0.1", find_free_port())
    assert found.level == "problem"
    assert "--listen" in found.remedy


def test_another_program_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        import threading

        def hang_up() -> None:
            connection, _ = other.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        (found,) = network.check_peer(*other.getsockname())
        thread.join()
    assert found.level == "warning"
    assert "not as a doctor" in found.text


@pytest.mark.parametrize("address", ["10.0.0.1", ":29400", "host:0", "host:99999", "host:http"])
def test_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        network.split_peer(address)
    assert network.split_peer("tcp://10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert network.split_peer("[::1]:29400") == ("::1", 29400)


@pytest.mark.parametrize(("host", "why"), [("0.0.0.0", "expected HOST:PORT"), ("8.8.8.8", "is a public address")])
def test_nobody_listens_for_the_whole_internet(host: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        answer(f"{host}:29400")
    assert "--allow-public-address" not in str(caught.value)


# The commands


@pytest.mark.distributed
def test_doctor_tells_and_its_exit_code(tmp_path: Path) -> None:
    completed = hf_diloco("doctor", "--json", "--store", f"file://{tmp_path}/store", "--folder", tmp_path)
    report = json.loads(completed.output)
    found = {one["check"] for one in report["findings"]}
    assert {"versions", "torch", "bf16", "deepspeed", "memory", "disk", "open files", "host name", "store"} <= found
    assert report["problems"] == 0
    output = hf_diloco("doctor", "--peer", f"127.0.0.1:{find_free_port()}", expect=1).output
    assert "problem  peer: " in output
    assert "→ run `hf-diloco doctor --listen" in output
    assert hf_diloco("doctor", "--peer", "nowhere", expect=2).output.startswith("error: --peer nowhere")


@pytest.mark.distributed
def test_env_has_versions_and_no_secrets() -> None:
    secret = "a-key-that-nobody-may-see"
    output = hf_diloco("env", HF_DILOCO_KEY=secret, HF_DILOCO_ISLAND="3").output
    assert re.search(rf"^torch +{re.escape(torch.__version__.partition('+')[0])}", output, re.MULTILINE)
    assert re.search(r"^HF_DILOCO_ISLAND +3$", output, re.MULTILINE)
    assert "HF_DILOCO_KEY" in output
    assert secret not in output
    assert json.loads(hf_diloco("env", "--json").output)["hf-diloco"]


def test_env_of_a_machine_that_lacks_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a bug says so, where PyTorch itself is what does not work."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("hf_diloco.utils.extras.version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = json.loads(CliRunner().invoke(app, ["env", "--json"], catch_exceptions=False).output)
    assert facts["deepspeed"] == "not installed"
    assert facts["cuda"].startswith("PyTorch cannot be imported: ")


@pytest.mark.slow
def test_validate_is_an_honest_dry_run(tmp_path: Path) -> None:
    path = ROOT / "configs" / "bucket.yaml"
    store = f"file://{tmp_path}/store"
    completed = hf_diloco("validate", path, f"output={tmp_path}", "--rendezvous", store, HF_DILOCO_KEY="k" * 32)
    for check in ("run file", "model", "memory", "disk", "store", "create if absent", "not tried"):
        assert re.search(rf"^(ok|warning) +{check}: ", completed.output, re.MULTILINE)
    assert "the training itself" in completed.output
    assert not list(tmp_path.glob("*/island-*")), "nothing was started"
    assert "sync_every" in hf_diloco("validate", path, "diloco.sync_evry=2", expect=2).output
    options = ["--islands", "3", "--name", "a", "--output", f"{tmp_path}/file", "--resume", "nowhere"]
    (tmp_path / "file").touch()
    refused = hf_diloco("validate", path, *options, "--rendezvous", f"file://{tmp_path}/file", expect=2).output
    assert f"{tmp_path}/file is a file: name a folder" in refused, "the options of launch"
    config = "{model_type: llama, hidden_size: 65536, intermediate_size: 65536, num_hidden_layers: 99}"
    too_large = hf_diloco("validate", path, f"model.config={config}", f"output={tmp_path}", expect=1)
    assert re.search(r"^problem +memory: ", too_large.output, re.MULTILINE)


def found_in(written: str) -> dict[str, dict[str, str]]:
    """The findings of `--json` by their checks; DeepSpeed may have logged a line, when it is imported first."""
    return {one["check"]: one for one in json.loads(written[written.index("{") :])["findings"]}


def test_validate_tells_of_devices_that_pytorch_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As PyTorch for CPUs on a machine with GPUs; memory and disk are looked at all the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_validate(LaunchOptions(ROOT / "configs" / "quickstart.yaml", output=str(tmp_path)), as_json=True) == 0
    found = found_in(capsys.readouterr().out)
    assert {"memory", "disk"} < found.keys()
    assert found["device memory"]["level"] == "warning"
    assert "training would be on the CPU" in found["device memory"]["text"]


@pytest.mark.parametrize(
    ("memory", "level", "code", "place"),
    [(80e9, "ok", 0, "tcp://127.0.0.1:{port}"), (1e6, "problem", 1, "file://{folder}/store")],
)
def test_validate_compares_a_rank_with_its_device(
    memory: float,
    level: str,
    code: int,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And says what it has not tried: the other island, and the way to it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HF_DILOCO_KEY", "k" * 32)
    answers = {"is_available": True, "device_count": 1, "get_device_properties": Device(memory), "set_device": None}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    rendezvous = place.format(port=find_free_port(), folder=tmp_path)
    quickstart = ROOT / "configs" / "quickstart.yaml"
    options = LaunchOptions(quickstart, island=0, rendezvous=rendezvous, output=str(tmp_path))
    assert run_validate(options, as_json=True) == code
    found = found_in(capsys.readouterr().out)
    assert (found["device memory"]["level"], found["memory"]["level"]) == (level, "ok")
    not_tried = found["not tried"]["text"]
    assert "the other islands (on each of them: hf-diloco validate)" in not_tried
    assert ("store" in found) == (f"the way to {rendezvous}" not in not_tried), "one of the two"


def test_validate_tries_the_model_and_images_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path)
    assert run_validate(LaunchOptions(tmp_path / "tiny.yaml"), as_json=True) == 0
    found = found_in(capsys.readouterr().out)
    assert found.keys() == {"run file", "not tried"}
    assert "model and images" in found["run file"]["text"]
    assert "3 nodes would start here, with 8 steps" in found["run file"]["text"]


@pytest.mark.parametrize(
    ("typed", "completion"), [("hf-diloco est", "estimate"), ("hf-diloco doctor --st", "--store")]
)
def test_shells_complete_commands_and_options(typed: str, completion: str) -> None:
    words: dict[str, Any] = {
        "_HF_DILOCO_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": len(typed.split()) - 1,
    }
    assert completion in hf_diloco(**words).output.split()


def test_shells_get_a_script() -> None:
    assert "_HF_DILOCO_COMPLETE=complete_bash" in hf_diloco(_HF_DILOCO_COMPLETE="source_bash").output
