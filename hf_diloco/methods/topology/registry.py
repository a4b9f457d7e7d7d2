"""All graphs by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import Topology
from hf_diloco.methods.topology.exponential import exponential, one_peer_exponential
from hf_diloco.methods.topology.matching import RandomMatching
from hf_diloco.methods.topology.own import SUFFIXES, from_file
from hf_diloco.methods.topology.undirected import full, grid, hypercube, ring, star, symmetric_exponential
from hf_diloco.utils.text import nearest

GRAPHS: dict[str, Callable[[int], Topology]] = {
    "ring": ring,
    "grid": grid,
    "star": star,
    "hypercube": hypercube,
    "exponential": exponential,
    "symmetric-exponential": symmetric_exponential,
    "one-peer-exponential": one_peer_exponential,
    "random-matching": RandomMatching,
    "full": full,
}
"""What makes each graph from the number of its nodes."""


def make_topology(name: str, num_nodes: int | None = None, seed: int = 0) -> Topology:
    """The graph of that name, or a user's own weights.

    Args:
        name: one of `GRAPHS` (with - or _), or the path of a file of weights (see `own.from_file`).
        num_nodes: how many take part; may be left out for a file, which says it.
        seed: of random matchings.

    Raises:
        ConfigError: no such graph; a number of nodes that it cannot have, or that a file does not have; wrong weights.
    """
    if Path(name).suffix in SUFFIXES:
        topology: Topology = from_file(name)
        if num_nodes not in (None, topology.num_nodes):
            raise ConfigError(
                f"num_nodes={num_nodes}: {name} has weights of {topology.num_nodes} nodes; give that or none"
            )
        return topology
    known = name.replace("_", "-")
    if known not in GRAPHS:
        raise ConfigError(
            f"topology {name!r}: no such graph{nearest(known, GRAPHS)}; there are {', '.join(GRAPHS)}; or give a file "
            f"of weights ({', '.join(SUFFIXES)})"
        )
    if num_nodes is None:
        raise ConfigError(f"topology {name!r}: num_nodes is missing; give how many take part")
    return RandomMatching(num_nodes, seed) if known == RandomMatching.name else GRAPHS[known](num_nodes)
