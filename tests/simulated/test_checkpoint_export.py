"""`hf-diloco checkpoint` on what a Trainer in this process has saved; with ranks in tests/equivalence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer
from typer.testing import CliRunner

from hf_diloco import DiLoCoCallback
from hf_diloco.cli.main import app
from hf_diloco.errors import CheckpointError
from hf_diloco.outer.export import export, find_checkpoint
from tests.programs.trainer_island import Tokens, make_model
from tests.trainers import make_saving_trainer, weights_of


def test_tied_weights_of_the_newest_checkpoint(tmp_path: Path) -> None:
    trainer = make_saving_trainer(tmp_path / "run", DiLoCoCallback(sync_every=3))
    trainer.train()
    shown = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run"), "--json"])
    facts = json.loads(shown.output)
    assert (facts["round"], facts["step"], facts["ranks"], facts["trained_with"]) == (2, 6, 1, "plain")
    table = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run")]).output
    assert str(tmp_path / "run" / "checkpoint-6") in "".join(table.split())
    made = CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "model")])
    assert "(round 2, step 6)" in " ".join(made.output.split())
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.tags == ["hf-diloco", "diloco"]
    assert "on 1 island." in card.text
    for row in ("| optimizer steps | 6 |", "| rounds | 2 |", "| steps between rounds | 3 |", "| payload | fp32 |"):
        assert row in card.text
    assert "## Figures" not in card.text
    assert "https://arxiv.org/abs/2311.08105" in card.text
    assert str(tmp_path) not in card.content
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(torch.cat([one.detach().reshape(-1) for one in model.parameters()]), weights_of(trainer))
    with pytest.raises(CheckpointError, match="exists already: name another folder"):
        export(*find_checkpoint(tmp_path / "run"), tmp_path / "model")
    (tmp_path / "run" / "checkpoint-6" / "config.json").unlink()
    found = find_checkpoint(tmp_path / "run")[0]
    assert found.name == "checkpoint-4"  # 6 is not whole any more
    with pytest.raises(CheckpointError, match=r"no whole checkpoint with outer state: name checkpoint-N"):
        find_checkpoint(tmp_path)


def test_adapters_become_a_folder_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    likeness = make_saving_trainer(tmp_path / "run", DiLoCoCallback(sync_every=3))
    trainer = Trainer(
        make_model(lora=True, tied=True, seed=1),
        likeness.args,
        train_dataset=Tokens(0),
        callbacks=[DiLoCoCallback(sync_every=3)],
    )
    trainer.train()
    CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "adapter")])
    assert "Trained with " in ModelCard.load(tmp_path / "adapter" / "README.md").text
    saved = load_file(tmp_path / "run" / "checkpoint-6" / "adapter_model.safetensors")
    made = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert made.keys() == saved.keys()
    assert all(torch.equal(made[name], saved[name]) for name in made)
    PeftModel.from_pretrained(make_model(lora=False, tied=True, seed=1), str(tmp_path / "adapter"))
