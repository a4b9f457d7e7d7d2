"""The equations of streaming DiLoCo, on all islands at once, and the stack of blocks that they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.small_model import batches, take_step

NUM_BLOCKS = 4
NUM_STEPS = 18


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.inner(values).tanh()


class Stack(nn.Module):
    """Blocks between an embedding and a head, named as a language model's are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 5)
        self.layers = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(5, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embed(values)
        for layer in self.layers:
            values = layer(values)
        return self.head(values)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def vector_of(model: nn.Module, names: list[str]) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    return torch.cat([parameters[name].detach().flatten() for name in names])


def write_vector(model: nn.Module, names: list[str], vector: torch.Tensor) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, part in zip(names, vector.split([parameters[name].numel() for name in names]), strict=True):
            parameters[name].copy_(part.view_as(parameters[name]))


# The equations, on all islands at once


@dataclass
class Part:
    """One fragment in the reference: outer parameters, momentum, and when it is due or lands."""

    names: list[str]
    anchor: torch.Tensor
    momentum: torch.Tensor
    due: int
    lands: int | None = None
    synced_at: int = 0


@dataclass
class Reference:
    """Islands in lockstep: arXiv 2501.18512, algorithm 2, with the outer Nesterov SGD of arXiv 2311.08105."""

    models: Sequence[nn.Module]
    sync_every: int
    delay: int
    alpha: float
    fragments: list[list[str]]
    lr: float = 0.7
    mu: float = 0.9
    parts: list[Part] = field(default_factory=list)
    num_begun: int = 0

    def __post_init__(self) -> None:
        for number, names in enumerate(self.fragments):
            start = vector_of(self.models[0], names)
            due = self.sync_every * (number + 1) // len(self.fragments)
            self.parts.append(Part(names, start, torch.zeros_like(start), due))

    def after_step(self, step: int, is_last: bool) -> None:
        flying = [part for part in self.parts if part.lands is not None]
        for part in sorted(flying, key=lambda part: part.lands or 0):
            if is_last or part.lands == step:
                self._land(part, self.alpha)
        while is_last and self.parts[self.num_begun % len(self.parts)].synced_at < step:
            self._land(self._outer_step(step), 0.0)
        if self.parts[self.num_begun % len(self.parts)].due == step:
            part = self._outer_step(step)
            part.lands = step + self.delay
            if not self.delay:
                self._land(part, 0.0)

    def _outer_step(self, step: int) -> Part:
        part = self.parts[self.num_begun % len(self.parts)]
        self.num_begun += 1
        deltas = [part.anchor - vector_of(model, part.names) for model in self.models]
        mean = deltas[0]
        for delta in deltas[1:]:
            mean = mean + delta
        if len(deltas) > 1:
            mean = mean * (1.0 / len(deltas))
        part.momentum = part.momentum * self.mu + mean
        part.anchor = part.anchor - (part.momentum * self.mu + mean) * self.lr
        part.due = step + self.sync_every
        part.synced_at = step
        return part

    def _land(self, part: Part, alpha: float) -> None:
        part.lands = None
        for model in self.models:
            local = vector_of(model, part.names)
            mixed = local.mul_(alpha).add_(part.anchor, alpha=1 - alpha) if alpha else part.anchor
            write_vector(model, part.names, mixed)


def strided(num_fragments: int) -> list[list[str]]:
    """The cut of `Stack`: block l in fragment l mod P, then embedding and head where there is least."""
    if num_fragments == 1:
        return [[name for name, _ in Stack().named_parameters()]]
    blocks = [[f"layers.{block}.inner.weight", f"layers.{block}.inner.bias"] for block in range(NUM_BLOCKS)]
    found = [[name for block in blocks[one::num_fragments] for name in block] for one in range(num_fragments)]
    sizes = [30 * len(blocks[one::num_fragments]) for one in range(num_fragments)]
    for names, size in ((["embed.weight", "embed.bias"], 30), (["head.weight", "head.bias"], 6)):
        smallest = sizes.index(min(sizes))
        found[smallest] += names
        sizes[smallest] += size
    order = [name for name, _ in Stack().named_parameters()]
    return [sorted(names, key=order.index) for names in found]


def expected_weights(num_islands: int, config: dict[str, Any], num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    models = [Stack() for _ in range(num_islands)]
    optimizers = [make_optimizer(model) for model in models]
    reference = Reference(
        models,
        config["sync_every"],
        config.get("fragment_sync_delay", 0),
        config.get("fragment_update_alpha", 0.0),
        strided(config.get("num_fragments", 1)),
    )
    data = [batches(island, num_steps) for island in range(num_islands)]
    for step in range(1, num_steps + 1):
        for model, optimizer, mine in zip(models, optimizers, data, strict=True):
            take_step(model, optimizer, mine[step - 1])
        reference.after_step(step, is_last=step == num_steps)
    return [vector_of(model, strided(1)[0]) for model in models]
