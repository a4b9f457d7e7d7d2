"""Methods of decentralised training as torch optimizers: one file a method."""

from hf_diloco.gossip.methods.base import GossipOptimizer
from hf_diloco.gossip.methods.d2 import D2
from hf_diloco.gossip.methods.da_dmsgd import DADmSGD
from hf_diloco.gossip.methods.decentlam import DecentLaM
from hf_diloco.gossip.methods.dmsgd import DmSGD
from hf_diloco.gossip.methods.dsgd import DSGD
from hf_diloco.gossip.methods.momentum_consensus import MomentumConsensus
from hf_diloco.gossip.methods.pmsgd import PmSGD
from hf_diloco.gossip.methods.qg_dmsgd import QGDmSGD
from hf_diloco.gossip.methods.registry import METHODS, make_optimizer
from hf_diloco.gossip.methods.swarmsgd import SwarmSGD

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
    "make_optimizer",
]
