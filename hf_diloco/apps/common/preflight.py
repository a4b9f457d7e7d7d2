"""What `hf-diloco launch --dry-run` tries: all that an island would check before its first step, but for the others.

Loads the libraries, which takes seconds, and reads a little of the data. Starts nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hf_diloco.apps.common.arguments import check_training, training_arguments
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.deepspeed import try_deepspeed
from hf_diloco.apps.common.hub import check_login, use_cache_without_hub
from hf_diloco.errors import ConfigError, DiLoCoError


def check_all(run: BaseRun, *others: Callable[[], object]) -> None:
    """Tries what the run file names: arguments of the Trainer, trackers, DeepSpeed's settings, model and data.

    Before that it tries `others`, each of which raises `DiLoCoError`. Raises `ConfigError`, naming every problem.
    """
    use_cache_without_hub(run.needs_hub)  # before the libraries are imported
    problems: dict[str, None] = {}
    for attempt in (*others, *_attempts(run)):
        try:
            attempt()
        except DiLoCoError as error:
            problems[str(error)] = None
    if problems:
        raise ConfigError("; ".join(problems))


def _attempts(run: BaseRun) -> Iterator[Callable[[], object]]:
    yield lambda: _try_training(run)
    if run.push_to_hub is not None:
        yield check_login
    yield from run.probes()


def _try_training(run: BaseRun) -> None:
    """As an island does, but for one rank, and without what needs a process group: DeepSpeed, and its backend."""
    check_training(run.training)
    fsdp = run.fsdp and run.fsdp.model_copy(update={"num_replicas": 1})
    training = {name: value for name, value in run.training.items() if name not in ("report_to", "ddp_backend")}
    args = training_arguments(run.model_copy(update={"deepspeed": None, "fsdp": fsdp, "training": training}))
    try_deepspeed(run, args)
