"""Exports the outer parameters of a checkpoint to a plain Hugging Face folder, without the training or a GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.outer.checkpoint import RECORD, OuterIndex, complete_checkpoints, load_outer, read_index
from hf_diloco.outer.manifest import describe_contents
from hf_diloco.utils.files import telling

CONFIG, ADAPTER_CONFIG, ADAPTER = "config.json", "adapter_config.json", "adapter_model.safetensors"
_WEIGHTS = "model[._-]*safetensors"
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "*.model")
_PLAIN = ("gossip.json", "files.json")
_PLACES = (".", "checkpoint-*", "island-0/checkpoint-*")
"""What checkpoints without outer state have instead, and where a folder may have them."""

_COMPILED = "_orig_mod."  # put before names by torch.compile
_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save)\.([^.]+)")
"""Finds the adapter's name in a parameter's name: "default", unless `get_peft_model` was given another name."""

_HALF = re.compile(r"(.*\.lora_(?:embedding_)?)([AB])(?:\.weight)?")
"""Splits the name in files of one of the two matrices of LoRA; each needs the other."""

_PROMPTS = {
    "prompt_encoder.embedding.weight": "prompt_embeddings",
    "prompt_encoder.prefix_task_cols": "prefix_task_cols",
    "prompt_encoder.prefix_task_rows": "prefix_task_rows",
}
"""Names, in the model and in files, of prompts that are parameters themselves."""


def find_checkpoint(path: Path) -> tuple[Path, OuterIndex]:
    """Returns the checkpoint at `path`, or the newest complete one in the folder of an island, or of a run's island 0.

    Raises:
        ConfigError: there is none.
        CheckpointError: its outer state is missing or damaged.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}: give a checkpoint-N, or the folder of an island or a run")
    is_one = (path / "diloco").is_dir() or path.name.startswith("checkpoint-")
    found = [] if is_one else complete_checkpoints(path) or complete_checkpoints(path / "island-0")
    if found:
        return found[-1]
    if plain := next((file for place in _PLACES for name in _PLAIN for file in path.glob(f"{place}/{name}")), None):
        raise ConfigError(
            f"{plain.parent} has no outer parameters, as nodes of a graph and runs without outer loop have none: the "
            "model is in it as it was trained, and in the folder `model` of a run that has ended"
        )
    if is_one:
        return path, read_index(path)
    raise ConfigError(
        f"{path} holds no whole checkpoint with outer state: name checkpoint-N, or the folder of an island"
    )


def outer_parameters(checkpoint: Path, index: OuterIndex) -> dict[str, torch.Tensor]:
    """Returns the outer parameters by name, in fp32: all trained parameters, assembled from all shards.

    Raises:
        CheckpointError: a file is corrupt.
    """
    values = load_outer(checkpoint, index, [(0, index.num_parameters)], only="anchor")["anchor"]
    parts = values.split([prod(shape) for shape in index.parameters.values()])
    return {
        name.replace(_COMPILED, ""): part.view(shape)
        for (name, shape), part in zip(index.parameters.items(), parts, strict=True)
    }


def export(checkpoint: Path, index: OuterIndex, folder: Path, like: Path | None = None) -> None:
    """Writes the outer parameters to `folder`, with configuration and tokenizer, for `from_pretrained` to load.

    A checkpoint of adapters becomes a PEFT folder. Parameters that are not trained come from the checkpoint, if it
    has them.

    Args:
        checkpoint: the Trainer's `checkpoint-N`.
        index: of its outer state.
        folder: to create; must not exist.
        like: a folder with the model's configuration and tokenizer, if the checkpoint has none.

    Raises:
        ConfigError: `folder` exists, or there is no configuration.
        CheckpointError: the export is impossible; the message says what is missing. Or `folder` cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already: name another folder, or remove it")
    source = like or checkpoint
    described = () if like else (CONFIG, ADAPTER_CONFIG, *_TOKENIZER)
    _refuse_damaged(checkpoint, index, [ADAPTER, _WEIGHTS, *described])
    parameters = outer_parameters(checkpoint, index)
    adapter, settings = _find_adapter(source, parameters)
    adapters, model = {}, None
    if settings is not None:
        adapters = _in_files_of_peft(checkpoint, index, adapter, parameters)
    elif (source / CONFIG).is_file():
        model = _make_model(source, checkpoint, index, parameters)
    else:
        raise ConfigError(
            f"{'--like ' if like else ''}{source} has no {CONFIG}: give a folder that has the model's by --like, such "
            "as the one that training began from"
        )
    with _made_whole(folder) as partial:
        if model is not None:
            model.save_pretrained(partial)
        elif settings is not None:
            save_file(adapters, partial / ADAPTER, {"format": "pt"})
            shutil.copy2(settings, partial)
        for path in (path for pattern in _TOKENIZER for path in source.glob(pattern) if path.is_file()):
            shutil.copy2(path, partial)
        if not (checkpoint / RECORD).is_file():  # a training deletes it before all other files
            raise CheckpointError(
                f"{checkpoint} was deleted while it was read, because training went on: export a newer one, or copy "
                "it first, or let training keep more (save_total_limit)"
            )


def _refuse_damaged(checkpoint: Path, index: OuterIndex, patterns: Iterable[str]) -> None:
    """Raises `CheckpointError` if a file that matches one of `patterns` does not hold what was recorded of it."""
    for file in index.checkpoint:
        path = checkpoint / file.name
        is_read = path.is_file() and any(path.match(pattern) for pattern in patterns)
        if is_read and (damage := describe_contents(path, file)):
            raise CheckpointError(f"{damage}: export an earlier checkpoint")


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """Yields a folder that becomes `folder` at the end; after an error nothing is left of it.

    Raises:
        CheckpointError: the disk is full, or fails.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        with telling(folder):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _find_adapter(source: Path, parameters: Iterable[str]) -> tuple[str, Path | None]:
    """Returns an adapter's name and the path of its PEFT settings: in a folder of that name unless it is "default"."""
    named = next((found[1] for found in map(_ADAPTER.search, parameters) if found), "")
    if (source / ADAPTER_CONFIG).is_file():
        return named or "default", source / ADAPTER_CONFIG
    settings = next(iter(sorted(source.glob(f"{escape(named) or '*'}/{ADAPTER_CONFIG}"))), None)
    return named or (settings.parent.name if settings else ""), settings


def _in_files_of_peft(
    checkpoint: Path, index: OuterIndex, adapter: str, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the outer parameters under PEFT's names for files, with what else the checkpoint has of the adapter.

    Raises:
        CheckpointError: PEFT's files would hold prompts that it computes from the parameters; or the checkpoint has
            only one of two matrices.
    """
    written = [checkpoint / ADAPTER, checkpoint / adapter / ADAPTER]
    saved = next((_read(path) for path in written if path.is_file()), None)
    place = re.compile(rf"(?:\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)")
    if saved is None:  # an Accelerator writes the whole model
        whole = _read_model(checkpoint, index)
        parameters = {**{name: value for name, value in whole.items() if place.search(name)}, **parameters}
    found = {_name_in_file(place.sub("", name)): value.clone() for name, value in parameters.items()}
    found = {**(saved or {}), **found}
    if any(name.startswith("prompt_encoder.") for name in found):
        raise CheckpointError(
            f"{checkpoint} holds the parameters that prompts are computed from, but PEFT's files hold the prompts: "
            "make those files where the model is trained, by save_model within outer_weights()"
        )
    _refuse_halves(checkpoint, found)
    return found


def _refuse_halves(checkpoint: Path, found: Iterable[str]) -> None:
    halves = {(half[1], half[2]) for half in map(_HALF.fullmatch, found) if half}
    for name, half in sorted(halves):
        other = "B" if half == "A" else "A"
        if (name, other) not in halves:
            raise CheckpointError(
                f"{checkpoint} has values of {name}{half}, but none of {name}{other}, which was not trained: make the "
                "adapter's files where the model is trained, by save_model within outer_weights()"
            )


def _name_in_file(name: str) -> str:
    """Returns PEFT's name for a parameter in files, given its name without the adapter's."""
    if name.endswith(".vblora_vector_bank"):
        return "base_model.vblora_vector_bank"
    name = _PROMPTS.get(name, name)
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def _make_model(source: Path, checkpoint: Path, index: OuterIndex, parameters: dict[str, torch.Tensor]) -> Any:
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    kind: Any = getattr(transformers, (getattr(config, "architectures", None) or ["?"])[0], None)
    if kind is None:
        raise CheckpointError(f"{source / CONFIG} names no model of transformers ({config.architectures})")
    config.dtype = torch.float32
    saved = _read_model(checkpoint, index)
    model, report = kind.from_pretrained(
        None, config=config, state_dict=saved, dtype=torch.float32, output_loading_info=True
    )
    own = dict(model.named_parameters())
    _refuse_unknown(checkpoint, parameters, own)
    needed = own.keys() | {name for name, _ in model.named_buffers()}  # tied weights by their first name
    if missing := sorted(set(report["missing_keys"]) & needed - parameters.keys()):
        raise CheckpointError(
            f"{checkpoint} has no values of {missing[0]} and {len(missing) - 1} others, which were not trained: they "
            "are only in the model that training began from"
        )
    # By the names that training uses: files may have others, which `from_pretrained` translates.
    for name, value in parameters.items():
        own[name].data.copy_(value)
    return model


def _refuse_unknown(
    checkpoint: Path, parameters: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]
) -> None:
    for name, value in parameters.items():
        if name not in known or known[name].shape != value.shape:
            raise CheckpointError(
                f"{checkpoint} has outer values of {name}, {tuple(value.shape)}, and the model of {CONFIG} no such "
                "parameter: give a folder with the configuration of the model that was trained by --like"
            )


def _read_model(checkpoint: Path, index: OuterIndex) -> dict[str, torch.Tensor]:
    """Returns what the Trainer or an Accelerator wrote of the model by name, trained or not."""
    stem = index.data.get("weights", "model")  # another one if an Accelerator has several models
    recorded = checkpoint / f"{stem}.safetensors"
    paths = [recorded] if recorded.is_file() else checkpoint.glob(f"{stem}[.-]*safetensors")
    return {name.replace(_COMPILED, ""): value for path in paths for name, value in _read(path).items()}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:  # such as of a loop's `save_state`, which records no other files
        raise CheckpointError(f"{path} cannot be read ({error}): export an earlier checkpoint") from None
