"""Trains one node, or all of them: from a run file to a trained, evaluated and saved image classifier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.apps.common.environment import is_leader
from hf_diloco.apps.common.load import parse_command_line
from hf_diloco.apps.common.model_card import Training, without_path
from hf_diloco.apps.common.process import last_evaluation, prepared, run_and_exit, say
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.config.base import need_number
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.utils.text import short_count

if TYPE_CHECKING:
    from hf_diloco.apps.vision.assemble import VisionNode
    from hf_diloco.gossip.node import NodeNeighbours
    from hf_diloco.trainer.progress import Progress

_DESCRIPTION = "Train one node of an image classifier, which averages with its neighbours after every step."


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one node and exits: 0 finished, 3 stopped on request with a checkpoint, 1 failed."""
    run_and_exit(lambda: parse_command_line(VisionRun, "python -m hf_diloco.apps.vision", _DESCRIPTION, argv), train)


def train(run: VisionRun) -> int:
    """Trains one node in this process; returns the exit code. For errors see `train_node`."""
    run.check()
    run.check_extras()
    config = run.gossip.resolve()
    need_number(config, config.num_nodes, "node")
    return train_node(run, config)


def train_node(run: VisionRun, config: GossipConfig, node: NodeNeighbours | None = None) -> int:
    """Trains one node; returns the exit code.

    Args:
        run: the run file.
        config: method, graph and rendezvous.
        node: its neighbours, already connected, if nodes are threads of this process.

    Raises:
        DiLoCoError: a setting is wrong, all neighbours were lost, ...
    """
    with prepared(run, "images") as progress:
        from hf_diloco.apps.common.training import train_on
        from hf_diloco.apps.vision.assemble import assemble

        assembled = assemble(run, config, progress, node)
        try:
            return train_on(assembled, progress, _print_plan, _finish)
        finally:
            assembled.callback.node.close()


def simulate_nodes(run: VisionRun, num_nodes: int, is_command: bool = False) -> int:
    """Trains all nodes as threads of this process; for the exit code and errors see `train_together`."""
    from hf_diloco.apps.common.simulation import LONGEST_WAIT, train_together
    from hf_diloco.gossip.choco import with_payload
    from hf_diloco.gossip.neighbours import MemoryGraph
    from hf_diloco.gossip.node import NodeNeighbours
    from hf_diloco.gossip.threads import Turns
    from hf_diloco.inner.island import IslandGroup
    from hf_diloco.trainer.gossip_start import check_gossip

    place = {"num_nodes": num_nodes, "rendezvous": None}
    gossips = [run.gossip.model_copy(update={"node": node, **place}) for node in range(num_nodes)]
    runs = [run.model_copy(update={"gossip": gossip}) for gossip in gossips]
    topology, turns = check_gossip(gossips[0]), Turns()
    graph = MemoryGraph(topology, timeout=LONGEST_WAIT)
    ends = [with_payload(graph.node(number), run.gossip.payload) for number in range(num_nodes)]
    nodes = [NodeNeighbours(end, topology, number, IslandGroup(), turns) for number, end in enumerate(ends)]
    return train_together(
        runs,
        turns,
        train=lambda number: train_node(runs[number], gossips[number], nodes[number]),
        leave=lambda number: nodes[number].close(),
        is_command=is_command,
    )


def _finish(node: VisionNode, progress: Progress) -> None:
    """Evaluates and saves (node 0) the mean over all nodes, and writes the summary."""
    from hf_diloco.apps.common.training import MODEL_FOLDER, record_end, save_final_model

    run, trainer, config = node.run, node.trainer, node.callback.config
    if last_evaluation(trainer) is None:
        progress.update(state="evaluating")
        with node.callback.mean_weights() if config.eval_weights == "average" else nullcontext():
            trainer.evaluate()
    with node.callback.mean_weights():
        if config.node == 0:
            progress.update(state="saving")
            save_final_model(trainer, run.folder)
    if not is_leader():
        return
    evaluation = last_evaluation(trainer)
    assert evaluation is not None, "these weights have been evaluated"
    weights = "outer" if "gossip/consensus_distance" in evaluation else "inner"
    accuracy, loss = evaluation["eval_accuracy"], evaluation["eval_loss"]
    more = {"eval_accuracy": accuracy, "eval_weights": weights}
    record_end(run, evaluation, more, describe_training(run), progress)
    if node.speaks:
        what = what_was_evaluated(config, weights, node.callback.nodes_in_mean)
        say(f"{what}: accuracy {accuracy:.2%}, loss {loss:.4f}")
        if config.node == 0:
            say(f"model: {run.folder / MODEL_FOLDER}")
    progress.update(state="done", message="")


def what_was_evaluated(config: GossipConfig, weights: str, nodes: Sequence[int]) -> str:
    """Returns in words what was evaluated; `nodes` are the nodes in the last mean."""
    if nodes[1:] and config.eval_weights == "local":
        return f"each of {len(nodes)} nodes by itself, on average"
    return f"the mean of {len(nodes)} nodes" if nodes[1:] and weights == "outer" else f"node {config.node}"


def _print_plan(node: VisionNode) -> None:
    """Prints model, data and graph, with the batch of one node and of all nodes."""
    from hf_diloco.trainer.arguments import examples_per_step

    run, data, config, args = node.run, node.data, node.callback.config, node.trainer.args
    total = config.num_nodes
    num_trained = sum(p.numel() for group in node.callback.optimizer.param_groups for p in group["params"])
    examples = examples_per_step(args)
    say(f"model: {short_count(num_trained)} trained parameters, images of {data.image_size} pixels a side")
    shares = f"{data.share_sizes[config.node]:,} of {sum(data.share_sizes):,} examples"
    counts = data.label_counts
    classes = "by class " + " ".join(map(str, counts)) if len(counts) <= 20 else f"{sum(map(bool, counts))} classes"
    say(f"data of node {config.node}: {shares}, {classes}; evaluation: {len(data.evaluation):,}")
    say(f"batch of node {config.node}: {examples:,} images a step; of all {total} nodes: {examples * total:,}")
    graph = node.callback.topology
    neighbours = ", ".join(map(str, graph.neighbours(config.node))) or "none"
    method = node.callback.optimizer.name
    say(f"{run.max_steps:,} steps of {method} on {graph.name} of {total}; neighbours: {neighbours}")


def describe_training(run: VisionRun) -> Training:
    """Returns the facts about a run for the model card."""
    from hf_diloco.methods.gossip import find_method

    data, method = run.data, run.gossip.method
    dataset = data.path if data.source == "hub" else None
    texts = {
        "digits": "1,797 handwritten digits of the UCI repository",
        "hub": f"{without_path(dataset)} ({data.split})",
    }
    return Training(
        data=texts.get(data.source) or f"images of {Path(data.path or '').name}",
        method=method,
        papers=[paper] if (paper := find_method(method).paper) else [],
        base_model=run.model.path,
        dataset=dataset,
        task="image-classification",
    )
