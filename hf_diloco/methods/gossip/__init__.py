"""Methods of decentralised training as torch optimizers: one file a method."""

from hf_diloco.methods.gossip.base import GossipOptimizer
from hf_diloco.methods.gossip.d2 import D2
from hf_diloco.methods.gossip.da_dmsgd import DADmSGD
from hf_diloco.methods.gossip.decentlam import DecentLaM
from hf_diloco.methods.gossip.dmsgd import DmSGD
from hf_diloco.methods.gossip.dsgd import DSGD
from hf_diloco.methods.gossip.momentum_consensus import MomentumConsensus
from hf_diloco.methods.gossip.pmsgd import PmSGD
from hf_diloco.methods.gossip.qg_dmsgd import QGDmSGD
from hf_diloco.methods.gossip.registry import METHODS, find_method, make_optimizer
from hf_diloco.methods.gossip.swarmsgd import SwarmSGD

__all__ = [
    "D2",
    "DSGD",
    "METHODS",
    "DADmSGD",
    "DecentLaM",
    "DmSGD",
    "GossipOptimizer",
    "MomentumConsensus",
    "PmSGD",
    "QGDmSGD",
    "SwarmSGD",
    "find_method",
    "make_optimizer",
]
