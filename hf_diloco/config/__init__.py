"""Settings of the outer loop, and what all blocks of settings share."""

from hf_diloco.config.base import (
    ENV_FOLDER,
    ENV_ISLAND,
    ENV_NUM_ISLANDS,
    ENV_RENDEZVOUS,
    Seconds,
    StrictModel,
    choose_config,
    describe,
    from_env,
    is_given,
    need_number,
)
from hf_diloco.config.diloco import DiLoCoConfig

__all__ = [
    "ENV_FOLDER",
    "ENV_ISLAND",
    "ENV_NUM_ISLANDS",
    "ENV_RENDEZVOUS",
    "DiLoCoConfig",
    "Seconds",
    "StrictModel",
    "choose_config",
    "describe",
    "from_env",
    "is_given",
    "need_number",
]
