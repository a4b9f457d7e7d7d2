"""One island of a mesh without a model: averages what it is told to, or the same again and again.

Settings, as JSON: store (port), island, num_islands, timeout (seconds), cases (list of [payload, size, weights, values
a chunk]) with result (file), or loop (values an exchange). More, if need be: key, num_connections, rate_limit
(bytes/s).
"""

from __future__ import annotations

import json
import sys
import time

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.errors import IslandLostError
from hf_diloco.store.credentials import Credentials
from hf_diloco.transport import mesh
from hf_diloco.transport.base import Lane, RateLimit
from tests.tcp_stores import reach


def make_values(case: int, island: int, size: int) -> torch.Tensor:
    """What island `island` contributes to case number `case`."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * case + island))


def main() -> None:
    settings = json.loads(sys.argv[1])
    island, num_islands = settings["island"], settings["num_islands"]
    store = reach(settings["store"])
    exchange = mesh.MeshExchange(
        Lane(
            store,
            "lane",
            island,
            num_islands,
            "127.0.0.1",
            settings["timeout"],
            Credentials(settings.get("key", "").encode()).link_key("test"),
            num_connections=settings.get("num_connections", 1),
            rate_limit=RateLimit(settings.get("rate_limit")),
        )
    )
    if "cases" in settings:
        results = []
        for case, (payload, size, weights, chunk) in enumerate(settings["cases"]):
            mesh.CHUNK_VALUES = chunk
            values = make_values(case, island, size)
            started = time.monotonic()
            traffic = exchange.average(values, weights, CODECS[payload])
            seconds = time.monotonic() - started
            results.append((values, traffic.bytes_sent, traffic.bytes_received, seconds))
        torch.save(results, settings["result"])
        return
    values = torch.ones(settings["loop"])
    print("connected", flush=True)
    number = 0
    while True:
        started = time.monotonic()
        try:
            exchange.average(values, [1.0] * num_islands, CODECS["fp32"])
        except IslandLostError as error:
            print(json.dumps({"lost": error.islands, "seconds": time.monotonic() - started, "text": str(error)}))
            return
        number += 1
        print(f"exchange {number}", flush=True)


if __name__ == "__main__":
    main()
