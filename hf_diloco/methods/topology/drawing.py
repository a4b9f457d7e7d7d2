"""Pictures of graphs, by networkx and Matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import Topology
from hf_diloco.methods.topology.graphs import grid_shape
from hf_diloco.utils.extras import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from networkx import Graph

SUFFIXES = (".png", ".svg", ".pdf")
NUM_STEPS = 4  # drawn side by side, of weights that change
_INCHES = 4.0
_NODE, _LINK = "#1f77b4", "#555555"


def check_picture(path: Path) -> None:
    """Raises `ConfigError` unless the file's format is supported, its folder exists, and Matplotlib is installed."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: pictures are files that end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}: create it, or give another file")
    need("a picture", "matplotlib")


def draw(topology: Topology, path: Path) -> None:
    """Draws a graph: arrows from sender to receiver, plain lines if links go both ways; wider for larger weights.

    If weights change, draws the first 4 steps. Replaces the file, whose suffix determines the format.

    Raises:
        ConfigError: the format is not supported.
    """
    check_picture(path)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display; other formats bring their own
    from matplotlib.figure import Figure

    num_steps = min(NUM_STEPS, topology.period or NUM_STEPS)
    with mpl.rc_context({"svg.hashsalt": topology.name}):  # so that equal graphs give equal files
        figure = Figure(figsize=(_INCHES * num_steps, _INCHES), layout="constrained")
        FigureCanvasAgg(figure)
        for step in range(num_steps):
            axes = figure.add_subplot(1, num_steps, step + 1)
            title = f"{topology.name}, n={topology.num_nodes}"
            axes.set_title(title if topology.is_static else f"{title}, step {step}")
            _paint(axes, topology, step)
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
        figure.savefig(path, dpi=150, metadata={dated: None} if dated else None)


def _paint(axes: Axes, topology: Topology, step: int) -> None:
    import networkx as nx

    weights = topology.weights(step).copy()
    np.fill_diagonal(weights, 0)
    kind = nx.Graph if topology.is_symmetric else nx.DiGraph
    graph = nx.from_numpy_array(weights.T, create_using=kind)  # column to row: from sender to receiver
    places = _places(topology, graph)
    size = max(20, min(400, 6000 / topology.num_nodes))
    widths = [1 + 3 * weight for _, _, weight in graph.edges(data="weight")]
    arrows: dict[str, Any] = {} if topology.is_symmetric else {"node_size": size, "connectionstyle": "arc3,rad=0.1"}
    nx.draw_networkx_edges(graph, places, ax=axes, width=widths, edge_color=_LINK, **arrows)
    nx.draw_networkx_nodes(graph, places, ax=axes, node_size=size, node_color=_NODE)
    nx.draw_networkx_labels(graph, places, ax=axes, font_color="white", font_size=max(4, math.sqrt(size) / 2))
    axes.margins(0.15)  # nodes are larger than the points that axes make room for
    axes.set_axis_off()
    axes.set_aspect("equal")


def _places(topology: Topology, graph: Graph) -> dict[int, Any]:
    """Returns the positions of nodes: a grid in rows and columns, a star around its centre, all others on a circle."""
    import networkx as nx

    if topology.name == "grid":
        _, columns = grid_shape(topology.num_nodes)
        return {node: (node % columns, -(node // columns)) for node in graph}
    if topology.name == "star" and topology.num_nodes > 1:
        return dict(nx.shell_layout(graph, [[0], list(graph)[1:]]))
    return dict(nx.circular_layout(graph))
