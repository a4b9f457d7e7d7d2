"""What `TrainingArguments` say of an island, and which of them the outer loop cannot work with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import ConfigError, UnsupportedError


def check_arguments(config: DiLoCoConfig, args: TrainingArguments) -> None:
    """Refuses what does not go together.

    Raises:
        ConfigError: tokens are to be weighed but are not counted, or checkpoints would leave out what resuming needs.
        UnsupportedError: FSDP.
    """
    if config.weight_by == "tokens" and args.include_num_input_tokens_seen == "no":
        raise ConfigError(
            "weight_by='tokens' needs the Trainer to count tokens: set include_num_input_tokens_seen='all' in "
            "TrainingArguments, or use weight_by='examples'"
        )
    _check_checkpoints(args)
    if getattr(args, "fsdp", None):
        raise UnsupportedError("FSDP is not supported yet: use DDP or DeepSpeed ZeRO inside the island")


def check_gossip_arguments(args: TrainingArguments, payload: str = "fp32") -> None:
    """Refuses what does not go with averaging between neighbours.

    Args:
        args: of the Trainer.
        payload: how vectors travel.

    Raises:
        ConfigError: fp16; checkpoints that would leave out what resuming needs, or go too early; with a payload also
            those that nodes might write after different steps.
        UnsupportedError: DeepSpeed or FSDP.
    """
    if args.fp16:
        raise ConfigError(
            "fp16=True scales losses and skips steps where they overflow, at which neighbours would wait: use "
            "bf16=True, or neither"
        )
    if args.deepspeed or getattr(args, "fsdp", None):
        raise UnsupportedError(
            "neighbours average whole parameter vectors, which DeepSpeed and FSDP divide: use DDP in a node"
        )
    if args.save_total_limit == 1:
        raise ConfigError(
            "save_total_limit=1 lets a node delete its last checkpoint before all others have written theirs: "
            "give 2 or more"
        )
    if payload != "fp32" and args.save_strategy not in (SaveStrategy.STEPS, SaveStrategy.NO):
        raise ConfigError(
            f"save_strategy={SaveStrategy(args.save_strategy).value} with payload={payload}: all nodes must save "
            "after the same steps, whatever their data and metrics; set it to steps"
        )
    _check_checkpoints(args)


def _check_checkpoints(args: TrainingArguments) -> None:
    if args.save_only_model:
        raise ConfigError("save_only_model=True leaves out what resuming needs: set it to False")


def folder_of(args: TrainingArguments) -> Path:
    """Where this island writes: the Trainer has a default for it, though its type does not say so."""
    return Path(args.output_dir or "trainer_output")


def examples_per_step(args: TrainingArguments) -> int:
    """Examples that one optimizer step of this island sees."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def tokens_per_step(facts: Mapping[str, Any], examples: int) -> int | None:
    """Tokens in so many examples, if the facts of the run say how long one is."""
    length = facts.get("sequence_length")
    return examples * int(length) if length else None


def floats(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among what the Trainer logs."""
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
