"""The live page: the report's parts for a run folder, and what the store says of islands, rounds and objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_diloco.dashboard.source import Look, Now
from hf_diloco.report.figures import LegendEntry, Plot, columns
from hf_diloco.report.html import figures_of, fill
from hf_diloco.report.rows import Tile
from hf_diloco.report.svg import colour, draw
from hf_diloco.status import RunStatus, rows as status_rows
from hf_diloco.utils import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOW_COLUMNS = ("", "state", "step", "round", "loss", "speed", "written", "message")


def render_page(name: str, interval: float, live: str) -> str:
    """The whole page around what `render_live` returned, which is asked for again every `interval` seconds."""
    return fill("dashboard.html.j2", title=name, interval=f"{interval:g}", live=live)


def render_live(look: Look) -> str:
    """The part of the page that changes."""
    figures = figures_of(look.run, look.report) if look.run and look.report else None
    return fill(
        "live.html.j2",
        name=look.name,
        figures=figures,
        warnings=[*look.problems, *(look.report.warnings if look.report else ())],
        now_columns=NOW_COLUMNS,
        now=[_now_row(look, number, now) for number, now in look.now.items()],
        store=_of_store(look.status) if look.status else None,
    )


def _now_row(look: Look, number: int, now: Now) -> tuple[str, ...]:
    """Where an island, or a node, stands, in the order of `NOW_COLUMNS`."""
    progress = now.progress
    steps = text.count(progress.step) + (f" of {progress.max_steps:,}" if progress.max_steps else "")
    speed = (
        f"{text.rate(progress.tokens_per_second)} {progress.unit}/s" if progress.tokens_per_second else text.MISSING
    )
    return (
        f"{look.report.noun if look.report else 'island'} {number}",
        progress.state,
        steps,
        text.count(progress.round),
        text.loss(progress.loss),
        speed,
        f"{text.seconds(round(now.age))} ago",
        text.printable(progress.message) or text.MISSING,
    )


def _of_store(status: RunStatus) -> dict[str, Any]:
    """What the page shows of a store, by the names that the template has for it."""
    return {
        "subtitle": f"{text.plural('island', len(status.islands))} {text.numbers(i.island for i in status.islands)}",
        "tiles": tiles(status),
        "plots": plots(status),
        "figures": status_rows.figures(status),
        "island_columns": status_rows.ISLAND_COLUMNS,
        "island_rows": [_printable(status_rows.island_row(status, island)) for island in status.islands],
        "round_columns": status_rows.ROUND_COLUMNS,
        "round_rows": [_printable(status_rows.round_row(entry)) for entry in status.rounds],
        "refused": [_printable(entry) for entry in status.refused.items()],
    }


def _printable(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.printable(cell) for cell in cells)


def tiles(status: RunStatus) -> list[Tile]:
    """The figures that a reader looks for first, where only the store is at hand."""
    alive = [island for island in status.islands if island.presence == "alive"]
    silent = [island.island for island in status.islands if island.presence == "silent"]
    speed = sum(island.tokens_per_second or 0 for island in alive)
    sent = sum(entry.payload_bytes or 0 for entry in status.rounds)
    of_all = f"of {status.num_rounds:,}" if status.num_rounds is not None else "committed"
    took = text.seconds(status.seconds_per_round)
    return [
        Tile("Rounds", text.count(status.round), of_all),
        Tile("A round takes", took, f"median of the last {len(status.rounds)}"),
        Tile("Islands", f"{len(alive)} alive", f"silent: {text.numbers(silent) or 'none'}"),
        Tile("Tokens/s", text.rate(speed or None), "of the islands that are alive"),
        Tile(
            "Offered", text.size(sent), f"in the last {len(status.rounds)} {text.plural('round', len(status.rounds))}"
        ),
        Tile("Refused", text.count(len(status.refused)), text.plural("object", len(status.refused))),
    ]


def plots(status: RunStatus) -> list[Plot]:
    """Traffic and time of the last rounds. Loss is in the islands' own records, and not in the store."""
    rounds = sorted(status.rounds, key=lambda entry: entry.round)
    payload = [(float(entry.round), float(entry.payload_bytes)) for entry in rounds if entry.payload_bytes is not None]
    took = [(float(entry.round), entry.seconds) for entry in rounds if entry.seconds is not None]
    return [
        _bars("Traffic of each round", "pseudo-gradients offered", payload, 0),
        _bars("Time of each round", "from the commit of the round before", took, 2),
    ]


def _bars(title: str, label: str, points: list[tuple[float, float]], number: int) -> Plot:
    if not points:
        return Plot(title, "Nothing is known of it yet.", None)

    def paint(axes: Axes) -> None:
        axes.bar(*columns(points), color=colour(number), linewidth=0)
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: text.seconds(value) if number else text.size(value))
        axes.set(xlabel="round")

    legend = (LegendEntry(label, colour(number), "box"),)
    return Plot(title, "", draw(title.partition(" ")[0].lower(), paint), legend)
