"""Inner optimizers that replace the Trainer's, chosen by the block `optimizer` of a run file.

The settings import no torch, so that mistakes are reported at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hf_diloco.config.base import Count
from hf_diloco.errors import ConfigError
from hf_diloco.utils.settings import Block

if TYPE_CHECKING:
    import torch
    from transformers import TrainerCallback, TrainingArguments

_OF_ONE_BIT = ("freeze_step", "bias_correction", "warmup_payload")
_OF_LAMB = ("min_coeff", "max_coeff", "coeff_beta", "factor_min", "factor_max", "factor_threshold")
_SETTINGS = {
    "onebit_lamb": (*_OF_ONE_BIT, *_OF_LAMB),
    "onebit_adam": _OF_ONE_BIT,
    "muon": ("muon_lr", "momentum", "nesterov", "ns_steps", "adjust_lr"),
}
"""The settings of each optimizer."""


class OptimizerBlock(Block):
    """An optimizer that replaces the Trainer's; its learning rate, betas and decay stay in `training`."""

    name: Literal["onebit_lamb", "onebit_adam", "muon"] = Field(description="see onebit.md and muon.md")
    freeze_step: Count | None = Field(
        None,
        description="1-bit, required: steps of the warm-up at full precision, 2 or more; null: all of them, no "
        "compression",
    )
    warmup_payload: Literal["fp32", "fp16"] = Field(
        "fp32", description="1-bit: number format of the gradients that ranks exchange in the warm-up"
    )
    bias_correction: bool = Field(False, description="1-bit: divide the moments by 1 - beta^t, as Adam does")
    min_coeff: float = Field(0.01, ge=0, description="LAMB: least trust ratio")
    max_coeff: float = Field(10.0, ge=0, description="LAMB: greatest trust ratio")
    coeff_beta: float = Field(0.9, ge=0, lt=1, description="LAMB: decay of the trust ratio that is kept")
    factor_min: float = Field(0.5, ge=0, description="LAMB: least factor on the trust ratio that is kept")
    factor_max: float = Field(4.0, ge=0, description="LAMB: greatest factor on it")
    factor_threshold: float = Field(0.1, ge=0, description="LAMB: how much the factor may change in a step")

    muon_lr: float | None = Field(
        None, gt=0, description="Muon: learning rate of the matrices of hidden layers; null: that of `training`"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon: decay of its momentum")
    nesterov: bool = Field(True, description="Muon: Nesterov momentum")
    ns_steps: int = Field(5, ge=1, le=99, description="Muon: steps of the Newton-Schulz iteration")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Muon: how its rate follows a matrix's shape; match_rms_adamw: for learning rates of AdamW",
    )

    @model_validator(mode="after")
    def _check(self) -> OptimizerBlock:
        if self.name != "muon" and "freeze_step" not in self.model_fields_set:
            raise ValueError(f"{self.name} needs freeze_step: about 30 % of max_steps, or null for no compression")
        check_freeze_step(self.freeze_step)
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is above {high}={getattr(self, high)}")
        for name in sorted({*self.changed()} - {"name", *_SETTINGS[self.name]}):
            owners = [owner for owner, settings in _SETTINGS.items() if name in settings]
            raise ValueError(f"{name}: only {' and '.join(owners)} has it, but name is {self.name}; leave it out")
        return self

    @property
    def kind(self) -> Literal["onebit", "muon"]:
        """The optimizer's name in `REFUSALS`."""
        return "muon" if self.name == "muon" else "onebit"

    def of_method(self) -> dict[str, Any]:
        """Returns the method's settings, without those of `training` and of the exchange."""
        return {name: getattr(self, name) for name in _SETTINGS[self.name] if name != "warmup_payload"}


def check_freeze_step(freeze_step: int | None) -> None:
    """Raises `ConfigError` if the warm-up of a 1-bit optimizer is too short."""
    if freeze_step is not None and freeze_step < 2:
        raise ConfigError(
            f"freeze_step={freeze_step}: the second moments need a warm-up of 2 steps or more; use about 30 % of all "
            "steps, or null for no compression"
        )


def make_optimizer(
    block: OptimizerBlock | None, model: torch.nn.Module, args: TrainingArguments
) -> torch.optim.Optimizer | None:
    """Makes the optimizer named in `block`, with rates, betas and decay of `args`; moves the model to its device.

    Returns:
        None if the Trainer makes its own optimizer.

    Raises:
        ConfigError: a setting is out of its range.
        UnsupportedError: the optimizer does not support the model.
    """
    if block is None:
        return None
    if block.kind == "onebit":
        from hf_diloco.optimizers.onebit.trainer import make_onebit

        return make_onebit(block.name, model, args, **block.of_method())
    from hf_diloco.optimizers.muon import MuonAdamW

    model.to(args.device)
    return MuonAdamW(
        model,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **block.of_method(),
    )


def callbacks_of(block: OptimizerBlock | None, optimizer: torch.optim.Optimizer | None) -> list[TrainerCallback]:
    """Returns the Trainer callbacks that the optimizer needs."""
    if block is None:
        return []
    from hf_diloco.optimizers.onebit.optimizer import OneBitOptimizer
    from hf_diloco.optimizers.onebit.trainer import OneBitCallback

    if not isinstance(optimizer, OneBitOptimizer):
        return []
    return [OneBitCallback(optimizer, block.warmup_payload)]
