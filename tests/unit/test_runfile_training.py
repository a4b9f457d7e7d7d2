"""The `training:` block against TrainingArguments: names, types, ranges, and what belongs elsewhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_diloco.apps.common.arguments import (
    check_names,
    check_training,
    training_arguments,
)
from hf_diloco.apps.common.base import DECIDED_ELSEWHERE
from hf_diloco.apps.common.deepspeed import deepspeed_config
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.errors import ConfigError
from tests.processes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"learning_rate": "fifty"}, "training.learning_rate: input should be a valid number, got 'fifty'"),
    ({"learning_rate": -3.0}, "training.learning_rate: input should be greater than 0, got -3.0"),
    ({"learning_rate": 0}, "should be greater than 0"),
    ({"learning_rate": float("nan")}, "should be a finite number, got nan"),
    ({"adam_beta1": float("nan")}, "training.adam_beta1: input should be a finite number, got nan"),
    ({"learning_rate": float("inf")}, "training.learning_rate: input should be a finite number, got inf"),
    ({"learning_rat": 1e-3}, "unknown setting training.learning_rat=0.001 (did you mean learning_rate?)"),
    ({"bf16": 1}, "training.bf16: input should be a valid boolean, got 1"),
    ({"save_steps": "10"}, "training.save_steps: input should be a valid number, got '10'"),
    ({"per_device_train_batch_size": 0}, "should be greater than 0, got 0"),
    ({"weight_decay": -0.1}, "should be greater than or equal to 0, got -0.1"),
    ({"adam_beta2": 1.0}, "should be less than 1, got 1.0"),
    ({"dataloader_num_workers": 100000}, "dataloader_num_workers: input should be less than or equal to 1024, got"),
    ({"accelerator_config": "x"}, "training.accelerator_config: no file 'x'; give a JSON file of Accelerate's"),
    ({"gradient_accumulation_steps": 2**40}, "gradient_accumulation_steps: input should be less than or equal to"),
    ({"include_num_input_tokens_seen": "x"}, "seen: 'x' is not one of all, non_padding, no"),
    ({"learning_rate": "x", "bf16": 1}, "'x'; training.bf16"),
]


@pytest.mark.parametrize(("training", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_training(training)
    assert message in str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_ready_run_file_passes(path: Path) -> None:
    training = load_run_file(path).training
    assert training["max_steps"] > 0
    check_training(training)


def test_names_that_are_right_need_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    monkeypatch.setattr("hf_diloco.apps.common.arguments.check_training", lambda training: pytest.fail("imports"))
    check_names(dict.fromkeys(set(names) - DECIDED_ELSEWHERE.keys()))


def test_a_name_that_is_wrong_is_told() -> None:
    with pytest.raises(ConfigError, match=r"training\.learning_rte"):
        check_names({"learning_rte": 1})


def test_what_is_decided_elsewhere_is_told_with_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(
            "quickstart", [f"training.{name}=1" for name in ("output_dir", "seed", "bf16_full_eval", "hub_model_id")]
        )
    assert "training: output_dir cannot be set here: checkpoints go to OUTPUT/NAME/island-K" in str(caught.value)
    assert "bf16_full_eval cannot be set here: evaluations belong to training" in str(caught.value)
    assert "hub_model_id cannot be set here: the final model alone is pushed; set push_to_hub" in str(caught.value)
    assert "seed cannot be set here: set seed at the top of the run file" in str(caught.value)


@pytest.mark.parametrize("name", DECIDED_ELSEWHERE)
def test_all_that_is_decided_elsewhere_is_an_argument(name: str) -> None:
    assert name in {field.name for field in dataclasses.fields(TrainingArguments)}


def test_structured_values_pass() -> None:
    check_training({
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
        "report_to": ["tensorboard"],
        "accelerator_config": {"split_batches": False},
        "save_total_limit": None,
        "warmup_steps": 0.1,
        "logging_steps": 10,
    })  # fmt: skip


def test_arguments_of_an_island(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "deepspeed=null", "diloco.island=1", "launch.use_cpu=true", "seed=7"]
    args = training_arguments(load_run_file(ROOT / "configs" / "quickstart.yaml", overrides))
    assert args.output_dir == str(tmp_path / "quickstart" / "island-1")
    assert (args.seed, args.use_cpu, args.deepspeed, args.num_train_epochs) == (7, True, None, 3.0)


def test_an_island_refuses_a_tracker_that_is_not_installed(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "deepspeed=null", "training.report_to=[mlflow]"]
    with pytest.raises(ConfigError, match=r"training\.report_to: 'mlflow' is not installed here: install its package"):
        check_training(load_run_file(ROOT / "configs" / "quickstart.yaml", overrides).training)


def test_what_transformers_refuses_becomes_a_config_error(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "deepspeed=null", "training.logging_steps=1.5"]
    with pytest.raises(ConfigError, match="training: --logging_steps must be an integer"):
        training_arguments(load_run_file(ROOT / "configs" / "quickstart.yaml", overrides))


def test_a_process_without_a_launcher_has_no_process_group(tmp_path: Path) -> None:
    """Islands of one rank and of several share a run file."""
    overrides = [f"output={tmp_path}", "deepspeed=null", "training.ddp_backend=gloo", "launch.use_cpu=true"]
    assert training_arguments(load_run_file(ROOT / "configs" / "quickstart.yaml", overrides)).ddp_backend is None


def test_zero_3_is_told_to_save_whole_models(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (tmp_path / "run.yaml").write_text("training: {max_steps: 1}\ndeepspeed: zero.json\n")
    config = deepspeed_config(load_run_file(tmp_path / "run.yaml"))
    assert config is not None
    assert config["zero_optimization"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def test_what_deepspeeds_configuration_leaves_out_comes_from_training(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "training: {max_steps: 1}\n"
        "deepspeed: {gradient_clipping: 0.5, gradient_accumulation_steps: null, zero_optimization: {stage: 1}}\n"
    )
    assert deepspeed_config(load_run_file(tmp_path / "run.yaml")) == {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
    }


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_ready_deepspeed_files_are_what_their_names_say(path: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**json.loads(path.read_text())["zero_optimization"])
    assert f"zero{int(zero.stage)}" == path.stem.split("_")[0]
    assert (zero.offload_optimizer is not None) == path.stem.endswith("_offload")
