"""Detects how a checkpoint was sharded, and loads ZeRO checkpoints of another number of ranks.

DeepSpeed refuses to load these. It has a checkpoint format that does not depend on the number of ranks, the
"universal checkpoint", with a converter and a setting to load it. Here the converter runs automatically when the
number of ranks has changed. Its output is as large as the checkpoint itself and is deleted after loading.

Checked against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import fcntl
import io
import logging
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup

logger = logging.getLogger("hf_diloco")

SavedKind = Literal["ZeRO", "FSDP2", "plain", ""]

_FILES: tuple[tuple[SavedKind, tuple[str, ...]], ...] = (
    ("ZeRO", ("global_step*/*model_states.pt",)),
    ("FSDP2", ("optimizer_0", "pytorch_model_fsdp*")),
    ("plain", ("optimizer.pt",)),
)

LONGEST_CONVERSION = 24 * 3600.0
"""Timeout in seconds of the other ranks while the leader converts a checkpoint."""

_PART = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_SUFFIX = "_converted"  # unlike the usual name of universal checkpoints that people make
_CUTS_PARAMETERS = 3


def saved_kind(checkpoint: Path) -> SavedKind:
    """Returns "ZeRO" (any stage, also 0), "FSDP2" or "plain" (also DDP); "" if no optimizer file is found."""
    return next((kind for kind, patterns in _FILES if any(any(checkpoint.glob(one)) for one in patterns)), "")


def load_engine(engine: Any, load_dir: str, tag: str | None = None, **kwargs: Any) -> Any:
    """Does `DeepSpeedEngine.load_checkpoint`, of a checkpoint of any number of ranks. Collective over the ranks.

    Raises:
        CheckpointError: the checkpoint is of another ZeRO stage, or cannot be converted.
    """
    load = partial(type(engine).load_checkpoint, engine)
    ranks = IslandGroup(timeout=LONGEST_CONVERSION)
    folder = _folder_of(Path(load_dir), tag)
    is_cut = hasattr(engine.optimizer, "dp_process_group")  # DeepSpeed's own test for writing a part
    check_stage(folder, engine.zero_optimization_stage(), is_cut, ranks)
    written_by = max(ranks.gather(count_ranks(folder)))
    if written_by in (0, ranks.size):  # 0: stage 0, which is not sharded, or nothing to convert
        ranks.on_leader(lambda: _delete_leftover(folder))
        return load(load_dir, tag, **kwargs)
    with _converted(folder, written_by, ranks) as universal, _loading_universal(engine):
        return load(load_dir, universal.name, **kwargs)


def count_ranks(folder: Path) -> int:
    """Returns the number of ranks that wrote a ZeRO checkpoint, from the files on this machine; 0 if not sharded."""
    parts = [int(match[1]) for path in folder.glob("*") if (match := _PART.fullmatch(path.name))]
    return max(parts, default=-1) + 1


def check_stage(folder: Path, stage: int, is_cut: bool, ranks: IslandGroup) -> None:
    """Raises if the checkpoint is of a ZeRO stage that the current stage cannot read. Collective over the ranks.

    ZeRO-3 shards the model's parameters into one file per rank. ZeRO-1 and 2 shard only the optimizer's state, and can
    read each other's files. ZeRO-0 shards nothing, except the optimizer's state with DeepSpeed's BF16_Optimizer.

    Args:
        folder: DeepSpeed's folder, `checkpoint-N/global_stepN`.
        stage: the ZeRO stage in which the island trains now.
        is_cut: whether the optimizer's state is sharded now.
        ranks: each may see only some of the files.

    Raises:
        CheckpointError: the stages do not match, so DeepSpeed would not find its files.
    """
    names = "mp_rank_*_model_states.pt", "zero_pp_rank_*_model_states.pt", "*zero_pp_rank_*_optim_states.pt"
    whole, parts, states = (any(ranks.gather(any(folder.glob(name)))) for name in names)
    before = "ZeRO-3" if parts else _stage_without_parts(states)
    now = "ZeRO-3" if stage == _CUTS_PARAMETERS else _stage_without_parts(is_cut)
    if (whole or parts) and before != now:
        raise CheckpointError(
            f"{folder} was written under {before}, and here ZeRO-{stage} trains, which cannot read it: resume with "
            "the stage that wrote it, or start a new run from its parameters (hf-diloco checkpoint export)"
        )


def _stage_without_parts(is_cut: bool) -> str:
    return "ZeRO-1 or 2" if is_cut else "ZeRO-0"


def _folder_of(checkpoint: Path, tag: str | None) -> Path:
    latest = checkpoint / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    return checkpoint / (tag or "")


@contextmanager
def _converted(folder: Path, written_by: int, ranks: IslandGroup) -> Iterator[Path]:
    """Yields a universal copy of the checkpoint, in a folder beside it, and deletes the copy afterwards.

    Islands that resume from the same checkpoint take turns.
    """
    universal = _universal_of(folder)
    with ExitStack() as turn:
        ranks.on_leader(lambda: turn.enter_context(_locked(folder)))
        try:
            ranks.on_leader(lambda: _convert(folder, universal, written_by, ranks.size))
            ranks.on_all(lambda: _need(universal))
            yield universal
        finally:
            ranks.barrier()  # every rank has read it
            ranks.on_leader(lambda: _delete(universal))  # the others wait: no search of the folder may see it vanish


def _universal_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)


@contextmanager
def _locked(folder: Path, waits: bool = True) -> Iterator[bool]:
    """Waits until no other process is inside. Yields False, without waiting, if the files cannot be locked.

    Args:
        waits: otherwise yields False if another process is inside.
    """
    is_locked = False
    with ExitStack() as stack:
        with suppress(OSError, StopIteration):
            part = next(path for path in folder.iterdir() if _PART.fullmatch(path.name))
            file = stack.enter_context(part.open("r+b"))  # NFS locks only what is open for writing
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked


def _delete_leftover(folder: Path) -> None:
    """Deletes the copy of a conversion that was killed, but not one that another island reads."""
    if (universal := _universal_of(folder)).is_dir():
        with _locked(folder, waits=False) as is_locked:
            if is_locked:
                _delete(universal)


def _delete(universal: Path) -> None:
    shutil.rmtree(universal, ignore_errors=True)
    latest = universal.parent / "latest_universal"
    with suppress(OSError):
        if latest.read_text(encoding="utf-8").strip() == universal.name:
            latest.unlink()


def _convert(folder: Path, universal: Path, written_by: int, num_ranks: int) -> None:
    """Runs DeepSpeed's converter; raises `CheckpointError` if it fails, or files of other machines are missing."""
    from deepspeed.checkpoint import ds_to_universal

    what = f"{folder} was written by {written_by} ranks, and this island has {num_ranks}"
    found = sum(_PART.fullmatch(path.name) is not None for path in folder.glob("*"))
    if found < written_by:
        raise CheckpointError(
            f"{what}: to convert it, copy the files of all machines into this folder (it holds the optimizer states "
            f"of {found} ranks), or start {written_by} ranks"
        )
    logger.info("%s: converting it with DeepSpeed's universal checkpoint", what)
    shutil.rmtree(universal, ignore_errors=True)
    settings = Namespace(
        input_folder=str(folder),
        output_folder=str(universal),
        num_extract_workers=1,  # in this process: its threads and CUDA do not survive a fork
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # only Megatron's checkpoints need that state
    )
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ds_to_universal.main(settings)
    except Exception as error:
        raise CheckpointError(
            f"{what}: DeepSpeed cannot convert it ({type(error).__name__}: {error}). Its converter knows ZeRO-1/2/3 "
            f"with Adam and AdamW. Start {written_by} ranks, or a new run from its parameters (hf-diloco checkpoint "
            "export), without the optimizer's state"
        ) from error


def _need(universal: Path) -> None:
    if not universal.is_dir():
        raise CheckpointError(
            f"{universal} was written by the island's first rank, and is not on this rank's disk: another number of "
            "ranks needs a folder that all machines of the island share"
        )


@contextmanager
def _loading_universal(engine: Any) -> Iterator[None]:
    """Lets an engine load a universal checkpoint, and then fixes the loaded state under ZeRO-3.

    There DeepSpeed gives every parameter group the settings of the first, so that groups without weight decay get it,
    and shares one step counter among all of them, so that each group's step increments it.
    """
    config = engine._config
    groups = engine.optimizer.optimizer.param_groups
    before = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    config.load_universal_checkpoint = True
    try:
        yield
    finally:
        config.load_universal_checkpoint = False
    if engine.zero_optimization_partition_weights():
        for group, own in zip(groups, before, strict=True):
            rate = float(own.get("initial_lr", own["lr"])), float(before[0].get("initial_lr", before[0]["lr"]))
            loaded = group["lr"] if rate[0] == rate[1] else group["lr"] * rate[0] / rate[1]
            group.update({**own, "lr": loaded})
        for state in engine.optimizer.optimizer.state.values():
            if isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.clone()
