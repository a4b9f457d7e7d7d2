"""Settings of decentralised training that only its methods and graphs can judge."""

from __future__ import annotations

import torch

from hf_diloco.errors import ConfigError
from hf_diloco.gossip.choco import check_static
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.methods.gossip import GossipOptimizer, SwarmSGD, make_optimizer
from hf_diloco.methods.topology import Topology, make_topology


def check_gossip(config: GossipConfig) -> Topology:
    """The graph, if the method exists, has these settings, and converges on it.

    Raises:
        ConfigError: it does not.
    """
    topology = make_topology(config.topology, config.num_nodes, config.topology_seed)
    parameter = torch.nn.Parameter(torch.zeros(1))
    node = MemoryGraph(topology).node(config.node)
    optimizer = make_optimizer(config.method, [parameter], node, 0.1, slowmo=config.slowmo, **config.method_settings)
    if config.payload != "fp32":
        _check_payload(config.payload, topology, optimizer)
    return topology


def _check_payload(payload: str, topology: Topology, optimizer: GossipOptimizer) -> None:
    if isinstance(optimizer, SwarmSGD):
        raise ConfigError(
            f"payload={payload}: {optimizer.name} has a code of its own; remove payload, and set options: "
            "{quantization: lattice-8} or lattice-16 (not with blocking)"
        )
    if optimizer.num_vectors == 0:
        raise ConfigError(
            f"payload={payload}: {optimizer.name} averages gradients over all nodes, and knows no neighbours that "
            "could keep replicas; remove payload, or choose another method"
        )
    check_static(topology, payload)
