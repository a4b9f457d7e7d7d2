"""The base of 1-bit LAMB and 1-bit Adam: two stages, the exchange of momentum, checkpoints, and DDP's hook.

DDP compares the hook's annotations with types, so this module must not turn annotations into strings.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.optim import Optimizer

from hf_diloco.errors import ConfigError, ExchangeError, UnsupportedError
from hf_diloco.optimizers import check_freeze_step
from hf_diloco.optimizers.onebit.all_reduce import OneBitAllReduce, rank_in

logger = logging.getLogger("hf_diloco")

State = dict[str, torch.Tensor]
MASK = "exp_avg_mask"
ERRORS = "onebit_errors"
MAX_STEPS_LEFT_OUT = 100
"""How many steps in a row may be left out before the run ends."""


class Tensor(NamedTuple):
    """One trained tensor: the parameter, its group's settings, its state, and its part of the exchanged vector.

    The state is empty before the first gradient. Without a gradient in the warm-up it stays empty for good.
    """

    parameter: torch.nn.Parameter
    group: dict[str, Any]
    state: State
    exchanged: torch.Tensor


class OneBitOptimizer(Optimizer):
    """An optimizer with a warm-up at full precision, after which the momentum is averaged in one bit per value.

    In the warm-up, the first `freeze_step` steps, gradients must be averaged over the ranks, as DDP does. Then the
    second moments are frozen, and each rank must pass its own gradients: DDP's communication hook `average_gradients`
    does both.

    Values whose second moment is zero at the freeze have had no gradient in the warm-up: their update would be
    divided by `eps` alone. Their momentum stays zero, unless `freeze_unseen` is false. A tensor whose `grad` is None
    throughout the warm-up never changes, not even by weight decay, as in torch's optimizers.

    A group may have `exp_avg_mask`, which multiplies the momentum of each of its parameters. Set it to zero where
    gradients are always zero (position embeddings beyond the sequence length), since one bit cannot represent zero.

    If a rank has a value that is not finite, the mean is over the other ranks; if all have, the step is left out, and
    after `MAX_STEPS_LEFT_OUT` such steps in a row an `ExchangeError` ends the run.

    Args:
        params: parameters or groups, all fp32 and on one device.
        defaults: settings of the groups, including `lr`, `betas`, `eps` and `weight_decay`.
        freeze_step: steps of the warm-up, at least 2; None: all steps.
        bias_correction: divide the moments by 1 - beta^t, with t the steps of the optimizer, also for a tensor whose
            first gradient comes later. For the second moment, t does not grow after the freeze.
        freeze_unseen: see above.
        process_group: the ranks; None: all.

    Raises:
        ConfigError: a setting is out of its range.
        UnsupportedError: a parameter is not fp32.

    Attributes:
        num_steps: steps taken.
        bytes_sent: bytes that this rank has sent in the compressed stage, since this object was made.
        num_left_out: contributions of ranks that were left out because they were not finite.
        saves_errors: whether `state_dict` includes this rank's errors. They differ between ranks, so set it to false
            if one rank's state is saved for all, and save the errors separately (`errors`, `load_errors`).
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        freeze_step: int | None,
        bias_correction: bool,
        freeze_unseen: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        check_freeze_step(freeze_step)
        for name in ("lr", "eps", "weight_decay"):
            _check_range(name, defaults[name])
        for number, beta in enumerate(defaults["betas"], 1):
            _check_range(f"beta {number}", beta, below=1.0)
        super().__init__(params, defaults)
        self.freeze_step = freeze_step
        self.bias_correction = bias_correction
        self.freeze_unseen = freeze_unseen
        self.process_group = process_group
        self.num_steps = 0
        self.num_left_out = self._num_steps_left_out = 0
        self.bytes_sent = 0
        self.saves_errors = True
        self._exchanged: torch.Tensor | None = None
        self._exchange: OneBitAllReduce | None = None
        self._lost_errors = ""  # why errors start at zero, for a warning when they do
        for parameter in self._parameters():
            if parameter.dtype != torch.float32:
                raise UnsupportedError(
                    f"a parameter of type {parameter.dtype} cannot be trained by a 1-bit optimizer: load the model in "
                    "fp32, and set bf16 to compute in bf16"
                )

    @property
    def is_compressed(self) -> bool:
        """Whether the next step exchanges one bit per value."""
        return self.freeze_step is not None and self.num_steps >= self.freeze_step

    @property
    def exchange(self) -> OneBitAllReduce:
        """The all-reduce of the compressed stage."""
        if self._exchange is None:
            device = next(self._parameters()).device
            size = sum(parameter.numel() for parameter in self._parameters())
            self._exchange = OneBitAllReduce(size, self.process_group, device)
        return self._exchange

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step; collective over the ranks in the compressed stage."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = list(self._tensors())
        if self.is_compressed:
            self._step_compressed(tensors)
        else:
            self._step_in_warm_up(tensors)
        self.num_steps += 1
        if self.num_steps == self.freeze_step:
            self._freeze(tensors)
            logger.info("step %d: the second moments are frozen; the momentum travels in 1 bit", self.num_steps)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the first step: what ranks exchange is as long as all parameters that were given."""
        if getattr(self, "_exchanged", None) is not None:
            raise UnsupportedError(
                "parameters cannot be added to a 1-bit optimizer after its first step; give all when it is made: "
                "frozen ones keep still"
            )
        super().add_param_group(param_group)

    # Methods override these

    def _new_state(self, parameter: torch.nn.Parameter) -> State:
        """Returns the initial state of a tensor, without its moments."""
        return {}

    @abstractmethod
    def _update_in_warm_up(self, tensor: Tensor) -> None:
        """Updates the parameter with the moments, which are up to date; may overwrite `exchanged`."""

    @abstractmethod
    def _update_compressed(self, tensor: Tensor) -> None:
        """Sets the momentum to `exchanged`, and updates the parameter; may overwrite `exchanged`."""

    def _freeze(self, tensors: list[Tensor]) -> None:
        """Called at the end of the warm-up."""

    # The two stages

    def _step_in_warm_up(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            gradient = tensor.parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise UnsupportedError("a 1-bit optimizer has a sparse gradient; make the embedding with sparse=False")
            beta1, beta2 = tensor.group["betas"]
            tensor.state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            tensor.state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            self._update_in_warm_up(tensor)

    def _step_compressed(self, tensors: list[Tensor]) -> None:
        self._fill_exchanged(tensors)
        if not self._average_exchanged():
            return
        for tensor in tensors:
            if not tensor.state or not tensor.parameter.requires_grad:  # a frozen tensor may have state from before
                continue
            if "scale" in tensor.state:
                tensor.exchanged.div_(tensor.state["scale"])
            if MASK in tensor.group:
                tensor.exchanged.mul_(tensor.group[MASK].to(tensor.exchanged.device))
            if self.freeze_unseen:
                tensor.exchanged.masked_fill_(tensor.state["exp_avg_sq"] == 0, 0.0)
            self._update_compressed(tensor)

    def _fill_exchanged(self, tensors: list[Tensor]) -> None:
        """Writes each tensor's new momentum, by this rank's gradient alone, to `exchanged`."""
        for tensor in tensors:
            if not tensor.state:  # its values are exchanged, but never used
                tensor.exchanged.zero_()
                continue
            beta1, _ = tensor.group["betas"]
            torch.mul(tensor.state["exp_avg"], beta1, out=tensor.exchanged)
            if tensor.parameter.grad is not None:
                tensor.exchanged.add_(tensor.parameter.grad, alpha=1 - beta1)
            if "scale" in tensor.state:
                tensor.exchanged.mul_(tensor.state["scale"])

    def _average_exchanged(self) -> bool:
        """Averages `exchanged` over the ranks with finite values; returns False if there are none, so no step.

        Raises:
            ExchangeError: no rank had finite values in `MAX_STEPS_LEFT_OUT` steps in a row.
        """
        exchange = self.exchange
        if self._lost_errors:
            logger.warning("1-bit errors begin at zero: %s", self._lost_errors)
            self._lost_errors = ""
        assert self._exchanged is not None
        num_finite = exchange.mean_(self._exchanged)
        self.bytes_sent += exchange.bytes_sent
        num_left_out = exchange.num_ranks - num_finite
        if num_left_out:
            self.num_left_out += num_left_out
            logger.warning(
                "step %d: the gradients of %d of %d ranks are not finite: %s",
                self.num_steps + 1,
                num_left_out,
                exchange.num_ranks,
                "they are left out of the mean" if num_finite else "the step is left out",
            )
        self._num_steps_left_out = 0 if num_finite else self._num_steps_left_out + 1
        if self._num_steps_left_out == MAX_STEPS_LEFT_OUT:
            raise ExchangeError(
                f"step {self.num_steps + 1}: no rank had finite gradients in the last {MAX_STEPS_LEFT_OUT} steps: "
                "look at the data, and resume from a checkpoint before them with a lower learning rate or a longer "
                "warm-up"
            )
        return num_finite > 0

    def _direction(self, tensor: Tensor, momentum: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """m / (sqrt(v) + eps), with bias correction if it is on; `out` may be `momentum`."""
        beta1, _ = tensor.group["betas"]
        torch.div(momentum, self._denominator(tensor, "exp_avg_sq"), out=out)
        return out.div_(1 - beta1 ** (self.num_steps + 1)) if self.bias_correction else out

    def _denominator(self, tensor: Tensor, name: str) -> torch.Tensor:
        """sqrt(v) + eps of the second moment of that name."""
        root = tensor.state[name].sqrt()
        if self.bias_correction:
            step = self.num_steps + 1
            if name == "exp_avg_sq" and self.freeze_step is not None:
                step = min(step, self.freeze_step)
            root.div_((1 - tensor.group["betas"][1] ** step) ** 0.5)
        return root.add_(tensor.group["eps"])

    # State

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """This rank's compression errors, see `OneBitAllReduce.errors`; empty in the warm-up."""
        return self.exchange.errors if self.is_compressed else {}

    def load_errors(self, errors: dict[str, Any]) -> None:
        """Restores `errors` of this rank, saved with the same number of ranks; if empty, they stay as is."""
        self._lost_errors = ""
        if errors:
            self.exchange.load_errors(errors)

    def lose_errors(self, reason: str) -> None:
        """Resets the errors to zero; warns with the reason if the checkpoint should have had some."""
        self._exchange, self._lost_errors = None, reason if self.is_compressed else ""

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with the number of steps and this rank's errors, but without masks."""
        state = super().state_dict()
        groups = [{name: value for name, value in group.items() if name != MASK} for group in state["param_groups"]]
        more: dict[str, Any] = {"num_steps": self.num_steps, "freeze_step": self.freeze_step}
        if self.saves_errors and (errors := self.errors):
            more[ERRORS] = {"rank": self.exchange.rank, "num_ranks": self.exchange.num_ranks, **errors}
        return {**state, "param_groups": groups, **more}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state of `state_dict`; keeps the masks, and ignores errors of another rank.

        Raises:
            ConfigError: the checkpoint's second moments were frozen after another number of steps.
        """
        num_steps, frozen = int(state_dict.get("num_steps", 0)), state_dict.get("freeze_step")
        was_compressed = frozen is not None and num_steps >= frozen
        if frozen != self.freeze_step and (was_compressed or num_steps >= (self.freeze_step or num_steps + 1)):
            raise ConfigError(
                f"freeze_step={self.freeze_step}, but the checkpoint of step {num_steps} was written with "
                f"freeze_step={frozen}: set it to that"
            )
        masks = [group.get(MASK) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mask in zip(self.param_groups, masks, strict=True):
            if mask is not None:
                group[MASK] = mask
        self.num_steps = num_steps
        self._load_errors_of(state_dict.get(ERRORS) or {})

    def _load_errors_of(self, errors: dict[str, Any]) -> None:
        rank, num_ranks = rank_in(self.process_group)
        if not errors:
            self.lose_errors("the checkpoint holds none")
        elif errors["num_ranks"] != num_ranks:
            self.lose_errors(f"the checkpoint is of {errors['num_ranks']} ranks, and this run has {num_ranks}")
        elif errors["rank"] != rank:
            self.lose_errors(f"the checkpoint holds those of rank {errors['rank']}, and this is rank {rank}")
        else:
            self.load_errors({"worker": errors["worker"], "server": errors["server"]})

    def _tensors(self) -> Iterator[Tensor]:
        size = sum(parameter.numel() for parameter in self._parameters())
        if self._exchanged is None:
            self._exchanged = torch.zeros(size, device=next(self._parameters()).device)
        begin = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.numel():
                    continue
                state = self.state[parameter]
                if not state and parameter.grad is not None and not self.is_compressed:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                    state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
                    state.update(self._new_state(parameter))
                part = self._exchanged[begin : begin + parameter.numel()].view(parameter.shape)
                begin += parameter.numel()
                yield Tensor(parameter, group, state, part)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def _check_range(name: str, value: float, below: float = float("inf")) -> None:
    if not 0 <= value < below:
        raise ConfigError(f"{name}={value}: must be at least 0" + (f" and below {below:g}" * (below < 1e9)))


# DDP's communication hook


def average_gradients(optimizer: OneBitOptimizer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients in the warm-up; afterwards each rank keeps its own, and DDP sends nothing.

    ddp.register_comm_hook(optimizer, average_gradients)
    """
    return _kept(bucket) if optimizer.is_compressed else allreduce_hook(_group(optimizer), bucket)


def average_gradients_in_fp16(
    optimizer: OneBitOptimizer, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Like `average_gradients`, but averages in fp16 in the warm-up, which sends half as much."""
    return _kept(bucket) if optimizer.is_compressed else fp16_compress_hook(_group(optimizer), bucket)


def _kept(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _group(optimizer: OneBitOptimizer) -> dist.ProcessGroup:
    return optimizer.process_group  # type: ignore[return-value]  # None is the world
