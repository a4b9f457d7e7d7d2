"""`hf-diloco checkpoint` on what a Trainer in this process has saved; with ranks in tests/equivalence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
)
from typer.testing import CliRunner

from hf_diloco import DiLoCoCallback, DiLoCoConfig, OuterLoop
from hf_diloco.cli.main import app
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.inner.base import PlainShards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.checkpoint import RECORD, OuterPart, read_index, save_outer
from hf_diloco.outer.export import export, find_checkpoint
from hf_diloco.outer.manifest import remove
from tests.full_disk import no_file_beyond
from tests.outer_state import make_index
from tests.programs.trainer_island import Tokens, make_model
from tests.trainers import make_saving_trainer, weights_of


def test_tied_weights_of_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = tmp_path / "runs" / "launched"  # of `hf-diloco launch -- COMMAND`
    (launched / "island-0").mkdir(parents=True)
    monkeypatch.setenv(ENV_FOLDER, str(launched / "island-0"))
    trainer = make_saving_trainer(tmp_path / "run", DiLoCoCallback(sync_every=3))
    trainer.train()
    shown = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run"), "--json"])
    facts = json.loads(shown.output)
    assert CliRunner().invoke(app, ["checkpoint", "inspect", str(launched), "--json"]).output == shown.output
    assert (facts["round"], facts["step"], facts["ranks"], facts["trained_with"]) == (2, 6, 1, "plain")
    table = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run")]).output
    assert str(tmp_path / "run" / "checkpoint-6") in "".join(table.split())
    assert "tokens" not in table, "nobody has counted them"
    made = CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "model")])
    assert "(round 2, step 6)" in " ".join(made.output.split())
    assert "Loading weights" not in made.output
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
    with pytest.raises(ConfigError, match="exists already: name another folder"):
        export(*find_checkpoint(tmp_path / "run"), tmp_path / "model")
    (tmp_path / "run" / "checkpoint-6" / "config.json").unlink()
    found = find_checkpoint(tmp_path / "run")[0]
    assert found.name == "checkpoint-4"  # 6 is not whole any more
    with pytest.raises(ConfigError, match=r"no whole checkpoint with outer state: name checkpoint-N"):
        find_checkpoint(tmp_path)
    (nodes := tmp_path / "nodes" / "island-0" / "checkpoint-3").mkdir(parents=True)
    (nodes / "gossip.json").touch()
    for folder in (tmp_path / "nodes", nodes.parent, nodes):
        with pytest.raises(ConfigError, match=f"{nodes} has no outer parameters, as nodes of a graph"):
            find_checkpoint(folder)
    for absent in ("runs/absent", "run/checkpoint-5"):
        with pytest.raises(ConfigError, match=f"there is no folder .*{absent}"):
            find_checkpoint(tmp_path / absent)


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


def of_known_values(model: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Saves a model, and beside it other outer parameters, which are returned."""
    getattr(model, "_orig_mod", model).save_pretrained(checkpoint)
    shards = PlainShards(model)
    anchor = torch.arange(shards.num_parameters, dtype=torch.float32)
    shapes = {name: list(shape) for name, shape in shards.shapes.items()}
    index = make_index(shards.num_parameters, parameters=shapes)
    save_outer(checkpoint, IslandGroup(), [OuterPart({"anchor": anchor}, [(0, len(anchor))])], index)
    values = zip(shapes.items(), anchor.split(list(shards.sizes.values())), strict=True)
    return {name.removeprefix("_orig_mod."): part.view(shape) for (name, shape), part in values}


def make_mixture() -> torch.nn.Module:
    """Whose experts lie otherwise in files than in memory."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    return MixtralForCausalLM(config)


def make_compiled() -> Any:
    return torch.compile(make_model(lora=False, tied=True, seed=1))


@pytest.mark.parametrize("make", [make_mixture, make_compiled])
def test_names_in_training_are_not_those_in_files(make: Callable[[], Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    expected = of_known_values(make(), checkpoint)
    index = read_index(checkpoint)
    for folder in (tmp_path / "model", tmp_path / "from sharded"):
        export(checkpoint, index, folder)
        found = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        (checkpoint / "model.safetensors").unlink(missing_ok=True)  # sharded checkpoints of FSDP2 have none


def test_what_is_not_trained_keeps_its_type_and_bits(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    model = ResNetForImageClassification(config).half()
    counters = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.int64]
    for name in counters:
        model.get_buffer(name).fill_(2**24 + 1)
    of_known_values(model, tmp_path / "checkpoint-1")
    export(tmp_path / "checkpoint-1", read_index(tmp_path / "checkpoint-1"), tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {int(found[name]) for name in counters} == {2**24 + 1}
    assert {found[name].dtype for name in found.keys() - set(counters)} == {torch.float32}


@pytest.mark.parametrize("name", ["default", "own"])
def test_whole_modules_beside_adapters(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(make_model(lora=False, tied=False, seed=1), settings, adapter_name=name)
    expected = of_known_values(model, tmp_path / "checkpoint-1")
    export(tmp_path / "checkpoint-1", read_index(tmp_path / "checkpoint-1"), tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_model(lora=False, tied=False, seed=1), str(tmp_path / "adapter"))
    found = dict(loaded.named_parameters())
    assert any("modules_to_save" in one for one in expected)
    assert all(torch.equal(found[one.replace(f".{name}.", ".default.")], expected[one]) for one in expected)


def make_adapters(kind: str, name: str = "default") -> Any:
    import peft

    prompts: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    settings: dict[str, Any] = {
        "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),  # whose projections are not trained
        "prompts": lambda: peft.PromptTuningConfig(**prompts),
        "prefix": lambda: peft.PrefixTuningConfig(**prompts),
        "computed": lambda: peft.PromptEncoderConfig(**prompts, encoder_hidden_size=4),
    }
    base = make_model(lora=False, tied=False, seed=1)
    return peft.get_peft_model(base, settings[kind](), adapter_name=name)


@pytest.mark.parametrize(
    ("kind", "name"), [("dora", "default"), ("ia3", "own"), ("vera", "own"), ("prompts", "default"), ("prefix", "own")]
)
def test_adapters_of_all_kinds_are_as_peft_saves_them(kind: str, name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model, checkpoint = make_adapters(kind, name), tmp_path / "checkpoint-1"
    expected = of_known_values(model, checkpoint)
    export(checkpoint, read_index(checkpoint), tmp_path / "adapter")
    saved = load_file(checkpoint / ("" if name == "default" else name) / "adapter_model.safetensors")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == saved.keys()
    loaded = PeftModel.from_pretrained(make_model(lora=False, tied=False, seed=1), str(tmp_path / "adapter"))
    found = dict(loaded.named_parameters())
    for one, value in expected.items():
        assert torch.equal(found[re.sub(rf"\.{name}(?=\.|$)", ".default", one)], value), one


def save_in_loop(folder: Path, model: torch.nn.Module, models: Sequence[torch.nn.Module] = ()) -> Path:
    """Returns a checkpoint of the model, as `OuterLoop` writes it. The Accelerator has all `models` in this order."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])
    accelerator = Accelerator(cpu=True)
    *_, optimizer = accelerator.prepare(*(models or [model]), optimizer)
    config = DiLoCoConfig(sync_every=2, outer_momentum=0.5)
    with OuterLoop(accelerator, model, optimizer, config, output_dir=folder) as outer:
        checkpoint = outer.save_checkpoint()
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("frozen", ["lora_A", "layers.0."])
def test_adapters_of_a_loop_keep_what_is_not_trained(frozen: str, tmp_path: Path) -> None:
    """LoRA-FA trains half of each adapter. PEFT drew the other half anew."""
    model = make_model(lora=True, tied=False, seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and frozen not in name)
    model.save_pretrained(tmp_path / "start")
    checkpoint = save_in_loop(tmp_path / "run", model)
    export(checkpoint, index := read_index(checkpoint), tmp_path / "adapter", tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    made = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert made.keys() == start.keys()
    assert all(torch.equal(made[name], start[name]) for name in start)
    (checkpoint / "model.safetensors").unlink()  # sharded checkpoints of FSDP2 have none
    if frozen == "lora_A":
        with pytest.raises(CheckpointError, match=r"has values of \S+lora_B, but none of \S+lora_A, which was not"):
            export(checkpoint, index, tmp_path / "half", tmp_path / "start")


@pytest.mark.parametrize("teacher_is_first", [True, False])
def test_what_is_not_trained_is_of_the_loops_own_model(teacher_is_first: bool, tmp_path: Path) -> None:
    """It was of whichever model's file was read last."""
    student, teacher = (make_model(lora=False, tied=False, seed=seed) for seed in (1, 2))
    student.model.embed_tokens.requires_grad_(False)
    student.save_pretrained(tmp_path / "start")
    models = [teacher, student] if teacher_is_first else [student, teacher]
    checkpoint = save_in_loop(tmp_path / "run", student, models)
    export(checkpoint, read_index(checkpoint), tmp_path / "model", tmp_path / "start")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], student.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("name", "place"), [("model.safetensors", -1), ("model.safetensors", 20), ("config.json", 20)]
)
def test_a_file_that_is_damaged_becomes_no_model(name: str, place: int, tmp_path: Path) -> None:
    """Weights that are not trained were exported as they were found, or there was a traceback."""
    trainer = make_saving_trainer(tmp_path / "run", DiLoCoCallback(sync_every=3), max_steps=2)
    trainer.train()
    path = (checkpoint := tmp_path / "run" / "checkpoint-2") / name
    contents = bytearray(path.read_bytes())
    contents[place] ^= 0x55
    path.write_bytes(contents)
    index = read_index(checkpoint)
    with pytest.raises(CheckpointError, match=f"{name} does not hold what was .* to it: export an earlier checkpoint"):
        export(checkpoint, index, tmp_path / "model")
    if place == 20 and name == "model.safetensors":
        index.checkpoint = []  # as a loop's `save_state` leaves it
        with pytest.raises(CheckpointError, match=f"{name} cannot be read .*: export an earlier checkpoint"):
            export(checkpoint, index, tmp_path / "model")


def test_prompts_that_are_computed_are_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    of_known_values(make_adapters("computed"), checkpoint)
    with pytest.raises(
        CheckpointError, match=r"holds the parameters that prompts are computed from.*save_model within outer_weights"
    ):
        export(checkpoint, read_index(checkpoint), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_an_export_that_a_full_disk_or_a_kill_ends_is_no_model_and_may_be_tried_again(tmp_path: Path) -> None:
    """There was a traceback, and a part of the folder, for which the next export was refused."""
    checkpoint = tmp_path / "checkpoint-1"
    of_known_values(make_model(lora=False, tied=True, seed=1), checkpoint)
    folder = tmp_path / "models" / "new"
    with no_file_beyond(4096), pytest.raises(CheckpointError, match=r"models/new cannot be written \(.*os error"):
        export(checkpoint, read_index(checkpoint), folder)
    assert not list(folder.parent.iterdir())
    (folder.parent / ".new.partial").mkdir()
    export(checkpoint, read_index(checkpoint), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["new"]


def test_a_checkpoint_that_training_deletes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was written without its tokenizer, and called whole."""
    checkpoint = tmp_path / "checkpoint-1"
    of_known_values(model := make_model(lora=False, tied=True, seed=1), checkpoint)
    save = type(model).save_pretrained

    def save_late(self: Any, folder: Path) -> None:
        save(self, folder)
        remove(checkpoint, first=RECORD)

    monkeypatch.setattr(type(model), "save_pretrained", save_late)
    with pytest.raises(CheckpointError, match="checkpoint-1 was deleted while it was read"):
        export(checkpoint, read_index(checkpoint), tmp_path / "model")
    assert not (tmp_path / "model").exists(), "or the next export would be refused"


def test_values_of_another_model_are_not_left_out(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    of_known_values(make_model(lora=False, tied=True, seed=1), checkpoint)
    index = read_index(checkpoint)
    index.parameters = {f"wrapped.{name}": shape for name, shape in index.parameters.items()}
    with pytest.raises(CheckpointError, match=r"has outer values of wrapped\.\S+, \(.*\), and the model"):
        export(checkpoint, index, tmp_path / "model")
    assert not (tmp_path / "model").exists()
