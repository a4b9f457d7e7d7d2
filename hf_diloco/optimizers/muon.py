"""Muon on the matrices of hidden layers and AdamW on everything else, as one optimizer.

    matrices W (m x n):  B = mu B + (1 - mu) g ;  G = (1 - mu) g + mu B with Nesterov, else B
                         O = NewtonSchulz(G)      # 5 steps: singular values near 1
                         W = W - lr wd W - lr s O ;  s = sqrt(max(1, m/n)), or .2 sqrt(max(m, n))
    embeddings, head, vectors:  AdamW

(Jordan, kellerjordan.github.io/posts/muon; the second s: arXiv 2502.16982; inside DiLoCo: MuLoCo, arXiv 2505.23725.)
Both halves are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from hf_diloco.errors import ConfigError, UnsupportedError


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` as one optimizer for the Trainer, schedulers and checkpoints.

        optimizer = MuonAdamW(model, lr=3e-3, muon_lr=2e-2, weight_decay=0.1)
        trainer = Trainer(model, args, ..., optimizers=(optimizer, None))

    The parameter groups have names: "adamw" and "muon", with weight decay, and "adamw_no_decay", the vectors (biases
    and norms). A scheduler scales each group's own learning rate. Empty groups are left out.

    Args:
        model: on its device.
        lr: of AdamW.
        muon_lr: of Muon; None: `lr`, for which `adjust_lr="match_rms_adamw"` is made.
        betas, eps: of AdamW.
        weight_decay: of both, decoupled.
        momentum, nesterov: of Muon.
        ns_steps: of the Newton-Schulz iteration.
        adjust_lr: how Muon's learning rate depends on a matrix's shape: "match_rms_adamw" (an update is about as large
            as one of AdamW) or "original".
        adamw: names of further parameters for AdamW, such as a head that `get_output_embeddings` does not return.

    Raises:
        ConfigError: a setting is out of its range, or a name in `adamw` is not a parameter of the model.
        UnsupportedError: the model has no matrix in a hidden layer.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        muon_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        adamw: Collection[str] = (),
    ) -> None:
        matrices, tables, vectors = split(model, adamw)
        if not matrices:
            raise UnsupportedError(
                "Muon trains the matrices of hidden layers, and this model has none: use another optimizer"
            )
        others = [
            {"params": tables, "name": "adamw", "weight_decay": weight_decay},
            {"params": vectors, "name": "adamw_no_decay", "weight_decay": 0.0},
        ]
        filled = [group for group in others if group["params"]]
        try:
            muon: Optimizer = torch.optim.Muon(
                [{"params": matrices, "name": "muon"}],
                lr=lr if muon_lr is None else muon_lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr,
            )
            halves: list[Optimizer] = [muon]
            if filled:
                halves.insert(0, AdamW(filled, lr=lr, betas=betas, eps=eps))
        except ValueError as error:
            raise ConfigError(f"Muon: {error}") from None
        super().__init__([group for half in halves for group in half.param_groups], {})
        self._halves = {_is_muon(half.param_groups[0]): half for half in halves}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, half in self._halves.items():  # groups and state are this optimizer's: a checkpoint replaces them
            half.param_groups = [group for group in self.param_groups if _is_muon(group) is is_muon]
            half.state = self.state
            half.step()
        return loss


def split(
    model: nn.Module, adamw: Collection[str] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Splits trainable parameters: matrices of hidden layers; other tensors of 2 or more dimensions; the rest.

    Embeddings and head do not count as hidden layers, nor do the matrices that `adamw` names. Embeddings are the
    weights of any `nn.Embedding`; the head is the module that the model's `get_output_embeddings` returns.

    Raises:
        ConfigError: `adamw` names a parameter that the model does not have.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    if unknown := [name for name in adamw if name not in named]:
        raise ConfigError(f"adamw: the model has no parameter {', '.join(unknown)}; see model.named_parameters()")
    outside = {id(named[name]) for name in adamw}
    outside |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outside |= {id(parameter) for parameter in _head(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = [one for one in trained if one.ndim == 2 and id(one) not in outside]
    others = [one for one in trained if one.ndim != 2 or id(one) in outside]
    return hidden, [one for one in others if one.ndim > 1], [one for one in others if one.ndim <= 1]


def _head(model: nn.Module) -> list[nn.Parameter]:
    find: Any = getattr(model, "get_output_embeddings", None)  # models of transformers have it
    head = find() if callable(find) else None
    return list(head.parameters()) if isinstance(head, nn.Module) else []


def _is_muon(group: dict[str, Any]) -> bool:
    return bool(group["name"] == "muon")
