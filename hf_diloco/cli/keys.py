"""`hf-diloco keys`: make the key of a run and the identities of its islands, and show what others need of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_diloco.cli.arguments import group

keys_app = group("Make keys and identities, and show public keys.")


@keys_app.command("make")
def make(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="where the private key goes; there must be none yet")],
    shared: Annotated[
        bool, typer.Option("--shared", help="Make the key that all islands of a run share, and not an identity.")
    ] = False,
) -> None:
    """Make an island's identity and print its public key, or, with --shared, a run's key. Only you can read the file.

    [bold]Examples[/bold]

    [cyan]hf-diloco keys make island-0.pem[/cyan]

    [cyan]hf-diloco keys make --shared diloco.key[/cyan]
    """
    from hf_diloco.store.credentials import make_identity, make_key
    from hf_diloco.utils.public_keys import show_public

    if shared:
        make_key(file)
        typer.echo(f"wrote {file}: copy it to all islands, and nobody else", err=True)
    else:
        typer.echo(show_public(make_identity(file).public_key().public_bytes_raw()))


@keys_app.command("show")
def show(file: Annotated[Path, typer.Argument(metavar="FILE", help="that `hf-diloco keys make` wrote")]) -> None:
    """Print the public key of an identity, for `identities` in a run file.

    [bold]Examples[/bold]

    [cyan]hf-diloco keys show island-0.pem[/cyan]
    """
    from hf_diloco.store.credentials import load_identity
    from hf_diloco.utils.public_keys import show_public

    private = load_identity(file, 0)
    assert private is not None
    typer.echo(show_public(private.public_key().public_bytes_raw()))
