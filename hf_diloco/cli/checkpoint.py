"""`hf-diloco checkpoint`: shows what is in a checkpoint, and exports its outer parameters as a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_diloco.cli.arguments import AsJson, examples, group

if TYPE_CHECKING:
    from hf_diloco.outer.checkpoint import OuterIndex

checkpoint_app = group("Look into a checkpoint with outer state, or make a model of it. Needs no GPU.")

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="a folder checkpoint-N; or the folder of an island, or of a run (then of island 0): its newest whole one",
        show_default=False,
    ),
]


@checkpoint_app.command()
@examples(
    "hf-diloco checkpoint inspect runs/quickstart",
    "hf-diloco checkpoint inspect runs/quickstart/island-1/checkpoint-60 --json",
)
def inspect(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: round, steps, method, fragments, ranks, sizes."""
    from hf_diloco.outer.export import find_checkpoint
    from hf_diloco.utils.tables import fact_table, output

    facts = _facts(*find_checkpoint(_where_written(checkpoint)))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    known = {name.replace("_", " "): value for name, value in facts.items() if value not in ("", None)}
    texts = ((name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in known.items())
    output().print(fact_table(texts))


@checkpoint_app.command()
@examples("hf-diloco checkpoint export runs/quickstart model-of-now")
def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where the model goes; is made")],
    like: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Folder with configuration and tokenizer, if the checkpoint has none."),
    ] = None,
) -> None:
    """Write the outer parameters of a checkpoint as a Hugging Face folder, in fp32, with its tokenizer.

    Whatever the ranks trained with: plain PyTorch, DDP, DeepSpeed ZeRO or FSDP2. Of adapters it makes a PEFT folder.
    A model card, README.md, says what the checkpoint knows of the training.
    """
    from hf_diloco.apps.common.model_card import write_card_of_checkpoint
    from hf_diloco.outer.export import export as write, find_checkpoint
    from hf_diloco.utils.extras import keep_deepspeed_quiet

    keep_deepspeed_quiet()  # transformers imports it
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would report all parameters trained under ZeRO-3 as missing
    logging.disable_progress_bar()
    found, index = find_checkpoint(_where_written(checkpoint))
    write(found, index, folder, like)
    write_card_of_checkpoint(folder, index)
    typer.echo(f"wrote the outer parameters of {found} (round {index.round}, step {index.global_step}) to {folder}")


def _where_written(folder: Path) -> Path:
    """Returns the folder of an island's checkpoints: for a launched script, usually its own `output_dir`."""
    from hf_diloco.errors import ConfigError
    from hf_diloco.report import load_run

    try:
        island = load_run(folder).islands[0]
    except ConfigError:  # a checkpoint, or not part of a run
        return folder
    written = island.record.parent
    return folder if written == island.folder else written


def _facts(checkpoint: Path, index: OuterIndex) -> dict[str, Any]:
    from hf_diloco.inner.checkpoints import saved_kind

    outer_bytes = sum(file.num_bytes for file in index.files)
    settings = index.settings
    return {
        "checkpoint": str(checkpoint),
        "round": index.round,
        "step": index.global_step,
        "steps_since_round": index.steps_since_sync,
        "tokens": index.data.get("tokens") or None,  # the Trainer counts them only if asked to
        "method": settings.get("method", "diloco"),
        "sync_every": settings.get("sync_every"),
        "payload": settings.get("payload", "fp32"),
        "fragments": max(1, len(index.fragments)),
        "ranks": len({file.name.rpartition("rank-")[2] for file in index.files}),
        "trained_with": saved_kind(checkpoint) or "unknown",
        "trainable_parameters": index.num_parameters,
        "outer_state_bytes": outer_bytes,
        "other_bytes": max(0, sum(file.num_bytes for file in index.checkpoint) - outer_bytes),
        "outer_digest": index.outer_digest,
        "run": index.run,
    }
