"""Runs of fixed membership: islands as threads that share a network in memory, which may be faulty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore

from hf_diloco.codecs import Codec
from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import ExchangeError
from hf_diloco.exchange.base import Exchange, Observer, Traffic
from hf_diloco.exchange.memory import MemoryNetwork
from hf_diloco.exchange.transport import MemoryTransport, Transport
from hf_diloco.island import IslandGroup
from hf_diloco.sessions import FixedSession
from hf_diloco.shards import open_shards


class Run:
    """`num_islands` islands that share a network and a store; `session` makes an island's session."""

    def __init__(self, folder: Path, num_islands: int, timeout: float = 30, **config: Any) -> None:
        self.folder = folder
        self.num_islands = num_islands
        self.config = {"rendezvous": "tcp://unused:1", "num_islands": num_islands, "sync_timeout": timeout, **config}
        self.network = MemoryNetwork(num_islands, timeout)
        self.store = HashStore()

    def transport(self, island: int) -> Transport:
        return MemoryTransport(self.network, self.store, island)

    def session(self, island: int, transport: Transport | None = None, **more: Any) -> FixedSession:
        config = DiLoCoConfig(**{"island": island, **self.config, **more.pop("config", {})})
        return FixedSession(config, IslandGroup(), transport=transport or self.transport(island), **more)

    def join(self, island: int, model: nn.Module, **more: Any) -> FixedSession:
        session = self.session(island, **more)
        session.join(open_shards(model, None), self.folder / str(island))
        return session


class FaultyExchange(Exchange):
    """Averages, and then spoils it."""

    def __init__(self, inner: Exchange, spoil: Callable[[torch.Tensor], None]) -> None:
        self._inner = inner
        self._spoil = spoil

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        def see(own: torch.Tensor, mean: torch.Tensor) -> None:
            self._spoil(mean)
            if observe:
                observe(own, mean)

        return self._inner.average(values, weights, codec, see)

    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        return self._inner.broadcast(values, source)

    def close(self) -> None:
        self._inner.close()


class FaultyTransport(Transport):
    def __init__(self, inner: Transport, spoil: Callable[[torch.Tensor], None]) -> None:
        self.store = inner.store
        self._inner = inner
        self._spoil = spoil

    def open(self, lane: int) -> Exchange:
        return FaultyExchange(self._inner.open(lane), self._spoil)


def cut(mean: torch.Tensor) -> None:
    raise ExchangeError("the link was cut")


def save(session: FixedSession, folder: Path, global_step: int) -> Path:
    checkpoint = folder / f"checkpoint-{global_step}"
    session.outer.save(checkpoint, global_step, {"steps": global_step})
    (checkpoint / "trainer_state.json").write_text("{}")
    return checkpoint


def raise_it(outcome: object) -> None:
    if isinstance(outcome, BaseException):
        raise outcome
