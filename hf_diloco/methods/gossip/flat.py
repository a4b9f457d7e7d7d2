"""A node's parameters and gradients as views of two flat vectors, and checks of their parameter groups."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from hf_diloco.errors import ConfigError, ExchangeError, UnsupportedError

logger = logging.getLogger("hf_diloco")

MAX_LEFT_OUT = 100
"""How many gradients in a row may be left out before the run ends: about the steps of one DiLoCo round, as a round
without any finite pseudo-gradient also ends a run."""

_CHUNK_VALUES = 1 << 18
"""Values that an update handles at a time on a CPU: its four vectors fit the cache, and the overhead of calls is small
compared with the arithmetic."""

_MAX_GROWTH = 2.0
"""The growth of γ in one step without a correction: at the second step of a warm-up from 0, γ doubles."""


@dataclass(frozen=True)
class Part:
    """A piece of the flat vectors with its parameter group's settings.

    Attributes:
        where: the slice of the flat vectors.
        lr: γ of this step.
        momentum: β; 0 for methods without momentum.
        growth: γ divided by the γ of the last step in which it was not 0; 1 at the first such step.
    """

    where: slice
    lr: float
    momentum: float
    growth: float

    @property
    def shrinkage(self) -> float:
        """The factor that shrinks a momentum m before the step, so that γ m at most doubles when γ jumps up.

        A momentum derived from the nodes' movement holds their distance, divided by the γ at that time. Without this
        factor, a warm restart of a cosine schedule would drive nodes apart by hundreds of times that distance.
        """
        return min(1.0, _MAX_GROWTH / self.growth) if self.growth else 1.0


class FlatParameters:
    """The parameters of an optimizer as views of one vector; their values and memory formats do not change.

    Attributes:
        parameters: of all groups, one after the other.
        spans: the slice of the flat vectors that each group occupies.
        x, g: the d values of the parameters; a buffer for their gradients.

    Raises:
        UnsupportedError: parameters are not all fp32 or all fp64, on one device.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], method: str) -> None:
        self.parameters: list[torch.nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self._method = method
        dtype, device = _common_kind(self.parameters)
        sizes = [sum(parameter.numel() for parameter in group["params"]) for group in groups]
        self.spans = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        self.x, self.g = (torch.empty(sum(sizes), dtype=dtype, device=device) for _ in range(2))
        like = [torch.empty_like(parameter, device="meta") for parameter in self.parameters]
        self._formats = [(tensor.shape, tensor.stride()) for tensor in like]
        self._views_of_x, self._views_of_g = self.views(self.x), self.views(self.g)
        self._num_left_out = self._num_left_out_in_a_row = 0

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """`vector`, of d values, cut into tensors of the parameters' shapes and memory formats."""
        pieces = vector.split([shape.numel() for shape, _ in self._formats])
        return [piece.as_strided(*format) for piece, format in zip(pieces, self._formats, strict=True)]

    def adopt(self, drain: Callable[[], None]) -> None:
        """Makes parameters views of `x`; repeats this for parameters that were given other memory since.

        Calls `drain` before a write to `x`, which an exchange may still be reading.

        Raises:
            UnsupportedError: a parameter moved to another device, or has another dtype.
        """
        for parameter, view in zip(self.parameters, self._views_of_x, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                raise UnsupportedError(
                    f"{self._method}: a parameter went from {view.dtype} on {view.device} to {parameter.dtype} on "
                    f"{parameter.device}; move the model before the optimizer is made"
                )
            drain()
            view.copy_(parameter.data)
            parameter.data = view

    def read_gradients(self, node: int, step: int) -> None:
        """Copies the parameters' gradients to `g`. A gradient of None becomes zero; if a value is not finite, all do.

        Raises:
            ExchangeError: the parameters are not finite either, or `MAX_LEFT_OUT` gradients in a row were not finite.
            UnsupportedError: a gradient is sparse.
        """
        present, gradients = [], []
        for parameter, view in zip(self.parameters, self._views_of_g, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise UnsupportedError(f"{self._method}: a sparse gradient; make the embedding with sparse=False")
            else:
                present.append(view)
                gradients.append(parameter.grad)
        if present:
            torch._foreach_copy_(present, gradients)
        if _is_finite(self.g):
            self._num_left_out_in_a_row = 0
        else:
            check_finite([self.x], node, step)  # parameters that are not finite never have finite gradients
            self._leave_out_gradient(node, step)

    def _leave_out_gradient(self, node: int, step: int) -> None:
        """Zeroes the gradient; warns the first, second, fourth, ... time."""
        self.g.zero_()
        self._num_left_out += 1
        self._num_left_out_in_a_row += 1
        if self._num_left_out_in_a_row == MAX_LEFT_OUT:
            raise ExchangeError(
                f"step {step + 1}: none of the last {MAX_LEFT_OUT} gradients of node {node} was finite: look at its "
                "data, and lower the learning rate. If the others go on, start this node again, alone, by the same "
                "command: it returns with their mean. If all nodes end like this, start all again"
            )
        if self._num_left_out.bit_count() == 1:
            logger.warning(
                "step %d: the gradient of node %d is not finite, and left out (%d so far): if it goes on, lower the "
                "learning rate, or look at the data",
                step + 1,
                node,
                self._num_left_out,
            )

    def parts(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        """Cuts the flat vectors by parameter group; on a CPU also into pieces that fit its cache."""
        for group, span in zip(groups, self.spans, strict=True):
            chunk = _CHUNK_VALUES if self.x.device.type == "cpu" else max(1, span.stop - span.start)
            lr, momentum = float(group["lr"]), float(group.get("momentum", 0.0))
            growth = lr / group["last_lr"] if group["last_lr"] else 1.0
            for low in range(span.start, span.stop, chunk):
                yield Part(slice(low, min(low + chunk, span.stop)), lr, momentum, growth)

    def decay(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Applies weight decay and LARS of each parameter group to `g`, in place; frozen parameters do not decay."""
        first = 0
        for group, span in zip(groups, self.spans, strict=True):
            last = first + len(group["params"])
            decay = float(group["weight_decay"])
            is_scaled = bool(group["lars"] and group["params"])
            scales = self._trust(slice(first, last), group["lars"], decay) if is_scaled else None
            if decay:
                self.g[span].add_(self.x[span], alpha=decay)
                for parameter, view in zip(group["params"], self._views_of_g[first:last], strict=True):
                    if not parameter.requires_grad:
                        view.zero_()
            if scales is not None:
                torch._foreach_mul_(self._views_of_g[first:last], list(scales.unbind()))
            first = last

    def _trust(self, which: slice, coefficient: float, decay: float) -> torch.Tensor:
        """LARS: the factor of each tensor, from its norms before weight decay; does not wait for the device."""
        norm_x = torch.stack(torch._foreach_norm(self._views_of_x[which]))
        norm_g = torch.stack(torch._foreach_norm(self._views_of_g[which]))
        trust = coefficient * norm_x / (norm_g + decay * norm_x)
        return torch.where((norm_x > 0) & (norm_g > 0), trust, torch.ones_like(trust))


def check_finite(vectors: Iterable[torch.Tensor], node: int, step: int) -> None:
    """Raises `ExchangeError` if a value is not finite: it would spread to the neighbours, and from them to all."""
    if not all(map(_is_finite, vectors)):
        raise ExchangeError(
            f"step {step + 1}: the parameters of node {node} are beyond all bounds, and not sent to others. If these "
            "go on, start this node again, alone, by the same command: it returns with their mean. If all nodes end "
            "like this, start all again with a smaller learning rate"
        )


def _is_finite(vector: torch.Tensor) -> bool:
    """Whether all values are finite, and none is absurdly large (1e19)."""
    return math.isfinite(float(torch.linalg.vector_norm(vector)))


@contextmanager
def own_settings(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps the groups' settings, except learning rates, over a load: nodes without a checkpoint have the same."""
    saved = {"params", "lr", "initial_lr", "num_steps", "last_lr"}
    mine = [{name: group[name] for name in group.keys() - saved} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, mine, strict=True):
        group.update(settings)


def check_group(group: dict[str, Any]) -> None:
    """Raises `ConfigError` if a setting of a group is out of its range."""
    for setting in ("lr", "weight_decay", "lars"):
        value = float(group[setting])
        if not 0 <= value < math.inf:
            raise ConfigError(f"{setting}={value}: give a finite number from 0 on")
    if (lars := float(group["lars"])) > 1:
        raise ConfigError(f"lars={lars:g}: give a number from 0 to 1; 0.001 is usual")
    check_below_1("momentum", float(group.get("momentum", 0.0)))


def check_below_1(setting: str, value: float) -> None:
    """Raises `ConfigError` unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"{setting}={value}: give a number from 0 to below 1")


def _common_kind(parameters: Sequence[torch.nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    if not parameters:
        raise ConfigError("the parameter groups are empty: give parameters that are trained")
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    names = ", ".join(sorted(f"{dtype} on {device}".removeprefix("torch.") for dtype, device in kinds))
    if len(kinds) > 1:
        raise UnsupportedError(f"parameters of several kinds ({names}); all must be of one type, on one device")
    dtype, device = next(iter(kinds))
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"parameters are {names}; keep them in float32 and compute in bf16 with autocast")
    return dtype, device
