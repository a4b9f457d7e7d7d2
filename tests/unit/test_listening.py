"""Ports answer only as long as they must, and strangers' connections leave files for the process."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Lane
from hf_diloco.transport.connections import Connections
from hf_diloco.transport.transfers import Deadline, Transfers
from hf_diloco.utils import listening
from hf_diloco.utils.listening import RESERVED_FILES, Door, keep_door, raise_file_limit
from tests.islands import run_islands
from tests.processes import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux'")

LOCALHOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def answers(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.2):
        return True
    return False


def listeners() -> set[tuple[str, int]]:
    return {
        (kept.laddr.ip, kept.laddr.port)
        for kept in psutil.Process().net_connections("tcp")
        if kept.status == psutil.CONN_LISTEN
    }


def test_gloo_answers_nobody_once_all_are_connected_and_transfers_go_on() -> None:
    store, before = ValueStore.in_memory(), listeners()

    def island(number: int) -> float:
        links = Connections(Lane(store, "lane", number, 3, LOCALHOST, 30, num_connections=2))
        meet.wait(30)
        if number == 0:
            doors = listeners() - before
            assert len(doors) == 6  # a device for each connection of each island
            assert not any(answers(door) for door in doors)
        meet.wait(30)
        transfers, got = Transfers(), torch.zeros(1000)
        links.receive(got, (number + 1) % 3, 1, transfers)
        links.send(torch.full((1000,), float(number)), (number - 1) % 3, 1, transfers)
        links.wait(transfers, Deadline(30))
        meet.wait(30)
        links.close()
        return float(got.mean())

    meet = threading.Barrier(3)
    assert run_islands(3, island) == [1.0, 2.0, 0.0]


def test_a_door_opens_again() -> None:
    with socket.create_server((LOCALHOST, 0)) as listener:
        door = Door(listener.fileno())
        assert answers(door.address)
        door.shut()
        assert not answers(door.address)
        door.open()
        assert answers(door.address)
        door.close()


def knock(ports: list[int], number: int) -> list[socket.socket]:
    """So many connections that say nothing, in turn to each port; who does not answer is not waited for."""
    strangers = []
    for count in range(number):
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex((LOCALHOST, ports[count % len(ports)]))
        strangers.append(stranger)
        if count % 50 == 0:
            time.sleep(0.02)
    return strangers


def test_few_connections_wait_for_the_reserve() -> None:
    """Once a port is shut and its reserve given back, they would be accepted, and leave no file to the process."""

    class Owner:
        """Who accepts, but is too late."""

    owner = Owner()
    with socket.create_server((LOCALHOST, 0), backlog=1000) as listener:
        keep_door(Door(listener.fileno()), owner)
        address = listener.getsockname()
        strangers = knock([address[1]], 4 * RESERVED_FILES)
        listener.setblocking(False)
        accepted = []
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted.append(listener.accept()[0])
        for one in (*accepted, *strangers):
            one.close()
    assert 0 < len(accepted) <= RESERVED_FILES // 4


@pytest.mark.usefixtures("limits")
def _is_own(line: str) -> bool:
    """Gloo, too, writes to standard output, up to PyTorch 2.9."""
    return not line.startswith("[Gloo]")


def test_1500_silent_connections_at_1024_files_disturb_nobody(free_port: int) -> None:
    raise_file_limit()
    program = ROOT / "tests" / "programs" / "crowded.py"
    with subprocess.Popen(
        [sys.executable, str(program), str(free_port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        ports = [int(port) for port in next(filter(_is_own, lines)).split()]
        strangers = [*knock([free_port], 1500), *knock(sorted({*ports} - {free_port}), 1500)]
        time.sleep(1)
        out, told = process.communicate("go on\n", timeout=120)
        for stranger in strangers:
            stranger.close()
    assert (process.returncode, [*filter(_is_own, out.splitlines())]) == (0, ["done"]), told
    assert "raise the limit" not in told, "who is silent is sent away before they are too many"


IN_ISLAND = """
import sys
from hf_diloco.apps.common.process import prepared
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import VisionRun
run = {"lm": RunFile, "vision": VisionRun}[sys.argv[1]](
    name="x", output=sys.argv[2], training={"max_steps": 1}, data={}
)
with prepared(run): pass
import psutil, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:PORT", rank=0, world_size=1)
dist.barrier()
kept = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
print(*(one.ip for one in kept if one.port == PORT))
"""


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["lm", "vision"])
def test_the_store_of_an_islands_own_processes_listens_on_its_address_only(
    kind: str, free_port: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", IN_ISLAND.replace("PORT", str(free_port)), kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert [*filter(_is_own, done.stdout.splitlines())] == ["127.0.0.1"], done.stderr


@pytest.fixture
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


WITHOUT_FILES = """
import os, resource
from hf_diloco.errors import IslandLostError
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Lane
from hf_diloco.transport.connections import Connections
before, store = resource.getrlimit(resource.RLIMIT_NOFILE), ValueStore.in_memory()
for num_left in range(4):  # not even a socket; a socket, and nothing for the thread's loop
    first_free = os.open(os.devnull, os.O_RDONLY)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + num_left, before[1]))
    try:
        Connections(Lane(store, "lane", 0, 2, "127.0.0.1", 1000.0))
    except IslandLostError as error:
        print(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
"""


@pytest.mark.distributed
def test_who_has_no_files_left_to_meet_others_says_so_at_once() -> None:
    """In a process of its own: in this one, threads of other tests may give files back meanwhile."""
    said = run([sys.executable, "-c", WITHOUT_FILES]).output
    found = re.findall(r"^island 0 cannot listen on 127\.0\.0\.1 .*Too many open files", said, re.MULTILINE)
    assert len(found) == 4, said


HOST_WITHOUT_FILES = """
import os, resource, threading
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import RendezvousError
from hf_diloco.store.rendezvous import StoreHost
config = DiLoCoConfig(num_islands=2, rendezvous="tcp://127.0.0.1:PORT")
StoreHost(config).close()  # so that all is imported
for thread in threading.enumerate():
    if thread.name == "hf-diloco-door":
        thread.join()  # until then it holds files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
for num_left in range(20):
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for file in taken[:num_left]:
        os.close(file)
    try:
        StoreHost(config).close()
        print("it serves")
        break
    except RendezvousError as error:
        print(error)
    finally:
        for file in taken[num_left:]:
            os.close(file)
"""


@pytest.mark.distributed
def test_who_has_no_files_left_to_keep_the_store_says_so_and_keeps_no_port(free_port: int) -> None:
    """Neither a port that nobody answers, which the next try would find in use."""
    said = run([sys.executable, "-c", HOST_WITHOUT_FILES.replace("PORT", str(free_port))]).output
    found = re.findall(r"^cannot (\w+) the rendezvous at .*Too many open files", said, re.MULTILINE)
    assert set(found) == {"open", "serve"}, said
    assert found == sorted(found), said
    assert re.search("^it serves$", said, re.MULTILINE), said


def test_looking_for_sockets_keeps_no_file_that_another_thread_opens_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a socket may by then be a file's."""
    one, duplicate = socket.socket(), os.dup
    number, path = one.fileno(), tmp_path / "file"

    def dup_later(file: int) -> int:
        if file == number and one.fileno() >= 0:
            one.close()
            opened = os.open(path, os.O_CREAT)
            if opened != number:  # a lower one was free
                os.dup2(opened, number)
                os.close(opened)
        return duplicate(file)

    monkeypatch.setattr(os, "dup", dup_later)
    found = listening._sockets()
    monkeypatch.undo()
    assert [file.fd for file in psutil.Process().open_files() if file.path == str(path)] == [number]
    assert number not in {one.file for one in found}
    os.close(number)


@pytest.mark.usefixtures("limits")
def test_the_soft_limit_of_files_becomes_the_hard_one() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    assert raise_file_limit() == min(hard, 1 << 16)
    assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
