"""DiLoCo for the Hugging Face Trainer, Accelerate and DeepSpeed: one model, several clusters, little traffic.

Everything but the errors is imported on first use, so `import hf_diloco` loads neither torch nor deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    UnknownIdentityError,
    UnsupportedError,
)

__version__ = "0.2.0"

_HOME = {
    "Codec": "hf_diloco.codecs",
    "DiLoCoCallback": "hf_diloco.trainer.callback",
    "DiLoCoConfig": "hf_diloco.config.diloco",
    "GossipCallback": "hf_diloco.trainer.gossip_callback",
    "GossipConfig": "hf_diloco.gossip.config",
    "GossipOptimizer": "hf_diloco.methods.gossip",
    "MethodOptions": "hf_diloco.methods.outer",
    "MuonAdamW": "hf_diloco.optimizers.muon",
    "OneBitAdam": "hf_diloco.optimizers.onebit.adam",
    "OneBitCallback": "hf_diloco.optimizers.onebit.trainer",
    "OneBitLamb": "hf_diloco.optimizers.onebit.lamb",
    "OuterLoop": "hf_diloco.trainer.loop",
    "OuterMethod": "hf_diloco.methods.outer",
    "Topology": "hf_diloco.methods.topology",
    "make_optimizer": "hf_diloco.methods.gossip",
    "make_topology": "hf_diloco.methods.topology",
    "simulate": "hf_diloco.apps.lm.simulate",
}

if TYPE_CHECKING:
    from hf_diloco.apps.lm.simulate import simulate
    from hf_diloco.codecs import Codec
    from hf_diloco.config.diloco import DiLoCoConfig
    from hf_diloco.gossip.config import GossipConfig
    from hf_diloco.methods.gossip import GossipOptimizer, make_optimizer
    from hf_diloco.methods.outer import MethodOptions, OuterMethod
    from hf_diloco.methods.topology import Topology, make_topology
    from hf_diloco.optimizers.muon import MuonAdamW
    from hf_diloco.optimizers.onebit.adam import OneBitAdam
    from hf_diloco.optimizers.onebit.lamb import OneBitLamb
    from hf_diloco.optimizers.onebit.trainer import OneBitCallback
    from hf_diloco.trainer.callback import DiLoCoCallback
    from hf_diloco.trainer.gossip_callback import GossipCallback
    from hf_diloco.trainer.loop import OuterLoop

__all__ = [
    "CheckpointError",
    "Codec",
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
    "GossipOptimizer",
    "IslandLostError",
    "MethodOptions",
    "MissedRoundError",
    "MuonAdamW",
    "OneBitAdam",
    "OneBitCallback",
    "OneBitLamb",
    "OuterLoop",
    "OuterMethod",
    "PayloadError",
    "RendezvousError",
    "StopRequested",
    "StoreError",
    "StoreFullError",
    "Topology",
    "UnknownIdentityError",
    "UnsupportedError",
    "make_optimizer",
    "make_topology",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
