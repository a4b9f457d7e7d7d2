"""The input of an estimate: from a run file, its model's size and its record, or from a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.errors import ConfigError
from hf_diloco.planning.equations import Link, Way

if TYPE_CHECKING:
    from hf_diloco.apps.lm.runfile import DiLoCoBlock, RunFile

DEFAULT_LAYERS = 24
DEFAULT_STEP_SECONDS = 1.0
STEP_ASSUMED = f"a step takes {DEFAULT_STEP_SECONDS:g} s (--step-time)"


@dataclass(frozen=True)
class Scenario:
    """The properties of a run that its traffic and memory depend on.

    Attributes:
        name: of the run; empty without a run file.
        num_parameters: trained parameters.
        largest_layer: parameters of the largest module that directly holds any.
        num_layers: blocks of the model.
        step_seconds: of one inner step, without communication.
        num_ranks: of an island.
        stage: of ZeRO; None without DeepSpeed.
        offload: of optimizer and of parameters to the host.
        max_steps: of the run; None if unknown.
        price: of a gigabyte that leaves an island, in any currency; None if unknown.
        assumed: values that were not given, with the option that sets each.
    """

    name: str
    num_parameters: int
    largest_layer: int
    num_layers: int
    diloco: DiLoCoBlock
    link: Link
    step_seconds: float
    num_ranks: int = 1
    stage: int | None = None
    offload: tuple[bool, bool] = (False, False)
    max_steps: int | None = None
    price: float | None = None
    assumed: tuple[str, ...] = field(default=())

    @property
    def num_islands(self) -> int:
        """Islands that take part in a round; 1 without an outer loop."""
        return self.diloco.num_islands if self.diloco.enabled else 1

    @property
    def way(self) -> Way:
        """How pseudo-gradients travel."""
        if not self.diloco.is_direct:
            return "bucket"
        if self.diloco.meets_at_island_0:
            return "island 0"
        return "store" if self.diloco.meets_in_store else "direct"

    def with_link(self, bits_per_second: float) -> Scenario:
        """Returns the same scenario at another bit rate."""
        return replace(self, link=replace(self.link, bits_per_second=bits_per_second))


def scenario_of(run: RunFile, link: Link, step_seconds: float | None, price: float | None) -> Scenario:
    """Returns the scenario of a language model's run; for its arguments see `Scenario`.

    If `step_seconds` is None, an inner step is as long as in the run's record, or else `DEFAULT_STEP_SECONDS`.
    Raises `ConfigError` if the model's configuration or its tokenizer cannot be loaded.
    """
    from hf_diloco.apps.lm.model import sketch_model
    from hf_diloco.apps.lm.tokenizer import load_tokenizer

    model = sketch_model(run, load_tokenizer(run.tokenizer.path) if run.tokenizer.path else None)
    measured = step_seconds or _measured_step(run.folder)
    stage, offload = _zero(run)
    limit = run.diloco.rate_limit * 1e6 if run.diloco.rate_limit else math.inf
    return Scenario(
        name=run.name,
        num_parameters=model.num_parameters(),
        largest_layer=max(sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()),
        num_layers=getattr(model.config.get_text_config(), "num_hidden_layers", None) or DEFAULT_LAYERS,
        diloco=run.diloco,
        link=replace(link, connections=run.diloco.connections, bits_per_second=min(link.bits_per_second, limit)),
        step_seconds=measured or DEFAULT_STEP_SECONDS,
        num_ranks=run.launch.num_processes,
        stage=stage,
        offload=offload,
        max_steps=run.max_steps,
        price=price,
        assumed=() if measured else (STEP_ASSUMED,),
    )


def _measured_step(folder: Path) -> float | None:
    """Returns the mean seconds of an inner step in the run's record; None if there is none."""
    from hf_diloco.report.read import load_run
    from hf_diloco.report.records import Sync

    if not folder.is_dir():
        return None
    try:
        islands = load_run(folder).islands
    except ConfigError:  # a folder without a record
        return None
    seconds, num_steps = 0.0, 0
    for section in islands[0].sections:
        syncs = section.of(Sync)
        if section.start and syncs:
            seconds += sum(sync.seconds_computing or 0.0 for sync in syncs)
            num_steps += syncs[-1].step - section.start.step
    return seconds / num_steps if num_steps and seconds else None


def _zero(run: RunFile) -> tuple[int | None, tuple[bool, bool]]:
    """Returns ZeRO's stage, and whether it offloads optimizer and parameters."""
    from hf_diloco.apps.common.deepspeed import deepspeed_config

    config = deepspeed_config(run)
    if config is None:
        return None, (False, False)
    zero: Any = config.get("zero_optimization") or {}
    devices = [str((zero.get(f"offload_{what}") or {}).get("device", "none")) for what in ("optimizer", "param")]
    return int(zero.get("stage", 0)), (devices[0] != "none", devices[1] != "none")
