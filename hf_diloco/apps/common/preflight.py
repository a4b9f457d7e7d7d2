"""What `hf-diloco launch --dry-run` tries: all that an island would check before its first step, but for the others.

Loads the libraries, which takes seconds, and reads a little of the data. Starts nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from hf_diloco.apps.common.arguments import check_training, deepspeed_config, training_arguments
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.hub import check_login, use_cache_without_hub
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.utils.extras import import_deepspeed_quietly
from hf_diloco.utils.text import nearest


def check_all(run: BaseRun, *others: Callable[[], object]) -> None:
    """Tries what the run file names: arguments of the Trainer, trackers, DeepSpeed's settings, model and data.

    Args:
        others: what else to try, before all that; each raises `DiLoCoError`.

    Raises:
        ConfigError: naming every problem.
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
    yield lambda: check_training(run.training)
    yield lambda: _check_trackers(run.training.get("report_to"))
    yield lambda: _check_deepspeed(run)
    yield lambda: _build_arguments(run)
    if run.push_to_hub is not None:
        yield check_login
    yield from run.probes()


def _build_arguments(run: BaseRun) -> None:
    """As an island does, but without DeepSpeed, which would start its process group, and with FSDP for one rank."""
    fsdp = run.fsdp and run.fsdp.model_copy(update={"num_replicas": 1})
    training = {**run.training, "report_to": "none"}
    training_arguments(run.model_copy(update={"deepspeed": None, "fsdp": fsdp, "training": training}))


def _check_trackers(report_to: Any) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    names = [report_to] if isinstance(report_to, str) else report_to if isinstance(report_to, list) else []
    for name in map(str, names):
        if name not in ("none", "all", *get_available_reporting_integrations()):
            known = sorted(INTEGRATION_TO_CALLBACK)
            hint = "install its package, or leave it out" if name in known else f"known: {', '.join(known)}"
            raise ConfigError(f"training.report_to: {name!r} is not to be had here{nearest(name, known)}: {hint}")


def _check_deepspeed(run: BaseRun) -> None:
    """The block `zero_optimization` as DeepSpeed reads it, and its types; what is "auto" is filled in later."""
    config = deepspeed_config(run)
    if config is None:
        return
    import_deepspeed_quietly()
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError
    from torch import optim

    _check_type(config, "optimizer", optim, DEEPSPEED_OPTIMIZERS, str.lower)
    _check_type(config, "scheduler", optim.lr_scheduler, lr_schedules.VALID_LR_SCHEDULES)
    zero = config.get("zero_optimization", {})
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    except ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"].lower(), one["input"]) for one in error.errors()]
        texts = [f"deepspeed: zero_optimization.{name}: {why}, got {value!r}" for name, why, value in found]
        raise ConfigError("; ".join(texts)) from None


def _check_type(
    config: dict[str, Any], block: str, torch_has: ModuleType, known: list[str], spell: Callable[[str], str] = str
) -> None:
    """Raises `ConfigError` if the type in a block is neither DeepSpeed's nor PyTorch's."""
    name = config.get(block, {}).get("type")
    if name is not None and spell(str(name)) not in known and not hasattr(torch_has, str(name)):
        hint = f"known: {', '.join(known)}, and those of {torch_has.__name__}"
        raise ConfigError(f"deepspeed: {block}.type: {name!r} is none{nearest(spell(str(name)), known)}: {hint}")
