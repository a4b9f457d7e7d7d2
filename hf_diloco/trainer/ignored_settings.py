"""Which settings of its configuration DeepSpeed reads: it ignores all others without a word."""

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
"""Blocks of which DeepSpeed reads some settings, and ignores all others without a word."""

_READ_ELSEWHERE = ("sequence_parallel_size", "msamp")
"""Settings that DeepSpeed, or Accelerate, reads at other times than the rest."""


def warn_of_ignored(plugin: Any) -> None:
    """Warns of settings that DeepSpeed ignores, which may be typing errors, or another tool's.

    Args:
        plugin: Accelerate's `DeepSpeedPlugin`, whose configuration DeepSpeed has taken; None: there is no DeepSpeed.
    """
    if plugin is None:
        return
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = Asked.of_config(copy.deepcopy(plugin.deepspeed_config))
    try:
        DeepSpeedConfig(asked)
    except Exception as error:  # it has taken it, in other circumstances
        logger.debug("DeepSpeed does not read its configuration again: %s", error)
        return
    if found := "; ".join(asked.unknown()):
        logger.warning("deepspeed: %s", found)


class Asked(dict[str, Any]):
    """A block of the configuration that notes which settings DeepSpeed asks for: it has no list of them.

    Args:
        values: the block.
        blocks: in it, that note the same.
    """

    def __init__(self, values: Mapping[str, Any], blocks: Mapping[str, Asked] | None = None) -> None:
        self._blocks = blocks or {}
        self._known: dict[str, Any] = {}  # with the defaults that are known
        super().__init__({**values, **self._blocks})

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Asked:
        """A whole configuration."""
        return cls(config, {name: cls(config[name]) for name in READ_BY_NAME if isinstance(config.get(name), Mapping)})

    def __contains__(self, key: Any) -> bool:
        self._known.setdefault(key, None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._known.setdefault(key, None)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value; notes the key and its default."""
        self._known[key] = default
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself, of which one may ask whether a key is in it."""
        return self

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Settings that DeepSpeed has not asked for, and so would ignore; but for comments, as `_comment`."""
        known = {*self._known, *_READ_ELSEWHERE} if not prefix else self._known
        for key, value in self.items():
            if key not in known and key[:1].isalpha():
                shown = redact(value, key)
                yield f"unknown setting {prefix}{key}={shown!r}{nearest(key, known)}, which DeepSpeed ignores"
        for name, block in self._blocks.items():
            yield from block.unknown(f"{name}.")

    def wrong_types(self, prefix: str = "") -> Iterator[str]:
        """Text, or nothing, in the place of a number, true or false: any text counts as true to DeepSpeed."""
        for key, default in self._known.items():
            value = super().get(key, default)
            if isinstance(default, bool | int | float) and isinstance(value, str | None):
                wanted = "true or false" if isinstance(default, bool) else "a number"
                yield f"{prefix}{key}: expected {wanted}, got {value!r}"
        for name, block in self._blocks.items():
            yield from block.wrong_types(f"{name}.")
