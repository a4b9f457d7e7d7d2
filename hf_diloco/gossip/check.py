"""Settings of decentralised training that only its methods and graphs can judge."""

from __future__ import annotations

import torch

from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.methods import make_optimizer
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.topology import Topology, make_topology


def check_gossip(config: GossipConfig) -> Topology:
    """The graph, if the method exists, has these settings, and converges on it.

    Raises:
        ConfigError: it does not.
    """
    topology = make_topology(config.topology, config.num_islands, config.topology_seed)
    parameter = torch.nn.Parameter(torch.zeros(1))
    node = MemoryGraph(topology).node(config.island)
    make_optimizer(config.method, [parameter], node, 0.1, **config.method_settings)
    return topology
