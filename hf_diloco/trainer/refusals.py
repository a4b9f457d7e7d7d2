"""Settings of the Trainer and of Accelerate that islands and nodes refuse: one list for all entry points.

The run file, `DiLoCoCallback`, `GossipCallback` and `OuterLoop` all check their settings against `REFUSALS` before
the first step, so all of them refuse the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import nearest

Where = Literal["islands", "nodes", "loop", "onebit", "muon"]
"""`islands`: a Trainer with `DiLoCoCallback`; `nodes`: a Trainer with `GossipCallback`; `loop`: `OuterLoop`;
`onebit`: a 1-bit optimizer, in a run file or with `OneBitCallback`; `muon`: Muon as `optimizer` of a run file."""

_TRAINERS: tuple[Where, ...] = ("islands", "nodes")


def _is_one(value: Any) -> bool:
    return not isinstance(value, bool) and value == 1


def _is_best(value: Any) -> bool:
    return str(getattr(value, "value", value)) == "best"


def _is_fsdp1(value: Any) -> bool:
    found = value if isinstance(value, Mapping) else {}
    return str(found.get("version", found.get("fsdp_version", 2))) == "1"


def _is_model_parallel(config: Any) -> bool:
    return config is not None and getattr(config, "non_data_parallel_size", None) != 1


def _is_other_than(default: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != default


def is_schedule_free(optimizer: Any) -> bool:
    """Whether an optimizer, given by its `optim` or class name, is schedule-free."""
    return "schedulefree" in str(getattr(optimizer, "value", optimizer)).replace("_", "").lower()


def follows_evaluations(scheduler: Any) -> bool:
    """Whether a schedule, given by its `lr_scheduler_type` or class name, depends on evaluation metrics."""
    name = str(getattr(scheduler, "value", scheduler)).replace("_", "").lower()
    return name in ("reducelronplateau", "greedy", "greedylr")


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be used.

    Attributes:
        setting: its name, as the user writes it.
        why: the reason and the remedy.
        where: the entry points that refuse it.
        applies: returns whether a value is refused.
        values: the refused values, in words, for the documentation.
    """

    setting: str
    why: str
    where: tuple[Where, ...] = _TRAINERS
    applies: Callable[[Any], bool] = bool
    values: str = "true"


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "load_best_model_at_end",
        "each process would go back to a checkpoint of its own, and all would end with different models; set it to "
        "false, and load the checkpoint that evaluated best when training has ended",
    ),
    Refusal(
        "auto_find_batch_size",
        "it starts training again here alone while the others wait; set per_device_train_batch_size",
    ),
    Refusal(
        "push_to_hub",
        "all would push their own models to one repository; set it to false, and upload the final model when training "
        "has ended (hf upload, or trainer.push_to_hub() on island or node 0; push_to_hub at the top of a run file)",
    ),
    Refusal("save_only_model", "it leaves out what resuming needs; set it to false"),
    Refusal(
        "restore_callback_states_from_checkpoint",
        "it replaces this package's callback by an empty one, and all state is restored without it; set it to false",
    ),
    Refusal(
        "enable_jit_checkpoint",
        "its own answer to SIGTERM writes a checkpoint that is not whole; set it to false: on SIGTERM this package's "
        "callback ends training after a step, with a whole checkpoint",
    ),
    Refusal(
        "save_strategy",
        "islands would save after different steps and hold no checkpoint of a common round to resume from; set it to "
        "steps",
        where=("islands",),
        applies=_is_best,
        values="best",
    ),
    Refusal(
        "optim",
        "schedule-free optimizers evaluate and save a mix of the weights with state that islands do not exchange: "
        "each would end with another model; choose another one, such as adamw_torch",
        where=("islands", "loop"),
        applies=is_schedule_free,
        values="schedule_free_*, and such an optimizer given as an object",
    ),
    Refusal(
        "lr_scheduler_type",
        "it follows evaluations: islands would train at rates of their own, and outer parameters, which stay the same "
        "until the next round, count as a plateau; choose a schedule of steps, such as cosine",
        where=("islands",),
        applies=follows_evaluations,
        values="reduce_lr_on_plateau, greedy, and such a schedule given as an object",
    ),
    Refusal(
        "hyperparameter_search",
        "each island would try settings of its own; search without this package's callback, then train with what was "
        "found",
        where=("islands",),
    ),
    Refusal(
        "fsdp",
        "neighbours, 1-bit optimizers and Muon need whole tensors, which FSDP cuts; leave it out, for DDP",
        where=("nodes", "onebit", "muon"),
        values="any",
    ),
    Refusal(
        "fsdp_config",
        "FSDP1 flattens parameters in a way that this package does not read; set version to 2",
        where=("islands", "loop"),
        applies=_is_fsdp1,
        values="version 1",
    ),
    Refusal(
        "parallelism_config",
        "tensor, context and sequence parallelism are not supported yet; leave it out, or set only dp_replicate_size "
        "and dp_shard_size, which are fsdp.num_replicas of a run file",
        where=("islands", "loop"),
        applies=_is_model_parallel,
        values="with tp_size, cp_size or sp_size",
    ),
    Refusal(
        "parallelism_config",
        "ranks of a node, and of 1-bit optimizers, train under DDP alone; leave it out",
        where=("nodes", "onebit"),
        values="any",
    ),
    Refusal(
        "EarlyStoppingCallback",
        "it would end training here alone while the others wait; leave it out, and stop all together (Ctrl-C, SIGTERM "
        "or callback.stop())",
    ),
    Refusal(
        "callbacks",
        "a Trainer has one DiLoCoCallback or GossipCallback, else weights are averaged twice; leave out all but one",
        applies=lambda names: len(names or ()) > 1,
        values="several of this package",
    ),
    Refusal(
        "torch.set_default_dtype",
        "what is kept and exchanged must be float32; set it back to torch.float32 when the model is made, or give its "
        "type to the model alone, as by from_pretrained(..., dtype=torch.bfloat16)",
        where=("islands", "nodes", "loop", "onebit"),
        applies=lambda dtype: str(dtype) not in ("None", "torch.float32"),
        values="other than torch.float32, when training begins",
    ),
    Refusal(
        "torch.set_default_device",
        'what is kept and exchanged must be in host memory; set it back to "cpu" when the model is made, and train '
        "outside `with torch.device(...)`",
        where=("islands", "nodes", "loop"),
        applies=lambda device: getattr(device, "type", "cpu") != "cpu",
        values="other than cpu, when training begins",
    ),
    Refusal(
        "deepspeed",
        "neighbours average whole parameter vectors, which DeepSpeed divides; use DDP in a node",
        where=("nodes",),
        values="any",
    ),
    Refusal(
        "deepspeed",
        "it averages gradients itself, at full precision, and ZeRO divides the optimizer's state among ranks, where a "
        "1-bit all-reduce needs each rank's own gradients and its whole momentum; leave it out: ranks train under DDP",
        where=("onebit",),
        values="any",
    ),
    Refusal(
        "deepspeed",
        "Muon needs whole matrices, which ZeRO cuts; leave the block `optimizer` out, and name DeepSpeed's own Muon "
        'in its configuration: "optimizer": {"type": "Muon", ...}, see muon.md',
        where=("muon",),
        values="any",
    ),
    Refusal(
        "optim",
        "the block `optimizer` takes its place; leave one of them out",
        where=("onebit", "muon"),
        values="any, in a run file",
    ),
    *(
        Refusal(
            name,
            "it is a setting of Adam's, and has no effect: nodes step with the gossip method, whose settings are "
            "`momentum` and `options`; leave it out",
            where=("nodes",),
            applies=_is_other_than(default),
            values=f"other than {default:g}",
        )
        for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_epsilon", 1e-8))
    ),
    *(
        Refusal(
            name,
            "it belongs to the optimizer that `optim` names, and has no effect on the one in its place: a gossip "
            "method, 1-bit or Muon; leave it out",
            where=("nodes", "onebit", "muon"),
            values="any",
        )
        for name in ("optim_args", "optim_target_modules")
    ),
    Refusal(
        "fp16",
        "its loss scaling skips a step on the one rank whose gradients overflow, where the others wait for it; set "
        "bf16, or neither",
        where=("onebit",),
    ),
    Refusal(
        "sync_every",
        "the 1-bit all-reduce is between the ranks of one island; between islands every step would send whole "
        "pseudo-gradients. Make all ranks one island (num_islands: 1), or synchronise less often",
        where=("onebit",),
        applies=_is_one,
        values="1, with several islands",
    ),
    Refusal(
        "fp16",
        "it scales losses and skips steps where they overflow, at which neighbours would wait; set bf16, or neither",
        where=("nodes",),
    ),
    Refusal(
        "save_total_limit",
        "the node would delete its last checkpoint before all others have written theirs; set 2 or more",
        where=("nodes",),
        applies=_is_one,
        values="1",
    ),
    Refusal(
        "ProjectConfiguration.total_limit",
        "Accelerate deletes the last checkpoint before the outer state of the new one is written; set 2 or more",
        where=("loop",),
        applies=_is_one,
        values="1",
    ),
)


def find_refused(settings: Mapping[str, Any], where: Where) -> Iterator[tuple[str, str]]:
    """Yields the settings that cannot be used, each with the reason and the remedy; missing ones have defaults."""
    for refusal in REFUSALS:
        value = settings.get(refusal.setting)
        if where in refusal.where and refusal.applies(value):
            yield refusal.setting, f"{_shown(value)} cannot be used: {refusal.why}"


def refuse(settings: Mapping[str, Any], where: Where) -> None:
    """Raises `ConfigError`, naming every setting that cannot be used, also of PyTorch's, its value and the remedy."""
    import torch  # run files are checked without it

    defaults = {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_default_device": torch.get_default_device(),
    }
    problems = [f"{name}={problem}" for name, problem in find_refused({**settings, **defaults}, where)]
    if problems:
        raise ConfigError("; ".join(problems))


def refuse_uncounted(weight_by: str, counted: Any) -> None:
    """Raises `ConfigError` if `weight_by` is "tokens", but the Trainer does not count tokens.

    `counted` is the Trainer's `include_num_input_tokens_seen`.
    """
    if weight_by == "tokens" and counted in ("no", False, None):
        raise ConfigError(
            "weight_by='tokens' needs the Trainer to count tokens: set include_num_input_tokens_seen='all' in "
            "TrainingArguments (in the block training of a run file), or use weight_by='examples'"
        )


def refuse_unreadable_masters(deepspeed: Mapping[str, Any], has_outer_loop: bool) -> None:
    """Raises `ConfigError` if the outer loop cannot read the master weights: on NVMe, or with tensor parallelism.

    Without an outer loop, NVMe only needs `nvme_path`.
    """
    block = deepspeed.get("tensor_parallel")
    size = block.get("autotp_size") if isinstance(block, Mapping) else 0
    if has_outer_loop and isinstance(size, int) and size > 1:
        raise ConfigError(
            f"deepspeed: tensor_parallel.autotp_size={size} cannot be used: the outer loop does not read parameters "
            "that are cut by tensor parallelism yet; leave it out, and use ZeRO inside the island"
        )
    zero = deepspeed.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param") if zero.get("stage") == 3 else ():
        block = zero.get(name)
        if not isinstance(block, Mapping) or block.get("device") != "nvme":
            continue
        setting = f"deepspeed: zero_optimization.{name}.device='nvme'"
        if has_outer_loop:
            raise ConfigError(f"{setting} cannot be used: the outer loop does not reach weights there; set it to cpu")
        if not block.get("nvme_path"):
            raise ConfigError(f"{setting} needs nvme_path, a folder there: set it too, or the device to cpu")


def refuse_unknown_layers(names: Iterable[str] | None, model: Any) -> None:
    """Raises `ConfigError` if FSDP is told to wrap a layer class that the model does not have.

    `names` is `transformer_layer_cls_to_wrap`; None for the classes that the model's class names.
    """
    known = {type(module).__name__ for module in model.modules()}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"fsdp: transformer_layer_cls_to_wrap: the model has no {name!r}{nearest(name, known)}: give classes "
                "of its modules, or leave it out for those that the model's class says"
            )


def _shown(value: Any) -> str:
    """Returns a value for an error message, cut to 60 characters, as settings may be whole configurations."""
    text = repr(getattr(value, "value", value))
    return text if len(text) <= 60 else f"{text[:57]}..."
