"""Commands around the rendezvous of islands: serve one, show a run's status, check the store, and make keys."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_diloco.cli.arguments import STORES, AsJson, examples, group
from hf_diloco.config.base import ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError
from hf_diloco.utils.extras import need
from hf_diloco.utils.listening import raise_file_limit
from hf_diloco.utils.public_keys import show_public
from hf_diloco.utils.urls import host_and_port, is_loopback, is_public, split_tcp_url

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger("hf_diloco")

StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="RENDEZVOUS",
        envvar=ENV_RENDEZVOUS,
        help=f"where the islands meet: {STORES}",
        show_default=False,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|RENDEZVOUS",
        envvar=ENV_RENDEZVOUS,
        help=f"a run folder, such as runs/quickstart; or where the islands meet: tcp://HOST:PORT, {STORES}",
        show_default=False,
    ),
]
KeyFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the run's key. Default: the key in HF_DILOCO_KEY.")
]
AllowPublicAddress = Annotated[
    bool, typer.Option("--allow-public-address", help="Listen at an address that the whole internet can reach.")
]

_BEHIND_A_FIREWALL = "Where a firewall lets nobody else in, add --allow-public-address"

store_app = group("Look after the store in which the islands of a run meet.")
keys_app = group("Make keys and identities, and show public keys.")


@examples(
    "hf-diloco status runs/quickstart",
    "hf-diloco status tcp://10.0.0.1:29400",
    "hf-diloco status s3://bucket/my-run",
    "hf-diloco status file:///shared/my-run --watch",
    "hf-diloco status s3://bucket/my-run --json | jq .round",
)
def status(
    run: RunArgument,
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
    """
    from hf_diloco.cli.status import run_status

    run_status(run, key_file, interval if watch else None, num_rounds, as_json)


@store_app.command("check")
@examples(
    "hf-diloco store check s3://bucket/my-run",
    "hf-diloco store check file:///shared/my-run --repair",
)
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

    [bold]Exit codes[/bold]

    0: nothing to be done. 1: something was found, or there is no run, or it has another key. 2: wrong command.
    """
    from hf_diloco.cli.status import run_check

    raise typer.Exit(run_check(rendezvous, key_file, is_deep=deep, repair=repair, as_json=as_json))


@examples(
    "hf-diloco rendezvous 10.0.0.1:29400 --folder /data/rendezvous",
    "hf-diloco launch run.yaml --island 1 --rendezvous http://10.0.0.1:29400/my-run",
)
def rendezvous(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="where to listen: this machine's address, as the islands see it")
    ],
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for what islands leave for each other; made if it is missing.")
    ],
    allow_public_address: AllowPublicAddress = False,
) -> None:
    """Keep a place to meet, for islands that have neither a bucket nor a common folder.

    It may run on any machine that all islands reach, and serve any number of runs; no island is then special. Islands
    come and go as in a bucket. Started again with the same folder, it goes on where it was.
    """
    from hf_diloco.store.server import StoreServer

    with open_listener(address, "the islands", allow_public_address) as listener:
        try:
            app = StoreServer(folder).app()
        except OSError as error:
            raise ConfigError(
                f"--folder {folder}: {error.strerror or error}. Name a folder whose parent is there, with space "
                "for a few copies of the model"
            ) from None
        url = url_of(listener)
        if not is_loopback(listener.getsockname()[0]):
            logger.warning(
                "who reaches %s can read the weights, and delete what lies here: keep strangers out by a firewall or "
                "a VPN, and give the islands a key, so that nobody forges it (docs/security.md)",
                url,
            )
        _serve(app, listener, f"islands meet at {url}/NAME, kept in {folder}; Ctrl-C ends this")


def _serve(app: web.Application, listener: socket.socket, message: str) -> None:
    """Serves until Ctrl-C; shows the message once the server runs, and handles that."""
    import asyncio

    from hf_diloco.store.serving import serve_until_stopped

    raise_file_limit()
    asyncio.run(serve_until_stopped(app, listener, lambda: print(message, flush=True)))


@examples(
    "hf-diloco dashboard runs/quickstart",
    "hf-diloco dashboard s3://bucket/my-run",
    "hf-diloco dashboard tcp://10.0.0.1:29400",
    "hf-diloco dashboard runs/quickstart --listen 10.0.0.1:29480 --prometheus",
)
def dashboard(
    run: RunArgument,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve the page; by default for this machine alone.")
    ] = "127.0.0.1:29480",
    interval: Annotated[
        float, typer.Option(min=1, max=3600, metavar="SECONDS", help="Time between two looks at the run.")
    ] = 5,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Serve /metrics too; needs the library prometheus-client.")
    ] = False,
    allow_public_address: AllowPublicAddress = False,
    key_file: KeyFileOption = None,
) -> None:
    """Serve a page that shows a run while it goes on: islands, rounds, loss, traffic, waiting, refused objects.

    It only reads, and goes on until Ctrl-C.
    """
    from hf_diloco.cli.status import check_url, is_rendezvous
    from hf_diloco.dashboard.server import Dashboard
    from hf_diloco.dashboard.source import Source
    from hf_diloco.store.credentials import load_key

    need("the page of a run", "matplotlib")
    if is_rendezvous(run):
        check_url(run, "dashboard", may_be_tcp=True)
    if prometheus:
        need("--prometheus", "prometheus_client")
    source = Source(run, load_key(key_file))
    with open_listener(listen, "its readers", allow_public_address) as listener:
        url, is_local = url_of(listener), is_loopback(listener.getsockname()[0])
        if not is_local:
            logger.warning("who reaches %s sees the run and its settings: there is no password", url)
        app = Dashboard(source, interval, is_local, prometheus).app()
        _serve(app, listener, f"open {url}/ in a browser; Ctrl-C ends this")


@keys_app.command("make")
@examples(
    "hf-diloco keys make island-0.pem",
    "hf-diloco keys make --shared diloco.key",
)
def make(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="where the private key goes; there must be none yet")],
    shared: Annotated[
        bool, typer.Option("--shared", help="Make the key that all islands of a run share, and not an identity.")
    ] = False,
) -> None:
    """Make an island's identity and print its public key, or, with --shared, a run's key.

    Only you can read the file.
    """
    from hf_diloco.store.credentials import make_identity, make_key

    if shared:
        make_key(file)
        typer.echo(f"wrote {file}: copy it to all islands, and nobody else", err=True)
    else:
        typer.echo(show_public(make_identity(file).public_key().public_bytes_raw()))


@keys_app.command("show")
@examples("hf-diloco keys show island-0.pem")
def show(file: Annotated[Path, typer.Argument(metavar="FILE", help="that `hf-diloco keys make` wrote")]) -> None:
    """Print the public key of an identity, for `identities` in a run file."""
    from hf_diloco.store.credentials import load_identity

    private = load_identity(file, 0)
    assert private is not None
    typer.echo(show_public(private.public_key().public_bytes_raw()))


def open_listener(address: str, readers: str, allow_public_address: bool | None = None) -> socket.socket:
    """Listens at HOST:PORT, an address at which `readers` (such as "the islands") reach this machine.

    `allow_public_address` is the option of this name; None for a command without it. Raises `ConfigError` if the
    address is invalid, public, or not this machine's; or the port is in use.
    """
    try:
        host, port = split_tcp_url(f"tcp://{address}")
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"address {address!r}: host {host!r} has no address ({error.strerror}): correct it"
        ) from None
    except ValueError:
        raise ConfigError(
            f"address {address!r}: expected HOST:PORT, one address of this machine for {readers}, as in "
            "10.0.0.1:29400; 0.0.0.0 and :: stand for all of them, and are refused"
        ) from None
    if is_public(str(found[0])) and not allow_public_address:
        raise ConfigError(
            f"{found[0]} is a public address, where anybody reaches the port: join the machines by a VPN "
            "and use its addresses (docs/security.md has a recipe)"
            + ("" if allow_public_address is None else f". {_BEHIND_A_FIREWALL}")
        )
    try:
        return socket.create_server(found[:2], family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(_problem(address, readers, error)) from None


def url_of(listener: socket.socket) -> str:
    """Returns the address of a listening socket, as `http://HOST:PORT`."""
    return f"http://{host_and_port(*listener.getsockname()[:2])}"


def _problem(address: str, readers: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        host, _, port = address.rpartition(":")
        return f"port {port} on {host} is in use: choose another, or end the program that has it"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is no address of this machine: give the one by which {readers} reach it"
    return f"cannot listen at {address}: {error.strerror or error}"
