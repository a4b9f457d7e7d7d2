"""Muon on the matrices of hidden layers and AdamW on the rest: one optimizer for a Trainer, a loop and a run file."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hf_diloco
from hf_diloco import DiLoCoConfig, MuonAdamW
from hf_diloco.apps.common.deepspeed import deepspeed_config
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.inner import open_shards
from hf_diloco.optimizers import OptimizerBlock
from hf_diloco.optimizers.muon import split
from tests.fixed_runs import Run
from tests.islands import run_islands
from tests.programs.trainer_island import Tokens, make_model

SETTINGS: dict[str, Any] = {"lr": 3e-3, "muon_lr": 2e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
SLOWMO: dict[str, Any] = {"method": "slowmo", "sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.6}


def llama(tied: bool = True, seed: int = 1) -> Any:
    return make_model(lora=False, tied=tied, seed=seed)


def backward(model: Any, seed: int) -> None:
    tokens = torch.stack([Tokens(seed, size=4)[number]["input_ids"] for number in range(4)])
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        backward(model, seed + step)
        optimizer.step()


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    return {name for name, one in model.named_parameters() if any(one is other for other in group["params"])}


# What is trained by what


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_hidden_layers_are_muons(tied: bool) -> None:
    model = llama(tied)
    groups = {group["name"]: names_of(model, group) for group in MuonAdamW(model, lr=1e-3).param_groups}
    assert groups["adamw"] == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set())
    assert all("norm" in name for name in groups["adamw_no_decay"])
    assert all(re.search(r"layers\.\d\.(self_attn|mlp)\.\w+_proj\.weight", name) for name in groups["muon"])
    assert sum(map(len, groups.values())) == len(dict(model.named_parameters()))


def test_all_embeddings_and_frozen_parameters_are_left_out() -> None:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
    }
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes))
    frozen = model.get_parameter("bert.encoder.layer.0.output.dense.weight").requires_grad_(False)
    hidden, others, vectors = split(model)
    assert {one.shape for one in others} == {(32, 8), (512, 8), (2, 8)}, "words, positions and types"
    assert len(hidden) == 6, "four of the attention, one of the rest, and that before the head"
    assert all(one is not frozen for one in [*hidden, *others, *vectors])


def test_a_head_that_the_model_does_not_tell_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Conv2d(2, 3, 3), nn.Linear(6, 2))
    groups = {
        group["name"]: names_of(model, group) for group in MuonAdamW(model, 1e-3, adamw=["2.weight"]).param_groups
    }
    assert groups == {
        "muon": {"0.weight"},
        "adamw": {"1.weight", "2.weight"},
        "adamw_no_decay": {"0.bias", "1.bias", "2.bias"},
    }
    with pytest.raises(ConfigError, match=r"the model has no parameter 3\.weight"):
        MuonAdamW(model, 1e-3, adamw=["3.weight"])
    with pytest.raises(UnsupportedError, match="this model has none"):
        MuonAdamW(nn.Embedding(4, 4), 1e-3)
    with pytest.raises(ConfigError, match="Learning rate should be >= 0 but is: -1"):
        MuonAdamW(model, 1e-3, muon_lr=-1)


# What is computed


def test_a_step_is_one_of_torchs_muon_and_one_of_torchs_adamw() -> None:
    model, other = llama(), llama()
    optimizer = MuonAdamW(model, **SETTINGS, momentum=0.9, ns_steps=4, adjust_lr="original")
    hidden, tables, vectors = split(other)
    halves = [
        torch.optim.Muon(hidden, lr=2e-2, weight_decay=0.1, momentum=0.9, ns_steps=4, adjust_lr_fn="original"),
        torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=3e-3,
            betas=(0.9, 0.95),
        ),
    ]
    for step in range(3):
        train(model, optimizer, 1, seed=step)
        backward(other, step)
        for half in halves:
            half.step()
    assert torch.equal(weights_of(model), weights_of(other))
    assert not torch.equal(weights_of(model), weights_of(llama()))


def test_a_matrix_moves_by_the_rate_in_every_direction() -> None:
    """By the equation itself: without decay, all singular values of the step are about lr x .2 sqrt(max(m, n))."""
    model = nn.Linear(48, 16, bias=False)
    before = model.weight.detach().clone()
    optimizer = MuonAdamW(model, lr=0.1)
    model(torch.randn(64, 48, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    values = torch.linalg.svdvals(before - model.weight.detach()) / (0.1 * 0.2 * 48**0.5)
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_a_schedule_multiplies_each_groups_own_rate() -> None:
    model = llama()
    optimizer = MuonAdamW(model, **SETTINGS)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    train(model, optimizer, 1)
    scheduler.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"adamw": 3e-3 / 2, "adamw_no_decay": 3e-3 / 2, "muon": 2e-2 / 2}
    start = weights_of(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    assert torch.equal(weights_of(model), start), "each half takes the rates of the groups as they are now"


def test_its_state_goes_on_bit_for_bit() -> None:
    model = llama()
    optimizer = MuonAdamW(model, **SETTINGS)
    train(model, optimizer, 2)
    again = llama()
    again.load_state_dict(model.state_dict())
    loaded = MuonAdamW(again, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, seed=5)
    train(again, loaded, 2, seed=5)
    assert torch.equal(weights_of(model), weights_of(again))


# Inside islands


def trainer(folder: Path, **changes: Any) -> transformers.Trainer:
    arguments: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    model = llama()
    callback = hf_diloco.DiLoCoCallback(sync_every=2)
    args = transformers.TrainingArguments(output_dir=str(folder), **arguments)
    optimizer = MuonAdamW(model, **SETTINGS)
    return transformers.Trainer(
        model, args, train_dataset=Tokens(0), optimizers=(optimizer, None), callbacks=[callback]
    )


def test_a_resumed_trainer_is_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "run")
    whole.train()
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))


def test_in_a_loop(tmp_path: Path) -> None:
    """An outer step that takes the average as it is changes nothing but by rounding, of which Muon makes much."""
    model, alone, start = llama(), llama(), weights_of(llama())
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, MuonAdamW(model, **SETTINGS))
    config = DiLoCoConfig(sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    with hf_diloco.OuterLoop(accelerator, prepared, optimizer, config, output_dir=tmp_path) as outer:
        for step in range(4):
            backward(prepared, step)
            optimizer.step()
            outer.step()
    train(alone, MuonAdamW(alone, **SETTINGS), 4)
    assert (weights_of(model) - weights_of(alone)).norm() < 0.01 * (weights_of(alone) - start).norm()


@pytest.mark.parametrize("wanted", ["zero", "keep", "average"])
def test_slowmo_sees_three_groups_and_all_buffers(wanted: str, tmp_path: Path) -> None:
    """The rates of each group, and of each parameter its own buffers, after a round of two islands."""

    def island_main(island: int) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = llama()
        optimizer = MuonAdamW(model, **SETTINGS)
        shards = open_shards(model, optimizer)
        session = run.session(island)
        session.join(shards, tmp_path / str(island))
        for step in range(2):
            train(model, optimizer, 1, seed=10 * island + step)
            held = buffers_of(model, optimizer)
            if session.outer.count_step():
                session.sync()
        now = buffers_of(model, optimizer)
        session.leave(finished=True)
        return shards.inner.rates, held, now

    run = Run(tmp_path, 2, **SLOWMO, options={"inner_buffers": wanted})
    results = run_islands(2, island_main)
    held = [result[1] for result in results]
    for rates, own, now in results:
        assert rates == [3e-3, 3e-3, 2e-2]
        assert {name.rpartition(".")[2] for name in own} == {"exp_avg", "exp_avg_sq", "momentum_buffer", "step"}
        for name, value in now.items():
            if wanted == "zero":
                assert not value.any(), name
            elif wanted == "keep" or name.endswith("step"):
                assert torch.equal(value, own[name]), name
            else:
                torch.testing.assert_close(value, (held[0][name] + held[1][name]) / 2, msg=name)


def buffers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{kind}": value.clone()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state[parameter].items()
    }


# In a run file


def run_file(folder: Path, **changes: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(json.dumps({"training": {"max_steps": 8}, "optimizer": {"name": "muon"}, **changes}))
    return path


def test_the_run_file_names_its_settings(tmp_path: Path) -> None:
    from hf_diloco.optimizers import make_optimizer

    block = load_run_file(
        run_file(tmp_path, optimizer={"name": "muon", "muon_lr": 0.02, "momentum": 0.9, "adjust_lr": "original"})
    ).optimizer
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        learning_rate=3e-3,
        weight_decay=0.2,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
    )
    optimizer = make_optimizer(block, llama(), args)
    assert isinstance(optimizer, MuonAdamW)
    adamw, vectors, muon = optimizer.param_groups
    assert (muon["lr"], muon["momentum"], muon["adjust_lr_fn"], muon["weight_decay"]) == (0.02, 0.9, "original", 0.2)
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (3e-3, (0.9, 0.95), 1e-6, 0.2)
    assert vectors["weight_decay"] == 0
    assert make_optimizer(None, llama(), args) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}}},
            "leave the block `optimizer` out, and name DeepSpeed's own",
        ),
        ({"training": {"max_steps": 8, "optim": "adamw_torch"}}, "the block `optimizer` takes its place"),
        ({"optimizer": {"name": "muon", "freeze_step": 3}}, "freeze_step: only onebit_lamb and onebit_adam has it"),
        ({"optimizer": {"name": "onebit_adam", "freeze_step": 3, "muon_lr": 1}}, "muon_lr: only muon has it"),
        ({"optimizer": {"name": "onebit_adam"}}, "onebit_adam needs freeze_step"),
        ({"optimizer": {"name": "muon", "muon_lr": 0}}, "muon_lr.*greater than 0"),
        ({"optimizer": {"name": "muon", "adjust_lr": "spectral"}}, "adjust_lr.*match_rms_adamw"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(run_file(tmp_path, **changes))


def test_settings_know_whose_they_are() -> None:
    assert OptimizerBlock(name="muon").kind == "muon"
    assert OptimizerBlock(name="onebit_lamb", freeze_step=None).kind == "onebit"
    assert "muon_lr" not in OptimizerBlock(name="onebit_lamb", freeze_step=None).of_method()


def test_zero_3_keeps_gradients_whole_for_deepspeeds_muon(tmp_path: Path) -> None:
    zero: dict[str, Any] = {"stage": 3}
    muon = {"optimizer": {"type": "Muon"}, "zero_optimization": zero}
    run = load_run_file(run_file(tmp_path, optimizer=None, deepspeed=muon))
    config = deepspeed_config(run)
    assert config is not None
    assert config["zero_optimization"]["reduce_scatter"] is False
    assert config["gradient_clipping"] == "auto", "without it DeepSpeed clips at 1, whatever max_grad_norm is"
    zero["reduce_scatter"] = True
    with pytest.raises(ConfigError, match="reduce_scatter to false"):
        deepspeed_config(load_run_file(run_file(tmp_path, optimizer=None, deepspeed=muon)))
    adam = {**muon, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    config = deepspeed_config(load_run_file(run_file(tmp_path, optimizer=None, deepspeed=adam)))
    assert config is not None
    assert "reduce_scatter" not in config["zero_optimization"]
