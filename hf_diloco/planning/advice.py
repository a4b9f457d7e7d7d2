"""One sentence: what to do with a run on its link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_diloco.methods.outer import find_method
from hf_diloco.planning.quantities import bit_rate
from hf_diloco.planning.scenario import Scenario
from hf_diloco.utils import text

if TYPE_CHECKING:
    from hf_diloco.planning.estimate import Row

_BY_CHANGE = (
    *(("DiLoCo", payload) for payload in ("bf16", "int8", "fp4")),
    *(("overlap", payload) for payload in ("bf16", "int8", "fp4")),
)
"""What changes training least comes first."""
_MOST_STEPS = 1000
"""Between rounds: beyond, quality falls (arXiv 2311.08105)."""


def advise(scenario: Scenario, rows: Sequence[Row]) -> str:
    """The mildest change with which the islands compute 95 % of the time.

    Args:
        scenario: the run.
        rows: its own first, see `planning.estimate`.
    """
    from hf_diloco.planning.estimate import TARGET, estimate_row

    own, others = rows[0], {(row.way.method, row.way.payload): row for row in rows[1:]}
    if scenario.num_islands == 1:
        return "One island exchanges nothing: any link will do."
    every_step = others["every step", "bf16"]
    if every_step.utilisation >= TARGET:
        return (
            "Exchange gradients at every step, without an outer loop: plain data parallelism computes "
            f"{text.share(every_step.utilisation)} of the time on this link."
        )
    if own.utilisation >= TARGET:
        return f"Keep these settings: the islands compute {text.share(own.utilisation)} of the time."
    wider = _with_connections(scenario)
    begin = f"As it is set up, the islands compute {text.share(own.utilisation)} of the time"
    streams = find_method(scenario.diloco.method).streams
    names = [name for name in _BY_CHANGE if streams or name[0] == "DiLoCo"]
    for way in (own.way, *(others[name].way for name in names)):
        row = estimate_row(wider, way)
        if row.utilisation >= TARGET:
            return f"{begin}; set {_settings(row, wider)} for {text.share(row.utilisation)}."
    steps = row.sync_every_for_target
    if steps is not None and steps <= _MOST_STEPS:
        return f"{begin}; set {_settings(row, wider)} and sync_every: {steps} for {text.share(TARGET)}."
    needed = f": {_settings(row, wider)} needs {bit_rate(row.rate_for_target)}" if row.rate_for_target else ""
    return f"{begin}; no setting reaches {text.share(TARGET)} on this link{needed}."


def _with_connections(scenario: Scenario) -> Scenario:
    """The scenario with as many connections as fill the link, if their number can be chosen."""
    if scenario.way == "bucket":
        return scenario
    return replace(scenario, link=replace(scenario.link, connections=scenario.link.useful_connections))


def _settings(row: Row, scenario: Scenario) -> str:
    """As they stand in a run file."""
    settings = [f"payload: {row.way.payload}"]
    if scenario.link.connections > scenario.diloco.connections:
        settings.append(f"connections: {scenario.link.connections}")
    if row.way.num_fragments > 1:
        settings.append(f"num_fragments: {row.way.num_fragments}")
    if row.way.delay:
        settings.append(f"fragment_sync_delay: {row.way.delay}")
    return ", ".join(settings)
