"""`hf-diloco dashboard`: the report's page while a run goes on, served on this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from hf_diloco.config import ENV_RENDEZVOUS

logger = logging.getLogger("hf_diloco")

DEFAULT_ADDRESS = "127.0.0.1:29480"


def dashboard(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RENDEZVOUS",
            envvar=ENV_RENDEZVOUS,
            help="a run folder, such as runs/quickstart, or the rendezvous of its islands",
            show_default=False,
        ),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve the page; by default for this machine alone.")
    ] = DEFAULT_ADDRESS,
    interval: Annotated[
        float, typer.Option(min=1, max=3600, metavar="SECONDS", help="Time between two looks at the run.")
    ] = 5,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Serve /metrics too; needs the library prometheus-client.")
    ] = False,
    allow_public_address: Annotated[
        bool, typer.Option("--allow-public-address", help="Listen at an address that the whole internet can reach.")
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the run's key. [HF_DILOCO_KEY, the key]")
    ] = None,
) -> None:
    """Serve a page that shows a run while it goes on: islands, rounds, loss, traffic, waiting, refused objects.

    It only reads, and goes on until Ctrl-C.

    [bold]Examples[/bold]

    [cyan]hf-diloco dashboard runs/quickstart[/cyan]

    [cyan]hf-diloco dashboard s3://bucket/my-run[/cyan]

    [cyan]hf-diloco dashboard tcp://10.0.0.1:29400[/cyan]

    [cyan]hf-diloco dashboard runs/quickstart --listen 10.0.0.1:29480 --prometheus[/cyan]
    """
    from aiohttp import web

    from hf_diloco.cli.listening import listen as open_listener, url_of
    from hf_diloco.cli.status import check_url
    from hf_diloco.dashboard import Dashboard, open_source
    from hf_diloco.dashboard.prometheus import check_installed
    from hf_diloco.store.credentials import load_key
    from hf_diloco.utils.extras import need
    from hf_diloco.utils.urls import is_loopback

    need("the page of a run", "matplotlib")
    if "://" in run:
        check_url(run, "dashboard", may_be_tcp=True)
    if prometheus:
        check_installed()
    source = open_source(run, load_key(key_file))
    with open_listener(listen, "its readers", allow_public_address) as listener:
        is_local = is_loopback(listener.getsockname()[0])
        if not is_local:
            logger.warning("who reaches %s sees the run and its settings: there is no password", url_of(listener))

        def tell(_: str) -> None:  # called once it serves, and Ctrl-C ends it as it should
            print(f"open {url_of(listener)}/ in a browser; Ctrl-C ends this", flush=True)

        app = Dashboard(source, interval, is_local, prometheus).app()
        web.run_app(app, sock=listener, print=tell, access_log=None, shutdown_timeout=1)
