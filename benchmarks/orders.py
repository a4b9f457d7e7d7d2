"""Processes that do what a program asks of them, through a store that the program keeps."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from tests.processes import Process


class Workers:
    """Those that answer, by number; see `answer_orders`.

    Args:
        store: kept by this program.
        processes: one a worker.
    """

    def __init__(self, store: Store, processes: Sequence[Process]) -> None:
        self._store = store
        self._processes = processes

    def ask(self, what: str, **order: Any) -> list[dict[str, Any]]:
        """Has all of them call their method `what`; returns their answers.

        Args:
            what: name of the method.
            **order: its arguments, of JSON.

        Raises:
            SystemExit: one of them has ended; with what it said.
        """
        count = self._store.add("orders", 1) - 1
        self._store.set(f"order/{count}", json.dumps({"do": what, **order}))
        keys = [f"answer/{count}/{number}" for number in range(len(self._processes))]
        while not self._store.check(keys):
            for process in self._processes:
                if process.popen.poll() is not None:
                    raise SystemExit(f"a process ended:\n{process.output[-3000:]}")
            time.sleep(0.02)
        return [json.loads(self._store.get(key)) for key in keys]


def reach_store(host: str, port: int, timeout: float) -> TCPStore:
    """The program's store, once a network leads there.

    Args:
        host: address of the program.
        port: of its store.
        timeout: seconds that an operation may take.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def answer_orders(store: Store, number: int, worker: object) -> None:
    """Does what worker `number` is asked for until the program kills this process; its answers are dicts of JSON."""
    for count in itertools.count():
        order = json.loads(store.get(f"order/{count}"))
        answer = getattr(worker, order.pop("do"))(**order)
        store.set(f"answer/{count}/{number}", json.dumps(answer))
