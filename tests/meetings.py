"""Islands that meet in an object store, as threads of the test process: they train a small model, and may die."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import MissedRoundError, StoreError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.saved_state import save_state
from hf_diloco.rounds.elastic import ElasticSession
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.open import open_session
from hf_diloco.store.objects import ObjectStore
from hf_diloco.utils.clock import REAL, Clock
from tests.islands import run_islands
from tests.small_model import batches, make_model, set_weights, take_step, weights_of

FEDAVG: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}

ENGINES: dict[str, dict[str, Any]] = {
    "bucket": {},
    "mesh": {"exchange": "mesh", "bind_address": "127.0.0.1"},
}


class Meeting:
    """A run in a store of its own; `island` starts one of its islands."""

    engine: ClassVar[dict[str, Any]] = {}
    clock: ClassVar[Clock] = REAL

    def __init__(
        self, folder: Path, num_islands: int = 2, num_rounds: int | None = None, width: int = 8, **settings: Any
    ) -> None:
        self.num_rounds = num_rounds
        self.width = width
        self.url = f"memory://{uuid.uuid4().hex}"
        self.folder = folder
        self.settings = {"sync_every": 2, "num_islands": num_islands, "grace": 5.0, "sync_timeout": 5.0, **settings}
        self.settings.setdefault("join_timeout", 20.0)
        self.settings = {**self.engine, **self.settings}

    def config(self, island: int, **settings: Any) -> DiLoCoConfig:
        return DiLoCoConfig(rendezvous=self.url, island=island, **{**self.settings, **settings})

    def island(
        self,
        number: int,
        seed: int = 0,
        checkpoint: Path | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> Member:
        config, folder = self.config(number, **settings), self.folder / f"island-{number}"
        return Member(config, folder, seed, checkpoint, self.num_rounds, self.width, self.clock, should_stop)


def make_optimizer(model: torch.nn.Module, width: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.4 / width)


class Member:
    """An island that trains a small model: `train` takes steps and synchronises when it is time."""

    started: ClassVar[list[Member]] = []

    def __init__(
        self,
        config: DiLoCoConfig,
        folder: Path,
        seed: int = 0,
        checkpoint: Path | None = None,
        num_rounds: int | None = None,
        width: int = 8,
        clock: Clock = REAL,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number = config.island
        self.model: torch.nn.Module = make_model(seed, width)
        self.optimizer = make_optimizer(self.model, width)
        if checkpoint is not None:
            self.model.load_state_dict(torch.load(checkpoint / "model.pt", weights_only=True))
        if config.meets_at_island_0:
            session = open_session(config, IslandGroup(), folder=folder)
            assert isinstance(session, ElasticSession)
            self.session = session
        else:
            self.session = ElasticSession(config, IslandGroup(), should_stop, clock)
        self.started.append(self)
        self.session.num_rounds = num_rounds
        self.session.join(open_shards(self.model, self.optimizer, 1), folder, checkpoint=checkpoint)
        self.reports: list[SyncReport] = []
        self.missed = 0
        self._batches = itertools.cycle(batches(100 + config.island, 64))

    def step(self) -> bool:
        take_step(self.model, self.optimizer, next(self._batches))
        return self.session.outer.count_step(weight=4.0)

    def train(self, num_steps: int) -> Member:
        for _ in range(num_steps):
            if self.step():
                self.sync()
        return self

    def train_to(self, round_number: int) -> Member:
        """As long as it takes: an island that comes too late for a round needs more steps."""
        while self.session.outer.round < round_number:
            self.train(1)
        return self

    def sync(self) -> None:
        try:
            self.reports.append(self.session.sync())
        except MissedRoundError:
            self.missed += 1

    def save(self, folder: Path) -> Path:
        self.session.drain()  # an average that is still uploaded lies in the vector that this overwrites
        folder.mkdir(parents=True)
        torch.save(self.model.state_dict(), folder / "model.pt")
        save_state(self.session.outer, folder, 0, {})
        return folder

    @property
    def hash(self) -> str:
        return self.session.outer.outer_hash

    @property
    def weights(self) -> torch.Tensor:
        return weights_of(self.model)

    @property
    def residual(self) -> torch.Tensor:
        """What the codec left out so far."""
        feedback = self.session.outer.current.feedback
        assert feedback is not None
        return feedback.residual.clone()

    @property
    def progress(self) -> torch.Tensor:
        """What it trained and has not brought into a round."""
        self.session.drain()  # as in `save`
        self.session.outer.current.take_progress()
        return self.session.outer.current.scratch.clone()

    @property
    def next_residual(self) -> torch.Tensor:
        """What will be left out of what it would send now."""
        decay = self.session.config.feedback_decay
        total = self.progress + decay * self.residual
        return total - sent_of(self.session.outer.codec.name, total)

    def leave(self, finished: bool = True) -> Member:
        self.session.leave(finished)
        return self

    def die(self) -> None:
        """As a killed process: no goodbye, no further sign of life."""
        if self.session.members is not None:
            self.session.members.stop_heartbeats()


class BrokenStore:
    """Fails every call while `is_down`, and those that `fails` names; counts this thread's in vain."""

    tells_changes = False

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.is_down = False
        self.fails: Callable[..., bool] = lambda name, *args: False
        self.num_in_vain = 0
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if not callable(operation):
            return operation

        def run(*args: Any) -> Any:
            if self.is_down or self.fails(name, *args):
                self.num_in_vain += threading.get_ident() == self._thread
                raise StoreError("the store is down")
            return operation(*args)

        return run


def offer_spoilt(islands: Sequence[Member], value: float) -> None:
    """Two islands take a round, to which the second brings parameters of nothing but `value`."""
    sound, spoilt = islands

    def take_round(island: int) -> None:
        if island == 1:
            set_weights(spoilt.model, value)
            spoilt.session.outer.current.steps = 1
            spoilt.session.outer.count_step()
            spoilt.sync()
        else:
            sound.train(2)

    run_islands(2, take_round)


def bury() -> None:
    """Ends what islands of a test still do."""
    while Member.started:
        Member.started.pop().die()


def sent_of(payload: str, values: torch.Tensor) -> torch.Tensor:
    """What others read of it."""
    sent = torch.empty_like(values)
    CODECS[payload].round_trip(values, sent)
    return sent
