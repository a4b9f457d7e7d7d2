"""DiLoCo for the Hugging Face Trainer, Accelerate and DeepSpeed: one model, several clusters, little traffic.

Names are imported on first use, so that `import hf_diloco` costs neither torch nor deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "hf_diloco.errors",
    "ConfigError": "hf_diloco.errors",
    "DiLoCoCallback": "hf_diloco.callback",
    "DiLoCoConfig": "hf_diloco.config",
    "DamagedTransferError": "hf_diloco.errors",
    "DiLoCoError": "hf_diloco.errors",
    "DivergedError": "hf_diloco.errors",
    "DuplicateIslandError": "hf_diloco.errors",
    "ExchangeError": "hf_diloco.errors",
    "FingerprintError": "hf_diloco.errors",
    "ForgedError": "hf_diloco.errors",
    "GossipCallback": "hf_diloco.gossip_callback",
    "GossipConfig": "hf_diloco.gossip.config",
    "IslandLostError": "hf_diloco.errors",
    "MissedRoundError": "hf_diloco.errors",
    "MuonAdamW": "hf_diloco.optimizers.muon",
    "OneBitAdam": "hf_diloco.onebit.adam",
    "OneBitCallback": "hf_diloco.onebit.trainer",
    "OneBitLamb": "hf_diloco.onebit.lamb",
    "OuterLoop": "hf_diloco.loop",
    "PayloadError": "hf_diloco.errors",
    "RendezvousError": "hf_diloco.errors",
    "StopRequested": "hf_diloco.errors",
    "StoreError": "hf_diloco.errors",
    "StoreFullError": "hf_diloco.errors",
    "UnsupportedError": "hf_diloco.errors",
}

if TYPE_CHECKING:
    from hf_diloco.callback import DiLoCoCallback
    from hf_diloco.config import DiLoCoConfig
    from hf_diloco.errors import (
        CheckpointError,
        ConfigError,
        DamagedTransferError,
        DiLoCoError,
        DivergedError,
        DuplicateIslandError,
        ExchangeError,
        FingerprintError,
        ForgedError,
        IslandLostError,
        MissedRoundError,
        PayloadError,
        RendezvousError,
        StopRequested,
        StoreError,
        StoreFullError,
        UnsupportedError,
    )
    from hf_diloco.gossip.config import GossipConfig
    from hf_diloco.gossip_callback import GossipCallback
    from hf_diloco.loop import OuterLoop
    from hf_diloco.onebit.adam import OneBitAdam
    from hf_diloco.onebit.lamb import OneBitLamb
    from hf_diloco.onebit.trainer import OneBitCallback
    from hf_diloco.optimizers.muon import MuonAdamW

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedTransferError",
    "DiLoCoCallback",
    "DiLoCoConfig",
    "DiLoCoError",
    "DivergedError",
    "DuplicateIslandError",
    "ExchangeError",
    "FingerprintError",
    "ForgedError",
    "GossipCallback",
    "GossipConfig",
    "IslandLostError",
    "MissedRoundError",
    "MuonAdamW",
    "OneBitAdam",
    "OneBitCallback",
    "OneBitLamb",
    "OuterLoop",
    "PayloadError",
    "RendezvousError",
    "StopRequested",
    "StoreError",
    "StoreFullError",
    "UnsupportedError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
