"""Finds settings in DeepSpeed's configuration that DeepSpeed silently ignores."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from hf_diloco.utils.redact import redact
from hf_diloco.utils.text import nearest

logger = logging.getLogger("hf_diloco")

READ_BY_NAME = (
    *("optimizer", "scheduler", "data_types", "torch_autocast", "checkpoint", "activation_checkpointing"),
    "flops_profiler",
)
"""Blocks in which DeepSpeed reads the settings it knows, and silently ignores all others."""

_READ_ELSEWHERE = ("sequence_parallel_size", "msamp")
"""Settings that DeepSpeed or Accelerate reads elsewhere."""


def warn_of_ignored(plugin: Any) -> None:
    """Warns about settings that DeepSpeed ignores: perhaps typos, or settings of another tool.

    `plugin` is Accelerate's `DeepSpeedPlugin`, whose configuration DeepSpeed has accepted; None without DeepSpeed.
    """
    if plugin is None:
        return
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = TrackedConfig.of_config(copy.deepcopy(plugin.deepspeed_config))
    try:
        DeepSpeedConfig(asked)
    except Exception as error:  # DeepSpeed has accepted it before, in other circumstances
        logger.debug("DeepSpeed does not read its configuration again: %s", error)
        return
    if found := "; ".join(asked.unknown()):
        logger.warning("deepspeed: %s", found)


class TrackedConfig(dict[str, Any]):
    """A block of the configuration that records which settings DeepSpeed reads, as DeepSpeed has no list of them.

    Nested `blocks` also record it.
    """

    def __init__(self, values: Mapping[str, Any], blocks: Mapping[str, TrackedConfig] | None = None) -> None:
        self._blocks = blocks or {}
        self._known: dict[str, Any] = {}  # keys read, with their defaults if known
        super().__init__({**values, **self._blocks})

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> TrackedConfig:
        """Wraps a whole configuration."""
        return cls(config, {name: cls(config[name]) for name in READ_BY_NAME if isinstance(config.get(name), Mapping)})

    def __contains__(self, key: Any) -> bool:
        self._known.setdefault(key, None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._known.setdefault(key, None)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value; records the key and its default."""
        self._known[key] = default
        return super().get(key, default)

    def keys(self) -> Any:
        """Returns this object, so that `key in block.keys()` is recorded, too."""
        return self

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Yields a message for each setting that DeepSpeed has not read, except comments such as `_comment`."""
        known = {*self._known, *_READ_ELSEWHERE} if not prefix else self._known
        for key, value in self.items():
            if key not in known and key[:1].isalpha():
                shown = redact(value, key)
                yield f"unknown setting {prefix}{key}={shown!r}{nearest(key, known)}, which DeepSpeed ignores"
        for name, block in self._blocks.items():
            yield from block.unknown(f"{name}.")

    def wrong_types(self, prefix: str = "") -> Iterator[str]:
        """Yields a message for each string or null in place of a number or bool: to DeepSpeed any string is true."""
        for key, default in self._known.items():
            value = super().get(key, default)
            if isinstance(default, bool | int | float) and isinstance(value, str | None):
                wanted = "true or false" if isinstance(default, bool) else "a number"
                yield f"{prefix}{key}: expected {wanted}, got {value!r}"
        for name, block in self._blocks.items():
            yield from block.wrong_types(f"{name}.")
