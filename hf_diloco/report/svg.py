"""Matplotlib figures as inline SVG whose colours follow the page: light or dark, as the reader's device asks.

Figures are drawn in placeholder colours that no one else uses; in the SVG each becomes a CSS variable of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_diloco.utils.extras import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.2, 3.3)  # inches: small, so that the text stays readable on a phone
NUM_COLOURS = 8

INK, MUTED, GRID = "#010101", "#010102", "#010103"
_PLACEHOLDERS = {INK: "ink", MUTED: "muted", GRID: "grid"} | {f"#0201{i:02x}": f"c{i}" for i in range(NUM_COLOURS)}

_SETTINGS: Any = {
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],  # comes with Matplotlib; the page's own font takes its place
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 9,
}


def need_plots() -> None:
    """Raises `ConfigError` where Matplotlib, which draws them, is not installed."""
    need("a page with plots", "matplotlib")


def colour(index: int) -> str:
    """The placeholder of the page's colour number `index`, which repeat after `NUM_COLOURS`."""
    return f"#0201{index % NUM_COLOURS:02x}"


def css_colour(placeholder: str) -> str:
    """The CSS of a placeholder colour."""
    return f"var(--{_PLACEHOLDERS[placeholder]})"


def draw(name: str, paint: Callable[[Axes], None]) -> str:
    """Returns an `<svg>` element of what `paint` draws on its axes; `name` keeps its ids apart from other figures'."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS), mpl.rc_context({"svg.hashsalt": name}):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = buffer.getvalue()
        return _themed(text[text.index("<svg") :], name)


def _themed(svg: str, name: str) -> str:
    """Placeholders become CSS variables, sizes the page's, and ids unique in the page."""
    for placeholder, variable in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    svg = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=href="#)', f"{name}-", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} aria-hidden="true">{rest}'
