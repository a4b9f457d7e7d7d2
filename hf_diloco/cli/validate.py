"""`hf-diloco validate`: checks everything about a run that can be checked without starting it.

`hf-diloco launch --dry-run` makes the same checks of the settings, with `check_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TypeVar

from hf_diloco.apps.common.arguments import check_training, training_arguments
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.deepspeed import try_deepspeed
from hf_diloco.apps.common.hub import check_login, use_cache_without_hub
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.cli import devices
from hf_diloco.cli.doctor import Check, Finding, judge, run_checks, show_findings
from hf_diloco.cli.doctor.machine import check_disk, memory_here
from hf_diloco.cli.doctor.network import check_store
from hf_diloco.cli.plan import LaunchOptions, Plan, leave_other_launchers, load_options, make_plan
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.utils import text
from hf_diloco.utils.urls import is_object_store

T = TypeVar("T")

_CHECKPOINT_BYTES = 20  # per parameter: fp32 weights and two moments, outer parameters and momentum
_KEPT = 2
_OTHER_MEMORY = 1e9  # bytes of a process whatever the model: PyTorch, Trainer, DeepSpeed


def run_validate(options: LaunchOptions, as_json: bool) -> int:
    """Runs `hf-diloco validate`; returns its exit code: 1 if the run would fail here, else 0.

    Raises `ConfigError` if the run file, the options, or files they name are unusable; the message has all problems.
    """
    run = load_options(options)
    leave_other_launchers()
    plan = check_all(run, lambda: make_plan(run, options))
    return show_findings(run_checks(_checks(run, plan)), as_json)


def check_all(run: BaseRun, first: Callable[[], T]) -> T:
    """Makes the checks of an island before its first step, except those with other islands. Starts and writes nothing.

    Imports the libraries, which takes seconds, and reads a little of the data. Calls `first` before, and returns its
    value. Raises `ConfigError` if `first` or a check failed; the message has all problems.
    """
    use_cache_without_hub(run.needs_hub)  # before the libraries are imported
    own: list[Callable[[], object]] = [partial(_try_training, run), *([check_login] if run.push_to_hub else [])]
    problems: dict[str, None] = {}
    made: list[T] = []
    for attempt in chain([lambda: made.append(first())], own, run.probes()):
        try:
            attempt()
        except DiLoCoError as error:
            problems[str(error)] = None
    if problems:
        raise ConfigError("; ".join(problems))
    return made[0]


def _try_training(run: BaseRun) -> None:
    """Creates the Trainer's arguments as an island does, but for one rank without process group; checks DeepSpeed."""
    check_training(run.training)
    fsdp = run.fsdp and run.fsdp.model_copy(update={"num_replicas": 1})
    training = {name: value for name, value in run.training.items() if name not in ("report_to", "ddp_backend")}
    args = training_arguments(run.model_copy(update={"deepspeed": None, "fsdp": fsdp, "training": training}))
    try_deepspeed(run, args)


def _checks(run: BaseRun, plan: Plan) -> Iterator[tuple[str, Check]]:
    yield "run file", partial(_settings, run, plan)
    if isinstance(run, RunFile):
        yield "memory", partial(_resources, run, plan)
    if plan.rendezvous is not None and is_object_store(plan.rendezvous):
        yield "store", partial(check_store, plan.rendezvous)
    yield "not tried", partial(_not_tried, run, plan)


def _settings(run: BaseRun, plan: Plan) -> Iterable[Finding]:
    here = text.counted(len(plan.islands), run.unit)
    named = "DeepSpeed's, tokenizer and data" if isinstance(run, RunFile) else "model and images"
    yield Finding(
        "run file",
        "ok",
        f"settings, Trainer's arguments, {named} of {run.name} can be used; "
        f"{here} would start here, with {run.max_steps:,} steps",
    )


def _resources(run: RunFile, plan: Plan) -> Iterator[Finding]:
    import torch

    from hf_diloco.planning.equations import Link
    from hf_diloco.planning.estimate import memory_of
    from hf_diloco.planning.scenario import scenario_of

    scenario = scenario_of(run, Link(1e9), None, None)
    memory = memory_of(scenario)
    ranks = scenario.num_ranks * len(plan.islands)
    found = f"{text.short_count(scenario.num_parameters)} parameters in {scenario.num_layers} layers can be made"
    yield Finding("model", "ok", found)
    has_devices = not run.launch.use_cpu and bool(devices.cuda_devices())
    on_cuda = has_devices and torch.cuda.is_available()
    if on_cuda:
        visible = (island.environment.get("CUDA_VISIBLE_DEVICES") or "" for island in plan.islands)
        num_sharing = devices.num_sharing([share.split(",") for share in visible if share])
        yield _device_memory(memory.accelerator, num_sharing)
    elif has_devices:
        yield Finding(
            "device memory",
            "warning",
            f"PyTorch {torch.__version__} cannot use the CUDA devices here: training would be on the CPU",
            "`hf-diloco doctor` says why; or set launch.use_cpu=true",
        )
    needed = memory.host + memory.outer + _OTHER_MEMORY + (0 if on_cuda else memory.accelerator)
    yield _host_memory(needed * ranks)
    kept = int(run.training.get("save_total_limit") or _KEPT) + 1
    yield from check_disk(run.folder, _CHECKPOINT_BYTES * scenario.num_parameters * kept * len(plan.islands))


def _device_memory(needed: float, num_sharing: int) -> Finding:
    """Checks that the states, `needed` bytes each, of `num_sharing` islands' ranks fit into a device's memory."""
    import torch

    total = min(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))
    users = f"{num_sharing} islands share a device of {text.size(total)}" if num_sharing > 1 else ""
    found = f"a rank needs {text.size(needed)}, and room for activations; " + (
        users or f"its device has {text.size(total)}"
    )
    remedy = "a higher ZeRO stage, more ranks, or offload (docs/deepspeed.md)"
    return judge("device memory", needed * num_sharing < total, found, remedy, "problem")


def _host_memory(needed: float) -> Finding:
    free, _ = memory_here()
    found = f"the ranks here need about {text.size(needed)}, and room for activations; {text.size(free)} are free"
    remedy = "a smaller model, fewer ranks, or fewer islands on this machine"
    return judge("memory", needed < free, found, remedy, "problem")


def _not_tried(run: BaseRun, plan: Plan) -> Iterable[Finding]:
    parts = ["the training itself, and whether its activations fit"]
    if run.meeting.num_islands > len(plan.islands):
        parts.append(f"the other {text.plural(run.unit, 2)} (on each of them: hf-diloco validate)")
        if plan.rendezvous is not None and not is_object_store(plan.rendezvous):
            parts.append(f"the way to {plan.rendezvous} (hf-diloco doctor --peer)")
    yield Finding("not tried", "ok", "; ".join(parts))
