"""1-bit LAMB: LAMB that exchanges momentum in one bit per value, with trust ratios frozen after the warm-up.

Warm-up, a plain LAMB (arXiv 1904.00962), g averaged over the ranks:

    m = b1 m + (1-b1) g ;  v = b2 v + (1-b2) g^2 ;  u = m / (sqrt(v)+eps) + wd w
    c = clip(||w|| / ||u||, min_coeff, max_coeff), 1 if a norm is 0 ;  w -= lr c u
    c_frozen = b3 c_frozen + (1-b3) c   where c is not 1

At the freeze v_fresh = v, and per tensor s = mean_l rms(m_l) / rms(m); 1 where rms(m) is 0. Then:

    m = (b1 m + (1-b1) g_rank) s, averaged in one bit, / s ;  g' = (m - b1 m_before) / (1-b1)
    v_fresh = b2 v_fresh + (1-b2) g'^2 ;  u0 = m / (sqrt(v)+eps) ;  u = u0 + wd w
    f = max_elements (sqrt(v)+eps) / (sqrt(v_fresh)+eps)
    where wd > 0:  r = min(1, ||u0|| / ||u||), f = f r + 1 - r
    f = clip(f, factor_min, factor_max), then to last_f (1 -+ factor_threshold) ;  w -= lr c_frozen f u

(1-bit LAMB, arXiv 2104.06069, and its authors' code in DeepSpeed 0.19.6.) c_frozen starts at 0, so after k steps with
the same c it is (1 - b3^k) c. This implementation divides it by 1 - b3^k, and uses 1 if c was always 1. DeepSpeed uses
c_frozen without correction: after a short warm-up all tensors move too little, and those whose c was always 1 never
move again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hf_diloco.errors import ConfigError
from hf_diloco.optimizers.onebit.optimizer import OneBitOptimizer, State, Tensor


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB; see the module for its equations, and `OneBitOptimizer` for stages, masks and the exchange.

        optimizer = OneBitLamb(model.parameters(), lr=11e-3, freeze_step=1000, weight_decay=0.01)
        ddp.register_comm_hook(optimizer, average_gradients)

    Args:
        params, lr, betas, eps, weight_decay: as of AdamW.
        freeze_step: steps of the warm-up; None: all steps, which is plain LAMB.
        min_coeff, max_coeff: limits of the trust ratio c.
        coeff_beta: b3. 1 / (1 - b3) should be well below `freeze_step`.
        factor_min, factor_max: limits of the factor f.
        factor_threshold: the largest relative change of f in a step.
        bias_correction, process_group: see `OneBitOptimizer`; no correction by default, as in the authors' code.
        match_deepspeed: use c_frozen as DeepSpeed does, and do not freeze values that had no gradient in the warm-up.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        freeze_step: int | None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        bias_correction: bool = False,
        match_deepspeed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 <= coeff_beta < 1:
            raise ConfigError(f"coeff_beta={coeff_beta}: must be at least 0 and below 1")
        for name, low, high in (("coeff", min_coeff, max_coeff), ("factor", factor_min, factor_max)):
            if not 0 <= low <= high:
                raise ConfigError(f"the least {name} {low} must be from 0 to the greatest, {high}")
        if factor_threshold < 0:
            raise ConfigError(f"factor_threshold={factor_threshold}: must not be negative")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
        }
        super().__init__(params, defaults, freeze_step, bias_correction, not match_deepspeed, process_group)
        self._coeff_beta = coeff_beta
        self._factor_range = (factor_min, factor_max)
        self._factor_threshold = factor_threshold
        self._is_debiased = not match_deepspeed

    def _new_state(self, parameter: torch.nn.Parameter) -> State:
        zero = torch.zeros((), device=parameter.device)
        return {"coeff": zero.clone(), "num_coeffs": zero.clone(), "last_factor": zero + 1}

    def _update_in_warm_up(self, tensor: Tensor) -> None:
        weights, group, state = tensor.parameter, tensor.group, tensor.state
        update = self._direction(tensor, state["exp_avg"], tensor.exchanged)
        update.add_(weights, alpha=group["weight_decay"])
        coeff = trust_ratio(weights.norm(), update.norm(), group["min_coeff"], group["max_coeff"])
        mixed = state["coeff"] * self._coeff_beta + coeff * (1 - self._coeff_beta)
        state["coeff"].copy_(torch.where(coeff != 1, mixed, state["coeff"]))
        state["num_coeffs"].add_(coeff != 1)
        weights.sub_(update.mul_(coeff * group["lr"]))

    def _freeze(self, tensors: list[Tensor]) -> None:
        tensors = [tensor for tensor in tensors if tensor.state]
        roots = [tensor.state["exp_avg"].norm() / tensor.parameter.numel() ** 0.5 for tensor in tensors]
        used = [root for root in roots if root > 0]
        mean = torch.stack(used).mean() if used else torch.ones(())
        for tensor, root in zip(tensors, roots, strict=True):
            tensor.state["fresh_exp_avg_sq"] = tensor.state["exp_avg_sq"].clone()
            tensor.state["scale"] = mean / root if root > 0 else torch.ones_like(root)

    def _update_compressed(self, tensor: Tensor) -> None:
        weights, group, state, momentum = tensor.parameter, tensor.group, tensor.state, tensor.exchanged
        beta1, beta2 = group["betas"]
        gradient = state["exp_avg"].mul_(-beta1).add_(momentum).div_(1 - beta1)
        state["fresh_exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(momentum)
        frozen = self._denominator(tensor, "exp_avg_sq")
        factor = frozen.div_(self._denominator(tensor, "fresh_exp_avg_sq")).max()
        update = self._direction(tensor, momentum, momentum)
        if group["weight_decay"]:
            norm = update.norm()
            share = (norm / update.add_(weights, alpha=group["weight_decay"]).norm()).clamp(max=1).nan_to_num(1.0)
            factor = factor * share + (1 - share)
        factor = clip_factor(factor, state["last_factor"], *self._factor_range, self._factor_threshold)
        state["last_factor"].copy_(factor)
        weights.sub_(update.mul_(self._frozen_coeff(state) * factor * group["lr"]))

    def _frozen_coeff(self, state: State) -> torch.Tensor:
        if not self._is_debiased:
            return state["coeff"]
        weight = 1 - self._coeff_beta ** state["num_coeffs"]
        return torch.where(state["num_coeffs"] > 0, state["coeff"] / weight, 1.0)


def trust_ratio(weights: torch.Tensor, update: torch.Tensor, least: float, greatest: float) -> torch.Tensor:
    """Returns c for two norms: their quotient within limits, or 1 if either is 0."""
    ratio = (weights / update).clamp(least, greatest)
    return torch.where((weights > 0) & (update > 0), ratio, 1.0)


def clip_factor(
    factor: torch.Tensor, last: torch.Tensor, least: float, greatest: float, threshold: float
) -> torch.Tensor:
    """Clips f to its limits, then to a relative change from its last value."""
    clipped = factor.clamp(least, greatest)
    return torch.minimum(torch.maximum(clipped, last * (1 - threshold)), last * (1 + threshold))
