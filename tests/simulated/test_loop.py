"""The outer loop in a hand-written Accelerate loop."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from transformers import Trainer, TrainingArguments

from hf_diloco import DiLoCoCallback, DiLoCoConfig, OuterLoop
from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.checkpoint import read_index
from hf_diloco.report import load_run, summarise
from hf_diloco.rounds.open import open_session
from tests.loops import make_loop
from tests.processes import Processes, find_free_port
from tests.programs.mesh_loop import BATCH, LEARNING_RATE, compute_loss, train
from tests.programs.trainer_island import Tokens, make_model


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class InOrder(Trainer):
    """Takes the data as it comes, as the loop does."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(Tokens(0))


def test_it_computes_what_the_callback_computes(tmp_path: Path) -> None:
    config: dict[str, Any] = {"sync_every": 3}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=9,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",  # the default is the fused one, which rounds differently
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    callback = DiLoCoCallback(**config)
    model = make_model(lora=False, tied=True, seed=1)
    trainer = InOrder(model, arguments, train_dataset=Tokens(0), callbacks=[callback], compute_loss_func=compute_loss)
    trainer.train()
    weights, reports = train({"config": config, "folder": str(tmp_path / "loop"), "steps": 9})
    assert same_bits(weights, {name: one.detach() for name, one in model.named_parameters()})
    lines = map(json.loads, (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines())
    hashes = [event["outer_hash"] for event in lines if event["event"] == "sync"]
    assert [report.outer_hash for report in reports] == hashes
    assert len(hashes) == 3


@pytest.mark.parametrize("accumulation", [1, 3])
def test_only_optimizer_steps_count(accumulation: int, tmp_path: Path) -> None:
    config = {"sync_every": 2, "weight_by": "examples"}
    settings = {"config": config, "folder": str(tmp_path), "steps": 4, "accumulation": accumulation}
    _, reports = train(settings)
    assert [report.round for report in reports] == [1, 2]
    assert [report.weight for report in reports] == [2 * accumulation * BATCH] * 2


@pytest.mark.parametrize("save_at", [3, 4, 5])
def test_resumed_is_uninterrupted_bit_for_bit(save_at: int, tmp_path: Path) -> None:
    settings = {"config": {"sync_every": 2}, "steps": 8, "save_at": save_at, "accumulation": 2}
    weights, reports = train({**settings, "folder": str(tmp_path / "a")})
    checkpoint = str(tmp_path / "a" / f"checkpoint-{save_at}")
    assert read_index(Path(checkpoint)).global_step == save_at
    later = {**settings, "folder": str(tmp_path / "b"), "resume_from": checkpoint, "save_at": 7}
    again, more = train(later)
    assert same_bits(again, weights)
    assert [report.outer_hash for report in more] == [report.outer_hash for report in reports[save_at // 2 :]]
    index = read_index(tmp_path / "b" / "checkpoint-7")
    assert (index.global_step, index.round, index.steps_since_sync) == (7, 3, 1)


class Recorder(GeneralTracker):
    """Keeps what is logged."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> list[Any]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


def test_figures_reach_accelerates_trackers(tmp_path: Path) -> None:
    recorder = Recorder()
    train({"config": {"sync_every": 2}, "folder": str(tmp_path), "steps": 4}, [recorder])
    assert [(step, values["diloco/round"]) for step, values in recorder.logged] == [(2, 1), (4, 2)]
    assert recorder.logged[0][1].keys() >= {"diloco/bytes_sent", "diloco/pseudo_gradient_norm"}


def test_a_loop_that_ends_off_a_boundary_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outer, _ = make_loop(tmp_path, sync_every=2)
    with caplog.at_level(logging.WARNING, "hf_diloco"), outer:
        assert outer.on_boundary
        assert outer.step() is None
        assert not outer.on_boundary
        report = outer.step()
        assert report is outer.report is not None
        assert (outer.round, outer.on_boundary) == (1, True)
        outer.step()
    assert "the loop ended 1 step after the last synchronisation" in caplog.text


def test_a_loop_in_a_run_that_is_over_ends_with_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = f"file://{tmp_path}/store"
    common = {"num_islands": 2, "min_islands": 1, "rendezvous": place, "join_timeout": 0.3, "sync_every": 2}
    weights = []
    for name in "ab":
        caplog.clear()
        outer, model = make_loop(tmp_path / name, num_steps=4, island=0, **common)
        with outer:
            for _ in range(4):
                with torch.no_grad():
                    model.weight += 1.0
                outer.step()
        assert outer.is_over
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
    assert f"the run at {place} ended with round 2: for another one give another rendezvous" in caplog.text
    assert "the loop's last 4 steps are not in the run, which ended with round 2" in caplog.text
    assert "without a part in it" not in caplog.text


def test_an_eager_loop_of_known_length_ends_with_its_last_round(tmp_path: Path) -> None:
    """One island alone takes DiLoCo's steps, and no outer step more."""
    weights = []
    for method in ("diloco", "eager"):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        plain = torch.nn.Linear(3, 1)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        config = DiLoCoConfig(method=method, sync_every=2)
        with OuterLoop(accelerator, model, optimizer, config, output_dir=tmp_path / method, num_steps=4) as outer:
            for step in range(4):
                with torch.no_grad():
                    plain.weight += 0.1 * (step + 1)
                outer.step()
        assert (outer.round, outer.on_boundary) == (2, True)
        weights.append(plain.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


def test_a_round_moves_the_prepared_model(tmp_path: Path) -> None:
    outer, model = make_loop(tmp_path, sync_every=1, outer_lr=0.5, outer_momentum=0.0)
    with outer:
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 1.0
        outer.step()
        torch.testing.assert_close(model.weight.detach(), before + 0.5)


def test_a_compiled_model_has_the_names_of_one_that_is_not(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    compiled: Any = torch.compile(torch.nn.Linear(3, 1), backend="eager")
    model, optimizer = accelerator.prepare(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    with OuterLoop(accelerator, model, optimizer, DiLoCoConfig(sync_every=2), output_dir=tmp_path) as outer:
        outer.save_state(tmp_path / "state")
    loop, plain = make_loop(tmp_path, sync_every=2, resume_from=tmp_path / "state")
    with (
        pytest.raises(CheckpointError, match="a model with other weights than the one to be trained: load the model"),
        loop,
    ):
        pytest.fail("it has resumed")
    loop, plain = make_loop(tmp_path, sync_every=2, resume_from=tmp_path / "state")
    plain.load_state_dict(model._orig_mod.state_dict())
    with loop:
        pass


def test_steps_without_their_weight_are_refused(tmp_path: Path) -> None:
    outer, _ = make_loop(tmp_path, weight_by="tokens")
    with outer, pytest.raises(ConfigError, match=r"weight_by='tokens' needs step\(weight=number of tokens\)"):
        outer.step()


def test_it_must_be_entered(tmp_path: Path) -> None:
    outer, _ = make_loop(tmp_path)
    assert outer.round == 0
    with pytest.raises(ConfigError, match="is a context manager"):
        outer.step()


def test_resuming_from_nothing_is_refused(tmp_path: Path) -> None:
    outer, _ = make_loop(tmp_path / "new", resume_from=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="has no outer state"), outer:
        pass


@pytest.mark.distributed
def test_two_islands_as_processes_with_equal_data_are_one_island(tmp_path: Path) -> None:
    common = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{find_free_port()}", "sync_every": 3}
    program = Path(__file__).parents[1] / "programs" / "mesh_loop.py"
    with Processes() as processes:
        islands = []
        for island in range(2):
            settings = {
                "config": {**common, "island": island},
                "folder": str(tmp_path / str(island)),
                "steps": 9,
                "result": str(tmp_path / f"{island}.pt"),
            }
            islands.append(processes.spawn([sys.executable, program, json.dumps(settings)], env={"PYTHONPATH": "."}))
        for process in islands:
            process.wait(120)
    weights, reports = train({"config": {"sync_every": 3}, "folder": str(tmp_path / "alone"), "steps": 9})
    for island in range(2):
        theirs, hashes = torch.load(tmp_path / f"{island}.pt", weights_only=True)
        assert same_bits(theirs, weights)
        assert hashes == [report.outer_hash for report in reports]


def test_a_signal_is_a_wish_from_the_first_question_on(tmp_path: Path) -> None:
    outer, _ = make_loop(tmp_path, sync_every=4)
    before = signal.getsignal(signal.SIGTERM)
    with outer:
        for step in range(1, 9):
            outer.step()
            if outer.should_stop():
                break
            if step == 6:
                signal.raise_signal(signal.SIGTERM)
        assert (step, outer.stopped) == (7, True)
        outer.save_state(tmp_path / "checkpoint")
    assert signal.getsignal(signal.SIGTERM) == before
    index = read_index(tmp_path / "checkpoint")
    assert (index.global_step, index.round, index.steps_since_sync) == (7, 1, 3)


def test_a_wish_at_the_last_step_changes_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(3, 1), torch.optim.SGD(model.parameters()))
    with OuterLoop(accelerator, model, optimizer, DiLoCoConfig(sync_every=2), num_steps=2) as outer:
        outer.step()
        assert not outer.should_stop()
        signal.raise_signal(signal.SIGINT)
        outer.step()
        assert not outer.should_stop()
    assert not outer.stopped
    assert outer.on_boundary


def test_a_wish_waits_for_the_end_of_accumulation(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(3, 1), torch.optim.SGD(model.parameters()))
    answers = []
    with OuterLoop(accelerator, model, optimizer, DiLoCoConfig(sync_every=8)) as outer:
        for number in range(4):
            with accelerator.accumulate(model):
                outer.step()
            answers.append(outer.should_stop())
            if number == 1:
                signal.raise_signal(signal.SIGTERM)
    assert answers == [False, False, False, True]


def test_the_record_of_a_loop_is_that_of_a_trainer(tmp_path: Path) -> None:
    outer, _ = make_loop(tmp_path, sync_every=2, weight_by="examples")
    with outer:
        for _ in range(4):
            outer.step(weight=3)
        outer.save_state(tmp_path / "checkpoint")
    events = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("sync", 2),
        ("sync", 4),
        ("save", 4),
        ("end", 4),
    ]
    assert events[3]["path"] == "checkpoint"
    (island,) = summarise(load_run(tmp_path)).islands
    assert (island.steps, island.num_rounds, island.ended, island.on_boundary) == (4, 2, True, True)


STREAMING = {"num_fragments": 2, "fragment_patterns": ["weight", "bias"], "fragment_sync_delay": 1}


@pytest.mark.parametrize("config", [STREAMING, {"method": "eager"}], ids=["streaming", "eager"])
def test_last_rounds_that_could_not_take_place_do_so_when_the_run_is_resumed(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """And not after a step more."""
    torch.manual_seed(0)
    outer, model = make_loop(tmp_path, sync_every=4, **config)
    with outer:
        for _ in range(6):
            model(torch.randn(8, 3)).square().mean().backward()
            outer._optimizer.step()
            outer._optimizer.zero_grad()
            outer.step()
        outer._accelerator.save_state(str(tmp_path / "last"))
        outer.save_state(tmp_path / "last")
    expected = model.weight.detach().clone()

    again, model = make_loop(tmp_path, sync_every=4, num_steps=6, resume_from=tmp_path / "last", **config)
    again._accelerator.load_state(str(tmp_path / "last"))
    with again:
        assert again.on_boundary
        assert torch.equal(model.weight, expected)
    assert torch.equal(model.weight, expected)


def test_who_is_asked_to_stop_and_finds_that_another_has_stopped_already_saves(free_port: int, tmp_path: Path) -> None:
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 2}
    outer, _ = make_loop(tmp_path / "0", island=0, **common)
    has_left = threading.Event()

    def other() -> None:
        session = open_session(DiLoCoConfig(island=1, **common), IslandGroup())
        session.join(open_shards(torch.nn.Linear(3, 1), None), tmp_path / "1")
        session.leave(finished=False)
        has_left.set()

    thread = threading.Thread(target=other)
    thread.start()
    with outer:
        outer.step()
        assert not outer.should_stop()
        assert has_left.wait(30)
        signal.raise_signal(signal.SIGTERM)
        assert outer.step() is None, "a round, of which the other island will not be"
        assert outer.should_stop()
        outer.save_state(tmp_path / "saved")
    thread.join()
    assert read_index(tmp_path / "saved").global_step == 2
