"""What does not go with the outer loop is refused from one list, by every way in, before the first step."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import ProjectConfiguration
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from hf_diloco import DiLoCoCallback, DiLoCoConfig, GossipCallback, OneBitAdam, OneBitCallback, OuterLoop
from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.errors import ConfigError
from hf_diloco.trainer.arguments import check_arguments
from hf_diloco.trainer.gossip_steps import check_gossip_arguments
from hf_diloco.trainer.refusals import REFUSALS, Refusal, Where, refuse
from tests.processes import ROOT
from tests.trainers import make_trainer

REFUSED_VALUES: dict[str, Any] = {
    "save_strategy": "best",
    "optim": "schedule_free_adamw",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), 0.5),
    **dict.fromkeys(("optim_args", "optim_target_modules"), "text"),
    "fsdp": "full_shard",
    "fsdp_config": {"version": 1},
    "parallelism_config": "tp",
    "deepspeed": "zero2.json",
    "save_total_limit": 1,
    "ProjectConfiguration.total_limit": 1,
}
OF_ARGUMENTS = [refusal for refusal in REFUSALS if refusal.setting in TrainingArguments.__dataclass_fields__]


def cases(where: Where) -> Any:
    found = [refusal for refusal in OF_ARGUMENTS if where in refusal.where]
    return pytest.mark.parametrize("refusal", found, ids=lambda refusal: refusal.setting)


def arguments(folder: Path, refusal: Refusal) -> TrainingArguments:
    """Arguments with a refused value; set afterwards, as some need what is not installed here."""
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    setattr(args, refusal.setting, REFUSED_VALUES.get(refusal.setting, True))
    return args


class Searching(TrainerCallback):
    """Makes training a trial."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.is_hyper_param_search = True


@cases("islands")
def test_the_callback_refuses(tmp_path: Path, refusal: Refusal) -> None:
    with pytest.raises(ConfigError, match=rf"^{refusal.setting}=.* cannot be used: "):
        check_arguments(DiLoCoConfig(), arguments(tmp_path, refusal))


@cases("nodes")
def test_a_node_refuses(tmp_path: Path, refusal: Refusal) -> None:
    with pytest.raises(ConfigError, match=rf"^{refusal.setting}=.* cannot be used: "):
        check_gossip_arguments(arguments(tmp_path, refusal))


@cases("islands")
def test_a_run_file_of_islands_refuses(refusal: Refusal) -> None:
    value = REFUSED_VALUES.get(refusal.setting, True)
    with pytest.raises(ConfigError, match=rf"{refusal.setting}={value!r} cannot be used: "):
        load_run_file(ROOT / "configs" / "quickstart.yaml", [f"training.{refusal.setting}={value}".lower()])


@pytest.mark.parametrize(
    "override",
    ["training.fp16=true", "training.save_total_limit=1", "training.adam_beta1=0.5", "training.optim_args=x=1"],
)
def test_a_run_file_of_nodes_refuses(override: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used: "):
        read_run_file(VisionRun, ROOT / "configs" / "vision" / "quickstart.yaml", [override])


def test_all_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse({"load_best_model_at_end": True, "push_to_hub": True, "auto_find_batch_size": False}, "islands")
    assert "load_best_model_at_end=True" in str(caught.value)
    assert "push_to_hub=True" in str(caught.value)
    assert "auto_find_batch_size" not in str(caught.value)


def test_defaults_pass(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    check_arguments(DiLoCoConfig(), args)
    check_gossip_arguments(args)
    refuse({field.name: getattr(args, field.name) for field in dataclasses.fields(args)}, "loop")


def test_nodes_are_not_told_of_islands() -> None:
    for refusal in REFUSALS:
        if "nodes" in refusal.where:
            assert "island" not in refusal.why.replace("island or node", ""), refusal.setting


def test_parallelism_of_data_alone_passes() -> None:
    """FSDP2 on replicas of shards."""
    settings = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}
    refuse(settings, "islands")
    for config, where in ((settings["parallelism_config"], "nodes"), (ParallelismConfig(tp_size=2), "islands")):
        with pytest.raises(ConfigError, match="parallelism_config="):
            refuse({"parallelism_config": config}, where)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 500}])
def test_training_does_not_begin(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=4), **changes)
    with pytest.raises(ConfigError, match="load_best_model_at_end=True cannot be used"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_early_stopping_is_refused(tmp_path: Path) -> None:
    stopping = EarlyStoppingCallback(3)
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(sync_every=4), stopping, eval_strategy="steps", metric_for_best_model="loss"
    )
    with pytest.raises(ConfigError, match="EarlyStoppingCallback=True cannot be used: it would end training here"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_round_of_islands_after_every_1_bit_step_is_refused_before_they_meet(tmp_path: Path) -> None:
    nowhere: dict[str, Any] = {"num_islands": 2, "island": 0, "rendezvous": "tcp://127.0.0.1:1", "join_timeout": 0.1}
    optimizer = OneBitAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, freeze_step=2)
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=1, **nowhere), OneBitCallback(optimizer))
    with pytest.raises(ConfigError, match="sync_every=1 cannot be used: the 1-bit all-reduce is between the ranks"):
        trainer.train()


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy", "an object"])
def test_a_schedule_that_follows_evaluations_is_refused(tmp_path: Path, kind: str) -> None:
    name = "linear" if kind == "an object" else kind
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=4), eval_strategy="steps", lr_scheduler_type=name)
    if kind == "an object":
        assert trainer.model is not None
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
        trainer.lr_scheduler = schedule
    with pytest.raises(ConfigError, match=r"lr_scheduler_type=.* cannot be used: it follows evaluations"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_search_for_hyperparameters_is_refused(tmp_path: Path) -> None:
    """By what the Trainer's state says; the libraries that make trials are not installed here."""
    trainer = make_trainer(tmp_path, Searching(), DiLoCoCallback(sync_every=4))
    trainer.callback_handler.callbacks.sort(key=lambda one: not isinstance(one, Searching))
    with pytest.raises(ConfigError, match="hyperparameter_search=True cannot be used: each island would try"):
        trainer.train()
    assert trainer.state.global_step == 0


def begin_as(way: str, folder: Path) -> Callable[[], object]:
    if way == "loop":
        accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return OuterLoop(accelerator, model, optimizer, output_dir=folder).__enter__
    one_bit = OneBitAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, freeze_step=2)
    callbacks: dict[str, Callable[[], TrainerCallback]] = {
        "islands": DiLoCoCallback,
        "nodes": lambda: GossipCallback(num_nodes=1),
        "1-bit": lambda: OneBitCallback(one_bit),
    }
    return make_trainer(folder, callbacks[way]()).train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["islands", "nodes", "1-bit", "loop"])
def test_another_default_type_is_refused(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As of scripts that make their model by it."""
    begin = begin_as(way, tmp_path)
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(ConfigError, match=rf"torch\.set_default_dtype={dtype} cannot be used: .* set it back to"):
            begin()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", ["islands", "nodes", "loop"])
def test_another_default_device_is_refused(where: Where) -> None:
    message = r"torch\.set_default_device=device\(type='meta'\) cannot be used: .* set it back to"
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        refuse({}, where)


def test_the_loop_refuses(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.raises(ConfigError, match=r"ProjectConfiguration\.total_limit=1 cannot be used"),
        OuterLoop(accelerator, model, optimizer),
    ):
        raise AssertionError("the loop has begun")


@pytest.mark.parametrize("make", [DiLoCoCallback, GossipCallback])
@pytest.mark.parametrize("given", [500, {"sync_every": 5}, "ring"], ids=str)
def test_settings_that_are_none(make: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"settings are given by name or as a \w+Config, got .*: write \w+Callback\("):
        make(given)


def test_the_loop_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"got 500: write OuterLoop\(\.\.\., DiLoCoConfig\(sync_every=500\)\)"):
        OuterLoop(types.SimpleNamespace(), None, None, 500)  # type: ignore[arg-type]
