"""Islands that meet in an object store and stream: as threads of the test process, they train a stack of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import MissedRoundError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.saved_state import save_state
from hf_diloco.rounds.elastic import ElasticSession
from hf_diloco.utils.clock import Clock
from tests.islands import run_islands
from tests.meetings import Meeting, Member
from tests.small_model import batches, take_step
from tests.streaming_reference import NUM_STEPS, Stack, make_optimizer, strided, vector_of


class Streamer(Member):
    """An island that trains a stack of blocks in fragments."""

    def __init__(
        self, config: DiLoCoConfig, folder: Path, num_rounds: int | None, checkpoint: Path | None, clock: Clock
    ) -> None:
        self.number = config.island
        self.model: torch.nn.Module = Stack()
        self.optimizer = make_optimizer(self.model)
        self.num_steps = 0
        if checkpoint is not None:
            saved = torch.load(checkpoint / "model.pt", weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.num_steps = saved["num_steps"]
        self.session = ElasticSession(config, IslandGroup(), clock=clock)
        self.started.append(self)
        self.session.num_rounds = num_rounds
        self.session.join(open_shards(self.model, self.optimizer, 1), folder, checkpoint=checkpoint)
        self.reports = []
        self.missed = 0

    def stream(self, num_steps: int, total: int = 10**9) -> Streamer:
        """Takes steps, of a run of `total`."""
        data = batches(self.number, NUM_STEPS)  # as many as the equations take, which makes them the same ones
        for _ in range(num_steps):
            batch = data[self.num_steps % NUM_STEPS]
            take_step(self.model, self.optimizer, batch)
            self.session.outer.count_step(len(batch))
            self.num_steps += 1
            self.advance(is_last=self.num_steps == total)
        return self

    def stream_to(self, round_number: int) -> Streamer:
        """As long as it takes."""
        while self.session.outer.round < round_number:
            self.stream(1)
        return self.drain()

    def advance(self, is_last: bool = False) -> None:
        try:
            if self.session.is_due(is_last):
                self.reports += self.session.advance(is_last)
        except MissedRoundError:
            self.missed += 1

    def bring(self, number: int, length: float) -> None:
        """A round of a fragment with a pseudo-gradient of this norm."""
        fragment = self.session.outer.fragments[number]
        values = torch.zeros(fragment.partition.numel)
        values[0] = length
        fragment.partition.scatter(fragment.method.parameters - values)
        for _ in range(self.session.outer.steps_left):
            self.session.outer.count_step(1.0)
        self.advance()

    def drain(self) -> Streamer:
        self.reports += self.session.drain()
        return self

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        self.drain()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "num_steps": self.num_steps}, folder / "model.pt")
        save_state(self.session.outer, folder, 0, {})
        return folder

    def die(self) -> None:
        super().die()
        self.session.close()

    def progress_of(self, number: int) -> torch.Tensor:
        """What it trained of a fragment and has not brought into a round."""
        fragment = self.session.outer.fragments[number]
        progress = torch.empty(fragment.partition.numel)  # a round behind the steps may be using the scratch vector
        fragment.partition.gather(progress)
        fragment.method.pseudo_gradient_(progress)
        return progress

    @property
    def weights(self) -> torch.Tensor:
        return vector_of(self.model, strided(1)[0])


class Streams(Meeting):
    """A run of such islands."""

    def join(self, number: int, checkpoint: Path | None = None, **settings: Any) -> Streamer:
        config = self.config(number, **settings)
        return Streamer(config, self.folder / f"island-{number}", self.num_rounds, checkpoint, self.clock)

    def join_all(self, checkpoints: list[Path] | None = None) -> list[Streamer]:
        """All of them, before one takes a step: nobody is late for the first round."""
        num_islands = self.settings["num_islands"]
        return run_islands(num_islands, lambda island: self.join(island, checkpoints[island] if checkpoints else None))


def train_all(islands: list[Streamer], num_steps: int, total: int = 10**9) -> list[Streamer]:
    return run_islands(len(islands), lambda island: islands[island].stream(num_steps, total).drain())
