"""`hf-diloco estimate`: what a run will cost on its link."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.cli.display import terminal
from hf_diloco.errors import ConfigError
from hf_diloco.planning.equations import Link
from hf_diloco.planning.estimate import TARGET, Estimate, Row, make_estimate
from hf_diloco.planning.quantities import bit_rate, duration, parse_count, parse_rate, parse_seconds
from hf_diloco.planning.scenario import DEFAULT_STEP_SECONDS, Scenario, read_scenario
from hf_diloco.utils import text

if TYPE_CHECKING:
    from rich.table import Table

_LEGEND = f"""
sent: by an island in a round of the whole model (every step: in a step); exchange: of one fragment, or of all;
stalled: in a round; {TARGET:.0%} from: the least sync_every with which islands compute {TARGET:.0%} of the time"""
_BETWEEN_ISLANDS = ("link", "ways", "a day", "assumed")
_RATE, _RTT = "1G", "50ms"
_DEFAULTS = {"islands": 2, "sync_every": 500, "payload": "fp32", "ranks": 1, "zero": None, "layers": 24}


def run_estimate(
    run_file: Path | None,
    overrides: Sequence[str],
    params: str | None,
    shape: Mapping[str, Any],
    *,
    bandwidth: str | None,
    rtt: str | None,
    step_time: str | None,
    price: float | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Runs `hf-diloco estimate`, see its options; `shape` are those that belong to a run file, if there is one.

    Raises:
        ConfigError: the run file or an option does not fit.
    """
    if picture is not None:
        from hf_diloco.methods.topology.drawing import check_picture

        check_picture(picture)
    link = Link(parse_rate(bandwidth or _RATE, "--bandwidth"), parse_seconds(rtt or _RTT, "--rtt"))
    step = None if step_time is None else parse_seconds(step_time, "--step-time")
    if step == 0:
        raise ConfigError(f"--step-time {step_time}: a step takes some time; give it as 1.5s")
    if price is not None and not math.isfinite(price):
        raise ConfigError(f"--price {price}: give what a gigabyte costs, as 0.09")
    if run_file is None:
        scenario = _from_numbers(params, shape, link, step, price)
    else:
        foreign = ["--params"] if params else []
        foreign += [f"--{name.replace('_', '-')}" for name, value in shape.items() if value != _DEFAULTS[name]]
        if foreign:
            raise ConfigError(
                f"{', '.join(foreign)}: {run_file} says this; change it there, or by "
                "KEY=VALUE, as diloco.sync_every=100"
            )
        scenario = read_scenario(run_file, overrides, link, step, price)
    given = {
        f"links of {bit_rate(link.bits_per_second)} (--bandwidth)": bandwidth,
        f"round trips of {_RTT} (--rtt)": rtt,
    }
    missing = [text for text, value in given.items() if value is None]
    estimate = make_estimate(replace(scenario, assumed=(*missing, *scenario.assumed)))
    if as_json:
        print(json.dumps(estimate.as_dict(), indent=2))
    else:
        _show(estimate)
    if picture is not None:
        from hf_diloco.planning.estimate import draw

        draw(estimate, picture)
        print(f"wrote {picture}", file=sys.stderr if as_json else sys.stdout)


def _from_numbers(
    params: str | None, shape: Mapping[str, Any], link: Link, step: float | None, price: float | None
) -> Scenario:
    if params is None:
        raise ConfigError("nothing to estimate: give a run file, or --params, as --params 1b")
    from pydantic import ValidationError

    from hf_diloco.apps.lm.runfile import DiLoCoBlock
    from hf_diloco.config.base import describe

    try:
        diloco = DiLoCoBlock(
            num_islands=shape["islands"], island=0, sync_every=shape["sync_every"], payload=shape["payload"]
        )
    except ValidationError as error:
        raise ConfigError(describe(error, DiLoCoBlock)) from None
    size = parse_count(params, "--params")
    return Scenario(
        name="",
        num_parameters=size,
        largest_layer=-(-size // shape["layers"]),
        num_layers=shape["layers"],
        diloco=diloco,
        link=link,
        step_seconds=step or DEFAULT_STEP_SECONDS,
        num_ranks=shape["ranks"],
        stage=shape["zero"],
        price=price,
        assumed=() if step else (f"a step takes {DEFAULT_STEP_SECONDS:g} s (--step-time)",),
    )


def _show(estimate: Estimate) -> None:
    console = terminal(sys.stdout)
    is_alone = estimate.scenario.num_islands == 1
    for name, value in _facts(estimate):
        if not (is_alone and name in _BETWEEN_ISLANDS):
            console.print(f"{name:<12}{value}", markup=False, soft_wrap=True)
    if is_alone:
        console.print("\nNothing travels between islands, as there is one: --islands 2, or diloco.num_islands=2.")
        return
    console.print()
    console.print(_table(estimate))
    console.print(_LEGEND, markup=False)
    console.print(f"\n{estimate.advice}", markup=False, soft_wrap=True)


def _facts(estimate: Estimate) -> list[tuple[str, str]]:
    scenario, own, memory = estimate.scenario, estimate.own, estimate.memory
    islands = f"{scenario.num_islands} {text.plural('island', scenario.num_islands)}"
    ranks = f"{scenario.num_ranks} {text.plural('rank', scenario.num_ranks)}"
    link = f"{bit_rate(scenario.link.bits_per_second)} each way, {duration(scenario.link.rtt)} there and back"
    overlap = next(row.way for row in estimate.rows if row.way.method == "overlap")
    host = f"{text.size(memory.host)} of DeepSpeed and " if memory.host else ""
    facts = [
        (
            "run",
            f"{scenario.name or 'by numbers'}: {text.short_count(scenario.num_parameters)} parameters, "
            f"{islands} of {ranks}",
        ),
        ("link", link),
        ("a step", f"{duration(scenario.step_seconds)} of computing"),
        (
            "a rank",
            f"{text.size(memory.accelerator)} on the accelerator, without activations; on the host {host}"
            f"{text.size(memory.outer)} of outer state",
        ),
        (
            "ways",  # what the names in the table stand for
            f"a round every {overlap.sync_every} steps; streaming: {overlap.num_fragments} fragments; overlap: the "
            f"same, {overlap.delay} steps go on meanwhile",
        ),
        ("a day", f"an island sends {text.size(own.bytes_sent_a_day)}{_price(own)}"),
    ]
    return [*facts, ("assumed", "; ".join(scenario.assumed))] if scenario.assumed else facts


def _price(row: Row) -> str:
    if row.price_a_day is None:
        return ""
    run = "" if row.price is None else f", and {row.price:,.2f} in the whole run"
    return f"; all islands together pay {row.price_a_day:,.2f}{run}"


def _table(estimate: Estimate) -> Table:
    from hf_diloco.utils.tables import empty_table

    columns = ("", "payload", "sent", "exchange", "stalled", "utilisation", f"{TARGET:.0%} from")
    table = empty_table(columns, words=columns[:2])
    before = None
    for row in estimate.rows:
        method = row.way.method
        if before and method != before:
            table.add_section()
        table.add_row(
            *("" if method == before else method, row.way.payload, text.size(row.bytes_sent)),
            *(_short(row.exchange_seconds), _short(row.stall_seconds), text.share(row.utilisation)),
            text.count(row.sync_every_for_target),
        )
        before = method
    return table


def _short(seconds: float) -> str:
    """In one unit, so that a column can be compared."""
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
