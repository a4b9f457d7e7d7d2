"""`hf-diloco estimate`: predicts what a run will cost on its link."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_diloco.apps.common.shipped import find_run_file
from hf_diloco.cli.arguments import AsJson, Overrides, examples
from hf_diloco.errors import ConfigError
from hf_diloco.planning.equations import Link
from hf_diloco.planning.estimate import TARGET, Estimate, Row, draw, make_estimate
from hf_diloco.planning.quantities import bit_rate, duration, parse_count, parse_rate, parse_seconds
from hf_diloco.planning.scenario import DEFAULT_STEP_SECONDS, STEP_ASSUMED, Scenario, scenario_of
from hf_diloco.utils import text

if TYPE_CHECKING:
    from rich.table import Table

    from hf_diloco.apps.lm.runfile import RunFile

_LEGEND = f"""
sent: by an island in a round of the whole model (every step: in a step); exchange: of one fragment, or of all;
stalled: in a round; {TARGET:.0%} from: the least sync_every with which islands compute {TARGET:.0%} of the time"""
_BETWEEN_ISLANDS = ("link", "ways", "a day", "assumed")
_RATE, _RTT = "1G", "50ms"
_MOST_EXPENSIVE = 1e9
_PANEL = "without RUN.yaml"


@examples(
    "hf-diloco estimate configs/quickstart.yaml --bandwidth 200M --rtt 80ms",
    "hf-diloco estimate --params 1b --islands 4 --bandwidth 200M --rtt 80ms --step-time 2s",
    "hf-diloco estimate --params 7b --bandwidth 1G --price 0.09 --json | jq .advice",
)
def estimate(
    ctx: typer.Context,
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.yaml",
            help="the run file, or the name of one that comes with hf-diloco; without it, --params",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Bits a second of an island's link, each way, as 200M or 10G. Default: 1G."),
    ] = None,
    rtt: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="To another island, or the store, and back, as 80ms. Default: 50ms."),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Of an inner step without communication. Default: as in the record, else 1s."
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of a gigabyte that leaves an island.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Parameters: 350M, 7b.", rich_help_panel=_PANEL)
    ] = None,
    islands: Annotated[int, typer.Option(min=1, max=1024, help="How many.", rich_help_panel=_PANEL)] = 2,
    sync_every: Annotated[int, typer.Option(min=1, help="Steps between rounds.", rich_help_panel=_PANEL)] = 500,
    payload: Annotated[str, typer.Option(help="Number format between islands.", rich_help_panel=_PANEL)] = "fp32",
    ranks: Annotated[int, typer.Option(min=1, help="Of an island.", rich_help_panel=_PANEL)] = 1,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.", rich_help_panel=_PANEL)] = None,
    layers: Annotated[int, typer.Option(min=1, max=10_000, help="Blocks of the model.", rich_help_panel=_PANEL)] = 24,
    picture: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE", help="Draw utilisation over bit rate: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run will cost on its link, before it starts: bytes, seconds, utilisation, memory.

    It starts nothing. If the run has a record already, its steps are taken to be as long as they were.
    """
    if picture is not None:
        from hf_diloco.methods.topology.drawing import check_picture

        check_picture(picture)
    link = Link(parse_rate(bandwidth or _RATE, "--bandwidth"), parse_seconds(rtt or _RTT, "--rtt"))
    step = None if step_time is None else parse_seconds(step_time, "--step-time")
    if step == 0:
        raise ConfigError(f"--step-time {step_time}: a step takes some time; give it as 1.5s")
    if price is not None and not price <= _MOST_EXPENSIVE:
        raise ConfigError(f"--price {price}: give what a gigabyte costs, as 0.09")
    if run_file is not None:
        find_run_file(run_file)  # refuses other arguments, such as a setting with --params
        _refuse_foreign(ctx, run_file)
        scenario = scenario_of(_read_run(run_file, overrides or ()), link, step, price)
    elif params is not None:
        from hf_diloco.apps.lm.runfile import outer_loop

        size = parse_count(params, "--params")
        scenario = Scenario(
            name="",
            num_parameters=size,
            largest_layer=-(-size // layers),
            num_layers=layers,
            diloco=outer_loop(num_islands=islands, island=0, sync_every=sync_every, payload=payload),
            link=link,
            step_seconds=step or DEFAULT_STEP_SECONDS,
            num_ranks=ranks,
            stage=zero,
            price=price,
            assumed=() if step else (STEP_ASSUMED,),
        )
    else:
        raise ConfigError("nothing to estimate: give a run file, or --params, as --params 1b")
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
        draw(estimate, picture)
        print(f"wrote {picture}", file=sys.stderr if as_json else sys.stdout)


def _refuse_foreign(ctx: typer.Context, run_file: Path) -> None:
    """Raises `ConfigError` for options that a run file already sets."""
    names = ("params", "islands", "sync_every", "payload", "ranks", "zero", "layers")
    sources = {f"--{name.replace('_', '-')}": ctx.get_parameter_source(name) for name in names}
    if given := [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]:
        raise ConfigError(
            f"{', '.join(given)}: {run_file} has this setting: change it there, or by KEY=VALUE, as in "
            "diloco.sync_every=100"
        )


def _read_run(path: Path, overrides: Sequence[str]) -> RunFile:
    from hf_diloco.apps.common.hub import use_cache_without_hub
    from hf_diloco.apps.common.load import kind_of
    from hf_diloco.apps.lm.runfile import RunFile, load_run_file

    if kind_of(path) is not RunFile:
        raise ConfigError(
            f"{path}: an estimate is of islands with rounds (a block diloco); for nodes on a graph use `hf-diloco "
            "topology`"
        )
    run = load_run_file(path, overrides)
    use_cache_without_hub(run.needs_hub)
    return run


def _show(estimate: Estimate) -> None:
    from hf_diloco.utils.tables import output, print_figures

    console = output()
    is_alone = estimate.scenario.num_islands == 1
    for name, value in _facts(estimate):
        if not (is_alone and name in _BETWEEN_ISLANDS):
            console.print(f"{name:<12}{value}", markup=False, soft_wrap=True)
    if is_alone:
        console.print("\nNothing travels between islands, as there is one: --islands 2, or diloco.num_islands=2.")
        return
    console.print()
    print_figures(console, _table(estimate))
    console.print(_LEGEND, markup=False)
    console.print(f"\n{estimate.advice}", markup=False, soft_wrap=True)


def _facts(estimate: Estimate) -> list[tuple[str, str]]:
    scenario, own, memory = estimate.scenario, estimate.own, estimate.memory
    islands, ranks = text.counted(scenario.num_islands, "island"), text.counted(scenario.num_ranks, "rank")
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
            "ways",  # explains the names in the table
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
    """Formats seconds always in the same unit, so that values of a column can be compared."""
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
