"""Graphs of decentralised training, with their weights: the registry, and graphs of a user's own.

Imports neither torch nor networkx.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import GRAPHS, PeriodicTopology, Topology, Weights, check_weights
from hf_diloco.methods.topology.graphs import metropolis
from hf_diloco.methods.topology.matching import RandomMatching
from hf_diloco.methods.topology.stability import check_decentlam, check_momentum_consensus, largest_stable_beta
from hf_diloco.utils.own_files import FORM, is_own, load_own
from hf_diloco.utils.text import nearest

if TYPE_CHECKING:
    from networkx import Graph

SUFFIXES = (".npy", ".csv", ".json")
"""Files that `from_file` reads."""


def make_topology(name: str, num_nodes: int | None = None, seed: int = 0) -> Topology:
    """Makes the graph of that name, or a user's own.

    Args:
        name: one of `GRAPHS` (with - or _), the path of a file of weights (see `from_file`), or a user's own
            class, called with the number of nodes, as FILE.py:CLASS.
        num_nodes: the number of nodes; optional for a file, which implies it.
        seed: of random matchings.

    Raises:
        ConfigError: no such graph; the graph or file does not have this number of nodes; invalid weights.
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
    make = GRAPHS[known]
    return make(num_nodes, seed) if "seed" in inspect.signature(make).parameters else make(num_nodes)


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


def from_weights(weights: ArrayLike, name: str = "own weights") -> PeriodicTopology:
    """Makes a graph with the given weights.

    Args:
        weights: numbers [num_nodes, num_nodes], or [period, num_nodes, num_nodes] for weights that change; see
            `Topology.weights`.

    Raises:
        ConfigError: not such an array, or as `Topology.check`.
    """
    try:
        matrices = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: no matrix of numbers ({error}); give rows of equal length") from None
    if matrices.ndim not in (2, 3) or not matrices.size:
        raise ConfigError(
            f"{name}: weights of shape {matrices.shape}: give a matrix, or a stack of them for weights that change"
        )
    for matrix in matrices.reshape(-1, *matrices.shape[-2:]):
        check_weights(matrix, name)
    topology = PeriodicTopology(name, matrices)
    topology.check()
    return topology


def from_file(path: str | Path) -> PeriodicTopology:
    """Reads weights from a file: .npy (an array), .csv (one row per line, with commas) or .json (lists of numbers).

    Raises:
        ConfigError: the file is missing or has another format; or as for `from_weights`.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: weights are read from files that end in {', '.join(SUFFIXES)}")
    try:
        weights = _read(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a file of weights, or a graph's name") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not read as {path.suffix[1:]} ({reason}); write the numbers anew") from None
    return from_weights(weights, str(path))


def from_graph(graph: Graph, name: str = "own graph") -> PeriodicTopology:
    """Makes a graph with Metropolis weights from a networkx graph.

    Args:
        graph: undirected and connected. Nodes are numbered in its order, unless their labels are 0 to n - 1.

    Raises:
        ConfigError: the graph is directed, empty or not connected.
    """
    if graph.is_directed():
        raise ConfigError(
            f"{name}: a directed graph has no Metropolis weights; give graph.to_undirected(), or a matrix of weights"
        )
    if not len(graph):
        raise ConfigError(f"{name}: a graph without nodes; add one for each that takes part")
    weights = metropolis(graph)
    labels = list(graph)
    if set(labels) == set(range(len(labels))):
        order = np.argsort(labels)
        weights = weights[np.ix_(order, order)]
    return from_weights(weights, name)


def _read(path: Path) -> ArrayLike:
    if path.suffix == ".npy":
        with path.open("rb") as file:
            array: Weights = np.lib.format.read_array(file, allow_pickle=False)
        return array
    if path.suffix == ".json":
        loaded: ArrayLike = json.loads(path.read_text())
        return loaded
    lines = (line for line in path.read_text().splitlines() if line.strip())
    return np.array([[float(word) for word in line.split(",")] for line in lines])


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
