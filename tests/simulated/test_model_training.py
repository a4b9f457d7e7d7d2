"""`train_lm.py` as one process: what a run leaves behind, how it goes on, how it stops, and what it refuses."""

from __future__ import annotations

import json
import logging
import pydoc_data.topics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diloco.apps.common.environment import STOPPED, prepare_environment
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.apps.lm.train import train
from hf_diloco.errors import ConfigError
from hf_diloco.trainer.progress import Progress
from tests.records import events

RUN: dict[str, Any] = {
    "model": {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}},  # dropout
    "tokenizer": {"train": {"vocab_size": 320}},
    "data": {"source": "files", "files": ["corpus-*.jsonl"], "sequence_length": 32, "num_eval_sequences": 8},
    "training": {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": 4,
        "disable_tqdm": True,
    },
    "sample": {"prompt": "The", "num_tokens": 8},
    "diloco": {"sync_every": 3},
}


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    yield
    logging.captureWarnings(False)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())[:40]]
    parts = [text[start : start + 200] for text in topics for start in range(0, min(len(text), 4000), 200)]
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in parts[number::3]]
        (tmp_path / f"corpus-{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path / "tiny.yaml"


def start(run_file: Path, *overrides: str) -> int:
    return train(load_run_file(run_file, [f"output={run_file.parent / 'runs'}", "launch.use_cpu=true", *overrides]))


def island_folder(run_file: Path, name: str = "tiny") -> Path:
    return run_file.parent / "runs" / name / "island-0"


def read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text())
    assert isinstance(value, dict)
    return value


def losses(folder: Path, kind: str = "train") -> list[tuple[int, float]]:
    name = "loss" if kind == "train" else "eval_loss"
    return [(line["step"], line[name]) for line in events(folder, kind)]


def test_what_a_run_leaves_behind(run_file: Path) -> None:
    assert start(run_file) == 0
    folder = island_folder(run_file)

    progress = read_json(folder / "progress.json")
    assert (progress["state"], progress["step"], progress["max_steps"], progress["round"]) == ("done", 6, 6, 2)
    assert progress["tokens_per_second"] > 0

    summary = read_json(folder / "summary.json")
    assert (summary["island"], summary["rounds"], summary["num_tokens"]) == (0, 2, 6 * 4 * 32)
    assert summary["eval_weights"] == "outer"
    assert losses(folder, "eval") == [(6, summary["eval_loss"])]

    settings = read_json(folder.parent / "run.json")
    assert settings["diloco"]["sync_every"] == 3
    assert {"python", "torch", "transformers", "deepspeed", "hf_diloco"} <= set(settings["versions"])

    model_folder = folder.parent / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model_folder.iterdir()}
    assert not [path for path in folder.parent.rglob("*") if path.name.endswith(".tmp")]
    assert not list(model_folder.glob("*.bin")), "nothing that would have to be unpickled"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    assert summary["sample"].startswith("The")
    assert model.config.vocab_size == len(tokenizer) == 320


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_resumed_equals_uninterrupted(run_file: Path, streaming: str) -> None:
    """The same losses, bit for bit, of a model with dropout, from a checkpoint in the middle of a round."""
    overrides = [
        f"data.streaming={streaming}",
        "data.num_eval_sequences=2",
        "training.gradient_accumulation_steps=2",
        "sample=null",
    ]
    assert start(run_file, *overrides) == 0
    folder = island_folder(run_file)
    whole, whole_eval = losses(folder), losses(folder, "eval")
    assert (folder / "checkpoint-4" / "data_position.json").exists() == (streaming == "true")
    resumed = island_folder(run_file, "resumed")
    resumed.mkdir(parents=True)
    (folder / "checkpoint-4").rename(resumed / "checkpoint-4")
    assert start(run_file, *overrides, "name=resumed") == 0
    assert losses(resumed) == whole[4:]
    assert losses(resumed, "eval") == whole_eval


@pytest.mark.parametrize("override", ["data.streaming=false", "data.streaming=true", "diloco.enabled=false"])
def test_a_finished_run_is_only_evaluated_again(
    override: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for has_ended in (False, True):
        assert start(run_file, "sample=null", "data.num_eval_sequences=2", override) == 0
        said = capsys.readouterr().out
        assert ("checkpoint-6 is of its last step. For a new run give another --name" in said) == has_ended
    folder = island_folder(run_file)
    assert [step for step, _ in losses(folder)] == [1, 2, 3, 4, 5, 6]
    assert read_json(folder / "summary.json")["eval_loss"] == losses(folder, "eval")[0][1]


def test_a_run_that_has_ended_keeps_the_settings_that_it_was_trained_with(run_file: Path) -> None:
    for every in (3, 2):
        assert start(run_file, "sample=null", f"diloco.sync_every={every}") == 0
    settings = island_folder(run_file).parent / "run.json"
    assert read_json(settings)["diloco"]["sync_every"] == 3
    assert start(run_file, "sample=null", "diloco.sync_every=2", "training.max_steps=8") == 0
    assert read_json(settings)["diloco"]["sync_every"] == 2, "it has trained on"


def test_the_summary_names_the_weights_of_its_loss_also_between_rounds(run_file: Path) -> None:
    for _ in range(2):  # the last evaluation of the training; and, where it has ended before, one after it
        assert start(run_file, "sample=null", "diloco.sync_every=4") == 0
        evaluated = events(island_folder(run_file), "eval")[-1]
        summary = read_json(island_folder(run_file) / "summary.json")
        assert (summary["eval_loss"], summary["eval_weights"]) == (evaluated["eval_loss"], evaluated["weights"])
    assert len({event["eval_loss"] for event in events(island_folder(run_file), "eval")}) == 2


def test_the_stop_file_ends_training_with_a_checkpoint(run_file: Path) -> None:
    folder = island_folder(run_file)
    folder.mkdir(parents=True)
    (folder / "stop").touch()  # of an earlier start: it must not end this one

    def ask() -> None:
        while not (folder / "progress.json").exists() or read_json(folder / "progress.json")["step"] < 5:
            time.sleep(0.01)
        (folder / "stop").touch()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert start(run_file, "training.max_steps=90000", "training.save_strategy=no") == STOPPED
    asking.join()
    progress = read_json(folder / "progress.json")
    assert progress["state"] == "done"
    assert progress["step"] >= 5
    assert (folder / f"checkpoint-{progress['step']}" / "diloco").is_dir()
    assert not (folder.parent / "model").exists()


def test_without_the_outer_loop_there_are_records_too(run_file: Path) -> None:
    assert start(run_file, "diloco.enabled=false") == 0
    folder = island_folder(run_file)
    assert [step for step, _ in losses(folder)] == [1, 2, 3, 4, 5, 6]
    summary = read_json(folder / "summary.json")
    assert (summary["eval_weights"], summary["bytes_sent"], summary["rounds"]) == ("inner", 0, 0)
    assert summary["eval_loss"] == losses(folder, "eval")[-1][1]


REFUSED = {
    "batch": (["training.per_device_train_batch_size=5000"], "fewer than the 5000 of one batch"),
    "scheduler": (["training.lr_scheduler_type=cosin"], "'cosin' is not one of"),
    "learning rate": (["training.learning_rate=0"], "should be greater than 0"),
    "model": (["model.config.n_positions=16"], "more than the 16 positions"),
    "rendezvous": (["diloco.num_islands=2"], "need a place to meet"),
    "no batch to evaluate": (
        ["training.dataloader_drop_last=true", "data.num_eval_sequences=2"],
        "of 2 examples to evaluate on no batch of 8 is left",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_training(run_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(run_file, *overrides)
    assert message in str(caught.value)
    assert not (island_folder(run_file) / "metrics.jsonl").exists()


def test_a_failure_shows_in_the_progress(run_file: Path) -> None:
    with pytest.raises(ConfigError):
        start(run_file, "model.config.n_positions=16")
    progress = read_json(island_folder(run_file) / "progress.json")
    assert progress["state"] == "failed"
    assert "more than the 16 positions" in progress["message"]


def test_resume_never_keeps_out_of_an_old_run(run_file: Path) -> None:
    (island_folder(run_file) / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        start(run_file, "launch.resume=never")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_position_in_other_data_is_no_place_to_go_on_from(run_file: Path, elsewhere: bool) -> None:
    assert start(run_file, "training.max_steps=4") == 0
    more = [f"launch.resume={island_folder(run_file) / 'checkpoint-4'}", "name=other"] if elsewhere else []
    with pytest.raises(ConfigError) as caught:
        start(run_file, *more, "seed=7", "data.sequence_length=16")
    assert "a run with data.sequence_length=32, seed=42, here data.sequence_length=16, seed=7" in str(caught.value)
    corpus = run_file.parent / "corpus-1.jsonl"
    text = corpus.read_text()
    corpus.write_text(text.partition("\n")[2])
    with pytest.raises(ConfigError, match=r"data have changed under the same name .*island-0 began.*data\.json"):
        start(run_file, *more)
    corpus.write_text(text)
    assert start(run_file, *more) == 0


def test_a_stream_goes_on_with_longer_sequences_and_another_seed(run_file: Path) -> None:
    """Its position is one of documents and tokens."""
    stream = ["data.streaming=true", "data.num_eval_sequences=1"]  # of text that Python brings: each version other
    assert start(run_file, "training.max_steps=4", *stream) == 0
    assert start(run_file, *stream, "data.sequence_length=64", "seed=7") == 0
    assert [step for step, _ in losses(island_folder(run_file))] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_a_run_does_not_end_before_the_checkpoint_that_it_resumes_from(run_file: Path, enabled: str) -> None:
    """Its model would be of no round, or of a step that nobody asked for."""
    assert start(run_file, f"diloco.enabled={enabled}") == 0
    with pytest.raises(ConfigError, match=r"max_steps is 3, and the checkpoint .* is of step 6: set max_steps to 6"):
        start(run_file, f"diloco.enabled={enabled}", "training.max_steps=3")


def test_resume_from_what_is_no_checkpoint(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="is no checkpoint of a Trainer"):
        start(run_file, f"launch.resume={run_file.parent}")


class TestEnvironment:
    def test_plain_python_is_a_world_of_one_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environment: dict[str, str] = {}
        monkeypatch.setattr("os.environ", environment)
        prepare_environment(wants_deepspeed=True)
        assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("0", "0", "1")
        assert int(environment["MASTER_PORT"]) > 0

    def test_a_launcher_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        environment = dict(given)
        monkeypatch.setattr("os.environ", environment)
        prepare_environment(wants_deepspeed=True)
        assert environment == given

    def test_what_an_absent_launcher_has_left_is_undone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        left = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
        world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        environment = left | world
        monkeypatch.setattr("os.environ", environment)
        prepare_environment(wants_deepspeed=False)
        assert environment == left | world, "a launcher's own"
        assert not capsys.readouterr().err
        for name in world:
            del environment[name]
        prepare_environment(wants_deepspeed=False)
        assert not environment.keys() & left
        told = capsys.readouterr().err
        assert all(f"{name} is unset" in told for name in left)

    def test_half_a_world(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.environ", {"RANK": "0", "WORLD_SIZE": "2"})
        with pytest.raises(ConfigError, match="not MASTER_ADDR, MASTER_PORT"):
            prepare_environment(wants_deepspeed=True)

    def test_what_would_drop_deepspeed_is_undone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        environment = {"ACCELERATE_USE_CPU": "True"}
        monkeypatch.setattr("os.environ", environment)
        prepare_environment(wants_deepspeed=False)
        assert "ACCELERATE_USE_CPU" in environment
        prepare_environment(wants_deepspeed=True)
        assert "ACCELERATE_USE_CPU" not in environment
        assert "would drop DeepSpeed" in capsys.readouterr().err


def test_progress_is_written_four_times_a_second_and_at_every_change(tmp_path: Path) -> None:
    progress = Progress(tmp_path, max_steps=1000)
    progress.update(state="training")
    begin = time.monotonic()
    seen = set()
    for step in range(1000):
        progress.update(step=step)
        seen.add(read_json(tmp_path / "progress.json")["step"])
    assert len(seen) <= 2 + 4 * (time.monotonic() - begin)
    progress.update(state="done", step=1000)
    assert read_json(tmp_path / "progress.json")["step"] == 1000
