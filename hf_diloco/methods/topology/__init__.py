"""Who averages with whom, and with which weights: one file a family of graphs. Imports neither torch nor networkx."""

from hf_diloco.methods.topology.base import PeriodicTopology, Topology
from hf_diloco.methods.topology.matching import RandomMatching
from hf_diloco.methods.topology.own import from_file, from_graph, from_weights
from hf_diloco.methods.topology.registry import GRAPHS, make_topology
from hf_diloco.methods.topology.stability import check_decentlam, check_momentum_consensus, largest_stable_beta

__all__ = [
    "GRAPHS",
    "PeriodicTopology",
    "RandomMatching",
    "Topology",
    "check_decentlam",
    "check_momentum_consensus",
    "from_file",
    "from_graph",
    "from_weights",
    "largest_stable_beta",
    "make_topology",
]
