"""Parameters that are their own masters: plain PyTorch, DDP, and DeepSpeed's ZeRO-0 in fp32."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from hf_diloco.errors import UnsupportedError
from hf_diloco.inner.base import InnerOptimizer, Segment, Shards, group_numbers, plain_name, refuse_unfrozen


class PlainShards(Shards):
    """All trainable parameters, on every rank.

    Parameters in 16 bits (a model loaded in bf16) are read and written through a cast; the outer state is fp32.
    """

    is_replicated = True

    def __init__(self, model: nn.Module, description: str = "DDP", optimizer: Any = None) -> None:
        self.description = description
        self._model, self._optimizer = model, optimizer
        self._parameters = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self._parameters.items():
            if not parameter.is_contiguous():
                raise UnsupportedError(
                    f"parameter {name} is not contiguous in memory: call .contiguous() on it before training"
                )
            if not parameter.is_floating_point():
                raise UnsupportedError(
                    f"parameter {name} has type {parameter.dtype}: only floating-point parameters can be "
                    "synchronised; freeze quantised ones (requires_grad=False)"
                )
        self.sizes = {name: p.numel() for name, p in self._parameters.items()}
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self.inner = InnerOptimizer(optimizer, group_numbers(optimizer, self._parameters))

    def check_trained(self) -> None:
        now = {plain_name(name): p for name, p in self._model.named_parameters()}
        refuse_unfrozen(now, self._optimizer, self.sizes)
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter:
                raise UnsupportedError(
                    f"parameter {name} is gone since training began, or another has taken its place, as by "
                    "load_state_dict(assign=True): change the model before training begins, or between two trainings"
                )

    def segments(self) -> list[Segment]:
        return [Segment(name, 0, parameter.data.view(-1)) for name, parameter in self._parameters.items()]

    def commit(self, names: Collection[str] | None = None) -> None:
        """Nothing to do: the parameter is the master."""
