"""Nodes that are all started again after some were lost: from which step, and how those enter who lack it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.errors import CheckpointError, IslandLostError, PayloadError
from hf_diloco.gossip.checkpoint import (
    RECORD,
    GossipIndex,
    Held,
    Resumption,
    choose_common,
    choose_own,
    choose_step,
    files_of,
    find_whole,
    read_held,
    save_index,
    take_mean,
    whole_checkpoints,
)
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph, MemoryNeighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.records import Record
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from hf_diloco.outer.manifest import check_contents
from hf_diloco.report import load_run, summarise
from hf_diloco.trainer.checkpoint_folder import CheckpointFolder
from tests.islands import run_islands, try_islands
from tests.tiny_nodes import events, run_of, simulate, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SWARM = ("gossip.method=swarm-sgd", "gossip.options={local_steps: 2}")


@pytest.mark.parametrize(
    ("steps", "step", "holders"),
    [
        ([[4, 8], [4, 8], [4, 8]], 8, (0, 1, 2)),
        ([[4, 8], [4], [4, 8, 12]], 8, (0, 2)),  # not 4, which all hold
        ([[8], [4], [8]], 8, (0, 2)),  # a node was lost, and the others let go of what it holds
        ([[], [8], [8]], 8, (1, 2)),  # a folder is gone
        ([[8], [4], [8], [4]], 8, (0, 2)),  # a tie
        ([[8], [4]], 8, (0,)),
        ([[16], [12], [8], [4], [], []], 16, (0,)),  # several were lost, one after the other
        ([[12], [8], [8], [8]], 8, (1, 2, 3)),  # killed while they saved
        ([[], [4], []], 4, (1,)),
    ],
)
def test_the_step_that_nodes_go_on_from(steps: list[list[int]], step: int, holders: tuple[int, ...]) -> None:
    late = tuple(node for node in range(len(steps)) if node not in holders)
    assert choose_step(of_one_life(steps)) == Resumption(step, holders, late)


def of_one_life(steps: list[list[int]]) -> list[list[Held]]:
    return [[(step, "a") for step in of_node] for of_node in steps]


@pytest.mark.parametrize(
    ("held", "step", "holders"),
    [
        ([[(4, "a"), (8, "b")], [(4, "a"), (8, "c")], [(4, "a")]], 4, (0, 1, 2)),
        ([[(8, "b")], [(8, "c")], [(8, "c")]], 8, (1, 2)),
        ([[(8, "c")], [(8, "b")], [(8, "b")], []], 8, (1, 2)),  # no majority: those of whom there are more
    ],
)
def test_checkpoints_of_one_step_may_be_of_different_lives(
    held: list[list[Held]], step: int, holders: tuple[int, ...]
) -> None:
    late = tuple(node for node in range(len(held)) if node not in holders)
    assert choose_step(held) == Resumption(step, holders, late)


def test_who_enters_is_said() -> None:
    held = of_one_life([[4], [8], [8], []])
    chosen = choose_step(held)
    assert chosen is not None
    assert chosen.describe(held) == (
        "nodes 0, 3 lack the checkpoint of step 8, from which nodes 1, 2 go on (node 0: 4; node 1: 8; node 2: 8; "
        "node 3: none): nodes 0, 3 enter with their mean, and without momentum"
    )


def test_without_any_checkpoint_all_begin() -> None:
    for choose in (choose_step, choose_own, lambda steps: choose_common(steps, "pmsgd")):
        assert choose([[], []]) is None


def test_nodes_that_cannot_enter_need_a_common_step() -> None:
    assert choose_common(of_one_life([[4, 8], [4], [4, 8]]), "pmsgd") == Resumption(4, (0, 1, 2), ())
    with pytest.raises(CheckpointError, match=r"node 0: 4; node 1: none.*pmsgd.*bring the missing checkpoints back"):
        choose_common(of_one_life([[4], []]), "pmsgd")
    with pytest.raises(CheckpointError, match=r"node 0: 4, 8 of life a; node 1: 8 of life b"):
        choose_common([[(4, "a"), (8, "a")], [(8, "b")]], "pmsgd")


@pytest.mark.parametrize("record", [{"steps": [4]}, {"held": 4}, {"held": [[4]]}, {"held": [["x", "a"]]}])
def test_a_node_of_another_version_is_told(record: Record) -> None:
    with pytest.raises(PayloadError, match=r"node 1 publishes its checkpoints in another format.*the same version"):
        read_held(record, 1)


def test_nodes_that_are_not_in_step_begin_with_their_own() -> None:
    assert choose_own(of_one_life([[4, 9], [7], []])) == Resumption(9, (0, 1), (2,))


def test_late_nodes_take_the_mean_of_the_holders() -> None:
    """Also where what they hold is no number; and holders keep theirs."""
    num_nodes, resumption = 5, Resumption(8, (0, 2, 3), (1, 4))
    graph = MemoryGraph(make_topology("ring", num_nodes))

    def enter(node: int) -> list[torch.Tensor]:
        value = float(node) if node in resumption.holders else float("nan")
        vectors = [torch.full((3,), value), torch.full((2, 2), 10 * value)]
        take_mean(graph.node(node), vectors, resumption)
        return vectors

    for node, vectors in enumerate(run_islands(num_nodes, enter)):
        value = float(node) if node in resumption.holders else 5 / 3
        torch.testing.assert_close(vectors[0], torch.full((3,), value))
        torch.testing.assert_close(vectors[1], torch.full((2, 2), 10 * value))


def test_without_any_holder_nobody_enters() -> None:
    graph = MemoryGraph(make_topology("ring", 2))
    for outcome in try_islands(
        2, lambda node: take_mean(graph.node(node), [torch.ones(3)], Resumption(8, (2,), (0, 1)))
    ):
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (2,)
        assert "no node that holds the checkpoint of step 8 came" in str(outcome)


# Checkpoints


def save(folder: Path, step: int, life: str = "", **files: str) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    for name, text in files.items():
        (checkpoint / f"{name}.json").write_text(text)
    save_index(checkpoint, GossipIndex(step=step, node=0, num_nodes=2, method="dsgd", life=life), IslandGroup())
    return checkpoint


class Back(MemoryNeighbours):
    """A node that returns to others, who have begun this life at step 4."""

    is_returning = True

    def recall(self, topic: str) -> list[Record]:
        return [{"node": 0, "step": 4, "life": "b"}]


@pytest.mark.parametrize(("method", "step"), [("dsgd", 6), ("swarm-sgd", 8)])
def test_a_node_that_returns_takes_no_checkpoint_of_a_life_that_all_went_back_from(
    method: str, step: int, tmp_path: Path
) -> None:
    """It would be elsewhere in its data, or at its end; where nodes are not in step, each goes on from its own."""
    for at, life in ((2, "a"), (4, "a"), (6, "b"), (8, "a")):
        save(tmp_path, at, life, trainer_state="{}")
    topology = make_topology("ring", 2)
    node = NodeNeighbours(Back(MemoryGraph(topology), 1), topology, 1, IslandGroup())
    config = GossipConfig(method=method, num_nodes=2, node=1, rendezvous="tcp://127.0.0.1:1")
    callback = GossipCallback(config, neighbours=node)
    callback.make_optimizer(torch.nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert callback.common_checkpoint(tmp_path) == tmp_path / f"checkpoint-{step}"


def test_what_is_left_of_an_earlier_life_goes_before_what_all_went_back_to(tmp_path: Path) -> None:
    """They went back from step 8 to 4, which is what they have in common until all have that of step 5."""
    for step in (4, 8):
        save(tmp_path, step, trainer_state="{}")
    checkpoints = CheckpointFolder(tmp_path, IslandGroup(), RECORD, find_whole, None, lambda: None, True, False)
    assert checkpoints.complete(checkpoints.path(5), lambda _: save(tmp_path, 5, trainer_state="{}"), limit=2)
    assert sorted(whole_checkpoints(tmp_path)) == [4, 5]


def test_a_checkpoint_without_trainers_state_is_not_whole(tmp_path: Path) -> None:
    whole = save(tmp_path, 2, trainer_state="{}")
    save(tmp_path, 4)
    assert whole_checkpoints(tmp_path) == {2: whole}


def test_a_checkpoint_that_a_user_names_is_read_before_it_is_resumed_from(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 2, trainer_state="{}", weights="[1]")
    check_contents(checkpoint, files_of, IslandGroup())
    (checkpoint / "weights.json").write_text("[2]")
    with pytest.raises(CheckpointError, match=r"weights\.json"):
        check_contents(checkpoint, files_of, IslandGroup())


# Whole runs, of nodes that are threads


def lose(run: VisionRun, node: int, *steps: int) -> None:
    """As if the node had been lost before it had written these checkpoints."""
    for step in steps:
        shutil.rmtree(run.folder / f"island-{node}" / f"checkpoint-{step}")


def keep_newest(run: VisionRun, *nodes: int) -> None:
    """As `save_total_limit` does."""
    for node in nodes:
        lose(run, node, *sorted(whole_checkpoints(run.folder / f"island-{node}"))[:-1])


@pytest.mark.parametrize("payload", [pytest.param("fp32", marks=pytest.mark.slow), "int8"])
def test_a_run_that_outlived_a_lost_node_goes_on(payload: str, tmp_path: Path) -> None:
    settings = (f"gossip.payload={payload}", "training.logging_steps=1")
    run = run_of(tmp_path, *settings)
    assert simulate(run) == 0
    lose(run, 2, 8)
    keep_newest(run, 0, 1)
    assert simulate(run_of(tmp_path, *settings, "training.max_steps=16")) == 0
    starts = [events(run, node, "start")[-1] for node in range(3)]
    assert [start["step"] for start in starts] == [8, 8, 8]
    rates = [events(run, node, "train")[-4]["learning_rate"] for node in range(3)]
    assert rates[2] == pytest.approx(rates[0]), "the schedule goes on, too"
    losses = [event["loss"] for event in events(run, 2, "train") if event["step"] > 8]
    assert len(losses) == 8
    assert losses[0] > min(losses[1:]) / 2, "it is the mean of one step, not of all before"
    for node in range(3):
        assert 16 in whole_checkpoints(run.folder / f"island-{node}")
        (news,) = [event["news"] for event in events(run, node, "neighbour")]
        assert "node 2 lacks the checkpoint of step 8" in news


def test_a_node_that_enters_says_where_its_learning_rate_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path)
    assert simulate(run) == 0
    lose(run, 2, 4, 8)
    said = r"node 2 enters with learning rates of \[.*\], and the others train with \[.*\]"
    assert simulate(run_of(tmp_path, "training.max_steps=12")) == 0
    assert not re.search(said, caplog.text)
    lose(run, 2, 12)
    assert simulate(run_of(tmp_path, "training.max_steps=16", "training.learning_rate=0.0123")) == 0
    assert re.search(said, caplog.text)


@pytest.mark.parametrize("lost", [pytest.param((8,), marks=pytest.mark.slow), (4, 8)])
def test_a_run_that_is_over_ends_again_with_the_mean(lost: tuple[int, ...], tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert simulate(run) == 0
    lose(run, 1, *lost)
    keep_newest(run, 0, 2)
    assert simulate(run) == 0
    assert [events(run, node, "end")[-1]["step"] for node in range(3)] == [8, 8, 8]
    saved = weights(run.folder / "model")
    holders = [weights(run.folder / f"island-{node}" / "checkpoint-8") for node in (0, 2)]
    for name, value in saved.items():
        if value.is_floating_point():
            mean = torch.stack([holder[name].double() for holder in holders]).mean(0)
            torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)


def test_nodes_that_wait_for_nobody_go_on_without_a_folder(tmp_path: Path) -> None:
    run = run_of(tmp_path, *SWARM)
    assert simulate(run) == 0
    lose(run, 0, 4, 8)
    assert simulate(run_of(tmp_path, *SWARM, "training.max_steps=12")) == 0
    assert [events(run, node, "start")[-1]["step"] for node in range(3)] == [8, 8, 8]


def test_nodes_of_equal_momentum_say_what_is_missing(tmp_path: Path) -> None:
    run = run_of(tmp_path, "gossip.method=pmsgd")
    assert simulate(run) == 0
    lose(run, 2, 8)
    keep_newest(run, 0, 1)
    with pytest.raises(CheckpointError, match="no node of pmsgd can begin without the momentum"):
        simulate(run)


def test_nodes_that_wait_for_nobody_end_with_their_mean_though_some_had_ended_before(tmp_path: Path) -> None:
    """Node 0 was killed when the others had taken the last step: it comes to no evaluation that is behind them."""
    settings = (*SWARM, "training.eval_strategy=steps", "training.eval_steps=2")
    run = run_of(tmp_path, *settings)
    assert simulate(run) == 0
    lose(run, 0, 8)
    assert simulate(run) == 0
    saved = weights(run.folder / "model")
    ends = [weights(run.folder / f"island-{node}" / "checkpoint-8") for node in range(3)]
    for name, value in saved.items():
        if value.is_floating_point():
            mean = torch.stack([end[name].double() for end in ends]).mean(0)
            torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)


def test_a_node_that_begins_its_data_anew_evaluates_and_saves_after_the_others_epochs(tmp_path: Path) -> None:
    settings = ("training.eval_strategy=epoch", "training.save_strategy=epoch")
    run = run_of(tmp_path, *settings)  # an epoch has 10 steps
    assert simulate(run) == 0
    lose(run, 2, 8)
    assert simulate(run_of(tmp_path, *settings, "training.max_steps=25")) == 0
    for node in range(3):
        for event in ("eval", "save"):
            assert [record["step"] for record in events(run, node, event)] == [8, 10, 20, 25]


def test_a_node_that_has_entered_goes_on_in_its_data_when_all_are_started_again(tmp_path: Path) -> None:
    """It began its data anew at step 8: the epoch of 10 steps in which it is at step 12 is not the others'."""
    run, longer = (run_of(tmp_path, f"training.max_steps={steps}") for steps in (8, 16))
    assert simulate(run) == 0
    lose(run, 2, 4, 8)
    assert simulate(longer) == 0
    checkpoints = [run.folder / f"island-{node}" / "checkpoint-16" for node in range(3)]
    uninterrupted = [weights(checkpoint) for checkpoint in checkpoints]
    for node in range(3):
        lose(run, node, 16)
    assert simulate(longer) == 0
    assert [events(run, node, "start")[-1]["step"] for node in range(3)] == [12, 12, 12]
    for before, checkpoint in zip(uninterrupted, checkpoints, strict=True):
        after = weights(checkpoint)
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_nodes_of_equal_momentum_do_not_resume_one_step_of_different_lives(tmp_path: Path) -> None:
    """All went back to step 4, on another way; node 1 was killed again before it had written its new checkpoint."""
    run = run_of(tmp_path, "gossip.method=pmsgd")
    assert simulate(run) == 0
    (run.folder / "island-1" / "checkpoint-8").rename(tmp_path / "earlier")
    lose(run, 0, 8)
    lose(run, 2, 8)
    longer = run_of(tmp_path, "gossip.method=pmsgd", "training.max_steps=12")
    assert simulate(longer) == 0
    lose(run, 1, 8)
    (tmp_path / "earlier").rename(run.folder / "island-1" / "checkpoint-8")
    for node in range(3):
        lose(run, node, 12)
    assert simulate(longer) == 0
    assert [events(run, node, "start")[-1]["step"] for node in range(3)] == [4, 4, 4]
    ends = [weights(run.folder / f"island-{node}" / "checkpoint-12") for node in range(3)]
    for name in ("classifier.1.weight", "classifier.1.bias"):
        assert torch.equal(ends[0][name], ends[1][name])


def test_a_run_that_ends_again_evaluates_the_weights_that_it_says(tmp_path: Path) -> None:
    run = run_of(tmp_path, "gossip.eval_weights=local")
    assert simulate(run) == 0
    lose(run, 1, 8)
    keep_newest(run, 0, 2)
    assert simulate(run) == 0
    for node in range(3):
        summary = json.loads((run.folder / f"island-{node}" / "summary.json").read_text())
        assert summary["eval_weights"] == events(run, node, "eval")[-1]["weights"] == "inner"
    report = summarise(load_run(run.folder))
    assert report.eval_loss == pytest.approx(summary["eval_loss"])
    assert not any("was of its own weights" in warning for warning in report.warnings)
