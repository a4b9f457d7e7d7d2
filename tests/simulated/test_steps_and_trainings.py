"""Islands that are to take unequal numbers of steps, and callbacks that train more than once."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from hf_diloco import DiLoCoCallback, DiLoCoConfig, OneBitAdam, OneBitCallback, OuterLoop
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import ConfigError, FingerprintError, IslandLostError, StopRequested
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership import ended_runs, facts
from hf_diloco.membership.facts import compare_facts, join_facts
from hf_diloco.report.progress import read_progress
from hf_diloco.rounds.elastic import ElasticSession
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.open import open_session
from hf_diloco.store.rendezvous import StoreHost
from hf_diloco.store.values import ValueStore
from hf_diloco.trainer.arguments import saving_facts
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.open import MemoryTransport
from hf_diloco.utils.files import PROGRESS_FILE
from tests.clocks import AT_ONCE, LONG, wait_until
from tests.islands import Beside, interrupted_after, run_islands, try_islands
from tests.loops import make_loop
from tests.programs.trainer_island import Tokens, make_model
from tests.records import events
from tests.trainers import make_trainer


def shards_of(seed: int) -> Any:
    return open_shards(make_model(lora=False, tied=True, seed=seed), None)


def meet(folder: Path, num_steps: list[int | None]) -> list[Any]:
    """Two islands over tcp://'s protocol that are to take so many steps each."""
    network, store = MemoryNetwork(2), ValueStore.in_memory()

    def island_main(island: int) -> None:
        config = DiLoCoConfig(island=island, num_islands=2, rendezvous="tcp://127.0.0.1:1", join_timeout=20)
        session = FixedSession(config, IslandGroup(), transport=MemoryTransport(network, store, island))
        session.num_steps = num_steps[island]
        session.join(shards_of(1), folder / str(island))

    return try_islands(2, island_main)


def test_unequal_numbers_of_steps_are_refused_when_islands_meet(tmp_path: Path) -> None:
    for outcome in meet(tmp_path, [8, 12]):
        assert isinstance(outcome, FingerprintError)
        assert "max_steps differs (island 0: 8, island 1: 12); set max_steps" in str(outcome)
        assert "num_train_epochs" in str(outcome)


def test_equal_and_unknown_numbers_pass(tmp_path: Path) -> None:
    assert meet(tmp_path, [8, 8]) == [None, None]
    assert meet(tmp_path / "unknown", [8, None]) == [None, None]
    with pytest.raises(FingerprintError, match="tokenizer differs"):
        compare_facts([{"tokenizer": "a"}, {}])


def test_who_does_not_know_its_number_of_steps_hides_no_difference_between_the_others() -> None:
    compare_facts([{}, {"max_steps": 3}, {}, {"max_steps": 3}])
    with pytest.raises(FingerprintError, match=r"max_steps differs \(island 0: None, island 1: 3, island 2: 4\)"):
        compare_facts([{}, {"max_steps": 3}, {"max_steps": 4}])


@pytest.mark.parametrize("who", ["island", "node"])
def test_another_version_of_the_package_is_named_first(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = join_facts({"max_steps": 1}, {})
    monkeypatch.setattr(facts, "PROTOCOL", facts.PROTOCOL + 1)
    with pytest.raises(
        FingerprintError, match=rf"protocol differs \({who} 0: .*install the same version of hf-diloco"
    ):
        compare_facts([mine, join_facts({"max_steps": 2}, {})], who)


def test_unequal_numbers_of_steps_are_refused_in_a_store(tmp_path: Path) -> None:
    def island_main(island: int, num_steps: int) -> None:
        config = DiLoCoConfig(
            island=island, num_islands=2, min_islands=1, rendezvous=f"file://{tmp_path}/store", join_timeout=0.3
        )
        session = ElasticSession(config, IslandGroup())
        session.num_steps, session.num_rounds = num_steps, 2
        session.join(shards_of(1), tmp_path / str(island))
        session.leave(finished=False)

    island_main(0, 8)
    with pytest.raises(FingerprintError, match=r"max_steps differs \(the run, begun by island 0: 8; island 1: 12\)"):
        island_main(1, 12)


def test_the_callback_tells_its_number_of_steps(tmp_path: Path, free_port: int) -> None:
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 2}

    def other() -> None:
        session = FixedSession(DiLoCoConfig(island=1, **common), IslandGroup())
        session.num_steps = 6
        session.join(shards_of(2), tmp_path / "other")

    with Beside(other) as failures:
        trainer = make_trainer(tmp_path / "run", DiLoCoCallback(DiLoCoConfig(island=0, **common)))
        with pytest.raises(FingerprintError, match=r"max_steps differs \(island 0: 4, island 1: 6\)"):
            trainer.train()
    assert isinstance(failures[0], FingerprintError)


@pytest.mark.parametrize(
    ("saving", "told"),
    [
        ([{"save_steps": 2}, {"save_steps": 3}], "island 0: every 2 steps, island 1: every 3 steps"),
        ([{"save_strategy": "epoch"}] * 2, "island 0: after epochs of 2 steps, island 1: after epochs of 3 steps"),
    ],
    ids=["steps", "epochs"],
)
def test_islands_that_would_save_in_different_rounds_are_refused(
    saving: list[dict[str, Any]], told: str, tmp_path: Path, free_port: int
) -> None:
    """They go back to a common checkpoint, and would have none."""

    def island_main(island: int) -> None:
        trainers[island].train()

    trainers = []
    for island in range(2):
        callback = DiLoCoCallback(island=island, num_islands=2, rendezvous=f"tcp://127.0.0.1:{free_port}")
        trainer = make_trainer(tmp_path / str(island), callback, **saving[island])
        trainer.train_dataset = Tokens(island, size=8 * (2, 3)[island])
        trainers.append(trainer)
    for outcome in try_islands(2, island_main):
        assert isinstance(outcome, FingerprintError)
        assert f"when checkpoints are saved differs ({told}); set save_strategy=steps and the same" in str(outcome)


def test_islands_that_both_save_at_the_end_alone_save_at_the_same_step() -> None:
    """The Trainer saves there, too, however far away the next `save_steps` or end of an epoch is."""
    all_saving: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"save_steps": 500}, {"save_steps": 1000}),
        ({"save_strategy": "epoch"}, {"save_strategy": "epoch"}),
    ]
    for saving in all_saving:
        facts = []
        for one, size in zip(saving, (5, 9), strict=True):
            args = TrainingArguments(use_cpu=True, report_to=[], max_steps=4, **one)
            state = TrainerState(max_steps=4, save_steps=int(args.save_steps))
            facts.append(saving_facts(args, state, DataLoader(Tokens(0, size=size))))
        assert facts[0] == facts[1]


def test_an_island_that_ends_before_the_others_is_named_at_once() -> None:
    network, store = MemoryNetwork(2), ValueStore.in_memory()

    def island_main(island: int) -> None:
        config = DiLoCoConfig(
            island=island, num_islands=2, rendezvous="tcp://127.0.0.1:1", sync_every=1, sync_timeout=600
        )
        session = FixedSession(config, IslandGroup(), transport=MemoryTransport(network, store, island))
        session.join(shards_of(1), Path(f"island-{island}"))
        try:
            for _ in range(1 if island else 2):
                session.outer.count_step(1.0)
                session.sync()
        finally:
            session.leave(finished=island == 1)

    outcomes = try_islands(2, island_main, timeout=30)  # sync_timeout is ten minutes
    assert isinstance(outcomes[0], IslandLostError)
    assert "island 1 ended after round 1, and others have more steps to take" in str(outcomes[0])
    assert "same number of steps" in str(outcomes[0])
    assert outcomes[1] is None


@pytest.mark.parametrize("callbacks", ["same", "new"])
def test_training_twice_with_two_islands(tmp_path: Path, free_port: int, callbacks: str) -> None:
    """Over real connections: island 1 is a session that follows."""
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 2}
    rounds = []

    def other() -> None:
        session = None
        for _ in range(2):
            session = open_session(DiLoCoConfig(island=1, **common), IslandGroup(), after=session)
            session.join(shards_of(2), tmp_path / "other")
            for _ in range(2):
                session.outer.current.steps = 2
                session.sync()
            session.leave(finished=True)
            rounds.append(session.outer.outer_hash)

    with Beside(other) as failures:
        trainers: list[Trainer] = []  # all are kept, as a notebook does
        for number in range(2):
            if callbacks == "new" or not trainers:
                trainers.append(make_trainer(tmp_path / str(number), DiLoCoCallback(island=0, **common)))
            trainers[-1].train()
    assert not failures
    assert len(set(rounds)) == (1 if callbacks == "new" else 2)  # a new trainer begins with the same weights


def test_each_loop_meets_the_others_at_the_same_port_also_after_an_interrupt(tmp_path: Path, free_port: int) -> None:
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 1}
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(layer := torch.nn.Linear(2, 2), torch.optim.SGD(layer.parameters()))
    config = DiLoCoConfig(island=0, **common)
    loops = [OuterLoop(accelerator, model, optimizer, config, output_dir=tmp_path / name) for name in "abc"]
    with pytest.raises(KeyboardInterrupt), interrupted_after(1.0), loops[0]:
        pytest.fail("island 1 is not there")

    def other() -> None:
        for _ in loops[1:]:
            session = open_session(DiLoCoConfig(island=1, **common), IslandGroup())
            session.join(open_shards(torch.nn.Linear(2, 2), None), tmp_path / "other")
            session.outer.count_step()
            session.sync()
            session.leave(finished=True)

    with Beside(other) as failures:
        for loop in loops[1:]:
            with loop as outer:
                assert outer.step() is not None
    assert not failures


class OwnFlow(DefaultFlowCallback):
    """A user's own, which the Trainer calls last."""


@pytest.mark.parametrize("flow", [None, OwnFlow])
def test_checkpoints_of_all_trainings_record_what_other_callbacks_write(
    flow: type[DefaultFlowCallback] | None, tmp_path: Path
) -> None:
    model = make_model(lora=False, tied=True, seed=1)
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=4, save_steps=4, disable_tqdm=True)
    callbacks = [DiLoCoCallback(sync_every=2), OneBitCallback(optimizer)]
    trainer = Trainer(model, args, train_dataset=Tokens(0), optimizers=(optimizer, None), callbacks=callbacks)
    if flow is not None:
        trainer.remove_callback(DefaultFlowCallback)
        trainer.add_callback(flow())
    for _ in range(2):
        trainer.train()
        recorded = (tmp_path / "checkpoint-4" / "diloco" / "outer.json").read_text()
        assert "onebit_errors_0_of_1.safetensors" in recorded
        shutil.rmtree(tmp_path / "checkpoint-4")


def test_training_twice_in_a_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    callback = DiLoCoCallback(num_islands=2, min_islands=1, island=0, rendezvous=url, sync_every=2, join_timeout=0.3)
    trainer = make_trainer(tmp_path / "run", callback)
    for _ in range(3):
        trainer.train()
        assert (callback.round, trainer.state.global_step) == (2, 4)
    assert sorted(path.parent.name for path in (tmp_path / "store").rglob("run.json")) == [
        "store",
        "training-2",
        "training-3",
    ]


def test_training_twice_where_island_0_keeps_the_store_and_takes_its_time(tmp_path: Path, free_port: int) -> None:
    """Islands are back while it has yet to end the store of the first training, or has not opened the next one."""
    common: dict[str, Any] = {"num_islands": 2, "max_islands": 3, "exchange": "bucket", "sync_every": 1}
    common |= {"rendezvous": f"tcp://127.0.0.1:{free_port}", "exchange_timeout": 3.0}

    def island_main(island: int) -> str:
        session: Any = None
        for pause in (4.0, 0.0):  # the first is longer than a store may be silent
            config, folder = DiLoCoConfig(island=island, **common), tmp_path / str(island)
            session = open_session(config, IslandGroup(), after=session, folder=folder)
            session.num_rounds = 1
            session.join(shards_of(island), folder)
            session.outer.count_step(1.0)
            session.sync()
            session.leave(finished=True)
            time.sleep(0 if island else pause)
        assert session.config.rendezvous.endswith("/training-2")
        return str(session.outer.outer_hash)

    assert len(set(run_islands(2, island_main))) == 1


def test_the_next_training_waits_for_island_0_to_end_the_store_of_the_last_one(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"num_islands": 2, "max_islands": 3, "sync_every": 1, "join_timeout": LONG}
    common |= {"rendezvous": f"tcp://127.0.0.1:{free_port}", "exchange_timeout": 3.0}
    end_store, is_awaited = ElasticSession._end_store, threading.Event()

    def end_late(self: ElasticSession, host: StoreHost, finished: bool) -> None:
        assert is_awaited.wait(LONG)
        end_store(self, host, finished)

    def look(*args: Any) -> bool:
        if found := ended_runs.is_of_ended_run(*args):
            is_awaited.set()
        return found

    monkeypatch.setattr(ElasticSession, "_end_store", end_late)
    monkeypatch.setattr("hf_diloco.rounds.open.is_of_ended_run", look)

    def island_main(island: int) -> list[tuple[str, list[int], str]]:
        outcomes = []
        for name in ("first", "second"):
            folder = tmp_path / name / str(island)
            session = open_session(DiLoCoConfig(island=island, **common), IslandGroup(), folder=folder)
            session.num_rounds = 1
            session.join(shards_of(island), folder)
            session.outer.count_step(1.0)
            participants = session.sync().participants
            session.leave(finished=True)
            outcomes.append((session.outer.run, participants, str(session.outer.outer_hash)))
        return outcomes

    first, second = run_islands(2, island_main)
    assert first == second
    assert [participants for _, participants, _ in first] == [[0, 1], [0, 1]]
    assert first[0][0] != first[1][0], "another run"


def test_a_session_that_cannot_be_opened_leaves_no_port_taken(tmp_path: Path, free_port: int) -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port}"
    config = DiLoCoConfig(num_islands=2, min_islands=1, island=0, rendezvous=rendezvous, join_timeout=0.5)
    without_key = config.model_copy(update={"key_file": tmp_path / "key"})
    with pytest.raises(ConfigError, match="key"):
        open_session(without_key, IslandGroup(), folder=tmp_path)
    session = open_session(config, IslandGroup(), folder=tmp_path)
    session.join(shards_of(0), tmp_path)
    session.leave(finished=False)


def test_a_store_whose_disk_is_gone_fails_no_finished_training(tmp_path: Path, free_port: int) -> None:
    common: dict[str, Any] = {"num_islands": 1, "max_islands": 2, "exchange": "bucket", "exchange_timeout": 0.5}
    config = DiLoCoConfig(island=0, rendezvous=f"tcp://127.0.0.1:{free_port}", **common)
    session = open_session(config, IslandGroup(), folder=tmp_path)
    session.join(shards_of(0), tmp_path / "0")
    (tmp_path / "rendezvous" / "objects").rename(tmp_path / "gone")  # at once, as heartbeats are written meanwhile
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    session.leave(finished=True)
    socket.create_server(("127.0.0.1", free_port)).close()


@pytest.mark.parametrize(
    ("settings", "has_store"),
    [({}, False), ({}, True), ({"min_islands": 1}, False)],
    ids=["fixed", "fixed, no run in its store", "elastic"],
)
def test_who_is_asked_to_stop_waits_for_no_island_0(
    settings: dict[str, Any], has_store: bool, tmp_path: Path, free_port: int
) -> None:
    """Neither until it opens the store, nor until it begins the run there."""
    rendezvous = f"tcp://127.0.0.1:{free_port}"
    config = DiLoCoConfig(num_islands=2, island=1, rendezvous=rendezvous, join_timeout=AT_ONCE, **settings)
    host = StoreHost(config) if has_store else None
    try:
        with pytest.raises(StopRequested):
            open_session(config, IslandGroup(), lambda: True, folder=tmp_path)
    finally:
        if host is not None:
            host.close()


@pytest.mark.parametrize("end", ["dropped", "hung up"])
def test_a_session_that_nobody_leaves_leaves_no_port_taken(end: str, tmp_path: Path, free_port: int) -> None:
    """As in a notebook, whose process lives on."""
    config = DiLoCoConfig(num_islands=2, min_islands=1, island=0, rendezvous=f"tcp://127.0.0.1:{free_port}")
    session = open_session(config, IslandGroup(), folder=tmp_path)
    assert session.common_checkpoint(tmp_path) is None
    if end == "dropped":
        del session
        gc.collect()
    else:
        session.hang_up()
    socket.create_server(("127.0.0.1", free_port)).close()


def test_processes_that_load_data_keep_no_port_taken(tmp_path: Path, free_port: int) -> None:
    config = DiLoCoConfig(num_islands=2, rendezvous=f"tcp://127.0.0.1:{free_port}")
    host = StoreHost(config, tmp_path)
    numbers: Any = [7, 8]
    batches = iter(DataLoader(numbers, num_workers=1, persistent_workers=True))  # forked: it has all sockets
    assert next(batches) == 7
    host.close()
    StoreHost(config, tmp_path).close()


def test_who_is_interrupted_while_the_others_end_leaves_no_port_taken(tmp_path: Path, free_port: int) -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port}"
    config = DiLoCoConfig(num_islands=1, max_islands=2, exchange="bucket", island=0, rendezvous=rendezvous)
    is_ending = threading.Event()

    def stop_or_interrupt() -> bool:
        if is_ending.is_set():
            raise KeyboardInterrupt
        return False

    keeper = open_session(config, IslandGroup(), stop_or_interrupt, folder=tmp_path)
    keeper.join(shards_of(0), tmp_path / "0")
    other = open_session(config.model_copy(update={"island": 1}), IslandGroup(), folder=tmp_path)
    other.join(shards_of(0), tmp_path / "1")
    is_ending.set()
    with pytest.raises(KeyboardInterrupt):
        keeper.leave(finished=True)
    socket.create_server(("127.0.0.1", free_port)).close()
    assert other.members is not None
    other.members.stop_heartbeats()


class Interrupts(TrainerCallback):
    """Raises in a step, as a library or a second Ctrl-C may."""

    def __init__(self, error: BaseException, callback: DiLoCoCallback) -> None:
        self._errors = [error]
        self._callback = callback

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 3 and self._errors:
            self._callback.stop()
            raise self._errors.pop()


class StopsAt(TrainerCallback):
    """Asks for a stop in the course of a step."""

    def __init__(self, step: int, callback: DiLoCoCallback) -> None:
        self._step = step
        self._callback = callback

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            self._callback.stop()


PLACES = ("alone", "store", "tcp", "tcp and another callback")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *((place, RuntimeError()) for place in PLACES),
        ("tcp", KeyboardInterrupt()),
        *(pytest.param(place, KeyboardInterrupt(), marks=pytest.mark.slow) for place in PLACES if place != "tcp"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_training_that_ended_in_an_error_goes_on(
    tmp_path: Path, place: str, error: BaseException, free_port: int
) -> None:
    places = {"alone": None, "store": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{free_port}"}
    rendezvous = places[place.partition(" ")[0]]
    common: dict[str, Any] = {"sync_every": 2, "rendezvous": rendezvous}
    if rendezvous:
        common |= {"num_islands": 2, "min_islands": 1, "island": 0, "join_timeout": 0.5}
    callback = DiLoCoCallback(**common)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path / "run", callback, Interrupts(error, callback), **saving)
    with pytest.raises(type(error)):
        trainer.train()
    if "another" in place:
        callback = DiLoCoCallback(**common)
        again = make_trainer(tmp_path / "run", callback, **saving)
    else:
        again = trainer
    again.train(resume_from_checkpoint=True)
    assert (callback.round, again.state.global_step, callback.stopped) == (2, 4, False)


def test_an_error_in_an_evaluation_before_the_first_step_is_told_to_the_others(tmp_path: Path) -> None:
    """Whichever weights it is of."""

    def fail(_: Any) -> dict[str, float]:
        raise RuntimeError("no such metric")

    common: dict[str, Any] = {"num_islands": 2, "min_islands": 1, "island": 0, "eval_weights": "inner"}
    callback = DiLoCoCallback(sync_every=2, rendezvous=f"file://{tmp_path}/store", join_timeout=0.5, **common)
    trainer = make_trainer(tmp_path / "run", callback, eval_on_start=True)
    trainer.compute_metrics = fail
    with pytest.raises(RuntimeError, match="no such metric"):
        trainer.train()
    assert callback._need_session().has_left


def test_a_loop_that_was_never_entered_blocks_no_other(tmp_path: Path, free_port: int) -> None:
    """In a notebook, after an interrupt between `common_checkpoint` and the loop."""
    common: dict[str, Any] = {"num_islands": 2, "min_islands": 1, "island": 0, "join_timeout": 0.5}
    common |= {"rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 1}
    never_entered, _ = make_loop(tmp_path, **common)
    never_entered.common_checkpoint()
    again, _ = make_loop(tmp_path, **common, num_steps=1)
    assert again.common_checkpoint() is None
    with again:
        again.step()
    assert again.round == 1


def test_after_an_error_the_trainer_trains_by_itself(tmp_path: Path) -> None:
    callback = DiLoCoCallback(sync_every=100)
    chosen: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, callback, Interrupts(RuntimeError(), callback), **chosen, save_total_limit=1)
    with pytest.raises(RuntimeError):
        trainer.train()
    assert trainer.args.save_total_limit == 1
    trainer.remove_callback(callback)
    trainer.train()
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-4"]
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[1] < losses[0], "of the weights that train, not of the outer parameters"


def test_a_second_training_that_ended_in_an_error_goes_on_in_its_own_place(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    callback = DiLoCoCallback(num_islands=2, min_islands=1, island=0, rendezvous=url, sync_every=2, join_timeout=0.3)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path / "run", callback, **saving)
    trainer.train()
    trainer.add_callback(Interrupts(RuntimeError(), callback))
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert (callback.round, trainer.state.global_step) == (2, 4)
    assert sorted(path.parent.name for path in (tmp_path / "store").rglob("run.json")) == ["store", "training-2"]


class CannotLogIn(TrainerCallback):
    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such account")


@pytest.mark.parametrize("where", ["a step", "an evaluation before the first step", "a tracker"])
def test_an_error_in_a_process_that_lives_on_is_told_to_the_others(where: str, tmp_path: Path, free_port: int) -> None:
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{free_port}", "sync_every": 2}

    def other() -> None:
        session = open_session(DiLoCoConfig(island=1, **common), IslandGroup())
        session.join(shards_of(2), tmp_path / "other")
        for _ in range(2):
            session.outer.count_step()
            session.outer.count_step()
            session.sync()

    with Beside(other) as failures:
        callback = DiLoCoCallback(island=0, **common)
        another = CannotLogIn() if where == "a tracker" else Interrupts(RuntimeError(), callback)
        evaluates = where == "an evaluation before the first step"
        trainer = make_trainer(tmp_path / "run", callback, another, eval_on_start=evaluates)
        if evaluates:
            trainer.compute_metrics = Mock(side_effect=RuntimeError)
        with pytest.raises(RuntimeError):
            trainer.train()
    assert isinstance(failures[0], IslandLostError), "long before sync_timeout"
    assert "its training ended in an error" in str(failures[0]), "nobody has asked it to stop"


@pytest.mark.parametrize("by", ["stop()", "an interrupt"])
def test_who_ends_a_resumed_training_in_the_round_that_it_begins_with_leaves_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    common: dict[str, Any] = {"num_islands": 2, "rendezvous": f"file://{tmp_path}/store", "sync_every": 2}
    callback = DiLoCoCallback(island=0, sync_timeout=LONG, **common)

    def other() -> None:
        """Is there, and never comes to a round."""
        session = open_session(DiLoCoConfig(island=1, **common), IslandGroup())
        session.join(shards_of(2), tmp_path / "other")
        wait_until(lambda: len(events(tmp_path / "run", "start")) == 2, "the resumed training")
        wait_until(lambda: read_progress(tmp_path / PROGRESS_FILE).state == "syncing", "its first round")
        if by == "stop()":
            callback.stop()
        else:
            os.kill(os.getpid(), signal.SIGALRM)
        session.abandon()

    trainer = make_trainer(tmp_path / "run", callback, StopsAt(2, callback), eval_on_start=True)
    with Beside(other) as failures, interrupted_after(LONG):
        trainer.train()
        assert callback.stopped
        with nullcontext() if by == "stop()" else pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=True)
        assert callback._need_session().has_left
    assert not failures
    assert (callback.stopped, callback.round, trainer.state.global_step) == (by == "stop()", 0, 2)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert len(events(tmp_path / "run", "eval")) == 1, "of the first training: who is to end evaluates nothing"
