"""1-bit optimizers under the Trainer: replaces DDP's all-reduce, and saves the errors in checkpoints."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.errors import CheckpointError, ConfigError, UnsupportedError
from hf_diloco.inner import refuse_foreign_optimizer, unwrap_optimizer
from hf_diloco.optimizers.onebit.adam import OneBitAdam
from hf_diloco.optimizers.onebit.lamb import OneBitLamb
from hf_diloco.optimizers.onebit.optimizer import OneBitOptimizer, average_gradients, average_gradients_in_fp16
from hf_diloco.trainer.arguments import check_ranks, decayed_groups, folder_of, name_evaluated
from hf_diloco.trainer.frames import find_resumed, find_trainer, move_before_trackers
from hf_diloco.trainer.refusals import refuse
from hf_diloco.utils.files import is_write_failure, reason_of

logger = logging.getLogger("hf_diloco")

METHODS: dict[str, type[OneBitOptimizer]] = {"onebit_lamb": OneBitLamb, "onebit_adam": OneBitAdam}
_WARMUPS = {"fp32": average_gradients, "fp16": average_gradients_in_fp16}
_BYTES = "bytes_untold"
_FILE = re.compile(r"onebit_errors_(\d+)_of_(\d+)\.safetensors")


def make_onebit(name: str, model: torch.nn.Module, args: TrainingArguments, **settings: Any) -> OneBitOptimizer:
    """Makes a 1-bit optimizer with learning rate, betas, eps and decay of `args`; moves the model to its device.

    Like the Trainer, it decays weights, but neither biases nor norms.

    Args:
        name: a name in `METHODS`.
        **settings: the method's own.

    Raises:
        ConfigError: a setting is out of its range.
        UnsupportedError: a parameter is not fp32.
    """
    model.to(args.device)
    groups = decayed_groups(model, args.weight_decay)
    betas = (args.adam_beta1, args.adam_beta2)
    kind: Any = METHODS[name]
    return cast(OneBitOptimizer, kind(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, **settings))


class OneBitCallback(TrainerCallback):
    """Connects a 1-bit optimizer to a Trainer under DDP.

        optimizer = make_onebit("onebit_lamb", model, args, freeze_step=1000)
        trainer = Trainer(model, args, ..., optimizers=(optimizer, None), callbacks=[OneBitCallback(optimizer)])

    After the warm-up DDP's own all-reduce is off. Every rank's errors are saved in the Trainer's checkpoint and
    restored from it: a resumed run equals an uninterrupted one. With another number of ranks, errors start at zero,
    with a warning.

    Args:
        optimizer: the Trainer's.
        warmup_payload: number format of the gradients that ranks exchange in the warm-up.

    Raises:
        TypeError: `optimizer` is no 1-bit optimizer.
        ConfigError: there is no such `warmup_payload`.
    """

    def __init__(self, optimizer: OneBitOptimizer, warmup_payload: Literal["fp32", "fp16"] = "fp32") -> None:
        if not isinstance(optimizer, OneBitOptimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give the Trainer's OneBitAdam or OneBitLamb")
        if warmup_payload not in _WARMUPS:
            raise ConfigError(f"OneBitCallback(warmup_payload={warmup_payload!r}): give {' or '.join(_WARMUPS)}")
        self.optimizer = optimizer
        self._warmup = _WARMUPS[warmup_payload]
        self._hooked: Any = None
        self._bytes_told = 0  # sent by this rank, and logged
        self._bytes_before = 0  # sent by all ranks before the checkpoint of a resumed run, and not logged yet
        optimizer.saves_errors = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks the settings, takes over DDP's all-reduce, and restores the errors.

        Raises:
            ConfigError: a setting of `REFUSALS` is used; or ranks would train apart.
            UnsupportedError: several ranks train without DDP, or the Trainer has another optimizer.
        """
        refuse({**vars(args), "optim": None}, "onebit")  # `optim` has a default in the Trainer's arguments
        check_ranks(args.world_size)
        trainer = find_trainer()
        move_before_trackers(self)  # and before the callback that completes checkpoints
        if unwrap_optimizer(kwargs["optimizer"]) is not self.optimizer:
            raise UnsupportedError(
                "OneBitCallback: the Trainer has another optimizer; give it optimizers=(optimizer, None)"
            )
        remedy = "make it of the parameters of this very model, adapters included"
        refuse_foreign_optimizer(kwargs["model"], self.optimizer, remedy)
        self._hook(trainer, args.world_size)
        self._bytes_before = 0
        if state.global_step:
            self._load(find_resumed(args, state.global_step))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adds `onebit/bytes_sent`, by all ranks since the last log, to the Trainer's logs."""
        logs, since = kwargs.get("logs"), self._bytes_untold
        if logs is None or name_evaluated(logs) is not None or not since:
            return
        self._bytes_told, self._bytes_before = self.optimizer.bytes_sent, 0
        logs["onebit/bytes_sent"] = since
        if state.log_history:
            state.log_history[-1]["onebit/bytes_sent"] = since

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes this rank's errors to the Trainer's checkpoint."""
        errors = self.optimizer.errors
        checkpoint = folder_of(args) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if errors and checkpoint.is_dir():
            exchange = self.optimizer.exchange
            path = checkpoint / f"onebit_errors_{exchange.rank}_of_{exchange.num_ranks}.safetensors"
            try:
                tensors = {name: error.cpu() for name, error in errors.items()}
                save_file(tensors, path, {_BYTES: str(self._bytes_untold)})
            except Exception as error:
                if not is_write_failure(error):
                    raise
                path.unlink(missing_ok=True)
                logger.error("%s cannot be written (%s): a run from here begins without", path, reason_of(error))

    @property
    def _bytes_untold(self) -> int:
        """Bytes that all ranks have sent since the last log."""
        since = self.optimizer.bytes_sent - self._bytes_told
        return self._bytes_before + (since and since * self.optimizer.exchange.num_ranks)

    def _hook(self, trainer: Trainer | None, num_ranks: int) -> None:
        wrapped = trainer.model_wrapped if trainer else None
        if num_ranks == 1 or (wrapped is self._hooked and wrapped is not None):
            return
        if not isinstance(wrapped, DistributedDataParallel):
            raise UnsupportedError(
                f"a 1-bit optimizer on {num_ranks} ranks needs DDP, whose all-reduce it takes over, but the Trainer "
                f"made a {type(wrapped).__name__}: leave DeepSpeed, FSDP and torch_compile out"
            )
        wrapped.register_comm_hook(self.optimizer, self._warmup)
        self._hooked = wrapped

    def _load(self, checkpoint: Path) -> None:
        if not self.optimizer.is_compressed:
            return
        rank, num_ranks = self.optimizer.exchange.rank, self.optimizer.exchange.num_ranks
        path = checkpoint / f"onebit_errors_{rank}_of_{num_ranks}.safetensors"
        try:
            self._bytes_before = _read_bytes(
                path if path.is_file() else next(checkpoint.glob("onebit_errors_*"), None)
            )
            if path.is_file():
                self.optimizer.load_errors(load_file(path))
                return
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): resume from an earlier checkpoint") from None
        sizes = {int(match[2]) for one in checkpoint.glob("onebit_errors_*") if (match := _FILE.fullmatch(one.name))}
        others = " and ".join(map(str, sorted(sizes - {num_ranks})))
        reason = f"is of {others} ranks, and this run has {num_ranks}" if others else "holds none of this rank"
        self.optimizer.lose_errors(f"{checkpoint} {reason}")


def _read_bytes(path: Path | None) -> int:
    """Reads the bytes that all ranks had sent, but not logged yet, from a file with a rank's errors."""
    if path is None:
        return 0
    with safe_open(path, "pt") as stored:
        return int((stored.metadata() or {}).get(_BYTES, 0))
