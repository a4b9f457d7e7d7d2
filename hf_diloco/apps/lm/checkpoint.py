"""Where a pre-trained model is: a hub id or a folder of Hugging Face's, or llama.cpp's format GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_diloco.apps.common.hub import why_not_loaded
from hf_diloco.errors import ConfigError
from hf_diloco.utils.extras import need

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SUFFIX = ".gguf"


class Source(NamedTuple):
    """What `from_pretrained` is called with.

    Attributes:
        name: a hub id or a folder.
        options: `gguf_file` with the name of a file in the folder, or nothing.
    """

    name: str
    options: dict[str, str]


def find_source(path: str, setting: str = "model.path") -> Source:
    """Where a model or tokenizer is loaded from.

    Args:
        path: a hub id, a folder, a GGUF file, or a folder with one GGUF file and no config.json.
        setting: that names it, for errors.

    Raises:
        ConfigError: the folder holds several GGUF files, the file is missing, or the package `gguf` is.
    """
    file = _gguf_file(Path(path), setting)
    if file is None:
        return Source(path, {})
    need(f"{setting}: {path}", "gguf")
    if not file.is_file():
        raise ConfigError(f"{setting}: there is no file {path!r}; give a GGUF file that exists")
    return Source(str(file.parent), {"gguf_file": file.name})


def load_config(path: str) -> PreTrainedConfig:
    """The configuration of a pre-trained model, without its weights.

    Raises:
        ConfigError: it cannot be had.
    """
    from transformers import AutoConfig

    source = find_source(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.name, **source.options)
    except Exception as error:  # of the Hub, the file system or the configuration's format
        raise _cannot_load(path, error) from error
    return config


def load_weights(path: str, auto_class: Any) -> PreTrainedModel:
    """A pre-trained model in fp32, which trains and is saved as one that never was quantised.

    Args:
        path: as for `find_source`.
        auto_class: of transformers, as `AutoModelForCausalLM`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    import torch

    source = find_source(path)
    try:
        model: PreTrainedModel = auto_class.from_pretrained(source.name, dtype=torch.float32, **source.options)
    except Exception as error:  # of the Hub, the file system or the checkpoint's format
        raise _cannot_load(path, error) from error
    if source.options:
        _forget_quantizer(model)
    return model


def _gguf_file(path: Path, setting: str) -> Path | None:
    if path.suffix == _SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{setting}: {str(path)!r} holds {len(files)} GGUF files ({names}); give the path of one")
    return files[0] if files else None


def _forget_quantizer(model: PreTrainedModel) -> None:
    """What was loaded is fp32, but Trainer and `save_pretrained` would take it for quantised."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def _cannot_load(path: str, error: Exception) -> ConfigError:
    return ConfigError(f"model.path: cannot load {path!r}: {why_not_loaded(path, error)}")
