"""The card of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_diloco.apps.common.model_card import Training, write_card, write_card_of_checkpoint
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.lm.train import describe_training
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.apps.vision.train import describe_training as describe_vision
from hf_diloco.methods.gossip import METHODS as GOSSIP
from hf_diloco.methods.outer import METHODS
from tests.outer_state import make_index
from tests.report_runs import write_run

TRAINING = Training(
    data="a|b <c>\nd",
    method="/home/somebody/own.py:Slow",
    papers=["1910.00643"],
    base_model="meta-llama/Llama-3.2-1B",
    dataset="allenai/c4",
    task="text-generation",
)


def test_a_card_says_what_was_trained_and_how(tmp_path: Path) -> None:
    run, model = write_run(tmp_path / "run"), tmp_path / "model"
    for record in run.rglob("metrics.jsonl"):
        record.write_text(record.read_text().replace('"fp32"', '"/home/somebody/bits.py:Bits"'))
    model.mkdir()
    (model / "README.md").write_text("what PEFT writes")
    write_card(model, run, TRAINING)
    card = ModelCard.load(model / "README.md")
    assert card.data.base_model == "meta-llama/Llama-3.2-1B"
    assert card.data.datasets == ["allenai/c4"]
    assert card.data.tags == ["hf-diloco", "Slow"]
    assert card.data.pipeline_tag == "text-generation"
    assert "| data | a\\|b &lt;c> d |" in card.text
    assert "| method | own.py:Slow |" in card.text
    assert "on 2 islands." in card.text
    assert "| tokens | 800 |" in card.text
    assert "| payload | bits.py:Bits |" in card.text
    assert "| bytes exchanged |" in card.text
    assert "| evaluation loss |" in card.text
    assert "https://arxiv.org/abs/1910.00643" in card.text
    assert "Trained with [hf-diloco](https://" in card.text
    assert "/blob/main/CITATION.cff))" in card.text
    assert "what PEFT writes" not in card.content
    for private in (str(tmp_path), "somebody"):
        assert private not in card.content


def test_a_folder_on_this_machine_is_no_model_of_the_hub(tmp_path: Path) -> None:
    run, model = write_run(tmp_path / "run"), tmp_path / "model"
    model.mkdir()
    base = tmp_path / "private" / "base"
    base.mkdir(parents=True)
    write_card(model, run, Training("text", "diloco", [], str(base), None, "fill-mask"))
    card = ModelCard.load(model / "README.md")
    assert card.data.base_model is None
    assert "| starts from | base |" in card.text
    assert "private" not in card.content


@pytest.mark.parametrize(
    ("base", "shown", "hub_id"),
    [
        ("/data/customer/base", "base", None),
        ("customer/runs/base/", "base", None),
        ("../customer/base", "base", None),
        ("~/base", "base", None),
        ("gpt2", "gpt2", "gpt2"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_a_folder_of_the_machine_that_trained_is_no_model_of_the_hub(
    base: str, shown: str, hub_id: str | None, tmp_path: Path
) -> None:
    """An export is often made on another machine, where the card showed the whole path."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    write_card_of_checkpoint(tmp_path, make_index(4))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == hub_id
    assert f"| adapters of | {shown} |" in card.text
    assert "customer" not in card.content


def test_a_card_that_cannot_be_written_is_only_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(tmp_path / "run")
    write_card(tmp_path / "gone", run, TRAINING)
    assert "the model has no card" in caplog.text


@pytest.mark.parametrize(
    ("settings", "data", "dataset"),
    [
        ({}, "English text that comes with Python", None),
        ({"data": {"source": "c4"}}, "allenai/c4 (train)", "allenai/c4"),
        ({"data": {"source": "hub", "path": "a/b", "split": "all"}}, "a/b (all)", "a/b"),
        ({"data": {"source": "files", "files": ["/secret/corpus/*.txt"]}}, "*.txt", None),
    ],
)
def test_data_of_language_models(settings: dict[str, object], data: str, dataset: str | None) -> None:
    whole = {"name": "a", "model": {"preset": "llama-tiny"}, "training": {"max_steps": 4}, **settings}
    training = describe_training(RunFile.model_validate(whole))
    assert (training.data, training.dataset) == (data, dataset)
    assert training.papers == ["2311.08105"]


def test_the_path_of_a_folder_of_data_stays_out_of_the_card(tmp_path: Path) -> None:
    """The card is pushed to the Hub; the path may name a customer."""
    run, model, folder = write_run(tmp_path / "run"), tmp_path / "model", tmp_path / "private" / "corpus"
    model.mkdir()
    folder.mkdir(parents=True)
    whole = {"name": "a", "training": {"max_steps": 4}, "data": {"source": "hub", "path": str(folder)}}
    for training in (
        describe_training(RunFile.model_validate(whole)),
        describe_vision(VisionRun.model_validate(whole)),
    ):
        write_card(model, run, training)
        card = ModelCard.load(model / "README.md")
        assert "| data | corpus (train) |" in card.text
        assert card.data.datasets is None
        assert "private" not in card.content


def test_data_of_image_models() -> None:
    whole = {"name": "a", "model": {"preset": "resnet-tiny"}, "training": {"max_steps": 4}}
    training = describe_vision(VisionRun.model_validate(whole))
    assert training.data.startswith("1,797 handwritten digits")
    assert training.task == "image-classification"


def test_papers_are_numbers_of_arxiv() -> None:
    papers = {name: method.paper for name, method in METHODS.items()}
    papers |= {name: method.paper for name, method in GOSSIP.items()}
    assert all(len(paper) == 10 and paper[4] == "." for paper in papers.values() if paper)
    assert {name for name, paper in papers.items() if not paper} <= {"bmuf", "dmsgd", "pmsgd"}
