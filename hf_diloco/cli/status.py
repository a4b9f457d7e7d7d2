"""`hf-diloco status`: look at a run in an object store, once or again and again."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_diloco.cli.display import terminal
from hf_diloco.errors import ConfigError, RendezvousError, StoreError
from hf_diloco.status import Observer, RunStatus
from hf_diloco.status.tables import render
from hf_diloco.store.credentials import load_key
from hf_diloco.store.objects import open_object_store
from hf_diloco.utils.urls import VALID_URLS, check_store_url, is_object_store

TIMEOUT = 15.0  # seconds without an answer after which a person is told


def run_status(url: str, key_file: Path | None, interval: float | None, num_rounds: int, as_json: bool) -> None:
    """Runs `hf-diloco status`.

    Args:
        url: where the islands meet.
        key_file: see `hf_diloco.store.signing.load_key`.
        interval: seconds between two looks; None: once.
        num_rounds: how many of the last rounds to show.
        as_json: for programs.

    Raises:
        ConfigError: the URL or the key cannot be one.
        RendezvousError: there is no run, or it was begun with another key, or the store cannot be opened.
        StoreError: the store does not answer; once it has, watching goes on regardless.
    """
    check_url(url, "status")
    with contextlib.suppress(KeyboardInterrupt) if interval else contextlib.nullcontext():
        key = load_key(key_file)
        store = open_object_store(url, TIMEOUT, read_only=True)
        observer = Observer(store, key, num_rounds)
        if interval is None:
            _show_once(observer.settle(), as_json)
        else:
            _watch(observer, interval, as_json)


def check_url(url: str, command: str) -> None:
    """Raises `ConfigError` unless a run's islands can meet there in a store that a command can look at."""
    if not is_object_store(url):
        raise ConfigError(
            f"rendezvous {url!r}: {command} needs an object store that the run's islands meet in ({VALID_URLS}); what "
            "other runs do is in the launcher's output and in `hf-diloco report RUN`"
        )
    try:
        check_store_url(url)
    except RendezvousError as error:
        raise ConfigError(str(error)) from None


def _show_once(status: RunStatus, as_json: bool) -> None:
    if as_json:
        print(status.model_dump_json(indent=2))
    else:
        terminal(sys.stdout).print(render(status))


def _watch(observer: Observer, interval: float, as_json: bool) -> None:
    """Shows one look after the other until the run is over."""
    with _display(as_json) as show:
        while True:
            begun = time.monotonic()
            try:
                status = observer.look()
            except StoreError as error:  # the run goes on without the store for a while, and so does this
                print(f"warning: {error}", file=sys.stderr)
            else:
                show(status)
                if status.is_over:
                    return
            time.sleep(max(0.0, begun + interval - time.monotonic()))


@contextlib.contextmanager
def _display(as_json: bool) -> Iterator[Callable[[RunStatus], object]]:
    """Where looks go: one place on a terminal, one after the other elsewhere."""
    console = terminal(sys.stdout)
    if as_json:
        yield lambda status: print(status.model_dump_json(), flush=True)
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda status: console.print(render(status))
    else:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda status: live.update(render(status), refresh=True)
