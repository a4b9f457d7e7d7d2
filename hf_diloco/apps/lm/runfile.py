"""The run file: one YAML with the model, the data, TrainingArguments, DeepSpeed and the outer loop.

Reading it imports neither transformers nor, unless `payload` is another than fp32, torch: mistakes show at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from hf_diloco.apps.common.base import MODELS, BaseRun, check_model
from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.common.paths import NamedFiles, get_at
from hf_diloco.apps.common.yaml_file import KeyPath
from hf_diloco.apps.data.sources import DataBlock, read_first
from hf_diloco.config import checks as config_checks
from hf_diloco.config.base import describe, is_given
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError
from hf_diloco.optimizers import OptimizerBlock
from hf_diloco.trainer.refusals import find_refused, refuse_uncounted
from hf_diloco.utils.settings import Block
from hf_diloco.utils.urls import check_between_processes

Preset = Literal["llama-tiny", "llama-60m", "llama-150m", "llama-400m", "llama-1b"]


class ModelBlock(Block):
    """The model: exactly one of `preset`, `path` and `config`."""

    objective: Literal["causal", "masked"] = Field(
        "causal", description="causal: predict the next token; masked: predict hidden ones, as BERT does"
    )
    mask_share: float = Field(0.15, gt=0, lt=1, description="objective masked: share of the tokens to predict")
    preset: Preset | None = Field(None, description="a Llama shape, trained from scratch")
    path: str | None = Field(None, description="hub id, folder or GGUF file of a model whose training continues")
    config: dict[str, Any] | None = Field(
        None, description="any transformers configuration, from scratch: {model_type: llama, hidden_size: 256, ...}"
    )

    @model_validator(mode="after")
    def _check(self) -> ModelBlock:
        check_model(self.preset, self.path, self.config, "llama")
        if self.objective == "masked" and self.preset is not None:
            raise ValueError(
                f"objective masked: preset {self.preset} is causal; give a config, as {{model_type: bert}}"
            )
        if self.objective == "causal" and "mask_share" in self.changed():
            raise ValueError("mask_share belongs to objective masked, but objective is causal")
        return self


class TrainTokenizer(Block):
    """A byte-level BPE trained on the corpus, the same on every island."""

    vocab_size: int = Field(
        4096, ge=300, le=1_000_000, description="tokens, including the 256 bytes and the special ones"
    )
    max_megabytes: float = Field(32.0, gt=0, description="megabytes of text to train it on (the same on all islands)")


class TokenizerBlock(Block):
    """The tokenizer: `path` or `train`; neither takes the model's own, or else trains one."""

    path: str | None = Field(None, description="hub id, folder, a tokenizer.json or a GGUF file")
    train: TrainTokenizer | None = Field(None, description="train one on the corpus")

    @model_validator(mode="after")
    def _check(self) -> TokenizerBlock:
        if self.path is not None and self.train is not None:
            raise ValueError("path and train exclude each other (set one of them to null)")
        return self


class SampleBlock(Block):
    """Text that the trained model writes at the end."""

    prompt: str = Field("The", min_length=1, description="text that the model continues")
    num_tokens: int = Field(40, ge=1, le=100_000, description="tokens to write")


class DiLoCoBlock(DiLoCoConfig):
    """`DiLoCoConfig` as it stands in a run file, where the rendezvous may be left to whoever starts the islands."""

    __init__ = BaseModel.__init__  # errors propagate to `load_run_file`, which knows the lines

    enabled: bool = Field(True, description="false: no outer loop; each island trains by itself")

    @model_validator(mode="after")
    def _check_islands(self) -> DiLoCoBlock:
        config_checks.check_islands(self)
        config_checks.check_meeting(self)
        if self.num_shares > 1 and self.rendezvous:
            check_between_processes(self.rendezvous)
        return self

    def resolve(self) -> DiLoCoConfig:
        """Returns the complete settings of one island; raises `ConfigError` if several islands have no rendezvous."""
        default = () if is_given(self, "island") else ("island",)
        return DiLoCoConfig(**self.model_dump(exclude={"enabled", *default}))

    @property
    def survives_losses(self) -> bool:
        return self.meets_in_store


def outer_loop(**settings: Any) -> DiLoCoBlock:
    """Creates a block without a run file; raises `ConfigError` if a setting is wrong."""
    try:
        block: DiLoCoBlock = DiLoCoBlock(**settings)
    except ValidationError as error:
        raise ConfigError(describe(error, DiLoCoBlock)) from None
    return block


class RunFile(BaseRun):
    """A language model's run: what is trained, on what, how, and where its folder is."""

    module: ClassVar[str] = "hf_diloco.apps.lm"
    meeting_name: ClassVar[str] = "diloco"
    files: ClassVar[NamedFiles] = NamedFiles(
        paths=(("deepspeed",), ("accelerate",), ("diloco", "key_file")),
        patterns=(("diloco", "identity_file"),),
        hub_ids_or_paths=(("model", "path"), ("tokenizer", "path"), ("data", "path")),
        globs=(("data", "files"), ("data", "eval_files")),
    )
    alternatives: ClassVar[Mapping[str, tuple[str, ...]]] = {"model": MODELS, "tokenizer": ("path", "train")}
    settings_of_order: ClassVar[tuple[KeyPath, ...]] = (
        *(("data", name) for name in ("source", "path", "name", "split", "files", "text_column", "shares")),
        *(("data", name) for name in ("streaming", "sequence_length", "num_eval_sequences")),
        *(("tokenizer", name) for name in ("path", "train")),
    )

    model: ModelBlock = ModelBlock(preset="llama-tiny")
    tokenizer: TokenizerBlock = TokenizerBlock()
    data: DataBlock = DataBlock()
    sample: SampleBlock | None = SampleBlock()
    optimizer: OptimizerBlock | None = Field(None, description="an optimizer instead of the Trainer's: 1-bit, or Muon")
    diloco: DiLoCoBlock = Field(default_factory=DiLoCoBlock)

    @model_validator(mode="after")
    def _check_blocks(self) -> RunFile:
        if self.data.shares == "domains" and len(self.data.files) < self.diloco.num_shares:
            raise ValueError(
                f"data.shares: domains gives file k to island k % num_islands, but {len(self.data.files)} files "
                f"cannot serve {self.diloco.num_shares} islands"
            )
        if self.data.streaming and (workers := self.training.get("dataloader_num_workers")):
            raise ValueError(
                f"training.dataloader_num_workers: {workers}, but a stream is read by rank 0 itself, which knows its "
                "position; set it to 0, or data.streaming to false"
            )
        if self.data.streaming and self.training.get("data_seed") is not None:
            raise ValueError(
                "training.data_seed has no effect on a stream, which is read in its own order; leave it out, or set "
                "data.streaming to false"
            )
        if self.diloco.enabled:
            refuse_uncounted(self.diloco.weight_by, self.training.get("include_num_input_tokens_seen"))
        if self.optimizer is not None:
            every = self.diloco.sync_every if self.diloco.enabled and self.diloco.num_shares > 1 else None
            settings = {**self.training, "deepspeed": self.deepspeed, "fsdp": self.fsdp, "sync_every": every}
            if problems := [f"{name}={problem}" for name, problem in find_refused(settings, self.optimizer.kind)]:
                raise ValueError("; ".join(problems))
        return self

    @property
    def meeting(self) -> DiLoCoBlock:
        return self.diloco

    @classmethod
    def order_of_data(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Does the same as `BaseRun`, but drops settings without effect: no seed shuffles a stream, for example."""
        order = super().order_of_data(values)
        has_own = any(get_at(values, ("data", name)) for name in ("eval_files", "eval_split"))
        irrelevant = ["data.num_eval_sequences"] if has_own or order.get("data.streaming") else []
        if order.get("data.streaming"):
            irrelevant += ["data.sequence_length", "seed", "training.data_seed"]
        kept = {name: value for name, value in order.items() if name not in irrelevant}
        return {**kept, "data.eval_files or data.eval_split": "given" if has_own else "not given"}

    @property
    def needs_hub(self) -> bool:
        return self.data.source == "c4" or super().needs_hub

    def probes(self) -> Iterator[Callable[[], object]]:
        """Yields checks that load a given tokenizer, create the model without weights, and read the first document."""
        from hf_diloco.apps.lm.model import sketch_model
        from hf_diloco.apps.lm.tokenizer import load_tokenizer

        path = (self.tokenizer.path or self.model.path) if self.tokenizer.train is None else None
        tokenizer = cache(lambda: load_tokenizer(path) if path else None)
        yield tokenizer
        yield lambda: sketch_model(self, tokenizer())
        if self.data.source != "embedded":
            yield partial(read_first, self.data)


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Reads and checks a language model's run file; see `read_run_file`."""
    return read_run_file(RunFile, path, overrides)
