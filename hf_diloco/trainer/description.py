"""What a checkpoint needs beside weights, so that its outer parameters can be made a model without the training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from hf_diloco.inner.island import IslandGroup
from hf_diloco.utils.files import telling

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


class ModelDescription:
    """Configuration and tokenizer of the model that trains.

    The Trainer writes both with whole models; with sharded checkpoints of FSDP it writes neither.

    Args:
        model: the module, also one whose parameters are sharded; of another library than transformers nothing is
            written.
        processing_class: the tokenizer, if the Trainer has one.
    """

    def __init__(self, model: nn.Module, processing_class: Any = None) -> None:
        self._model: Any = model
        self._processing_class = processing_class

    def complete(self, checkpoint: Path, ranks: IslandGroup) -> None:
        """Writes into a checkpoint what it lacks. Collective over the ranks.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        ranks.on_leader(lambda: self._write(checkpoint))

    def _write(self, checkpoint: Path) -> None:
        if any((checkpoint / name).exists() for name in (CONFIG, ADAPTER_CONFIG)):
            return
        with telling(checkpoint):
            checkpoint.mkdir(parents=True, exist_ok=True)
            for adapter in getattr(self._model, "peft_config", {}).values():
                adapter.save_pretrained(str(checkpoint))
            if not hasattr(self._model, "peft_config") and hasattr(self._model, "config"):
                config = copy.deepcopy(self._model.config)
                config.architectures = [_class_name(self._model)]
                config.save_pretrained(str(checkpoint))
            if hasattr(self._processing_class, "save_pretrained"):
                self._processing_class.save_pretrained(str(checkpoint))


def _class_name(model: nn.Module) -> str:
    """The name of the model's class, without the FSDP that `fully_shard` puts before it."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next(name for name in names if not name.startswith("FSDP"))
