"""Nodes that are all started again after some were lost: from which step, and how those enter who lack it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.errors import CheckpointError, IslandLostError
from hf_diloco.gossip.checkpoint import GossipIndex, check_files, save_index, whole_checkpoints
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from hf_diloco.trainer.gossip_start import Resumption, choose_common, choose_own, choose_step, take_mean
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
    assert choose_step(steps) == Resumption(step, holders, late)


def test_who_enters_is_said() -> None:
    steps = [[4], [8], [8], []]
    chosen = choose_step(steps)
    assert chosen is not None
    assert chosen.describe(steps) == (
        "nodes 0, 3 lack the checkpoint of step 8, from which nodes 1, 2 go on (node 0: 4; node 1: 8; node 2: 8; "
        "node 3: none): nodes 0, 3 enter with their mean, and without momentum"
    )


def test_without_any_checkpoint_all_begin() -> None:
    for choose in (choose_step, choose_own, lambda steps: choose_common(steps, "pmsgd")):
        assert choose([[], []]) is None


def test_nodes_that_cannot_enter_need_a_common_step() -> None:
    assert choose_common([[4, 8], [4], [4, 8]], "pmsgd") == Resumption(4, (0, 1, 2), ())
    with pytest.raises(CheckpointError, match=r"node 0: 4; node 1: none.*pmsgd.*bring the missing checkpoints back"):
        choose_common([[4], []], "pmsgd")


def test_nodes_that_are_not_in_step_begin_with_their_own() -> None:
    assert choose_own([[4, 9], [7], []]) == Resumption(9, (0, 1), (2,))


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


def save(folder: Path, step: int, **files: str) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    for name, text in files.items():
        (checkpoint / f"{name}.json").write_text(text)
    save_index(checkpoint, GossipIndex(step=step, node=0, num_nodes=2, method="dsgd"), IslandGroup())
    return checkpoint


def test_a_checkpoint_without_trainers_state_is_not_whole(tmp_path: Path) -> None:
    whole = save(tmp_path, 2, trainer_state="{}")
    save(tmp_path, 4)
    assert whole_checkpoints(tmp_path) == {2: whole}


def test_a_checkpoint_of_an_earlier_version_is_whole(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 2, trainer_state="{}")
    (checkpoint / "gossip.json").write_text(
        '{"format": 1, "step": 2, "node": 0, "num_nodes": 2, "method": "dsgd", "facts": {"seed": 42}, "files": []}'
    )
    assert whole_checkpoints(tmp_path) == {2: checkpoint}


def test_a_checkpoint_that_a_user_names_is_read_before_it_is_resumed_from(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 2, trainer_state="{}", weights="[1]")
    check_files(checkpoint, IslandGroup())
    (checkpoint / "weights.json").write_text("[2]")
    with pytest.raises(CheckpointError, match=r"weights\.json"):
        check_files(checkpoint, IslandGroup())


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
    for node in range(3):
        assert 16 in whole_checkpoints(run.folder / f"island-{node}")
        (news,) = [event["news"] for event in events(run, node, "neighbour")]
        assert "node 2 lacks the checkpoint of step 8" in news


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


def test_a_node_that_begins_its_data_anew_evaluates_with_the_others_after_their_epochs(tmp_path: Path) -> None:
    settings = ("training.eval_strategy=epoch",)
    run = run_of(tmp_path, *settings)  # an epoch has 10 steps
    assert simulate(run) == 0
    lose(run, 2, 4, 8)
    assert simulate(run_of(tmp_path, *settings, "training.max_steps=25")) == 0
    for node in range(3):
        assert [event["step"] for event in events(run, node, "eval")] == [8, 10, 20, 25]
