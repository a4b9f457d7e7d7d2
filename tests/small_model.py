"""Models of a few and of a few dozen parameters, its batches, a step of training, and what memory that takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Linear(nn.Module):
    """The least that a Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The squared error."""
        return {"loss": (self.layer(x) - y).square().mean()}


def make_model(seed: int = 0, width: int = 8) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def set_weights(model: nn.Module, values: torch.Tensor | float) -> None:
    parameters = list(model.parameters())
    vector = torch.as_tensor(values, dtype=torch.float32).expand(sum(one.numel() for one in parameters))
    with torch.no_grad():
        for parameter, part in zip(parameters, vector.split([one.numel() for one in parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def batches(seed: int, number: int, size: int = 4) -> torch.Tensor:
    return torch.randn(number, size, 5, generator=torch.Generator().manual_seed(seed))


@contextmanager
def new_tensor_bytes() -> Iterator[Callable[[], int]]:
    """Yields what counts the bytes of all tensors that were made in the block, and live; storages count once."""
    gc.collect()
    gc.freeze()  # what was there before is not looked at, which is faster, too

    def count() -> int:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())

    try:
        yield count
    finally:
        gc.unfreeze()
