"""The report as one self-contained page, without scripts and external resources."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco import __version__
from hf_diloco.errors import ConfigError
from hf_diloco.report import figures, rows
from hf_diloco.report.figures import need_plots
from hf_diloco.report.read import Run
from hf_diloco.report.summary import Report, summarise
from hf_diloco.utils.files import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment


MAX_ROUND_ROWS = 1000  # the last ones


def write_html(run: Run, path: str | Path, report: Report | None = None) -> Path:
    """Writes the page of a run, and returns its path; creates the file's folder if missing.

    `report` is the result of `summarise(run)`, if already computed. Raises `ConfigError` if the file cannot be
    written, or Matplotlib is missing.
    """
    need_plots()
    page = fill("report.html.j2", **figures_of(run, report or summarise(run)), settings=setting_groups(run))
    return write_page(page, Path(path))


def write_page(page: str, target: Path) -> Path:
    """Writes a page atomically; returns its path. Raises `ConfigError` if it cannot be written."""
    if target.is_dir():
        raise ConfigError(f"cannot write the report to {target}: it is a folder; give another file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, page, durable=False)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {target}: {error.strerror}; give another file") from None
    return target


def fill(template: str, **values: Any) -> str:
    """Renders one of the package's templates; escapes all text, and replaces characters that UTF-8 cannot encode."""
    page = _templates().get_template(template).render(version=__version__, **values)
    return page.encode(errors="replace").decode()  # JSON may hold half a surrogate pair


def figures_of(run: Run, report: Report) -> dict[str, Any]:
    """Returns the template variables that describe a run."""
    return {
        "report": report,
        "subtitle": rows.subtitle(report),
        "tiles": rows.tiles(report),
        "overview": rows.overview(report),
        "columns": rows.island_columns(report),
        "island_rows": [rows.island_row(report, island) for island in report.islands],
        "round_columns": rows.ROUND_COLUMNS,
        "round_rows": [rows.round_row(entry) for entry in report.rounds[-MAX_ROUND_ROWS:]],
        "plots": figures.plots(run, report),
    }


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("hf_diloco", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def setting_groups(run: Run) -> dict[str, dict[str, str]]:
    """Returns the run's settings by block (`diloco`, `training`, ...); without `run.json`, those of the last start."""
    if not run.settings:
        start = next((island.start for island in run.islands if island.start), None)
        known = start.model_dump(exclude={"event", "step", "time", "island"}, exclude_none=True) if start else {}
        return {"diloco": {name: _plain(value) for name, value in known.items()}} if start else {}
    groups: dict[str, dict[str, str]] = {}
    for key, value in run.settings.items():
        block, prefix = (key, "") if isinstance(value, Mapping) else ("run", key)
        groups.setdefault(block, {}).update(_flat(prefix, value))
    return {name: group for name, group in groups.items() if group}


def _flat(prefix: str, value: Any) -> dict[str, str]:
    """Flattens nested settings to dotted names; leaves out unset ones."""
    if isinstance(value, Mapping):
        inner = ((f"{prefix}.{key}" if prefix else str(key), part) for key, part in value.items())
        return {name: shown for key, part in inner for name, shown in _flat(key, part).items()}
    return {} if value is None or value == [] else {prefix: _plain(value)}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
