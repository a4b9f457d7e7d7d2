"""The optimizer inside an island, as an outer method sees it: learning rates, parameter groups, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_diloco.errors import UnsupportedError

_PACKAGES = ("torch", "deepspeed", "hf_diloco")
_KNOWN = ("SGD", "Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam", "MuonAdamW", "MuonWithAuxAdam")
"""Optimizers that begin anew with buffers and a count of steps that are 0."""


class InnerOptimizer:
    """One rank's view of it.

    Args:
        optimizer: torch's, below DeepSpeed's; None where there is none to look at.
        groups: the parameter group that each trainable parameter is in, by name.

    Attributes:
        kind: name of its class.
        groups: as above.
        rates: the learning rate of each parameter group at the last step; before the first, at present.
    """

    def __init__(self, optimizer: Any = None, groups: Mapping[str, int] | None = None) -> None:
        self.kind = type(optimizer).__name__
        self.groups = groups or {}
        self._optimizer = optimizer
        self._param_groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
        self.rates = [float(group["lr"]) for group in self._param_groups]

    @property
    def num_groups(self) -> int:
        """How many parameter groups there are."""
        return len(self.rates)

    def watch(self) -> None:
        """From now on `rates` are those of the last step.

        Schedulers change them right after a step, before or after anybody else is told of it.

        Raises:
            UnsupportedError: the optimizer is none of torch's.
        """
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise UnsupportedError(
                f"the learning rates of {self.kind} cannot be seen, and this method of the outer loop needs them: use "
                "a torch.optim optimizer, or method=diloco"
            )

        self._optimizer.register_step_pre_hook(lambda *_: self._note_rates())
        self._note_rates()

    def check_buffers(self, wanted: str) -> None:
        """Raises `UnsupportedError` if nothing else than keeping the buffers is possible, and it is wanted."""
        if wanted == "keep":
            return
        if type(self._optimizer).__module__.partition(".")[0] not in _PACKAGES or self.kind not in _KNOWN:
            raise UnsupportedError(
                f"options.inner_buffers={wanted}: the buffers of {self.kind} are not known (those of "
                f"{', '.join(_KNOWN)} are): set it to keep"
            )
        if wanted == "average" and self.kind == "MuonWithAuxAdam":
            raise UnsupportedError(
                "options.inner_buffers=average: the momentum of DeepSpeed's Muon lies otherwise than the master "
                "weights, which this package cannot average: set it to keep or zero"
            )

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """What it keeps for each tensor that it trains."""
        state: Mapping[torch.Tensor, dict[str, Any]] = self._optimizer.state
        return state

    @property
    def buffers(self) -> list[str]:
        """Names of its momentum or moments in `state`; not every tensor has each."""
        if self.kind == "SGD":
            return ["momentum_buffer"] if any(group["momentum"] for group in self._param_groups) else []
        if self.kind == "MuonAdamW":
            return ["momentum_buffer", "exp_avg", "exp_avg_sq"]
        variant = ["max_exp_avg_sq"] if any(group.get("amsgrad") for group in self._param_groups) else []
        return ["exp_avg", "exp_avg_sq", *variant]

    def commit_buffer(self, name: str) -> None:
        """Makes all copies of a buffer agree after it was written. Collective over the island's ranks under HSDP."""

    def zero_buffers(self) -> None:
        """Has the optimizer go on as if it had taken no step yet: momentum, moments, and the count for their bias."""
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif name == "step":
                    state[name] = 0
        for group in self._optimizer.param_groups:
            if "step" in group:
                group["step"] = 0

    def _note_rates(self) -> None:
        """Takes the rates of the groups that a step is of: ZeRO-1 and ZeRO-2 show one at a time."""
        present = self._optimizer.param_groups
        if len(present) == self.num_groups:
            self._param_groups = list(present)
        for number, group in enumerate(self._param_groups):
            if any(group is one for one in present):
                self.rates[number] = float(group["lr"])
