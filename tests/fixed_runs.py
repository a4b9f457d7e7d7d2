"""Runs of fixed membership: islands as threads that share a network in memory, which may be faulty."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hf_diloco.codecs import Codec
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ExchangeError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.all_gather import AllGather, Links
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord
from hf_diloco.membership.unanimity import Unanimity
from hf_diloco.outer.saved_state import save_state
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Exchange, Observer, Traffic
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.open import MemoryTransport, Transport
from hf_diloco.utils.clock import REAL, Clock
from tests.islands import run_islands
from tests.small_model import batches, make_model, take_step, weights_of

T = TypeVar("T")


class Run:
    """`num_islands` islands that share a network and a store; `session` makes an island's session."""

    def __init__(self, folder: Path, num_islands: int, timeout: float = 30, **config: Any) -> None:
        self.folder = folder
        self.num_islands = num_islands
        self.config = {"rendezvous": "tcp://unused:1", "num_islands": num_islands, "sync_timeout": timeout, **config}
        self.network = MemoryNetwork(num_islands, timeout)
        self.store = ValueStore.in_memory()

    def transport(self, island: int) -> Transport:
        return MemoryTransport(self.network, self.store, island)

    def session(self, island: int, transport: Transport | None = None, **more: Any) -> FixedSession:
        config = DiLoCoConfig(**{"island": island, **self.config, **more.pop("config", {})})
        return FixedSession(config, IslandGroup(), transport=transport or self.transport(island), **more)

    def join(self, island: int, model: nn.Module, **more: Any) -> FixedSession:
        session = self.session(island, **more)
        session.join(open_shards(model, None), self.folder / str(island))
        return session


class FixedIsland:
    """An island over a real rendezvous, which trains a small model."""

    def __init__(self, folder: Path, url: str, island: int, num_rounds: int | None = None, **settings: Any) -> None:
        self.config = DiLoCoConfig(num_islands=2, island=island, rendezvous=url, sync_every=2, **settings)
        self.session = FixedSession(self.config, IslandGroup(), folder=folder / str(island))
        self.session.num_rounds = num_rounds
        self.session.tokens_per_step = 32
        self._model = make_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self.session.join(open_shards(self._model, self._optimizer, 1), folder / str(island))

    def train(self, num_steps: int) -> FixedIsland:
        for batch in batches(self.config.island, num_steps):
            take_step(self._model, self._optimizer, batch)
            if self.session.outer.count_step(weight=4.0):
                self.session.sync()
        return self

    def leave(self) -> None:
        self.session.leave(finished=True)


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

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        return self._inner.send_message(message, notify)

    def messages(self) -> dict[int, bytes]:
        return self._inner.messages()

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
    save_state(session.outer, checkpoint, global_step, {"steps": global_step})
    (checkpoint / "trainer_state.json").write_text("{}")
    return checkpoint


def raise_it(outcome: object) -> None:
    if isinstance(outcome, BaseException):
        raise outcome


def assert_resumed_is_uninterrupted(
    folder: Path,
    num_steps: int,
    at: int,
    config: dict[str, Any],
    look: Callable[[FixedSession, Path], T],
    width: int = 8,
) -> list[T]:
    """Two islands that stop after `at` steps and resume have the bits of two that do not: weights, hashes, `look`.

    Args:
        look: what is compared beside; of a session and the checkpoint that it wrote after its last step.

    Returns:
        What `look` found at the end, of each island.
    """

    def train(run: Run, island: int, first: int, last: int, state: dict[str, Any] | None) -> Any:
        model = make_model(width=width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = run.session(island)
        checkpoint = None
        if state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            checkpoint = state["checkpoint"]
        session.join(open_shards(model, None), run.folder / str(island), checkpoint=checkpoint)
        hashes = []
        for batch in batches(island, num_steps)[first:last]:
            take_step(model, optimizer, batch)
            if session.outer.count_step(weight=len(batch) + island):
                hashes.append(session.sync().outer_hash)
        saved = save(session, run.folder / str(island), last)
        found = look(session, saved)
        session.leave(finished=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "checkpoint": saved}
        return weights_of(model), hashes, found, state

    whole, before, after = (Run(folder / name, 2, **config) for name in ("whole", "before", "after"))
    uninterrupted = run_islands(2, lambda island: train(whole, island, 0, num_steps, None))
    stopped = run_islands(2, lambda island: train(before, island, 0, at, None))
    resumed = run_islands(2, lambda island: train(after, island, at, num_steps, stopped[island][3]))
    for one, two, first in zip(resumed, uninterrupted, stopped, strict=True):
        assert torch.equal(one[0], two[0])
        assert first[1] + one[1] == two[1]
        assert one[2] == two[2]
    return [one[2] for one in resumed]


class NoLinks:
    """Carry nothing, and have lost some islands."""

    def __init__(self, find_broken: Callable[[], Collection[int]]) -> None:
        self.find_broken = find_broken

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        return False

    def messages(self) -> dict[int, bytes]:
        return {}


def unanimity(
    store: ValueStore,
    island: int,
    num_islands: int,
    patience: float = 20.0,
    should_stop: Callable[[], bool] = lambda: False,
    find_broken: Callable[[], Collection[int]] = tuple,
    clock: Clock = REAL,
    links: Sequence[Links] = (),
    log: RunLog | None = None,
) -> Unanimity:
    """An island's part in deciding rounds, without a session; `patience`: for offers and for votes."""
    all_gather = AllGather(store, island, num_islands, should_stop, clock=clock)
    return Unanimity(all_gather, log or store.log, patience, patience, links or [NoLinks(find_broken)])


def offer_of(island: int, weight: float = 1.0, state: str = "ab", serial: int = 1) -> OfferRecord:
    return OfferRecord(island=island, incarnation=1, serial=serial, steps=2, weight=weight, norm=1.0, state=state)


def convene(of: Unanimity, number: int, offer: OfferRecord) -> Attempt:
    """Offers to the next attempt of a round; returns it once all have."""
    return of.agree(number, offer)


def vote(of: Unanimity, number: int, mean: str = "ab") -> OutcomeRecord:
    """Votes in the next attempt of a round."""
    return of.commit(of.current(number), mean)


class CountingObjects:
    """A store that counts the answers that an island waits for; what it writes behind everything else is none."""

    def __init__(self, store: ObjectStore) -> None:
        self.trips = 0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.trips += name in ("poll", "decide") or (name in ("get", "list") and self._store.listings.current is None)
        return getattr(self._store, name)


class Jittery:
    """Lets other threads in between any two operations of a store or of links."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner = inner
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._inner, name)
        if not callable(operation):
            return operation

        def call(*arguments: Any, **named: Any) -> Any:
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            result = operation(*arguments, **named)
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            return result

        return call
