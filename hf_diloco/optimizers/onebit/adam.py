"""1-bit Adam: Adam that exchanges momentum in one bit per value, with second moments frozen after the warm-up.

    warm-up:      m = b1 m + (1-b1) g ;  v = b2 v + (1-b2) g^2      # g averaged over the ranks
    compressed:   m = b1 m + (1-b1) g_rank, averaged in one bit ;   # v as it was at the freeze
    both:         w -= lr (m / (sqrt(v) + eps) + wd w)

(arXiv 2102.02888.) Weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_diloco.optimizers.onebit.optimizer import OneBitOptimizer, Tensor


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam; see the module for its equations, and `OneBitOptimizer` for stages, masks and the exchange.

    Args:
        params, lr, betas, eps, weight_decay: as of AdamW.
        freeze_step: steps of the warm-up; None: all steps, which is AdamW (with `bias_correction`).
        bias_correction, process_group: see `OneBitOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        freeze_step: int | None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, freeze_step, bias_correction, True, process_group)

    def _update_compressed(self, tensor: Tensor) -> None:
        tensor.state["exp_avg"].copy_(tensor.exchanged)
        self._update_in_warm_up(tensor)

    def _update_in_warm_up(self, tensor: Tensor) -> None:
        update = self._direction(tensor, tensor.state["exp_avg"], tensor.exchanged)
        update.add_(tensor.parameter, alpha=tensor.group["weight_decay"])
        tensor.parameter.sub_(update, alpha=tensor.group["lr"])
