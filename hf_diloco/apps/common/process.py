"""Common parts of an island's process, for all tasks: exit codes, folder, logging."""

from __future__ import annotations

import errno
import io
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hf_diloco
from hf_diloco.apps.common.arguments import check_training
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.environment import ENV_DEBUG, ENV_LAUNCHED, is_leader
from hf_diloco.apps.common.hub import check_login, use_cache_without_hub
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.utils.extras import installed_version
from hf_diloco.utils.files import STOP_FILE, read_json, write_json
from hf_diloco.utils.redact import redact

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_diloco.trainer.progress import Progress

R = TypeVar("R", bound=BaseRun)

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers")

_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""Full; failing; made read-only by the system after an error; or a file that a server of NFS has lost."""


class _Output(io.FileIO):
    """Standard output that drops text instead of raising if the disk it is redirected to is full or fails."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _DISK_FAILURES:
                raise
            return len(data)


def _output(number: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_Output(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True)


def run_and_exit(parse: Callable[[], R], train: Callable[[R], int]) -> None:
    """Runs one island and exits: 0 finished, 3 stopped on request with a checkpoint, 1 failed."""
    sys.stdout, sys.stderr = _output(1), _output(2)  # the launcher redirects them to a log
    try:
        sys.exit(train(parse()))
    except DiLoCoError as error:
        if os.environ.get(ENV_DEBUG):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


@contextmanager
def prepared(run: BaseRun, unit: str = "tokens") -> Iterator[Progress]:
    """Checks settings, prepares the folder and sets up logging before training; reports errors inside as progress.

    Yields:
        The progress file; its speed counts `unit`, tokens or images.

    Raises:
        ConfigError: a setting is wrong, or the folder belongs to an earlier run.
    """
    check_folder(run)
    use_cache_without_hub(run.needs_hub)
    from hf_diloco.trainer.progress import Progress

    check_training(run.training)
    if run.push_to_hub is not None and run.meeting.island == 0 and is_leader():
        check_login()
    progress = Progress(run.island_folder() if is_leader() else None, run.max_steps, unit=unit)
    if is_leader():
        _prepare_folder(run)
    try:
        progress.update(message="loading libraries")
        _set_up_logging()
        from hf_diloco.apps.common.island_store import use_island_store

        use_island_store()
        yield progress
    except BaseException as error:
        progress.update(state="failed", message=str(error) or type(error).__name__)
        raise


def check_folder(run: BaseRun, island: int | None = None) -> None:
    """Refuses to mix a new run into an old run's folder; `island` defaults to this one.

    Raises `ConfigError` if the folder belongs to an earlier run, or is not writable; or `launch.resume` names no
    checkpoint; or the checkpoint's position is one in other data.
    """
    folder = run.island_folder(island)
    _check_writable(folder)
    if others := _other_kind(run):
        raise ConfigError(f"name: {run.folder} holds a run of {others}, of another kind: choose another name")
    if run.launch.resume == "never" and any(folder.glob("checkpoint-*")):
        raise ConfigError(
            f"launch.resume: never, but {folder} holds checkpoints of an earlier run; delete it, choose another name, "
            "or use resume: auto to go on"
        )
    if checkpoint := run.checkpoint_given(island):
        _refuse_other_order(run, checkpoint, checkpoint.parent.parent)
    elif any(folder.glob("checkpoint-*")):
        _refuse_other_order(run, folder, run.folder)


def _check_writable(folder: Path) -> None:
    place = folder
    try:
        while not place.exists() and not place.is_symlink():
            place = place.parent
    except OSError as error:
        raise ConfigError(f"output: {str(folder)!r} cannot be used: {error.strerror}; name another folder") from None
    if not place.is_dir():
        what = "is a link to nothing" if place.is_symlink() else "is a file"
        raise ConfigError(f"output: {place} {what}, where the folder {folder} is to be made: name another")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"output: {place} cannot be written to: name another folder, or see to its permissions")


def _refuse_other_order(run: BaseRun, holder: Path, folder: Path) -> None:
    """Raises `ConfigError` if the checkpoints' position in the data is one in other data, or in another order."""
    if changed := _changed_order(run, folder):
        once, here = (", ".join(f"{name}={pair[k]!r}" for name, pair in changed.items()) for k in (0, 1))
        raise ConfigError(
            f"{holder} is of a run with {once}, here {here}: training would go on at its position in other data, see "
            "some examples twice and others never; set what it was, or begin a new run under another name. To train "
            "its model on other data, begin that run with it as model.path (docs/checkpoints.md, On other data)"
        )


def _changed_order(run: BaseRun, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Returns where `order_of_data` of the run in a folder and of this run differ. Ignores the folders of files."""
    saved = read_json(folder / "run.json")
    before = run.order_of_data(saved) if saved else {}
    now = run.order_of_data(redact(run.model_dump(mode="json")))
    pairs = {name: (before[name], value) for name, value in now.items() if name in before}
    return {name: pair for name, pair in pairs.items() if _without_folder(pair[0]) != _without_folder(pair[1])}


def _without_folder(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folder(item) for item in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def _other_kind(run: BaseRun) -> str:
    """Returns "islands" or "nodes" if the run in this folder is of the other kind; else ""."""
    saved = read_json(run.folder / "run.json")
    kinds = {"diloco": "islands", "gossip": "nodes"}
    found = [name for name in kinds if saved.get(name)]
    return kinds[found[0]] if len(found) == 1 and found[0] != run.meeting_name else ""


def _prepare_folder(run: BaseRun) -> None:
    """Creates the island's folder, and deletes an old stop file; raises `ConfigError` if it cannot."""
    folder = run.island_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP_FILE).unlink(missing_ok=True)
        is_stale = not (run.folder / "run.json").exists() or bool(_changed_order(run, run.folder))
        if (run.meeting.island == 0 and not _has_ended(run)) or is_stale:
            write_run_json(run)
    except OSError as error:
        raise ConfigError(f"output: {folder} cannot be made: {error}") from None


def _has_ended(run: BaseRun) -> bool:
    """Whether training has ended, so that the run is only evaluated again, and `run.json` must stay as it is."""
    names = (path.name.removeprefix("checkpoint-") for path in run.island_folder().glob("checkpoint-*"))
    steps = [int(name) for name in names if name.isdecimal()]
    return run.launch.resume == "auto" and max(steps, default=0) >= run.max_steps


def write_run_json(run: BaseRun) -> None:
    """Writes `run.json` into the run folder: the resolved settings without secrets, and the packages' versions."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "hf_diloco": hf_diloco.__version__}
    versions |= {package: installed_version(package) for package in _PACKAGES}
    write_json(run.folder / "run.json", {**redact(run.model_dump(mode="json")), "versions": versions})


def _set_up_logging() -> None:
    """Sets up logging: the leader logs everything, the other ranks only errors."""
    import datasets

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("hf_diloco").setLevel(logging.INFO if is_leader() else logging.ERROR)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if is_leader() else logging.ERROR)
    if os.environ.get(ENV_LAUNCHED) or not is_leader():
        datasets.disable_progress_bars()


def last_evaluation(trainer: Trainer) -> dict[str, float] | None:
    """Returns the last evaluation, if it is of the Trainer's present step; else None."""
    for entry in reversed(trainer.state.log_history):
        if "eval_loss" in entry:
            return dict(entry) if entry.get("step") == trainer.state.global_step else None
    return None


def say(text: str) -> None:
    """Prints a line, on the leader."""
    if is_leader():
        print(text, flush=True)
