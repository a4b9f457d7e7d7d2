"""Graphs of decentralised training, with their weights: the registry.

Imports neither torch nor networkx.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import PeriodicTopology, Topology
from hf_diloco.methods.topology.graphs import (
    exponential,
    full,
    grid,
    hypercube,
    one_peer_exponential,
    ring,
    star,
    symmetric_exponential,
)
from hf_diloco.methods.topology.matching import RandomMatching
from hf_diloco.methods.topology.own import SUFFIXES, from_file, from_graph, from_weights
from hf_diloco.methods.topology.stability import check_decentlam, check_momentum_consensus, largest_stable_beta
from hf_diloco.utils.own_files import FORM, is_own, load_own
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
    """The graph of that name, or a user's own.

    Args:
        name: one of `GRAPHS` (with - or _), the path of a file of weights (see `own.from_file`), or a user's own
            class, made with the number of nodes, as FILE.py:CLASS.
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
    if not (is_own(name) or known in GRAPHS):
        raise ConfigError(
            f"topology {name!r}: no such graph{nearest(known, GRAPHS)}; there are {', '.join(GRAPHS)}; or give a file "
            f"of weights ({', '.join(SUFFIXES)}), or {FORM} of your own"
        )
    if num_nodes is None:
        raise ConfigError(f"topology {name!r}: num_nodes is missing; give how many take part")
    if is_own(name):
        return _own_graph(name, num_nodes)
    return RandomMatching(num_nodes, seed) if known == RandomMatching.name else GRAPHS[known](num_nodes)


def _own_graph(name: str, num_nodes: int) -> Topology:
    try:
        make: Callable[[int], Topology] = load_own(name, Topology)  # type: ignore[type-abstract]
    except ValueError as error:
        raise ConfigError(f"topology {error}") from None
    try:
        topology = make(num_nodes)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"topology {name!r}: it cannot be made with num_nodes={num_nodes} ({type(error).__name__}: {error}); "
            "correct the file"
        ) from error
    if topology.num_nodes != num_nodes:
        raise ConfigError(
            f"topology {name!r}: made with num_nodes={num_nodes}, it has {topology.num_nodes}; correct it"
        )
    topology.check()
    return topology


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
