"""The commands of `hf-diloco` and their options."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hf_diloco import __version__
from hf_diloco.cli import planning
from hf_diloco.cli.arguments import AsJson, Overrides, RunFileArgument, group
from hf_diloco.cli.checkpoint import checkpoint_app
from hf_diloco.cli.compare import compare
from hf_diloco.cli.configs import configs_app
from hf_diloco.cli.dashboard import dashboard
from hf_diloco.cli.init import init
from hf_diloco.cli.keys import keys_app
from hf_diloco.config import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError, DiLoCoError

app = group("Train one model on several islands of accelerators with little traffic between them (DiLoCo).")

StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="RENDEZVOUS",
        envvar=ENV_RENDEZVOUS,
        help="where the islands meet: s3://BUCKET/PREFIX, gs://…, az://…, file:///DIR or http://HOST:PORT/NAME",
        show_default=False,
    ),
]
KeyFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the run's key. [HF_DILOCO_KEY, the key]")
]


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
    """What stands behind `--` is a command of the user's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.obj, args = tuple(args[place + 1 :]), args[:place]
        elif not args:
            args = ["--help"]
        return super().parse_args(ctx, args)


@app.command(cls=_LaunchCommand)
def launch(
    ctx: typer.Context,
    run_file: Annotated[Path | None, RunFileArgument.__metadata__[0]] = None,
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
            help="Where the islands meet: tcp://HOST:PORT of island 0's machine, or an object store, "
            f"s3://BUCKET/PREFIX, gs://…, az://…, file:///DIR, http://HOST:PORT/NAME [{ENV_RENDEZVOUS}].",
        ),
    ] = None,
    num_islands: Annotated[
        int | None,
        typer.Option(
            "--islands",
            "--num-islands",
            "--num-nodes",
            min=1,
            help=f"Number of islands, or nodes, in the run [{ENV_NUM_ISLANDS}].",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; its folder is OUTPUT/NAME.")] = None,
    output: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder of run folders.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: from the newest round that all islands hold a checkpoint of. never: a new run. Or a folder.",
        ),
    ] = None,
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

    Ctrl-C asks every island to finish its step and write a checkpoint; a second one ends them at once.
    The same command continues the run. Behind `--`, a command of your own takes the place of a run file.

    [bold]Examples[/bold]

    [cyan]hf-diloco launch quickstart[/cyan]

    [cyan]hf-diloco launch quickstart training.max_steps=60 diloco.sync_every=10 --name short[/cyan]

    [cyan]hf-diloco launch run.yaml --island 1 --rendezvous tcp://10.0.0.1:29400[/cyan]

    [cyan]hf-diloco launch vision/quickstart gossip.method=dmsgd[/cyan]

    [cyan]hf-diloco launch quickstart --simulate 2[/cyan]

    [cyan]hf-diloco launch --islands 2 -- python my_script.py[/cyan]

    [cyan]hf-diloco launch --islands 2 -- torchrun --nproc_per_node 4 my_script.py[/cyan]

    [bold]Exit codes[/bold]

    0: finished. 1: an island failed. 2: wrong command or run file. 3: stopped, every island with a checkpoint.
    130 (Ctrl-C) or 143 (SIGTERM): ended without waiting for checkpoints.
    """
    if ctx.obj is not None:
        from hf_diloco.cli.script import ScriptOptions, run_script

        if run_file is not None or resume is not None or simulate is not None:
            option = f"--resume {resume}" if simulate is None else f"--simulate {simulate}"
            given = option if run_file is None else str(run_file)
            raise ConfigError(f"{given} before `--`: either a run file, or options and a command of your own")
        command = ScriptOptions(ctx.obj, island, num_islands, rendezvous, name, output)
        raise typer.Exit(run_script(command, grace=grace, dry_run=dry_run))
    if run_file is None:
        raise ConfigError("launch what? A run file, as `hf-diloco launch quickstart`, or `-- python my_script.py`")
    from hf_diloco.cli.plan import LaunchOptions
    from hf_diloco.cli.run import run_launch

    asked = LaunchOptions(run_file, tuple(overrides or ()), island, num_islands, rendezvous, name, output, resume)
    if simulate is not None:
        from hf_diloco.cli.simulate import run_simulation

        raise typer.Exit(run_simulation(asked, simulate))
    raise typer.Exit(run_launch(asked, grace=grace, dry_run=dry_run))


app.command()(init)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run folder, such as runs/quickstart")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="where --html goes (default: RUN/report.html)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, for programs.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write a page with plots of loss and traffic.")] = False,
) -> None:
    """Show what a run did: loss, speed, bytes exchanged, time spent waiting; also while it goes on.

    [bold]Examples[/bold]

    [cyan]hf-diloco report runs/quickstart[/cyan]

    [cyan]hf-diloco report runs/quickstart --json | jq .eval_loss[/cyan]

    [cyan]hf-diloco report runs/quickstart --html page.html[/cyan]
    """
    if file is not None and not html:
        raise ConfigError(f"{file}: a second argument is the page's file; add --html, or give one run folder")
    from hf_diloco.report import load_run, print_report, summarise, write_html

    loaded = load_run(run)
    if html:
        page = file or run / "report.html"
        write_html(loaded, page)
        typer.echo(f"wrote {page}", err=as_json)
    if as_json:
        typer.echo(summarise(loaded).model_dump_json(indent=2))
    elif not html:
        print_report(summarise(loaded))


@app.command()
def status(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RENDEZVOUS",
            envvar=ENV_RENDEZVOUS,
            help="a run folder, such as runs/quickstart; or where the islands meet: tcp://HOST:PORT, "
            "s3://BUCKET/PREFIX, gs://…, az://…, file:///DIR or http://HOST:PORT/NAME",
            show_default=False,
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C or the run's end.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two looks of --watch.")
    ] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for programs; with --watch a line for each look.")
    ] = False,
    num_rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="How many of the last rounds.")] = 10,
    key_file: KeyFileOption = None,
) -> None:
    """Show where the islands of a run stand, and what became of the last rounds.

    It only reads. Which islands live shows in whether their signs of life change, so it takes a few seconds.

    [bold]Examples[/bold]

    [cyan]hf-diloco status runs/quickstart[/cyan]

    [cyan]hf-diloco status tcp://10.0.0.1:29400[/cyan]

    [cyan]hf-diloco status s3://bucket/my-run[/cyan]

    [cyan]hf-diloco status file:///shared/my-run --watch[/cyan]

    [cyan]hf-diloco status s3://bucket/my-run --json | jq .round[/cyan]
    """
    from hf_diloco.cli.status import run_status

    run_status(run, key_file, interval if watch else None, num_rounds, as_json)


@app.command()
def rendezvous(
    address: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", help="where to listen: this machine's address, as the islands see it"),
    ],
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for what islands leave for each other; made if it is missing.")
    ],
    allow_public_address: Annotated[
        bool, typer.Option("--allow-public-address", help="Listen at an address that the whole internet can reach.")
    ] = False,
) -> None:
    """Keep a place to meet, for islands that have neither a bucket nor a common folder.

    It may run on any machine that all islands reach, and serve any number of runs; no island is then special. Islands
    come and go as in a bucket. Started again with the same folder, it goes on where it was.

    [bold]Examples[/bold]

    [cyan]hf-diloco rendezvous 10.0.0.1:29400 --folder /data/rendezvous[/cyan]

    [cyan]hf-diloco launch run.yaml --island 1 --rendezvous http://10.0.0.1:29400/my-run[/cyan]
    """
    from hf_diloco.cli.rendezvous import run_rendezvous

    raise typer.Exit(run_rendezvous(address, folder, allow_public_address))


app.command()(compare)
app.command()(dashboard)

store_app = group("Look after the store in which the islands of a run meet.")
app.add_typer(store_app, name="store")
app.add_typer(configs_app, name="configs")
app.add_typer(keys_app, name="keys")
app.add_typer(checkpoint_app, name="checkpoint")


@store_app.command("check")
def store_check(
    rendezvous: StoreArgument,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Move what is damaged, forged or abandoned to damaged/. Nothing is deleted."),
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read all values too, and compare them with their digests.")
    ] = False,
    as_json: AsJson = False,
    key_file: KeyFileOption = None,
) -> None:
    """List what is damaged, forged or left behind in the store of a run, and names that no island gives.

    It may be called while the run goes on. Without --repair it only reads.

    [bold]Examples[/bold]

    [cyan]hf-diloco store check s3://bucket/my-run[/cyan]

    [cyan]hf-diloco store check file:///shared/my-run --repair[/cyan]

    [bold]Exit codes[/bold]

    0: nothing to be done. 1: something was found, or there is no run, or it has another key. 2: wrong command.
    """
    from hf_diloco.cli.store import run_check

    raise typer.Exit(run_check(rendezvous, key_file, is_deep=deep, repair=repair, as_json=as_json))


@app.command()
def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="ring, grid, star, hypercube, exponential, symmetric-exponential, one-peer-exponential, "
            "random-matching, full; or your own: a file of weights (.npy, .csv, .json), or FILE.py:CLASS",
            show_default=False,
        ),
    ],
    num_nodes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="How many take part. Default: 8, or as a file says.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random matchings.")] = 0,
    num_parameters: Annotated[
        float,
        typer.Option("--parameters", min=1, help="Values in the model, as 7e9.", show_default="25.6e6, a ResNet-50"),
    ] = 25.6e6,
    picture: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE", help="Draw the graph: a .png, .svg or .pdf file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a graph of decentralised training: weights, speed of averaging, traffic, stability with momentum.

    [bold]Examples[/bold]

    [cyan]hf-diloco topology ring --num-nodes 8[/cyan]

    [cyan]hf-diloco topology one-peer-exponential --num-nodes 16 --draw graph.svg[/cyan]

    [cyan]hf-diloco topology weights.csv --parameters 7e9 --json | jq .rho[/cyan]
    """
    from hf_diloco.cli.topology import run_topology

    run_topology(name, num_nodes, seed, num_parameters, picture, as_json)


@app.command("config-schema")
def config_schema(
    vision: Annotated[bool, typer.Option("--vision", help="Of image classifiers' run files.")] = False,
) -> None:
    """Print the JSON schema of run files, for editors and other programs.

    [bold]Examples[/bold]

    [cyan]hf-diloco config-schema > run.schema.json[/cyan]

    [cyan]hf-diloco config-schema --vision > vision.schema.json[/cyan]
    """
    from hf_diloco.apps.lm.runfile import RunFile
    from hf_diloco.apps.vision.runfile import VisionRun

    typer.echo(json.dumps((VisionRun if vision else RunFile).model_json_schema(), indent=2))


planning.add_commands(app)


def main() -> None:
    """The `hf-diloco` program. Errors of this package are one line on stderr (HF_DILOCO_DEBUG=1: a traceback)."""
    try:
        app(prog_name="hf-diloco")
    except (DiLoCoError, OSError) as error:
        if os.environ.get("HF_DILOCO_DEBUG"):
            raise
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
