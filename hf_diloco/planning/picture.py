"""A picture of an estimate: utilisation over the bit rate of the link, by Matplotlib."""

from __future__ import annotations

from pathlib import Path

from hf_diloco.planning.estimate import TARGET, Estimate, Way, own_way, utilisation_of
from hf_diloco.planning.quantities import bit_rate

_NUM_POINTS = 60
_DECADES = 2.5  # on either side of the link's rate


def draw(estimate: Estimate, path: Path) -> None:
    """Draws the run, data parallelism, DiLoCo, streaming and overlap with a few payloads.

    Args:
        estimate: what is drawn.
        path: the file, replaced if it is there; its suffix says what kind of picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scenario = estimate.scenario
    here = scenario.link.bits_per_second
    rates = [here * 10 ** (_DECADES * (2 * point / _NUM_POINTS - 1)) for point in range(_NUM_POINTS + 1)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for way in _drawn(estimate):
        shares = [100 * utilisation_of(scenario.with_link(rate), way) for rate in rates]
        own = way.method == "this run"
        axes.plot(rates, shares, label=f"{way.method}, {way.payload}", linewidth=3 if own else 1.5)
    axes.axvline(here, color="0.5", linestyle=":", label=bit_rate(here))
    axes.axhline(100 * TARGET, color="0.8", linestyle="--")
    axes.set(xscale="log", xlabel="bits a second of each island's link", ylabel="utilisation, %", ylim=(0, 101))
    axes.set_title(
        f"{scenario.name or 'estimate'}: {scenario.num_islands} islands, round trip {scenario.link.rtt:g} s"
    )
    axes.legend()
    figure.savefig(path, dpi=150)


def _drawn(estimate: Estimate) -> list[Way]:
    """The run's own way, and those that show most."""
    shown = {
        ("every step", "bf16"),
        ("DiLoCo", "fp32"),
        ("streaming", "fp32"),
        ("overlap", "fp32"),
        ("overlap", "fp4"),
    }
    return [
        own_way(estimate.scenario),
        *(row.way for row in estimate.rows[1:] if (row.way.method, row.way.payload) in shown),
    ]
