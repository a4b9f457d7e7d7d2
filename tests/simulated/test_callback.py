"""The callback in a real Trainer: a single island in this process, and beside it a second one as a thread."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from hf_diloco import DiLoCoCallback, DiLoCoConfig
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    DuplicateIslandError,
    IslandLostError,
    MissedRoundError,
)
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.checkpoint import complete_checkpoints, read_index
from hf_diloco.outer.saved_state import save_state
from hf_diloco.outer.state import OuterState
from hf_diloco.report import load_run, summarise
from hf_diloco.report.progress import read_progress
from hf_diloco.rounds.elastic import ElasticSession
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.trainer import callback as callbacks
from hf_diloco.trainer.arguments import check_launched
from hf_diloco.trainer.record import Record
from tests.processes import Processes, find_free_port
from tests.programs.trainer_island import Tokens, make_model
from tests.records import events
from tests.trainers import second_island

MAX_STEPS = 8
BATCH = 4
LENGTH = 16


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Training that ends in an error puts the old ones back at the next signal only: the Trainer tells nobody."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def make_trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    model: Any = None,
    **arguments: Any,
) -> Trainer:
    chosen: dict[str, Any] = {
        "max_steps": MAX_STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        **arguments,
    }
    return Trainer(
        model or make_model(lora=False, tied=True, seed=1),
        TrainingArguments(output_dir=str(folder), **chosen),
        train_dataset=Tokens(0),
        eval_dataset=Tokens(1, size=8),
        callbacks=list(callbacks),
    )


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.model is not None
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(trainer: Trainer) -> dict[float, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class At(TrainerCallback):
    """Does something in the course of one step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step = step
        self.action = action

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.action()


class KilledError(Exception):
    """Stands for SIGKILL."""


class KilledAfterSave(TrainerCallback):
    """The process ends as soon as a checkpoint is whole."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KilledError


class Ending(TrainerCallback):
    """Is told that training has ended, as trackers are, which then write what they hold."""

    has_ended = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.has_ended = True


# Between synchronisations


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_a_round_in_reach_it_is_the_plain_trainer(accumulation: int, tmp_path: Path) -> None:
    plain = make_trainer(
        tmp_path / "plain", gradient_accumulation_steps=accumulation, eval_strategy="steps", eval_steps=3
    )
    plain.train()
    callback = DiLoCoCallback(sync_every=1000)
    ours = make_trainer(
        tmp_path / "ours", callback, gradient_accumulation_steps=accumulation, eval_strategy="steps", eval_steps=3
    )
    ours.train()
    assert same_bits(weights_of(ours), weights_of(plain))
    assert losses(ours) == losses(plain)
    assert len(losses(plain)) == MAX_STEPS
    assert callback.round == 0


def test_lr_1_without_momentum_is_the_plain_trainer_within_rounding(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path / "plain")
    plain.train()
    ours = make_trainer(tmp_path / "ours", DiLoCoCallback(sync_every=2, outer_lr=1.0, outer_momentum=0.0))
    ours.train()
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=1e-4, atol=1e-6)


def test_only_optimizer_steps_count(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=4, weight_by="examples")
    make_trainer(tmp_path, callback, gradient_accumulation_steps=3).train()
    assert [event["step"] for event in events(tmp_path, "sync")] == [4, 8]
    assert [event["weight"] for event in events(tmp_path, "sync")] == [4 * 3 * BATCH] * 2
    assert callback.round == 2


def test_tokens_are_counted_by_the_trainer(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=4, weight_by="tokens")
    make_trainer(tmp_path, callback, include_num_input_tokens_seen="all").train()
    assert [event["weight"] for event in events(tmp_path, "sync")] == [4 * BATCH * LENGTH] * 2


def test_the_model_ends_on_the_outer_parameters(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=4)
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    outer = callback._need_session().outer.current.method.parameters
    assert torch.equal(torch.cat([one.flatten() for one in weights_of(trainer).values()]), outer)


# What a person sees


def test_the_launcher_of_a_script_sees_its_end_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = tmp_path / "launched" / "island-0"
    launched.mkdir(parents=True)
    monkeypatch.setenv(ENV_FOLDER, str(launched))
    callback = DiLoCoCallback(sync_every=4, fingerprint={"sequence_length": LENGTH})
    trainer = make_trainer(tmp_path / "own", callback, eval_strategy="steps", eval_steps=4)
    trainer.train()
    trainer.evaluate()
    shown = read_progress(launched / "progress.json")
    assert (shown.state, shown.noun, shown.unit) == ("done", "island", "tokens")
    assert summarise(load_run(tmp_path / "launched")).num_rounds == 2

    callback.stop()
    trainer.args.max_steps = 12
    trainer.train()
    shown = read_progress(launched / "progress.json")
    assert (shown.state, shown.step, shown.max_steps) == ("stopped", 1, 12)


def test_deepspeed_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("hf_diloco.trainer.arguments.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torchrun --nproc_per_node 1"):
        check_launched()
    monkeypatch.setenv("RANK", "0")
    check_launched()


def test_steps_that_were_in_no_round_are_brought_to_a_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through an object store, where rounds may be missed: the model that stays is the outer one nevertheless."""
    callback = DiLoCoCallback(sync_every=2, rendezvous=f"memory://{tmp_path.name}", min_islands=1)
    sync = ElasticSession.sync

    def miss_the_second(session: ElasticSession) -> Any:
        if session.outer.round == 1 and session.outer.steps == 2:
            session.outer.current.due_at = 4
            session.rounds.refused.add({3: "island 3 is somebody else"})
            raise MissedRoundError("round 2 is missed on purpose")
        return sync(session)

    monkeypatch.setattr(ElasticSession, "sync", miss_the_second)
    make_trainer(tmp_path, callback, max_steps=5).train()
    rounds = [(event["round"], event["weight"]) for event in events(tmp_path, "sync")]
    assert rounds == [(1, 1.0), (2, 1.5)]  # the weight of a whole round's steps is 1
    assert [event["round"] for event in events(tmp_path, "missed")] == [2]
    assert [event["islands"] for event in events(tmp_path, "refused")] == [{"3": "island 3 is somebody else"}]
    assert callback.moved_at_end
    assert events(tmp_path, "end")[0]["on_boundary"]


class Tracker(TrainerCallback):
    """Stands where WandB's and TensorBoard's callbacks stand."""

    logged: list[tuple[int, dict[str, Any]]]

    def __init__(self) -> None:
        type(self).logged = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        type(self).logged.append((state.global_step, dict(logs or {})))


LOGGED = {
    "diloco/round",
    "diloco/seconds_computing",
    "diloco/seconds_waiting",
    "diloco/seconds_exchanging",
    "diloco/bytes_sent",
    "diloco/bytes_received",
    "diloco/pseudo_gradient_norm",
}


@pytest.mark.parametrize("how", ["callbacks=", "add_callback"])
def test_figures_reach_a_tracker_and_the_history(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Tracker)
    callback = DiLoCoCallback(sync_every=4)
    trainer = make_trainer(
        tmp_path,
        *([callback] if how == "callbacks=" else []),
        report_to=["recorder"],
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=2,
    )
    if how == "add_callback":
        trainer.add_callback(callback)
    trainer.train()
    with_figures = {step: logs for step, logs in Tracker.logged if "diloco/round" in logs}
    assert [(step, logs["diloco/round"]) for step, logs in with_figures.items()] == [(4, 1), (8, 2)]
    assert with_figures[4].keys() >= LOGGED | {"loss"}
    assert all(isinstance(value, int | float) for value in with_figures[4].values())
    history = [entry for entry in trainer.state.log_history if "diloco/round" in entry]
    assert [entry["step"] for entry in history] == [4, 8]
    assert history[0].keys() >= LOGGED
    outer = {step: logs["diloco/outer_loss"] for step, logs in Tracker.logged if "diloco/outer_loss" in logs}
    evaluated = {step: logs["eval_loss"] for step, logs in Tracker.logged if "eval_loss" in logs}
    assert evaluated.keys() == {2, 4, 6, 8}
    assert outer == evaluated


def test_figures_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make_trainer(tmp_path / "run", DiLoCoCallback(sync_every=4), report_to=["tensorboard"]).train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    board = event_accumulator.EventAccumulator(str(folder))
    board.Reload()
    scalars = {tag: [(one.step, one.value) for one in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    (tag,) = [tag for tag in scalars if tag.endswith("diloco/round")]
    assert scalars[tag] == [(4, 1.0), (8, 2.0)]


INNER = [(2, "inner"), (4, "outer"), (6, "inner"), (8, "outer"), (8, "outer")]


@pytest.mark.parametrize(
    ("weights", "expected"), [("inner", INNER), ("outer", [(step, "outer") for step, _ in INNER])]
)
def test_evaluations_say_whose_weights_they_saw(weights: str, expected: list[tuple[int, str]], tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=4, eval_weights=weights)
    trainer = make_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.evaluate()
    assert [(event["step"], event["weights"]) for event in events(tmp_path, "eval")] == expected
    history = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert events(tmp_path, "eval")[1]["eval_loss"] == history[4]
    assert (history[6] == history[4]) is (weights == "outer"), "the outer parameters change with rounds only"
    logged = {entry["step"] for entry in trainer.state.log_history if "diloco/outer_loss" in entry}
    assert logged == {step for step, evaluated in expected if evaluated == "outer"}


def test_evaluations_of_several_data_sets_are_recorded(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(sync_every=4, eval_weights="inner"), eval_strategy="steps", eval_steps=2
    )
    trainer.eval_dataset = {"one": Tokens(1, size=8), "two": Tokens(2, size=8)}
    trainer.train()
    recorded = events(tmp_path, "eval")
    assert [(event["step"], event["weights"]) for event in recorded] == [
        (step, "outer" if step in (4, 8) else "inner") for step in (2, 4, 6, 8) for _ in range(2)
    ]
    for number, name in enumerate(("one", "two")):
        history = [entry for entry in trainer.state.log_history if f"eval_{name}_loss" in entry]
        losses = [entry[f"eval_{name}_loss"] for entry in history]
        assert [event[f"eval_{name}_loss"] for event in recorded[number::2]] == losses
        assert [entry.get(f"diloco/outer_{name}_loss") for entry in history] == [None, losses[1], None, losses[3]]
    report = summarise(load_run(tmp_path))
    assert (report.eval_loss, report.islands[0].steps) == (None, MAX_STEPS)


@pytest.mark.parametrize("settings", [{}, {"fragment_sync_delay": 3}], ids=["blocking", "behind the steps"])
def test_evaluations_of_the_outer_weights_leave_training_as_it_is(settings: dict[str, Any], tmp_path: Path) -> None:
    def train(name: str, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
        trainer = make_trainer(tmp_path / name, DiLoCoCallback(sync_every=4, **settings), **arguments)
        trainer.eval_dataset = {"one": Tokens(1, size=8), "two": Tokens(2, size=8)}
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if arguments:
            for name in ("one", "two"):
                seen = {
                    e["step"]: e[f"eval_{name}_loss"] for e in trainer.state.log_history if f"eval_{name}_loss" in e
                }
                assert seen[6] == seen[5] == seen[4]
                assert seen[8] != seen[6]
        return weights_of(trainer), losses

    with_evaluations = train("with", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=3)
    without = train("without")
    assert same_bits(with_evaluations[0], without[0])
    assert with_evaluations[1] == without[1]


class Quiet(Trainer):
    """Evaluates in a way of its own, and calls no callback."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        return {"eval_loss": 1.0}


def test_training_goes_on_from_its_own_weights_after_an_evaluation_that_calls_no_callback(tmp_path: Path) -> None:
    def train(name: str, kind: type[Trainer]) -> Trainer:
        callback = DiLoCoCallback(sync_every=3)
        trainer = make_trainer(tmp_path / name, callback, eval_strategy="steps", eval_steps=2)
        trainer.__class__ = kind
        trainer.train()
        return trainer

    assert same_bits(weights_of(train("a", Quiet)), weights_of(train("b", Trainer)))


class Asks(TrainerCallback):
    """Has the Trainer evaluate after step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate |= state.global_step == 2


def test_an_evaluation_that_another_callback_asks_for_is_of_the_outer_weights(tmp_path: Path) -> None:
    make_trainer(tmp_path, DiLoCoCallback(sync_every=4), Asks()).train()
    assert [(event["step"], event["weights"]) for event in events(tmp_path, "eval")] == [(2, "outer")]


def test_the_outer_weights_can_be_saved_between_rounds(tmp_path: Path) -> None:
    class Saver(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (4, 6):
                before = {name: value.detach().clone() for name, value in kwargs["model"].named_parameters()}
                with callback.outer_weights():
                    kwargs["model"].save_pretrained(tmp_path / str(state.global_step))
                assert same_bits(before, dict(kwargs["model"].named_parameters()))

    callback = DiLoCoCallback(sync_every=4)
    make_trainer(tmp_path, callback, Saver()).train()
    saved = [(tmp_path / step / "model.safetensors").read_bytes() for step in ("4", "6")]
    assert saved[0] == saved[1]


def test_evaluating_without_training_works(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback())
    assert "eval_loss" in trainer.evaluate()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_record_of_a_run(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=3, fingerprint={"sequence_length": LENGTH})
    trainer = make_trainer(tmp_path, callback, save_strategy="steps", save_steps=4, gradient_accumulation_steps=2)
    trainer.train()
    (start,) = events(tmp_path, "start")
    expected = {
        "island": 0,
        "num_islands": 1,
        "num_ranks": 1,
        "num_parameters": sum(one.numel() for one in weights_of(trainer).values()),
        "payload": "fp32",
        "sync_every": 3,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "max_steps": MAX_STEPS,
        "examples_per_step": 2 * BATCH,
        "tokens_per_step": 2 * BATCH * LENGTH,
        "resumed": False,
        "round": 0,
    }
    assert {name: start[name] for name in expected} == expected
    assert start["shards"] == "plain, 1 rank"
    assert re.fullmatch("[0-9a-f]{32}", start["params_hash"])
    assert [event["step"] for event in events(tmp_path, "train")] == list(range(1, MAX_STEPS + 1))
    assert {event["step"]: event["loss"] for event in events(tmp_path, "train")} == losses(trainer)
    assert [(event["step"], event["round"]) for event in events(tmp_path, "sync")] == [(3, 1), (6, 2)]
    assert [event["path"] for event in events(tmp_path, "save")] == ["checkpoint-4", "checkpoint-8"]
    (end,) = events(tmp_path, "end")
    assert (end["rounds"], end["on_boundary"], end["steps_since_sync"], end["step"]) == (2, False, 2, MAX_STEPS)
    assert 0 < end["seconds_computing"] <= end["seconds_total"]


def test_a_plan_that_ends_off_a_boundary_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_diloco"):
        make_trainer(tmp_path, DiLoCoCallback(sync_every=3)).train()
    texts = [record.getMessage() for record in caplog.records if record.name == "hf_diloco"]
    first = next(text for text in texts if "the run ends 2 steps after its last synchronisation" in text)
    assert "max_steps (8) be a multiple of sync_every (3)" in first
    assert "training ended 2 steps after the last synchronisation" in texts[-1]


def test_a_plan_that_fits_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_diloco"):
        make_trainer(tmp_path, DiLoCoCallback(sync_every=4, num_islands=1)).train()
    assert not [record for record in caplog.records if record.name == "hf_diloco"]


@pytest.mark.parametrize(("momentum", "warned"), [(0.9, True), (0.5, False)])
def test_few_rounds_with_much_momentum_are_warned_of(
    momentum: float, warned: bool, free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "hf_diloco"),
        second_island(free_port, tmp_path, 2, sync_every=4, outer_momentum=momentum) as config,
    ):
        make_trainer(tmp_path / "first", DiLoCoCallback(**config)).train()
    assert ("2 outer rounds are too few for outer_momentum 0.9 to settle" in caplog.text) is warned


# Two islands


def test_two_islands_meet_and_report_each_other(free_port: int, tmp_path: Path) -> None:
    with second_island(free_port, tmp_path, 2, sync_every=4) as config:
        trainer = make_trainer(tmp_path / "first", DiLoCoCallback(**config))
        trainer.train()
    syncs = events(tmp_path / "first", "sync")
    num_parameters = sum(one.numel() for one in weights_of(trainer).values())
    for event in syncs:
        assert event["participants"] == [0, 1]
        assert event["bytes_sent"] == event["bytes_received"] == 4 * num_parameters
    assert len(syncs) == 2
    assert all(entry["diloco/bytes_sent"] for entry in trainer.state.log_history if "diloco/round" in entry)


def rates_of(trainer: Trainer) -> list[float]:
    """The learning rate of each step."""
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def planned_rates(folder: Path) -> list[float]:
    plain = make_trainer(folder)
    plain.train()
    return rates_of(plain)


def take_two_rounds(folder: Path, settings: dict[str, Any]) -> str:
    """Has island 0 take two of a run's four rounds, then leave; returns the digest of its outer parameters."""
    first = ElasticSession(DiLoCoConfig(island=0, **settings), IslandGroup())
    first.num_rounds = 4
    first.join(open_shards(make_model(lora=False, tied=True, seed=1), None), folder)
    for _ in range(2):
        first.outer.current.steps = 2
        first.sync()
    first.leave(finished=False)
    return first.outer.outer_hash


def test_an_island_that_joins_has_the_learning_rate_of_the_run(tmp_path: Path) -> None:
    common = {"rendezvous": f"file://{tmp_path}/store", "sync_every": 2, "max_islands": 2, "grace": 0.1}
    take_two_rounds(tmp_path / "first", common)
    newcomer = make_trainer(tmp_path / "second", DiLoCoCallback(DiLoCoConfig(island=1, **common)))
    newcomer.train()
    assert rates_of(newcomer) == planned_rates(tmp_path / "plain")[4:]
    assert newcomer.state.global_step == 4  # the run's rounds are complete then


def test_an_island_that_joined_late_resumes_with_its_learning_rate(tmp_path: Path) -> None:
    """In the middle of a round: no rate comes twice."""
    common = {"rendezvous": f"file://{tmp_path}/store", "sync_every": 2, "max_islands": 2, "grace": 0.1}
    take_two_rounds(tmp_path / "first", common)
    callback = DiLoCoCallback(DiLoCoConfig(island=1, **common))
    newcomer = make_trainer(tmp_path / "second", At(1, callback.stop), callback)
    newcomer.train()
    newcomer.train(resume_from_checkpoint=True)
    assert rates_of(newcomer) == planned_rates(tmp_path / "plain")[4:]


def test_an_island_that_resumes_after_the_last_round_has_the_runs_parameters_and_trains_no_more(
    tmp_path: Path,
) -> None:
    """It took a step first, which was in no round."""
    common = {"rendezvous": f"file://{tmp_path}/store", "sync_every": 2, "max_islands": 2, "grace": 0.1}
    take_two_rounds(tmp_path / "first", common)
    callback = DiLoCoCallback(DiLoCoConfig(island=1, **common))
    late = make_trainer(tmp_path / "second", At(1, callback.stop), callback)
    late.train()
    last = take_two_rounds(tmp_path / "first", common)
    late.train(resume_from_checkpoint=True)
    assert late.state.global_step == 1
    assert callback.moved_at_end
    (saved,) = [index for _, index in complete_checkpoints(tmp_path / "second")]
    assert (saved.round, saved.outer_digest) == (4, last)
    assert events(tmp_path / "second", "end")[-1]["on_boundary"]


def test_a_process_whose_place_was_taken_while_it_hung_touches_no_checkpoint(tmp_path: Path) -> None:
    """It deleted those of the process that came after it, as theirs are of later steps."""
    folder, later = tmp_path / "run", tmp_path / "later"
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    make_trainer(later, DiLoCoCallback(sync_every=2, num_islands=1), **saving).train()

    def begin_another() -> None:
        (later / "checkpoint-8").rename(folder / "checkpoint-8")
        Record(folder).write("start", 2)

    old = make_trainer(folder, At(3, begin_another), DiLoCoCallback(sync_every=2, num_islands=1), **saving)
    with pytest.raises(DuplicateIslandError, match=r"another process has begun to train in .*run since"):
        old.train()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    assert [event["step"] for event in events(folder, "start")] == [0, 2]
    assert not events(folder, "train")[2:], "what it has to tell is of no use to the other's record"


def test_a_lost_island_ends_training_after_a_checkpoint(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, launched = tmp_path / "first", tmp_path / "launched"
    launched.mkdir()
    monkeypatch.setenv(ENV_FOLDER, str(launched))
    with second_island(free_port, tmp_path, 1, sync_every=3) as config:
        callback, tracker = DiLoCoCallback(**config), Ending()
        trainer = make_trainer(folder, callback, tracker)
        with pytest.raises(IslandLostError, match="island 1 left the run before round 2") as caught:
            trainer.train()
    assert caught.value.islands == (1,)
    assert tracker.has_ended, "else what it has not written yet is lost"
    assert not trainer.is_in_train
    assert trainer.state.global_step == 6
    assert not callback.stopped
    index = read_index(folder / "checkpoint-6")
    assert (index.round, index.steps_since_sync) == (1, 3), "the round that did not take place is due"
    assert events(folder, "end")[0]["rounds"] == 1
    shown = read_progress(launched / "progress.json")
    assert shown.state == "failed"
    assert "island 1 left the run before round 2" in shown.message
    saved = torch.load(folder / "checkpoint-6" / "optimizer.pt", weights_only=True)
    assert saved["state"]


@pytest.mark.parametrize("is_sound", [True, False])
def test_an_island_that_is_wrong_again_leaves_a_checkpoint_if_its_state_is_sound(
    is_sound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(self: FixedSession, is_last: bool = False) -> None:
        raise DivergedError("wrong again", is_sound)

    monkeypatch.setattr(FixedSession, "advance", diverge)
    trainer = make_trainer(tmp_path / "run", DiLoCoCallback(sync_every=3))
    with pytest.raises(DivergedError, match="wrong again"):
        trainer.train()
    assert [index.global_step for _, index in complete_checkpoints(tmp_path / "run")] == ([3] if is_sound else [])


# Stopping


@pytest.mark.parametrize("way", ["stop()", "SIGINT", "SIGTERM", "file"])
def test_a_wish_to_stop_is_followed_by_a_checkpoint_and_a_clean_end(way: str, tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    callback = DiLoCoCallback(sync_every=4, stop_file=stop_file)
    ways: dict[str, Callable[[], object]] = {
        "stop()": callback.stop,
        "SIGINT": lambda: signal.raise_signal(signal.SIGINT),
        "SIGTERM": lambda: signal.raise_signal(signal.SIGTERM),
        "file": stop_file.touch,
    }
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    trainer = make_trainer(tmp_path / "run", At(3, ways[way]), callback)
    trainer.train()
    assert callback.stopped
    assert trainer.state.global_step == 3
    ((path, index),) = complete_checkpoints(tmp_path / "run")
    assert index.global_step == 3
    assert (path / "model.safetensors").is_file()
    assert events(tmp_path / "run", "end")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_who_wishes_to_stop_waits_for_no_evaluation(tmp_path: Path) -> None:
    """The Trainer ends the epoch, too, with all that is done then."""
    callback = DiLoCoCallback(sync_every=4)
    trainer = make_trainer(tmp_path, callback, At(3, callback.stop), eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    assert callback.stopped
    assert events(tmp_path, "eval") == []
    assert [event["step"] for event in events(tmp_path, "save")] == [3]


def test_after_training_that_failed_ctrl_c_is_obeyed(tmp_path: Path) -> None:
    def fail() -> None:
        raise KilledError

    callback = DiLoCoCallback(sync_every=4)
    with pytest.raises(KilledError):
        make_trainer(tmp_path, At(3, fail), callback).train()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not callback.stopped


def test_a_stopped_run_goes_on_with_the_same_callback(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", DiLoCoCallback(sync_every=4))
    whole.train()
    callback = DiLoCoCallback(sync_every=4)
    trainer = make_trainer(tmp_path / "run", At(3, callback.stop), callback)
    trainer.train()
    assert callback.stopped
    trainer.train(resume_from_checkpoint=True)
    assert not callback.stopped
    assert trainer.state.global_step == MAX_STEPS
    assert same_bits(weights_of(trainer), weights_of(whole))


def test_training_again_begins_again(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=4)
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    trainer.train()
    assert callback.round == 2
    assert [event["round"] for event in events(tmp_path, "sync")] == [1, 2, 1, 2]


@pytest.mark.distributed
def test_ctrl_c_in_a_process_of_its_own(tmp_path: Path) -> None:
    settings = {
        "output_dir": str(tmp_path),
        "result": str(tmp_path / "result.json"),
        "max_steps": 100_000,
        "diloco": {"sync_every": 5},
    }
    program = Path(__file__).parents[1] / "programs" / "trainer_island.py"
    with Processes() as processes:
        environment = {"PYTHONPATH": ".", "MASTER_PORT": find_free_port()}  # else 29500, which others may listen on
        process = processes.spawn([sys.executable, program, json.dumps(settings)], env=environment)
        process.wait_for(r"diloco/round")
        process.interrupt()
        process.wait(60)
    steps = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert steps < 100_000
    ((_, index),) = complete_checkpoints(tmp_path)
    assert index.global_step == steps


# Checkpoints


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 4, 6])
def test_resumed_is_uninterrupted_bit_for_bit(step: int, tmp_path: Path) -> None:
    """Rounds end at 3 and 6: before the first, in the middle of one, on a boundary."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    whole = make_trainer(tmp_path / "run", DiLoCoCallback(sync_every=3), **saving)
    whole.train()
    expected = [(event["step"], event["outer_hash"]) for event in events(tmp_path / "run", "sync")]
    callback = DiLoCoCallback(sync_every=3)
    resumed = make_trainer(tmp_path / "run", callback, model=make_model(lora=False, tied=True, seed=9), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert same_bits(weights_of(resumed), weights_of(whole))
    assert losses(resumed) == losses(whole)
    again = [(event["step"], event["outer_hash"]) for event in events(tmp_path / "run", "sync")][len(expected) :]
    assert again == [one for one in expected if one[0] > step]
    assert events(tmp_path / "run", "start")[1]["resumed"] is True
    assert callback.round == 2


@pytest.mark.parametrize("is_said_to_both", [True, False])
def test_resuming_from_another_folder(is_said_to_both: bool, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = make_trainer(tmp_path / "a", DiLoCoCallback(sync_every=3), **saving)
    whole.train()
    checkpoint = (tmp_path / "a" / "checkpoint-4").rename(tmp_path / "kept")
    other = make_model(lora=False, tied=True, seed=2)
    make_trainer(tmp_path / "b", DiLoCoCallback(sync_every=3), model=other, **saving).train()  # with the same steps
    callback = DiLoCoCallback(sync_every=3, resume_from_checkpoint=checkpoint if is_said_to_both else None)
    resumed = make_trainer(tmp_path / "b", callback)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same_bits(weights_of(resumed), weights_of(whole))


def test_another_place_in_the_data_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with second_island(find_free_port(), tmp_path, rounds=1, sync_every=4) as common:
        make_trainer(tmp_path, DiLoCoCallback(**common), save_strategy="steps", max_steps=4).train()
    resumed = make_trainer(tmp_path, DiLoCoCallback(sync_every=4), seed=8, per_device_train_batch_size=2)
    resumed.train(resume_from_checkpoint=True)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    for expected in (
        "took 4 examples a step, and takes 2 now",
        "by seed 7, and is by seed 8",
        "by 2 islands, and is by 1",
    ):
        assert any(expected in message for message in told), told


def test_a_training_after_one_that_resumed_elsewhere_begins_anew(tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", DiLoCoCallback(sync_every=4), save_strategy="steps", save_steps=4).train()
    checkpoint = tmp_path / "a" / "checkpoint-4"
    callback = DiLoCoCallback(sync_every=4, resume_from_checkpoint=checkpoint)
    trainer = make_trainer(tmp_path / "b", callback)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert callback.round == 2
    trainer.train()
    assert callback.round == 2
    assert [event["resumed"] for event in events(tmp_path / "b", "start")] == [True, False]


@pytest.mark.parametrize("max_steps", [8, 6], ids=["on a boundary", "between rounds"])
def test_a_finished_training_that_is_resumed_keeps_its_weights(
    max_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The Trainer by itself takes one step more, on each island another one."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole = make_trainer(tmp_path, DiLoCoCallback(sync_every=4), max_steps=max_steps, **settings)
    whole.train()
    caplog.clear()
    callback = DiLoCoCallback(sync_every=4)
    resumed = make_trainer(tmp_path, callback, max_steps=max_steps, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert same_bits(weights_of(resumed), weights_of(whole))
    assert (resumed.state.global_step, callback.round) == (max_steps, max_steps // 4)
    assert callback.moved_at_end, "a round that was due may have taken place: what was evaluated before counts no more"
    assert complete_steps(tmp_path) == list(range(2, max_steps + 1, 2))
    assert ("after the last synchronisation" in caplog.text) is (max_steps == 6)


def test_an_island_with_steps_in_no_round_that_is_resumed_when_all_is_over_ends_with_the_runs_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had missed the rounds, and was killed after its last step; meanwhile the other island has completed them."""
    common = {"rendezvous": f"file://{tmp_path}/store", "sync_every": 2, "max_islands": 2, "grace": 0.1}
    own = DiLoCoConfig(island=1, **common)

    def miss(session: ElasticSession) -> Any:
        raise MissedRoundError("missed on purpose")

    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    late = make_trainer(tmp_path / "late", DiLoCoCallback(own), KilledAfterSave(), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(ElasticSession, "sync", miss)
        with pytest.raises(KilledError):
            late.train()
    first = make_trainer(tmp_path / "first", DiLoCoCallback(DiLoCoConfig(island=0, **common)), max_steps=4)
    first.train()
    callback = DiLoCoCallback(own)
    late = make_trainer(tmp_path / "late", callback, **settings)
    late.train(resume_from_checkpoint=True)
    assert read_index(tmp_path / "late" / "checkpoint-4").steps_since_sync == 4
    assert same_bits(weights_of(late), weights_of(first))
    assert events(tmp_path / "late", "end")[-1]["on_boundary"]
    assert callback.moved_at_end


def test_the_common_checkpoint_of_one_island_is_its_newest(tmp_path: Path) -> None:
    make_trainer(tmp_path, DiLoCoCallback(sync_every=4), save_strategy="steps", save_steps=3).train()
    (tmp_path / "checkpoint-8" / "diloco" / "outer.json").unlink(missing_ok=True)
    assert DiLoCoCallback(sync_every=4).common_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    assert DiLoCoCallback(sync_every=4).common_checkpoint(tmp_path / "nothing") is None


@dataclass
class OwnConfig:
    width: int


class OwnModel(torch.nn.Module):
    """A model that is not from transformers, with a configuration of its own kind."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = torch.nn.Embedding(64, config.width)
        self.head = torch.nn.Linear(config.width, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def test_a_model_with_a_configuration_of_its_own_kind_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(sync_every=2), model=OwnModel(OwnConfig(16)), max_steps=2, save_strategy="steps"
    )
    trainer.train()
    assert complete_steps(tmp_path) == [2]


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=4))
    with pytest.raises(CheckpointError, match=r"checkpoint-4 has no outer state.*Resume from an earlier checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process ends after the Trainer has written the checkpoint of `step`, before the outer state is beside it."""

    def maybe_save(outer: OuterState, checkpoint: Path, global_step: int, data: Any) -> None:
        if global_step == step:
            raise KilledError
        save_state(outer, checkpoint, global_step, data)

    monkeypatch.setattr(callbacks, "save_state", maybe_save)


def complete_steps(folder: Path) -> list[int]:
    return [index.global_step for _, index in complete_checkpoints(folder)]


LIMITED: dict[str, Any] = {"save_strategy": "steps", "save_total_limit": 1}


@pytest.mark.parametrize("killed_at", [4, 6])
def test_with_one_checkpoint_allowed_there_is_always_one(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(monkeypatch, killed_at)
    with pytest.raises(KilledError):
        make_trainer(tmp_path, DiLoCoCallback(sync_every=4), save_steps=2, **LIMITED).train()
    assert complete_steps(tmp_path) == [killed_at - 2]
    assert (tmp_path / f"checkpoint-{killed_at}" / "trainer_state.json").is_file()


def test_a_torn_checkpoint_does_not_push_out_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run leaves 2, whole, and 4, torn; the second goes on from 2 and is killed while it writes 3."""
    with monkeypatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(KilledError):
            make_trainer(tmp_path, DiLoCoCallback(sync_every=4), save_steps=2, **LIMITED).train()
    kill_at(monkeypatch, 3)
    callback = DiLoCoCallback(sync_every=4)
    trainer = make_trainer(tmp_path, At(3, callback.stop), callback, save_steps=2, **LIMITED)
    with pytest.raises(KilledError):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "checkpoint-3").is_dir()
    assert complete_steps(tmp_path) == [2]


def test_the_limit_on_checkpoints_holds_in_the_end(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=4), save_steps=2, **LIMITED)
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]
    assert complete_steps(tmp_path) == [8]
    assert trainer.args.save_total_limit == 1


# What is refused


def test_settings_are_given_once() -> None:
    with pytest.raises(ConfigError, match=r"either a DiLoCoConfig or settings by name, not both \(sync_every\)"):
        DiLoCoCallback(DiLoCoConfig(), sync_every=3)


def test_a_wrong_setting_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"sync_every: .*got 0"):
        DiLoCoCallback(sync_every=0)


def test_tokens_that_nobody_counts_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=4, weight_by="tokens"))
    with pytest.raises(ConfigError, match="set include_num_input_tokens_seen='all'"):
        trainer.train()


def test_weighting_by_tokens_needs_an_input_that_holds_them(tmp_path: Path) -> None:
    """The first step says so, and not the first round."""
    callback = DiLoCoCallback(sync_every=4, weight_by="tokens")
    trainer = make_trainer(tmp_path, callback, include_num_input_tokens_seen="all")
    model: Any = trainer.model
    model.main_input_name = "inputs_embeds"
    with pytest.raises(ConfigError, match=r"no tokens in this step: .* 'inputs_embeds', which the batch lacks"):
        trainer.train()
    assert trainer.state.global_step == 1


# Other trainers


def test_trls_trainer_takes_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Tracker)
    callback = DiLoCoCallback(sync_every=2)
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="steps",
        save_steps=4,
        report_to=["recorder"],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        max_length=LENGTH,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    import datasets

    tokens = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in Tokens(0, size=64).tokens]
    trainer = trl.SFTTrainer(
        make_model(lora=False, tied=True, seed=1),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(tokens),
        processing_class=make_tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.round == 2
    assert [step for step, logs in Tracker.logged if "diloco/round" in logs] == [2, 4]
    assert complete_steps(tmp_path) == [4]


def test_trackers_see_rounds_that_a_checkpoint_waited_for(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=4, num_fragments=2, fragment_sync_delay=1)
    chosen: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 100}
    trainer = make_trainer(tmp_path, callback, max_steps=16, **chosen)
    trainer.train()
    logged = [entry["diloco/round"] for entry in trainer.state.log_history if "diloco/round" in entry]
    assert logged[:6] == [1, 2, 3, 4, 5, 6]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t1"
    )
