"""The `optimizer` block of a run file. Imports no torch, so that mistakes show at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hf_diloco.runs.block import Block, Count

_OF_LAMB = (
    "min_coeff",
    "max_coeff",
    "coeff_beta",
    "factor_min",
    "factor_max",
    "factor_threshold",
)


class OptimizerBlock(Block):
    """A 1-bit optimizer in the place of the Trainer's; its learning rate, betas and decay stay in `training`."""

    name: Literal["onebit_lamb", "onebit_adam"] = Field(description="see onebit.md")
    freeze_step: Count | None = Field(
        description="steps of the warm-up at full precision, 2 or more; null: all of them, no compression"
    )
    bias_correction: bool = Field(False, description="divide the moments by 1 - beta^t, as Adam does")
    min_coeff: float = Field(0.01, ge=0, description="LAMB: least trust ratio")
    max_coeff: float = Field(10.0, ge=0, description="LAMB: greatest trust ratio")
    coeff_beta: float = Field(0.9, ge=0, lt=1, description="LAMB: decay of the trust ratio that is kept")
    factor_min: float = Field(0.5, ge=0, description="LAMB: least factor on the trust ratio that is kept")
    factor_max: float = Field(4.0, ge=0, description="LAMB: greatest factor on it")
    factor_threshold: float = Field(0.1, ge=0, description="LAMB: how much the factor may change in a step")

    @model_validator(mode="after")
    def _check(self) -> OptimizerBlock:
        if self.freeze_step is not None and self.freeze_step < 2:
            raise ValueError(
                f"freeze_step={self.freeze_step}: the second moments need a warm-up of 2 steps or more; use about "
                "15 % of max_steps, or null for no compression"
            )
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is above {high}={getattr(self, high)}")
        given = [name for name in _OF_LAMB if name in self.model_fields_set]
        if self.name != "onebit_lamb" and given:
            raise ValueError(f"{', '.join(given)}: only onebit_lamb has it, but name is {self.name}; leave it out")
        return self

    def of_method(self) -> dict[str, object]:
        """The settings that the method takes, but for those of `training`."""
        names = ("freeze_step", "bias_correction", *(_OF_LAMB if self.name == "onebit_lamb" else ()))
        return {name: getattr(self, name) for name in names}
