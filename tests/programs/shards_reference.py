"""What an engine should do, written plainly: fp32 masters of all parameters beside a model in the working format."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_diloco.inner.base import Shards
from tests.programs.shards_engines import (
    ADAM,
    LEARNING_RATE,
    Engine,
    Fsdp2Engine,
    autocast,
    groups_of_optimizer,
    make_model,
    muon,
    named_parameters,
    trainable,
)
from tests.programs.shards_table import Cell


def working_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """The parameters that the forward pass uses, whole, frozen ones too. Collective under ZeRO-3 and FSDP2."""
    parameters = dict(named_parameters(engine.module))
    if isinstance(engine, Fsdp2Engine):
        # What is unsharded at the moment is a copy, and no DTensor: the next forward pass uses it as it is.
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in parameters.items()}
        return {name: one.detach().to(engine.dtype, copy=True) for name, one in whole.items()}
    if any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def whole(shards: Shards) -> torch.Tensor:
    """All values in the canonical order, put together from all ranks' segments; equal on all ranks."""
    values = torch.zeros(shards.num_parameters)
    for (start, length), segment in zip(shards.intervals(), shards.segments(), strict=True):
        values[start : start + length] = segment.values
    if not shards.is_replicated:
        dist.all_reduce(values)
    return values


class Reference:
    """AdamW on fp32 masters; forward and backward in the working format; gradients averaged over the ranks."""

    def __init__(self, cell: Cell, engine: Engine) -> None:
        self._cell = cell
        self.model = make_model(cell)
        for name, weights in working_weights(engine).items():
            self.model.get_parameter(name).data = weights
        for name, buffer in engine.module.named_buffers():  # DeepSpeed leaves some of them in fp32
            self.model.get_buffer(name).data = buffer.clone()
        keep = self.dtype if cell.numbers == "bf16 parameters" else torch.float32
        given = make_model(cell) if cell.fsdp is not None else self.model  # DeepSpeed's begin from rounded weights
        self._masters = {name: nn.Parameter(p.detach().to(keep).clone()) for name, p in trainable(given)}
        groups = groups_of_optimizer(cell, list(self._masters.items()))
        is_muon = cell.optimizer == "muon"
        self._optimizer = muon(groups) if is_muon else torch.optim.AdamW(groups, lr=LEARNING_RATE, **ADAM)
        if cell.stage == 0 and cell.numbers == "bf16":
            # DeepSpeed makes Adam's state by a step without gradients, which decays the masters a little.
            for master in self._masters.values():
                master.grad = torch.zeros_like(master)
            self._optimizer.step()

    @property
    def dtype(self) -> torch.dtype:
        """The working format."""
        return next(self.model.parameters()).dtype

    @property
    def sizes(self) -> dict[str, int]:
        return {name: master.numel() for name, master in self._masters.items()}

    def masters(self) -> torch.Tensor:
        """All masters in the canonical order, fp32."""
        return torch.cat([master.detach().float().flatten() for master in self._masters.values()])

    def write(self, values: torch.Tensor) -> None:
        """Replaces all masters, and the working copies with them."""
        for master, part in zip(self._masters.values(), values.split(list(self.sizes.values())), strict=True):
            master.data.copy_(part.view_as(master))
        self._push()

    def begin_anew(self, rates: list[float]) -> None:
        """Goes on with these learning rates, and as if no step had been taken."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()

    def buffer(self, name: str) -> torch.Tensor:
        """One of the optimizer's moments in the canonical order, fp32; zeros where it has none."""
        states = ((one, self._optimizer.state[one]) for one in self._masters.values())
        return torch.cat([state.get(name, torch.zeros_like(one)).float().flatten() for one, state in states])

    def write_buffer(self, name: str, values: torch.Tensor) -> None:
        """Replaces one of the optimizer's moments."""
        for master, part in zip(self._masters.values(), values.split(list(self.sizes.values())), strict=True):
            self._optimizer.state[master][name].copy_(part.view_as(master))

    def step(self, batches: list[torch.Tensor]) -> None:
        """One optimizer step over this rank's micro-batches."""
        for tokens in batches:
            with autocast(self._cell):
                loss = self.model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
        for name, parameter in trainable(self.model):
            assert parameter.grad is not None
            gradient = parameter.grad.to(self._masters[name].dtype)
            dist.all_reduce(gradient)
            self._masters[name].grad = gradient / dist.get_world_size()
            parameter.grad = None
        self._optimizer.step()
        self._push()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad(), autocast(self._cell):
            return self.model(input_ids=tokens).logits

    def _push(self) -> None:
        with torch.no_grad():
            for name, parameter in trainable(self.model):
                parameter.copy_(self._masters[name])
