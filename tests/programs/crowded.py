"""Two islands as threads of a process that may open 1,024 files; they exchange, while strangers connect, until told.

    python crowded.py PORT

Prints the listening ports once the islands are connected; after a line on standard input makes an exchange, and opens
as many files as a checkpoint has; then prints "done".
"""

from __future__ import annotations

import logging
import resource
import sys
import tempfile
import threading

import psutil
import torch

from hf_diloco.codecs import CODECS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.tcp_store import meet
from hf_diloco.transport.base import Lane
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.utils.waiting import WaitNotes

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
logging.basicConfig()
connected, go_on = threading.Barrier(3), threading.Event()


def island(number: int) -> None:
    config = DiLoCoConfig(island=number, num_islands=2, rendezvous=f"tcp://127.0.0.1:{sys.argv[1]}")
    notes = WaitNotes(number)
    store, _, address, _ = meet(
        config, Credentials(), number == 0, f"island {number}", {"num_islands": 2}, 60.0, notes
    )
    mesh = MeshExchange(Lane(store, "lane", number, 2, address, 60))
    connected.wait(60)
    go_on.wait(120)
    store.set(f"there/{number}", "yes")
    store.wait([f"there/{1 - number}"], 60)
    values = torch.full((100_000,), float(number))
    mesh.average(values, [0.5, 0.5], CODECS["fp32"])
    assert (values == 0.5).all()


# Daemons: an error of this thread ends the process
threads = [threading.Thread(target=island, args=(number,), daemon=True) for number in range(2)]
for thread in threads:
    thread.start()
connected.wait(60)
ports = [kept.laddr.port for kept in psutil.Process().net_connections("tcp") if kept.status == psutil.CONN_LISTEN]
print(*ports, flush=True)
sys.stdin.readline()
files = [tempfile.TemporaryFile() for _ in range(100)]  # noqa: SIM115 - all at once is the point
go_on.set()
for thread in threads:
    thread.join()
print("done", flush=True)
