"""Saves a rank's outer state to a checkpoint, and restores it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_diloco.errors import CheckpointError
from hf_diloco.outer.checkpoint import (
    FragmentIndex,
    OuterIndex,
    OuterPart,
    files_of,
    load_outer,
    read_index,
    save_outer,
)
from hf_diloco.outer.fragment import EagerFragment
from hf_diloco.outer.manifest import check_contents
from hf_diloco.outer.state import OuterState
from hf_diloco.utils.own_files import is_own

_RATES = "inner-rates"
"""Name of the tensor with the inner learning rates of the last step before a checkpoint."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which the masters may have been rounded when they are loaded."""

_FAR = 0.1
"""As a share of the parameters' norm: larger than the error of rounding them to 16 bits."""

_SUM_ROUNDING, _ROUNDING = 1e-3, 1e-6
"""Tolerances, as shares of the distance and of the parameters' norm: for sums in another order, and for tiny values
flushed to zero."""


def save_state(
    outer: OuterState, checkpoint: Path, global_step: int, data: Mapping[str, Any], is_last: bool = True
) -> None:
    """Writes the outer state into a checkpoint folder, all or nothing. Collective over the island's ranks.

    Args:
        global_step: optimizer steps of the whole training.
        data: the island's position in its data.
        is_last: everything else is in the folder already.

    Raises:
        CheckpointError: the outer state cannot be written; on every rank.
    """
    index = OuterIndex(
        round=outer.round,
        steps_since_sync=outer.steps,
        weight_since_sync=outer.current.weight,
        global_step=global_step,
        num_parameters=outer.shards.num_parameters,
        model=outer.shards.digest,
        parameters={name: list(shape) for name, shape in outer.shards.shapes.items()},
        outer_digest=outer.outer_hash,
        run=outer.run,
        settings=outer.config.model_dump(),
        data=dict(data),
        fragments=[
            FragmentIndex(
                steps=fragment.steps,
                weight=fragment.weight,
                due_at=None if outer.config.meets_in_store else fragment.due_at,
                install_in=fragment.install_in,
                digest=fragment.digest,
                parameters=names,
                anticipated_of=fragment.anticipated_of if isinstance(fragment, EagerFragment) else None,
                distances=[distance for distance in distances if math.isfinite(distance)],
            )
            for fragment, names, distances in zip(outer.fragments, outer.names, outer.distances(_DTYPES), strict=True)
        ],
    )
    rates = {_RATES: torch.tensor(outer.rates, dtype=torch.float64)} if outer.rates else {}
    parts = [OuterPart({**fragment.state_dict(), **rates}, fragment.intervals) for fragment in outer.fragments]
    save_outer(checkpoint, outer.island, parts, index, is_last)


def restore_state(outer: OuterState, checkpoint: Path) -> None:
    """Restores the outer state of a checkpoint. The masters must have been restored already.

    Collective over the island's ranks.

    Raises:
        CheckpointError: a rank cannot read the checkpoint, it belongs to another model, or the masters have not been
            restored; on every rank.
    """
    if checkpoint != outer.checked:
        check_contents(checkpoint, files_of, outer.island)
    stored = outer.island.on_all(lambda: _load(outer, checkpoint))
    _refuse_other_masters(outer, checkpoint, stored)
    if outer.round and outer.on_boundary and outer.buffers == "zero":
        outer.shards.inner.zero_buffers()
    outer.make_digests()


def _load(outer: OuterState, checkpoint: Path) -> list[FragmentIndex]:
    """Restores everything but the combined digest; returns the stored progress of each fragment."""
    index = read_index(checkpoint)
    stored = index.fragments
    _refuse_another(outer, checkpoint, index, stored)
    for number, (fragment, counts) in enumerate(zip(outer.fragments, stored, strict=True)):
        state = load_outer(checkpoint, index, fragment.intervals)
        if (rates := state.pop(_RATES, None)) is not None:
            outer.shards.inner.rates = rates.tolist()
        fragment.load_state_dict(state)
        fragment.steps, fragment.weight, fragment.install_in = counts.steps, counts.weight, counts.install_in
        fragment.digest = counts.digest
        if isinstance(fragment, EagerFragment):
            fragment.anticipated_of = counts.anticipated_of or outer.config.num_islands
        if counts.due_at is not None and index.settings.get("sync_every") == outer.config.sync_every:
            fragment.due_at = counts.due_at
        elif index.round > number:  # the fragment has had its first round
            fragment.due_at = outer.config.sync_every
    outer.round = outer.num_begun = index.round
    outer.run = index.run
    return stored


def _refuse_other_masters(outer: OuterState, checkpoint: Path, stored: Sequence[FragmentIndex]) -> None:
    """Raises `CheckpointError` if the masters' distance from the outer parameters differs from the saved one.

    The masters may have been rounded to 16 bits since then, and be sharded over another number of ranks.
    """
    sizes = outer.island.sum([fragment.method.parameters.norm().item() ** 2 for fragment in outer.fragments])
    for counts, (distance,), square in zip(stored, outer.distances(), sizes, strict=True):
        known = [(before, before * _SUM_ROUNDING + math.sqrt(square) * _ROUNDING) for before in counts.distances]
        if not known and counts.steps == 0 and counts.install_in is None:
            known = [(0.0, math.sqrt(square) * _FAR)]  # the masters were the outer parameters
        if known and all(abs(distance - before) > margin for before, margin in known):
            raise CheckpointError(
                f"{checkpoint} holds the outer state of a model with other weights than the one to be trained: load "
                "the model and its optimizer from there first (accelerator.load_state, or trainer.train with "
                "resume_from_checkpoint)"
            )


def _refuse_another(outer: OuterState, checkpoint: Path, index: OuterIndex, stored: Sequence[FragmentIndex]) -> None:
    """Raises `CheckpointError` unless the checkpoint has this model, this method and these fragments."""
    if index.model != outer.shards.digest:
        raise CheckpointError(
            f"{checkpoint} holds the outer state of another model: {index.num_parameters:,} trainable parameters, "
            f"here {outer.shards.num_parameters:,} (or others of the same number)"
        )
    method = index.settings["method"]
    if not _is_same_method(method, outer.config.method):
        raise CheckpointError(
            f"{checkpoint} is of a run with method={method}, here method={outer.config.method}, which cannot go on "
            f"from there: resume with method={method}, or start in another run folder"
        )
    if len(stored) != len(outer.fragments):
        raise CheckpointError(
            f"{checkpoint} is of a run with num_fragments={len(stored)}, here num_fragments="
            f"{len(outer.fragments)}, which cannot go on from there: resume with the same number"
        )
    if [counts.parameters for counts in stored] != outer.names:
        raise CheckpointError(
            f"{checkpoint} is of a run with as many fragments, but other parameters in them: resume with the same "
            "fragment_order and fragment_patterns"
        )


def _is_same_method(one: str, other: str) -> bool:
    """Compares methods by name. The file of a user's own method may have moved or changed since."""
    return one == other or (is_own(one) and is_own(other) and one.rpartition(":")[2] == other.rpartition(":")[2])
