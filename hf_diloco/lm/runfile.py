"""The run file: one YAML with the model, the data, TrainingArguments, DeepSpeed and the outer loop.

Reading it imports neither torch nor transformers, so that mistakes show at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from hf_diloco import config_checks
from hf_diloco.config import (
    ENV_ISLAND,
    ENV_NUM_ISLANDS,
    ENV_RENDEZVOUS,
    DiLoCoConfig,
    describe,
)
from hf_diloco.data.settings import DataBlock
from hf_diloco.errors import ConfigError
from hf_diloco.lm.paths import resolve_paths
from hf_diloco.lm.yaml_file import KeyPath, nearest_line, parse_override, read_yaml, set_at

Count = Annotated[int, Field(ge=1)]

ENVIRONMENT = {"island": ENV_ISLAND, "num_islands": ENV_NUM_ISLANDS, "rendezvous": ENV_RENDEZVOUS}

COMMAND_LINE = "command line: "

ALTERNATIVES: dict[str, tuple[str, ...]] = {"model": ("preset", "path", "config"), "tokenizer": ("path", "train")}

Preset = Literal["llama-tiny", "llama-60m", "llama-150m", "llama-400m", "llama-1b"]


class Block(BaseModel):
    """A settings block of the run file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelBlock(Block):
    """The model: exactly one of `preset`, `path` and `config`."""

    preset: Preset | None = Field(None, description="a Llama shape, trained from scratch")
    path: str | None = Field(None, description="hub id or folder of a model whose training continues")
    config: dict[str, Any] | None = Field(
        None, description="any transformers configuration, from scratch: {model_type: llama, hidden_size: 256, ...}"
    )

    @model_validator(mode="after")
    def _check(self) -> ModelBlock:
        given = [name for name in ALTERNATIVES["model"] if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of preset, path and config makes the model; got {' and '.join(given) or 'none'} "
                "(set the others to null)"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError(f"config needs a model_type, as in model_type: llama; got {self.config!r}")
        return self


class TrainTokenizer(Block):
    """A byte-level BPE trained on the corpus, the same on every island."""

    vocab_size: int = Field(4096, ge=300, le=1_000_000, description="tokens, with the 256 bytes and the specials")
    max_megabytes: float = Field(32.0, gt=0, description="megabytes of text to train it on (the same on all islands)")


class TokenizerBlock(Block):
    """The tokenizer: `path` or `train`; neither takes the model's own, or else trains one."""

    path: str | None = Field(None, description="hub id, folder, or a tokenizer.json")
    train: TrainTokenizer | None = Field(None, description="train one on the corpus")

    @model_validator(mode="after")
    def _check(self) -> TokenizerBlock:
        if self.path is not None and self.train is not None:
            raise ValueError("path and train exclude each other (set one of them to null)")
        return self


class LaunchBlock(Block):
    """How `hf-diloco launch` starts an island, and where training begins."""

    num_processes: Count = Field(1, description="ranks of one island")
    use_cpu: bool | None = Field(None, description="null: true when there is no CUDA device")
    threads: Count | None = Field(None, description="OMP_NUM_THREADS of one rank")
    resume: str = Field(
        "auto",
        description="auto: from the newest round that all islands have; never: a new run; or a checkpoint folder",
    )


class SampleBlock(Block):
    """Text that the trained model writes at the end."""

    prompt: str = Field("The", description="text that the model continues")
    num_tokens: Count = Field(40, description="tokens to write")


class DiLoCoBlock(DiLoCoConfig):
    """`DiLoCoConfig` as it stands in a run file, where the rendezvous may be left to whoever starts the islands."""

    __init__ = BaseModel.__init__  # errors rise to `load_run_file`, which knows their lines

    enabled: bool = Field(True, description="false: no outer loop; each island trains by itself")

    @model_validator(mode="after")
    def _check_islands(self) -> DiLoCoBlock:
        config_checks.check_islands(self.island, self.num_islands, self.max_islands, self.min_islands)
        config_checks.check_meeting(self)
        if self.num_shares > 1 and self.rendezvous and self.rendezvous.startswith("memory:"):
            raise ValueError(
                f"rendezvous={self.rendezvous}: islands of a run file are processes, and share no memory: use "
                "file:///DIR, or another object store"
            )
        return self

    def resolve(self) -> DiLoCoConfig:
        """The complete settings of one island.

        Raises:
            ConfigError: when several islands have no rendezvous.
        """
        return DiLoCoConfig(**self.model_dump(exclude={"enabled"}))


class RunFile(Block):
    """A run: what is trained, on what, how, and where its folder is."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$", description="the run folder is OUTPUT/NAME")
    output: str = Field("runs", min_length=1, description="folder of run folders")
    seed: int = Field(42, ge=0, lt=2**32, description="initial weights, data order, dropout; the same on all islands")
    model: ModelBlock = ModelBlock(preset="llama-tiny")
    tokenizer: TokenizerBlock = TokenizerBlock()
    data: DataBlock = DataBlock()
    training: dict[str, Any] = Field(description="any of transformers' TrainingArguments; max_steps is needed")
    deepspeed: dict[str, Any] | str | None = Field(None, description="DeepSpeed configuration: file or mapping")
    accelerate: str | None = Field(None, description="an `accelerate config` file, for hf-diloco launch")
    launch: LaunchBlock = LaunchBlock()
    sample: SampleBlock | None = SampleBlock()
    diloco: DiLoCoBlock = Field(default_factory=DiLoCoBlock)

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: dict[str, Any]) -> dict[str, Any]:
        max_steps = training.get("max_steps")
        if "num_train_epochs" in training:
            raise ValueError(
                "num_train_epochs differs in steps where the islands' shares differ in size; set max_steps instead"
            )
        if not isinstance(max_steps, int) or isinstance(max_steps, bool) or max_steps < 1:
            raise ValueError(f"max_steps must be a whole number of inner steps from 1 on, got {max_steps!r}")
        return training

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, deepspeed: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
        if isinstance(deepspeed, str):
            _check_json_object(Path(deepspeed))
        return deepspeed

    @model_validator(mode="after")
    def _check_domains(self) -> RunFile:
        if self.data.shares == "domains" and len(self.data.files) < self.diloco.num_shares:
            raise ValueError(
                f"data.shares: domains gives file k to island k % num_islands, but {len(self.data.files)} files "
                f"cannot serve {self.diloco.num_shares} islands"
            )
        return self

    @property
    def max_steps(self) -> int:
        """Inner optimizer steps of the run."""
        return int(self.training["max_steps"])

    @property
    def folder(self) -> Path:
        """The run folder, OUTPUT/NAME."""
        return Path(self.output) / self.name

    def island_folder(self, island: int | None = None) -> Path:
        """The folder of one island (default: this one's) in the run folder."""
        return self.folder / f"island-{self.diloco.island if island is None else island}"


def _check_json_object(path: Path) -> None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Reads and checks a run file. Command line beats environment beats file beats default.

    Args:
        path: the YAML file. Files named in it are looked for beside it, then in the working directory.
        overrides: `key.sub=value` items from the command line, with YAML values; later ones win.

    Raises:
        ConfigError: naming each problem, its value and where it stands.
    """
    path = Path(path)
    values, lines = read_yaml(path)
    origins: dict[KeyPath, str] = {key: f"{path}, line {line}: " for key, line in lines.items()}
    values.setdefault("name", path.stem)
    resolve_paths(values, (path.parent, Path()), origins)
    for key, variable in ENVIRONMENT.items():
        if os.environ.get(variable):
            set_at(values, ("diloco", key), os.environ[variable])
            origins["diloco", key] = f"environment variable {variable}: "
    for item in overrides:
        key_path, value = parse_override(item)
        set_at(values, key_path, value)
        origins[key_path] = COMMAND_LINE
        _drop_alternatives(values, key_path, origins)
    resolve_paths(values, (Path(), path.parent), origins)
    try:
        return RunFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe(error, origins, str(path))) from None


def _drop_alternatives(values: dict[str, Any], given: KeyPath, origins: dict[KeyPath, str]) -> None:
    """`model.path=...` on the command line takes the place of the file's preset, and the like."""
    group = ALTERNATIVES.get(given[0], ())
    if len(given) < 2 or given[1] not in group:
        return
    for other in group:
        if other != given[1] and origins.get((given[0], other)) != COMMAND_LINE:
            values[given[0]].pop(other, None)


def _describe(error: ValidationError, origins: dict[KeyPath, str], file: str) -> str:
    """One line for each problem, with the place where the setting stands."""
    texts = []
    for problem in error.errors():
        kind: str | PydanticCustomError = problem["type"]
        if kind == "value_error":
            kind = PydanticCustomError("value_error", "{text}", {"text": str(problem["ctx"]["error"])})
        details = InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"], ctx=problem.get("ctx", {}))
        one = ValidationError.from_exception_data(error.title, [details])
        texts.append(f"{nearest_line(origins, problem['loc']) or f'{file}: '}{describe(one, RunFile)}")
    return "; ".join(texts)
