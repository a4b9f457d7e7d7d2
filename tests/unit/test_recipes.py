"""Run files that follow a paper: each loads, and has the values that the paper names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.apps.common.arguments import check_training
from hf_diloco.apps.lm.runfile import RunFile, load_run_file
from hf_diloco.config.advice import warn_about_plan
from hf_diloco.config.diloco import DiLoCoConfig
from tests.processes import ROOT

FOLDER = ROOT / "configs" / "recipes"

NESTEROV: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
WHOLE: dict[str, Any] = {"num_fragments": 1, "fragment_sync_delay": 0}

# file -> the paper, what its outer loop is, what of the inner one is its own
PAPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "diloco": (
        "arXiv 2311.08105",
        {"sync_every": 500, "num_islands": 8, "payload": "fp32", **NESTEROV, **WHOLE},
        {"learning_rate": 4e-4, "warmup_steps": 1000, "weight_decay": 0.1, "max_steps": 24_000 + 64_000},
    ),
    "opendiloco_fp16": (
        "arXiv 2407.07852",
        {"sync_every": 500, "num_islands": 8, "payload": "fp16", **NESTEROV, **WHOLE},
        {"learning_rate": 4e-4, "warmup_steps": 1000, "max_steps": 88_000},
    ),
    "intellect_1_int8": (
        "arXiv 2412.01152",
        {"sync_every": 100, "payload": "int8", **NESTEROV, **WHOLE},
        {"warmup_steps": 1000, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95},
    ),
    "streaming_diloco_fp4": (
        "arXiv 2501.18512",
        {
            "sync_every": 100,
            "num_islands": 2,
            "payload": "fp4",
            "feedback_decay": 0.0,
            "outer_momentum": 0.9,
            "nesterov": True,
            "fragment_order": "strided",
            "fragment_update_alpha": 0.5,
        },
        {},
    ),
    "sparseloco": (
        "arXiv 2508.15706",
        {"payload": "topk", "feedback_decay": 0.95, "outer_lr": 1.0, "outer_momentum": 0.0, **WHOLE},
        {},
    ),
}


# Those that run on two cores: file -> the paper, what its outer loop is.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "slowmo": (
        "arXiv 1910.00643",
        {
            "method": "slowmo",
            "sync_every": 12,
            "outer_lr": 1.0,
            "outer_momentum": 0.6,
            "options": {"inner_buffers": "keep"},
        },
    ),
    "overlap_local_sgd": (
        "arXiv 2002.09539",
        {"method": "overlap-local-sgd", "sync_every": 12, "outer_momentum": 0.7, "options": {"pull": 0.6}},
    ),
    "muloco": (
        "arXiv 2505.23725",
        {"sync_every": 30, "outer_lr": 0.7, "outer_momentum": 0.6, "nesterov": True, **WHOLE},
    ),
    "fsdp2": (
        "arXiv 2304.11277",
        {"sync_every": 12, "outer_lr": 0.7, "outer_momentum": 0.5, "nesterov": True, **WHOLE},
    ),
    "snoo": (
        "arXiv 2510.15830",
        {"num_islands": 1, "sync_every": 20, "outer_lr": "auto", "outer_momentum": "auto", "nesterov": True, **WHOLE},
    ),
}


def load(name: str) -> RunFile:
    return load_run_file(FOLDER / f"{name}.yaml")


def settings_of(run: RunFile) -> DiLoCoConfig:
    """As on an island."""
    block = run.diloco.model_dump(exclude={"enabled"})
    return DiLoCoConfig(**{**block, "rendezvous": "tcp://10.0.0.1:29400"})


def test_every_recipe_has_its_paper() -> None:
    without_outer_loop = "onebit_lamb"  # tests/unit/test_masking.py
    assert {path.stem for path in FOLDER.iterdir()} == {*PAPERS, *SMALL, without_outer_loop}


@pytest.mark.parametrize("name", PAPERS)
def test_values_are_the_papers(name: str) -> None:
    paper, outer, inner = PAPERS[name]
    run = load(name)
    config = settings_of(run)
    assert {key: getattr(config, key) for key in outer} == outer
    assert {key: run.training[key] for key in inner} == inner
    head = "".join(line for line in (FOLDER / f"{name}.yaml").read_text().splitlines() if line.startswith("#"))
    assert paper in head
    assert "# From" in head
    assert "# Ours:" in head
    assert f"configs/recipes/{name}.yaml" in head


@pytest.mark.parametrize("name", SMALL)
def test_small_recipes_need_neither_network_nor_gpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    paper, outer = SMALL[name]
    run = load(name)
    check_training(run.training)
    config = settings_of(run) if run.diloco.num_islands > 1 else run.diloco.resolve()
    assert {key: getattr(config, key) for key in outer} == outer
    assert run.data.source == "embedded"
    assert run.model.preset == "llama-tiny"
    for steps in (run.max_steps, run.training["eval_steps"], run.training["save_steps"]):
        assert steps % run.diloco.sync_every == 0
    with caplog.at_level(logging.INFO, "hf_diloco"):
        warn_about_plan(config, run.max_steps)
    assert not caplog.records
    head = "".join(line for line in (FOLDER / f"{name}.yaml").read_text().splitlines() if line.startswith("#"))
    assert paper in head
    assert "# Ours:" in head
    assert f"configs/recipes/{name}.yaml" in head


@pytest.mark.parametrize("name", PAPERS)
def test_nothing_is_to_be_said_against_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run = load(name)
    check_training(run.training)
    assert run.data.source == "c4"
    assert Path(str(run.deepspeed)).is_file()
    for steps in (run.max_steps, run.training["eval_steps"], run.training["save_steps"]):
        assert steps % run.diloco.sync_every == 0
    with caplog.at_level(logging.INFO, "hf_diloco"):
        warn_about_plan(settings_of(run), run.max_steps)
    assert not caplog.records


@pytest.mark.parametrize("name", PAPERS)
def test_a_step_of_an_island_sees_512_sequences(name: str) -> None:
    run = load(name)
    ranks = run.launch.num_processes
    accumulated = run.training["gradient_accumulation_steps"]
    assert run.training["per_device_train_batch_size"] * accumulated * ranks == 512
    assert run.data.sequence_length == 1024


def test_streaming_keeps_to_the_papers_limits() -> None:
    from hf_diloco.apps.lm.model import _SHAPES

    run = load("streaming_diloco_fp4")
    config = settings_of(run)
    assert 1 <= config.fragment_sync_delay <= 5
    assert _SHAPES[str(run.model.preset)]["num_hidden_layers"] == 3 * config.num_fragments
    assert config.sync_every % config.num_fragments == 0


def test_sparseloco_has_15_to_30_steps_between_rounds() -> None:
    assert 15 <= load("sparseloco").diloco.sync_every <= 30
