"""A node's parameters and gradients as two flat vectors, of which each parameter and gradient is a view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_diloco.errors import UnsupportedError
from hf_diloco.methods.gossip.checks import common_kind


class FlatParameters:
    """The parameters of an optimizer, made views of one vector; their values and memory formats stay.

    Args:
        parameters: all fp32 or all fp64, on one device.
        method: what messages call the optimizer.

    Attributes:
        x: their values: d of them.
        g: room for as many gradients.

    Raises:
        UnsupportedError: parameters of other or several types or devices.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], method: str) -> None:
        self._parameters = parameters
        self._method = method
        dtype, device = common_kind(parameters)
        size = sum(parameter.numel() for parameter in parameters)
        self.x, self.g = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        like = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        self._formats = [(tensor.shape, tensor.stride()) for tensor in like]
        self._views_of_x, self._views_of_g = self.views(self.x), self.views(self.g)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """`vector`, of d values, cut into tensors of the parameters' shapes and memory formats."""
        pieces = vector.split([shape.numel() for shape, _ in self._formats])
        return [piece.as_strided(*format) for piece, format in zip(pieces, self._formats, strict=True)]

    def adopt(self, settle: Callable[[], None] = lambda: None) -> None:
        """Makes parameters views of `x`; again if somebody has given them other memory.

        Args:
            settle: called before `x` is written to: somebody may still read it.

        Raises:
            UnsupportedError: a parameter went to another device, or has another type.
        """
        for parameter, view in zip(self._parameters, self._views_of_x, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                raise UnsupportedError(
                    f"{self._method}: a parameter went from {view.dtype} on {view.device} to {parameter.dtype} on "
                    f"{parameter.device}; move the model before the optimizer is made"
                )
            settle()
            view.copy_(parameter.data)
            parameter.data = view

    def read_gradients(self) -> None:
        """Copies the parameters' gradients to `g`; one that is None counts as zero.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        present, gradients = [], []
        for parameter, view in zip(self._parameters, self._views_of_g, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise UnsupportedError(f"{self._method}: a sparse gradient; make the embedding with sparse=False")
            else:
                present.append(view)
                gradients.append(parameter.grad)
        if present:
            torch._foreach_copy_(present, gradients)

    def decay(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Weight decay and LARS of each parameter group, in the place of `g`."""
        first, start = 0, 0
        for group in groups:
            last = first + len(group["params"])
            end = start + sum(parameter.numel() for parameter in group["params"])
            decay = float(group["weight_decay"])
            scales = self._trust(slice(first, last), group["lars"], decay) if group["lars"] else None
            if decay:
                self.g[start:end].add_(self.x[start:end], alpha=decay)
            if scales is not None:
                torch._foreach_mul_(self._views_of_g[first:last], list(scales.unbind()))
            first, start = last, end

    def _trust(self, which: slice, coefficient: float, decay: float) -> torch.Tensor:
        """LARS: each tensor's factor, from its norms before weight decay; nothing waits for an accelerator."""
        norm_x = torch.stack(torch._foreach_norm(self._views_of_x[which]))
        norm_g = torch.stack(torch._foreach_norm(self._views_of_g[which]))
        trust = coefficient * norm_x / (norm_g + decay * norm_x)
        return torch.where((norm_x > 0) & (norm_g > 0), trust, torch.ones_like(trust))
