"""The `hf-diloco` program: registers all commands, and defines those that start, report and compare runs."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hf_diloco import __version__
from hf_diloco.cli import doctor, meeting
from hf_diloco.cli.arguments import (
    STORES,
    AsJson,
    NumIslands,
    OptionalRunFile,
    Overrides,
    Resume,
    RunFileArgument,
    RunName,
    RunsFolder,
    examples,
    group,
)
from hf_diloco.cli.checkpoint import checkpoint_app
from hf_diloco.cli.configs import configs_app
from hf_diloco.cli.estimate import estimate
from hf_diloco.cli.init import init
from hf_diloco.cli.topology import topology
from hf_diloco.config.base import ENV_ISLAND, ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError, DiLoCoError

app = group("Train one model on several islands of accelerators with little traffic between them (DiLoCo).")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-diloco {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""


class _LaunchCommand(TyperCommand):
    """Splits the arguments at `--`: what follows is a user's own command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.obj, args = tuple(args[place + 1 :]), args[:place]
        elif not args:
            args = ["--help"]
        return super().parse_args(ctx, args)


@examples(
    "hf-diloco launch quickstart",
    "hf-diloco launch quickstart training.max_steps=60 diloco.sync_every=10 --name short",
    "hf-diloco launch run.yaml --island 1 --rendezvous tcp://10.0.0.1:29400",
    "hf-diloco launch vision/quickstart gossip.method=dmsgd",
    "hf-diloco launch quickstart --simulate 2",
    "hf-diloco launch --islands 2 -- python my_script.py",
    "hf-diloco launch --islands 2 -- torchrun --nproc_per_node 4 my_script.py",
)
def launch(
    ctx: typer.Context,
    run_file: OptionalRunFile = None,
    overrides: Overrides = None,
    island: Annotated[
        int | None,
        typer.Option(
            "--island",
            "--node",
            min=0,
            envvar=ENV_ISLAND,
            help="Start this island, or node, alone; the others are started elsewhere. Default: all, on this machine.",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Where the islands meet: tcp://HOST:PORT of island 0's machine, or an object store, {STORES}. "
            f"Default: {ENV_RENDEZVOUS}, else the run file's.",
        ),
    ] = None,
    num_islands: NumIslands = None,
    name: RunName = None,
    output: RunsFolder = None,
    resume: Resume = None,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long islands that are asked to stop may take.")
    ] = 120,
    simulate: Annotated[
        int | None,
        typer.Option("--simulate", min=1, metavar="N", help="Train N islands, or nodes, as threads of one process."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show what would be started, and start nothing.")
    ] = False,
) -> None:
    """Start the islands of a run: all of them on this machine, or one on its cluster.

    Ctrl-C asks every island to finish its step and write a checkpoint; a second one ends them without a checkpoint.
    The same command continues the run. Behind `--`, a command of your own takes the place of a run file.

    [bold]Exit codes[/bold]

    0: finished. 1: an island failed. 2: wrong command or run file. 3: stopped, every island with a checkpoint.
    130 (Ctrl-C), 143 (SIGTERM) or 129 (SIGHUP): ended without waiting for checkpoints.
    """
    if ctx.obj is not None:
        from hf_diloco.cli.script import plan_script, run_script

        if run_file is not None or resume is not None or simulate is not None:
            option = f"--resume {resume}" if simulate is None else f"--simulate {simulate}"
            given = option if run_file is None else str(run_file)
            raise ConfigError(f"{given} before `--`: either a run file, or options and a command of your own")
        plan = plan_script(ctx.obj, island, num_islands, rendezvous, name, output)
        raise typer.Exit(run_script(plan, grace=grace, dry_run=dry_run))
    if run_file is None:
        raise ConfigError("launch what? A run file, as `hf-diloco launch quickstart`, or `-- python my_script.py`")
    from hf_diloco.cli.plan import LaunchOptions
    from hf_diloco.cli.run import run_launch

    asked = LaunchOptions(run_file, tuple(overrides or ()), island, num_islands, rendezvous, name, output, resume)
    if simulate is not None:
        from hf_diloco.cli.run import run_simulation

        raise typer.Exit(run_simulation(asked, simulate, dry_run=dry_run))
    raise typer.Exit(run_launch(asked, grace=grace, dry_run=dry_run))


@examples(
    "hf-diloco validate configs/quickstart.yaml",
    "hf-diloco validate run.yaml --island 1 --rendezvous s3://bucket/my-run",
)
def validate(
    run_file: RunFileArgument,
    overrides: Overrides = None,
    island: Annotated[
        int | None,
        typer.Option("--island", "--node", min=0, help="The one that starts here. Default: all, on this machine."),
    ] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="URL", help="Where the islands meet.")] = None,
    num_islands: NumIslands = None,
    name: RunName = None,
    output: RunsFolder = None,
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Check a run without starting it: settings, model, data, memory, disk and store; and say what was not tried.

    [bold]Exit codes[/bold]

    0: nothing speaks against it. 1: it would fail on this machine. 2: wrong command or run file.
    """
    from hf_diloco.cli.plan import LaunchOptions
    from hf_diloco.cli.validate import run_validate

    asked = LaunchOptions(run_file, tuple(overrides or ()), island, num_islands, rendezvous, name, output, resume)
    raise typer.Exit(run_validate(asked, as_json))


@examples(
    "hf-diloco report runs/quickstart",
    "hf-diloco report runs/quickstart --json | jq .eval_loss",
    "hf-diloco report runs/quickstart --html page.html",
)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run folder, such as runs/quickstart")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="where --html goes (default: RUN/report.html)")
    ] = None,
    as_json: AsJson = False,
    html: Annotated[bool, typer.Option("--html", help="Write a page with plots of loss and traffic.")] = False,
) -> None:
    """Show what a run did: loss, speed, bytes exchanged, time spent waiting; also while it goes on."""
    if file is not None and not html:
        raise ConfigError(f"{file}: a second argument is the page's file; add --html, or give one run folder")
    from hf_diloco.report import load_run, print_report, summarise, write_html

    loaded = load_run(run)
    figures = summarise(loaded)
    if html:
        page = file or run / "report.html"
        write_html(loaded, page, figures)
        typer.echo(f"wrote {page}", err=as_json)
    if as_json:
        typer.echo(figures.model_dump_json(indent=2))
    elif not html:
        print_report(figures)


@examples(
    "hf-diloco compare runs/first runs/second",
    "hf-diloco compare runs/first runs/second --html comparison.html",
    "hf-diloco compare runs/first runs/second --json | jq '.[] | {name, eval_loss}'",
)
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="two run folders or more", show_default=False)
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page: loss against tokens, time and bytes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: loss, tokens, time, bytes sent, time spent waiting; also while they go on."""
    from hf_diloco.report.compare import COLUMNS, load_candidates, row, write_comparison
    from hf_diloco.utils.tables import empty_table, output, plain, print_figures

    found = load_candidates(runs)
    if as_json:
        typer.echo(json.dumps([entry.as_dict() for entry in found], indent=2))
    else:
        table = empty_table((name.replace(" ", "\n") for name in COLUMNS), words=("run", "method"))
        for entry in found:
            table.add_row(*map(plain, row(entry)))
        print_figures(output(), table)
    if html is not None:
        typer.echo(f"wrote {write_comparison(found, html)}", err=as_json)


@examples(
    "hf-diloco config-schema > run.schema.json",
    "hf-diloco config-schema --vision > vision.schema.json",
)
def config_schema(
    vision: Annotated[bool, typer.Option("--vision", help="Of image classifiers' run files.")] = False,
) -> None:
    """Print the JSON schema of run files, for editors and other programs."""
    from hf_diloco.apps.lm.runfile import RunFile
    from hf_diloco.apps.vision.runfile import VisionRun

    typer.echo(json.dumps((VisionRun if vision else RunFile).model_json_schema(), indent=2))


app.command(cls=_LaunchCommand)(launch)
for _command in (
    *(init, report, meeting.status, meeting.rendezvous, compare, meeting.dashboard),
    *(topology, config_schema, estimate, doctor.doctor, doctor.env, validate),
):
    app.command()(_command)
app.add_typer(meeting.store_app, name="store")
app.add_typer(configs_app, name="configs")
app.add_typer(meeting.keys_app, name="keys")
app.add_typer(checkpoint_app, name="checkpoint")


def _refuse_deleted_directory() -> None:
    """Raises `ConfigError` if the working directory is gone: libraries fail there in their own words, torch too."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working directory has been deleted, or moved away: change to one that is there (cd)"
        ) from None


def main() -> None:
    """The `hf-diloco` program. Errors of this package are one line on stderr (HF_DILOCO_DEBUG=1: a traceback)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # and not closed
            stream.reconfigure(errors="replace")  # a terminal without a character loses only that character
    try:
        _refuse_deleted_directory()
        app(prog_name="hf-diloco")
    except (DiLoCoError, OSError) as error:
        if os.environ.get("HF_DILOCO_DEBUG"):
            raise
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
