"""`hf-diloco topology`: shows the properties and the traffic of a graph for decentralised training."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_diloco.cli.arguments import AsJson, examples
from hf_diloco.planning.quantities import parse_count
from hf_diloco.utils import text
from hf_diloco.utils.own_files import is_own

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from hf_diloco.methods.topology import Topology

DEFAULT_NODES = 8
NUM_DRAWN = 4  # steps shown if the weights have no period
_NUM_PRINTED = 4  # steps in the terminal; --json has the whole period
_WIDEST = 12  # nodes up to which the matrix fits in a terminal
_BYTES_PER_VALUE = 4  # fp32


@dataclass(frozen=True)
class Step:
    """A graph at one step.

    Attributes:
        weights: W, row by row; row i has node i's weights of all nodes' vectors.
        receives_from: for each node, the nodes it receives from, without itself.
        sends_to: for each node, the nodes it sends to, without itself.
    """

    weights: list[list[float]]
    receives_from: list[tuple[int, ...]]
    sends_to: list[tuple[int, ...]]


@dataclass(frozen=True)
class TopologyFigures:
    """The figures that the command shows; for the first ones see `Topology`.

    Attributes:
        largest_stable_beta: see `hf_diloco.methods.topology.stability`; None: it is not known.
        num_parameters: values in the model.
        bytes_per_step: fp32 bytes that a node sends per step if it sends its vector to each receiver: the mean over
            nodes and steps.
        most_bytes_per_step: the same, for the node and step with the most.
        all_reduce_bytes: bytes that a node sends in a ring all-reduce of the same vector.
        steps: the steps of a period; without a period, the first 4.
    """

    name: str
    num_nodes: int
    period: int | None
    is_symmetric: bool
    rho: float
    spectral_gap: float
    largest_stable_beta: float | None
    num_parameters: int
    bytes_per_step: float
    most_bytes_per_step: int
    all_reduce_bytes: float
    steps: list[Step]


@examples(
    "hf-diloco topology ring --num-nodes 8",
    "hf-diloco topology one-peer-exponential --num-nodes 16 --draw graph.svg",
    "hf-diloco topology weights.csv --parameters 7b --json | jq .rho",
)
def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A graph of docs/topology.md, such as ring; or your own: a file of weights (.npy, .csv, .json), or "
            "FILE.py:CLASS.",
            show_default=False,
        ),
    ],
    num_nodes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="How many take part. Default: 8, or as a file says.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random matchings.")] = 0,
    parameters: Annotated[
        str,
        typer.Option(
            metavar="COUNT", help="Values in the model: 350M, 7b. Default: 25.6M, a ResNet-50.", show_default=False
        ),
    ] = "25.6M",
    picture: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE", help="Draw the graph: a .png, .svg or .pdf file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a graph of decentralised training: weights, speed of averaging, traffic, stability with momentum."""
    from hf_diloco.methods.topology import GRAPHS, make_topology
    from hf_diloco.methods.topology.drawing import check_picture, draw
    from hf_diloco.utils.tables import output, print_figures

    num_parameters = parse_count(parameters, "--parameters")
    if picture is not None:
        check_picture(picture)
    by_name = is_own(name) or name.replace("_", "-") in GRAPHS
    if num_nodes is None and by_name:
        num_nodes = DEFAULT_NODES
    graph = make_topology(name, num_nodes, seed)
    figures = measure(graph, num_parameters)
    if as_json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        print_figures(output(), *render(figures).renderables)
    if picture is not None:
        draw(graph, picture)
        print(f"wrote {picture}", file=sys.stderr if as_json else sys.stdout)


def measure(topology: Topology, num_parameters: int) -> TopologyFigures:
    """Computes the figures of a graph, for a model of `num_parameters` values."""
    import numpy as np

    from hf_diloco.methods.topology import largest_stable_beta

    steps = [_step(topology, step) for step in range(topology.period or NUM_DRAWN)]
    sent = np.array([[len(receivers) for receivers in step.sends_to] for step in steps])
    num_bytes, num_nodes = _BYTES_PER_VALUE * num_parameters, topology.num_nodes
    largest = largest_stable_beta(topology)
    return TopologyFigures(
        name=topology.name,
        num_nodes=num_nodes,
        period=topology.period,
        is_symmetric=topology.is_symmetric,
        rho=topology.rho,
        spectral_gap=topology.spectral_gap,
        largest_stable_beta=None if math.isnan(largest) else largest,
        num_parameters=num_parameters,
        bytes_per_step=float(sent.mean()) * num_bytes,
        most_bytes_per_step=int(sent.max()) * num_bytes,
        all_reduce_bytes=2 * (num_nodes - 1) / num_nodes * num_bytes,
        steps=steps,
    )


def _step(topology: Topology, step: int) -> Step:
    import numpy as np

    weights = topology.weights(step)
    links = weights > 0
    np.fill_diagonal(links, False)
    return Step(
        weights=weights.tolist(),
        receives_from=[tuple(np.flatnonzero(row).tolist()) for row in links],
        sends_to=[tuple(np.flatnonzero(column).tolist()) for column in links.T],
    )


def render(figures: TopologyFigures) -> Group:
    """Returns the figures, and a table of weights and neighbours for each of the first steps."""
    from rich.console import Group

    from hf_diloco.utils.tables import fact_table

    steps = figures.steps[:_NUM_PRINTED]
    titles = [f"step {number}" if figures.period != 1 else "" for number in range(len(steps))]
    tables = [_step_table(step, title, figures) for step, title in zip(steps, titles, strict=True)]
    return Group(*(part for table in (fact_table(_rows(figures)), *tables) for part in (table, "")))


def _rows(figures: TopologyFigures) -> list[tuple[str, str]]:
    from hf_diloco.methods.topology.stability import floor_digits

    drawn_anew = "drawn anew at each step" if figures.period is None else f"come again after {figures.period} steps"
    changes = "do not change" if figures.period == 1 else drawn_anew
    exact = "" if figures.rho else f": the exact average after {text.counted(figures.period or 0, 'step')}"
    most = f", at most {text.size(figures.most_bytes_per_step)}"
    largest = figures.largest_stable_beta
    stable = "stable with momentum below 1"
    if largest is None:
        stable = "not known with which momentum it is stable"
    elif largest < 1:
        stable = f"stable with momentum up to {floor_digits(largest)}"
    return [
        ("graph", f"{figures.name}, {text.counted(figures.num_nodes, 'node')}"),
        ("weights", f"{'symmetric' if figures.is_symmetric else 'not symmetric'}, {changes}"),
        ("rho", f"{figures.rho:.4f}; spectral gap {figures.spectral_gap:.4f}{exact}"),
        (
            "a node sends",
            f"{text.size(figures.bytes_per_step)} a step"
            f"{most if figures.most_bytes_per_step > figures.bytes_per_step else ''}; "
            f"in a ring all-reduce {text.size(figures.all_reduce_bytes)}",
        ),
        ("of", f"{text.short_count(figures.num_parameters)} fp32 values, once to each receiver"),
        ("DecentLaM", stable),
    ]


def _step_table(step: Step, title: str, figures: TopologyFigures) -> Table:
    """Returns a table with a row for each node: its weights, unless there are too many nodes, and its neighbours."""
    from hf_diloco.utils.tables import empty_table

    with_weights = figures.num_nodes <= _WIDEST
    nodes = map(str, range(figures.num_nodes if with_weights else 0))
    lists = (" receives from",) if figures.is_symmetric else (" receives from", " sends to")
    table = empty_table((title or "node", *nodes, *lists), words=lists, long=lists)
    for node, weights in enumerate(step.weights):
        others = (step.receives_from[node], step.sends_to[node])[: len(lists)]
        numbers = [f" {text.numbers(found) or text.MISSING}" for found in others]
        table.add_row(str(node), *(_weight(value) for value in weights if with_weights), *numbers)
    return table


def _weight(value: float) -> str:
    """Returns a weight as a fraction if it is one, such as 1/3; 0 as a dot."""
    fraction = Fraction(value).limit_denominator(99)
    if not value:
        return "·"
    return str(fraction) if abs(fraction - Fraction(value)) < 1e-9 else f"{value:.3f}"
