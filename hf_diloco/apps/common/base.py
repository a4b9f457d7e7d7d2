"""Common base of the run files of all tasks."""

from __future__ import annotations

import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from hf_diloco.apps.common.paths import NamedFiles, get_at
from hf_diloco.apps.common.yaml_file import KeyPath, parse_whole
from hf_diloco.config.base import Count
from hf_diloco.errors import ConfigError
from hf_diloco.trainer.refusals import Where, find_refused
from hf_diloco.utils.extras import need
from hf_diloco.utils.settings import Block
from hf_diloco.utils.text import counted

if TYPE_CHECKING:
    from hf_diloco.apps.lm.runfile import DiLoCoBlock
    from hf_diloco.apps.vision.runfile import GossipBlock

OFFLOAD_ON_CPU = (
    "fsdp.cpu_offload: on CPU all is in host memory already, and the page-locked memory that PyTorch offloads to "
    "needs an accelerator: set it to false"
)

DECIDED_ELSEWHERE = {
    "output_dir": "checkpoints go to OUTPUT/NAME/island-K; set output and name at the top of the run file",
    "deepspeed": "it has its own place: set deepspeed at the top of the run file",
    "fsdp": "it has its own place: set fsdp at the top of the run file",
    "fsdp_config": "its keys have their own place: set fsdp at the top of the run file",
    "seed": "set seed at the top of the run file; it is the same for all",
    "use_cpu": "set launch.use_cpu",
    "resume_from_checkpoint": "set launch.resume",
    "ignore_data_skip": "the position in the data is kept with every checkpoint",
    "num_train_epochs": "its steps differ where shares of the data differ in size; set max_steps instead",
    "local_rank": "it comes from the launcher",
    "do_train": "a run trains, then evaluates",
    "do_eval": "a run trains, then evaluates; between, eval_strategy and eval_steps decide",
    "do_predict": "a run trains, then evaluates",
    "remove_unused_columns": "the data has no others than the model takes",
    "label_names": "the data has one, labels",
    "eval_use_gather_object": "evaluations gather the loss, a tensor",
    "train_sampling_strategy": "all sequences are equally long",
    "length_column_name": "all sequences are equally long",
    **dict.fromkeys(
        ("prediction_loss_only", "eval_do_concat_batches", "include_for_metrics", "batch_eval_metrics"),
        "the task decides what evaluations measure",
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "evaluations belong to training, in whose number format they run; set bf16",
    ),
    **dict.fromkeys(
        ("hub_model_id", "hub_revision", "hub_strategy", "hub_always_push"),
        "the final model alone is pushed; set push_to_hub at the top of the run file",
    ),
    "hub_token": "the token is that of this machine's user; run `hf auth login`, or set HF_TOKEN",
}
"""Settings of the Trainer that a run file sets elsewhere, or that have no effect, each with the reason."""

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
_SWITCHED_BY = {
    **dict.fromkeys(("eval_steps", "eval_delay"), ("eval_strategy",)),
    **dict.fromkeys((f"{name}_kwargs" for name in _CHECKPOINTING), _CHECKPOINTING),
    "liger_kernel_config": ("use_liger_kernel",),
}
"""Settings of the Trainer that need another one (or its older name) to have an effect. That one may be set to off."""

_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*"
MODELS = ("preset", "path", "config")  # settings of the block `model`; exactly one is given


class LaunchBlock(Block):
    """How `hf-diloco launch` starts an island, and where training begins."""

    num_processes: int = Field(1, ge=1, le=1024, description="ranks of one island")
    use_cpu: bool | None = Field(None, description="null: true when there is no CUDA device")
    threads: int | None = Field(None, ge=1, le=1024, description="OMP_NUM_THREADS of one rank")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: from the newest round that all islands have; never: a new run; or a checkpoint folder",
    )


class FsdpBlock(Block):
    """FSDP2 inside an island; `fsdp: {}` is enough. Other keys than `num_replicas` are those of `fsdp_config`."""

    num_replicas: Count = Field(
        1, description="copies of the model in an island, each sharded over ranks / num_replicas of it (HSDP)"
    )
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = Field(
        "SHARDED_STATE_DICT",
        description="checkpoints of one part per rank, or gathered on one rank, which is slow if large",
    )
    reshard_after_forward: bool = Field(True, description="false: keep whole parameters until the backward pass")
    activation_checkpointing: bool = Field(False, description="compute activations again in the backward pass")
    cpu_offload: bool = Field(False, description="keep parameters and optimizer state in host memory")
    transformer_layer_cls_to_wrap: list[str] | None = Field(
        None, description="classes whose modules are gathered one by one; null: what the model's class says"
    )

    def num_shards(self, num_ranks: int) -> int:
        """Returns the number of ranks over which each replica is sharded.

        Raises `ConfigError` if the ranks cannot be divided into equal replicas of at least two ranks.
        """
        num_shards, rest = divmod(num_ranks, self.num_replicas)
        if self.num_replicas > 1 and (rest or num_shards < 2):
            raise ConfigError(
                f"fsdp.num_replicas: {self.num_replicas} replicas need two ranks each or more, and equally many, but "
                f"the island has {counted(num_ranks, 'rank')}: change it, or launch.num_processes"
            )
        return num_shards


def check_model(preset: str | None, path: str | None, config: dict[str, Any] | None, example: str) -> None:
    """Raises `ValueError` unless exactly one of the three is given; `example` is a `model_type` for the message."""
    given = [name for name, value in zip(MODELS, (preset, path, config), strict=True) if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"exactly one of preset, path and config makes the model; got {' and '.join(given) or 'none'}"
            + (" (set the others to null)" if given else "")
        )
    if config is not None and not isinstance(config.get("model_type"), str):
        raise ValueError(f"config needs a model_type, as in model_type: {example}; got {config!r}")


class PushBlock(Block):
    """The final model on the Hugging Face Hub: island or node 0 pushes it, with its card, when training has ended."""

    repo: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$", description="YOU/NAME; created if it does not exist")
    private: bool = Field(True, description="a repository that is created is visible only to you and those you invite")
    revision: str | None = Field(None, description="existing branch; null: main")


def _tell_that_name_may_be_left_out(schema: dict[str, Any]) -> None:
    """Removes `name` from the schema's required fields: the default is the run file's name."""
    schema["required"].remove("name")


def problem_of_name(name: str) -> str:
    """Returns why a run cannot have this name; "" if it can."""
    if re.fullmatch(_NAME, name):
        return ""
    return (
        f"{name!r} cannot be a run's name, as its folder is called so: use letters, digits and _, after the first "
        "also . + = -"
    )


class BaseRun(Block):
    """A run: what is trained, how, and where its folder is.

    Attributes:
        module: the module that a process of the run executes.
        meeting_name: the name of the block that `meeting` returns.
        unit: what a participant is called.
        files: settings that name files.
        where: the entry point, for `REFUSALS`: islands or nodes.
        alternatives: for each block, settings that exclude each other; one on the command line replaces the others.
        settings_of_order: settings that, besides seeds, determine the order of the data.
        metrics: metrics that evaluations measure.
    """

    model_config = ConfigDict(json_schema_extra=_tell_that_name_may_be_left_out)

    module: ClassVar[str]
    meeting_name: ClassVar[str]
    unit: ClassVar[str] = "island"
    files: ClassVar[NamedFiles]
    where: ClassVar[Where] = "islands"
    alternatives: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    settings_of_order: ClassVar[tuple[KeyPath, ...]]
    metrics: ClassVar[tuple[str, ...]] = ("loss",)

    name: str = Field(pattern=f"^{_NAME}$", max_length=255, description="the run folder is OUTPUT/NAME")
    output: str = Field("runs", min_length=1, description="folder of run folders")
    seed: int = Field(42, ge=0, lt=2**32, description="initial weights, data order, dropout; the same everywhere")
    training: dict[str, Any] = Field(description="any of transformers' TrainingArguments; max_steps is needed")
    deepspeed: dict[str, Any] | str | None = Field(None, description="DeepSpeed configuration: file or mapping")
    fsdp: FsdpBlock | None = Field(None, description="FSDP2 inside an island, instead of DeepSpeed")
    push_to_hub: PushBlock | None = Field(None, description="publish the final model; null: do not")
    accelerate: str | None = Field(None, description="an `accelerate config` file, for hf-diloco launch")
    launch: LaunchBlock = LaunchBlock()

    @classmethod
    def setting(cls, name: str) -> str:
        """Returns the key of "island", "num_islands" or "rendezvous" in this kind of run file: `gossip.num_nodes`."""
        return f"{cls.meeting_name}.{name.replace('island', cls.unit)}"

    @classmethod
    def order_of_data(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of a run file that determine the order of a share's examples: what a position means."""
        found = {path: get_at(values, path[:-1]) for path in (*cls.settings_of_order, ("seed",))}
        order = {".".join(path): block[path[-1]] for path, block in found.items() if block and path[-1] in block}
        return {**order, "training.data_seed": get_at(values, ("training", "data_seed"))}

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, name: Any) -> Any:
        if isinstance(name, str) and (problem := problem_of_name(name)):
            raise ValueError(f"{problem}; where name is not set, it is that of the run file")
        return name

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        problems = [f"{name}={problem}" for name, problem in find_refused(training, cls.where)]
        elsewhere = [name for name in training if name in DECIDED_ELSEWHERE]
        problems += [f"{name} cannot be set here: {DECIDED_ELSEWHERE[name]}" for name in elsewhere]
        for name, switches in _SWITCHED_BY.items():
            if training.get(name) is not None and not training.keys() & {*switches}:
                problems.append(f"{name} has no effect without {switches[0]}: set that too, or leave {name} out")
        if problems:
            raise ValueError("; ".join(problems))
        max_steps = training.get("max_steps")
        if not isinstance(max_steps, int) or isinstance(max_steps, bool) or max_steps < 1:
            raise ValueError(f"max_steps must be a whole number of inner steps from 1 on, got {max_steps!r}")
        return training

    @field_validator("deepspeed", mode="before")
    @classmethod
    def _check_deepspeed(cls, deepspeed: Any) -> Any:
        if not isinstance(deepspeed, dict | str | None):
            raise ValueError(f"expected a JSON file of DeepSpeed's settings, or a block of them, got {deepspeed!r}")
        if isinstance(deepspeed, str):
            read_json_object(Path(deepspeed))
        elif odd := [key for key in deepspeed or () if not isinstance(key, str)]:
            raise ValueError(f"its keys must be names of settings, got {odd[0]!r}")
        return deepspeed

    @model_validator(mode="after")
    def _check_sharding(self) -> Self:
        if self.deepspeed is not None and self.fsdp is not None:
            raise ValueError("deepspeed and fsdp both say how an island shards its model: set one of them to null")
        if self.fsdp is not None and self.fsdp.cpu_offload and self.launch.use_cpu:
            raise ValueError(OFFLOAD_ON_CPU)
        sharding = "deepspeed" if self.deepspeed is not None else "fsdp" if self.fsdp is not None else ""
        for name in _OF_DDP if sharding else ():
            if self.training.get(name) is not None:
                raise ValueError(f"training.{name} has no effect, as {sharding} takes the place of DDP: leave it out")
        return self

    @property
    def needs_hub(self) -> bool:
        """Whether the run names anything on the Hub, that is, a model or data set that is not a local path."""
        values = self.model_dump()
        texts = [get_at(values, path) for path in self.files.hub_ids_or_paths]
        return any(isinstance(text, str) and not os.path.exists(text) for text in texts)

    @property
    @abstractmethod
    def meeting(self) -> DiLoCoBlock | GossipBlock:
        """The block with the number of islands and the rendezvous; its name depends on the subclass."""

    def check(self) -> None:
        """Raises `ConfigError` for mistakes whose detection needs libraries that take seconds to import."""

    def check_extras(self) -> None:
        """Raises `ConfigError` if this machine lacks a library that the run needs."""
        if self.deepspeed is not None:
            need("deepspeed in the run file", "deepspeed")

    def probes(self) -> Iterator[Callable[[], object]]:
        """Yields functions that check whether model and data can be loaded; each raises a `DiLoCoError` if not."""
        return iter(())

    @property
    def max_steps(self) -> int:
        return int(self.training["max_steps"])

    @property
    def folder(self) -> Path:
        """The run folder, OUTPUT/NAME."""
        return Path(os.path.expanduser(self.output)) / self.name

    def island_folder(self, island: int | None = None) -> Path:
        """The folder of one island (default: this one's) in the run folder."""
        return self.folder / f"island-{self.meeting.island if island is None else island}"

    def checkpoint_given(self, island: int | None = None) -> Path | None:
        """Returns the checkpoint in `launch.resume` for one island (default: this one); None with auto or never.

        Raises `ConfigError` if the folder is not a checkpoint.
        """
        resume = self.launch.resume
        if resume in ("auto", "never"):
            return None
        number = self.meeting.island if island is None else island
        path = Path(os.path.expanduser(resume.replace("{island}", str(number))))
        if not os.path.exists(path / "trainer_state.json"):
            raise ConfigError(
                f"launch.resume: {str(path)!r} is no checkpoint of a Trainer; give auto, never or the path of a "
                "checkpoint-N"
            )
        return path


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises `ConfigError` if that fails, or a key is repeated."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_int=parse_whole)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is given twice")
        found[key] = value
    return found
