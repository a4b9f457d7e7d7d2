"""Nodes of a graph that are killed, stopped and started again, one by one and all at once: what is lost.

    python benchmarks/chaos_nodes.py                              # about ten minutes on two cores
    python benchmarks/chaos_nodes.py --restarts 12 --faults 6 --seed 1 --method qg-dmsgd

Four nodes on a ring train a tiny image classifier on generated files of the idx format, each started by its own
`hf-diloco launch --island K`. Between two starts of all nodes some are killed, or stopped for less or longer than
`exchange_timeout`, and started again alone; node 0, which keeps the rendezvous, only stops for less. In the end all
are killed at the same moment, or one is killed for good and the others end some time later, killed or asked to stop.
Then all are started again. After the last start they train to the end. The exit code is 1 if

- a node ended otherwise than by a kill, with exit code 0, 3 (it was asked to stop) or 1 (it was stopped for longer
  than `exchange_timeout`, and says that it is to be started again alone); or any of the last start not with 0;
- a node that was started with all others does not go on from the newest step that a majority held, or any if none
  (of swarm-sgd, whose nodes are not in step: from its own newest, or without any from the largest);
- a node that was started alone begins before a step that all others have behind them, or a step counter goes back;
- a loss is no number, the nodes' relative distance from their mean passes 0.5, or the last evaluation is not of the
  mean of all nodes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.chaos import STUCK_SECONDS, Event, Island, leave_in_order
from hf_diloco.cli.devices import free_ports
from hf_diloco.gossip.checkpoint import Held, Resumption, choose_own, choose_step, lives_of, whole_checkpoints
from hf_diloco.inner.island import IslandGroup

NUM_NODES = 4
EXCHANGE_TIMEOUT = 12.0
MAX_DISTANCE = 0.5
LAST_STEPS = 150


def write_idx(folder: Path, seed: int = 0) -> None:
    """Images of 8 x 8 pixels in four classes, each a pattern with noise, as files of MNIST's format."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, (4, 8, 8))
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", 2000), ("t10k", 200)):
        labels = rng.integers(0, 4, size)
        images = np.clip(patterns[labels] + rng.normal(0, 60, (size, 8, 8)), 0, 255)
        for name, values in ((f"{split}-images-idx3", images), (f"{split}-labels-idx1", labels)):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (folder / f"{name}-ubyte").write_bytes(header + values.astype(np.uint8).tobytes())


def run_file(folder: Path, method: str = "decentlam", save_steps: int = 40) -> dict[str, Any]:
    """A run without an end, whose steps take some hundredths of a second."""
    return {
        "name": "chaos",
        "output": str(folder),
        "model": {"config": {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8}},
        "data": {"source": "idx", "path": str(folder / "data"), "image_size": 8},
        "training": {
            "max_steps": 10_000_000,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 8,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_steps": save_steps,
            "save_total_limit": 2,
            "eval_strategy": "steps",
            "eval_steps": 3 * save_steps,
        },
        "gossip": {
            "method": method,
            "topology": "ring",
            "num_nodes": NUM_NODES,
            "join_timeout": 600,
            "exchange_timeout": EXCHANGE_TIMEOUT,
        },
        "launch": {"use_cpu": True, "threads": 1},
    }


class Node(Island):
    """A node of its own launcher, whose output is kept.

    Attributes:
        may_fail: it was stopped for longer than the others wait.
    """

    def __init__(self, number: int, run: Path, url: str, *overrides: str) -> None:
        super().__init__(number, run, url)
        self._command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(run), *overrides]
        self._command += ["--island", str(number), "--rendezvous", url]
        self.may_fail = False

    @property
    def steps(self) -> int:
        """Steps that its newest process has behind it; 0 while it takes none."""
        begun = self.lives[-1].begun
        return max((event["step"] for event in self.events("train") if event["time"] > begun), default=0)

    def num_losses(self, number: int) -> int:
        """How often its record says that a neighbour was lost."""
        return sum(event["news"].startswith(f"node {number} was lost") for event in self.events("neighbour"))

    def ask_to_stop(self) -> None:
        """SIGTERM: all nodes end after the same step, with checkpoints; of swarm-sgd this one."""
        assert self._launcher is not None
        self._launcher.send_signal(signal.SIGTERM)


class Graph:
    """All nodes of a run, from one start of all to the next.

    Args:
        folder: for the run file, its data and what the nodes write.
        run: the run file's contents.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.nodes: list[Node] = []
        self.folder = folder
        self.is_in_step = run["gossip"]["method"] != "swarm-sgd"
        self._file = folder / "chaos.yaml"
        self._file.write_text(yaml.safe_dump(run))
        write_idx(folder / "data")

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self.nodes)))

    def held(self) -> list[list[Held]]:
        """Step and life of each node's whole checkpoints."""
        folders = [self.folder / "chaos" / f"island-{number}" for number in range(NUM_NODES)]
        return [lives_of(whole_checkpoints(folder), IslandGroup()) for folder in folders]

    def resumption(self) -> Resumption | None:
        """What all would go on from now."""
        return (choose_step if self.is_in_step else choose_own)(self.held())

    def newest(self, node: int) -> int:
        """The step of a node's newest whole checkpoint."""
        return max((step for step, _ in self.held()[node]), default=0)

    def start(self, *overrides: str) -> None:
        """Starts all, waits until all take steps, and checks from where they do."""
        held, chosen = self.held(), self.resumption()
        self.say(f"all are started; they hold {held}")
        url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.nodes = [Node(number, self._file, url, *overrides) for number in range(NUM_NODES)]
        for node in self.nodes:
            node.start()
        self.wait("start", range(NUM_NODES))
        self.counts["starts of all nodes"] += 1
        self.counts["of these with nodes that lacked the checkpoint"] += bool(chosen and chosen.late)
        for node in self.nodes:
            begun, expected = self._begin(node)["step"], chosen.step if chosen else 0
            if not self.is_in_step and held[node.number]:
                expected = max(held[node.number])[0]
            if begun != expected:
                self.problems.append(f"node {node.number} went on from step {begun}, not {expected}, of {held}")

    def wait(self, what: str, numbers: Sequence[int]) -> None:
        """Returns when these take steps.

        Raises:
            TimeoutError: they do not for a long time.
            RuntimeError: one has ended.
        """
        self.wait_until(what, lambda: all(self.nodes[number].steps for number in numbers))

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Returns when it holds; raises as `wait`."""
        deadline = time.monotonic() + 2 * STUCK_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {2 * STUCK_SECONDS:g} s")
            time.sleep(0.3)

    def pause(self, seconds: float) -> None:
        """Lets them train, and checks that none ends."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.check()
            time.sleep(0.2)

    def check(self) -> None:
        """Raises `RuntimeError` if a node has ended that nobody has harmed."""
        for node in self.nodes:
            if node.lives and node.lives[-1].killed is None and not node.may_fail and node.code is not None:
                raise RuntimeError(f"node {node.number} ended with exit code {node.code}: see {node.folder}")

    def kill(self, numbers: Sequence[int]) -> None:
        """All of these at the same moment, as nearly as can be."""
        for number in numbers:
            self.nodes[number].kill()
        self.counts["kills"] += len(numbers)

    def bring_back(self, number: int) -> None:
        """Starts a node alone, while the others go on."""
        node = self.nodes[number]
        others = min(other.steps for other in self.nodes if other is not node)
        node.may_fail = False
        node.start()
        self.wait(f"return of node {number}", [number])
        self.counts["nodes started again alone"] += 1
        begun = self._begin(node)["step"]
        if begun < others - NUM_NODES:
            self.problems.append(f"node {number} returned at step {begun}, when the others had {others} behind them")
        self.say(f"node {number} is back, at step {begun}")

    def stop_briefly(self, number: int, seconds: float) -> None:
        """For less than the others wait."""
        self.nodes[number].stop()
        time.sleep(seconds)
        self.nodes[number].go_on()
        self.counts["stops shorter than exchange_timeout"] += 1

    def stop_for_long(self, number: int) -> None:
        """Until the others have given it up; it then ends, and says how it returns."""
        node = self.nodes[number]
        node.may_fail = True
        node.stop()
        begun = time.monotonic()
        known = {
            near: near.num_losses(number) for near in (self.nodes[number - 1], self.nodes[(number + 1) % NUM_NODES])
        }
        self.wait_until("a loss", lambda: all(near.num_losses(number) > before for near, before in known.items()))
        self.say(f"node {number} was given up within {time.monotonic() - begun:.0f} s")
        node.go_on()
        self.counts["stops longer than exchange_timeout"] += 1
        deadline = time.monotonic() + STUCK_SECONDS
        while node.code is None and time.monotonic() < deadline:
            time.sleep(0.3)
        message = (node.folder / "progress.json").read_text()
        if node.code != 1 or f"Start node {number} again, alone" not in message:
            self.problems.append(f"node {number}, stopped for long, ended with exit code {node.code}: {message}")

    def end(self, expected: int) -> None:
        """Waits until all have ended, and checks their exit codes."""
        deadline = time.monotonic() + 2 * STUCK_SECONDS
        alive = [node for node in self.nodes if node.lives[-1].killed is None]
        while any(node.code is None for node in alive) and time.monotonic() < deadline:
            time.sleep(0.3)
        codes = {node.number: node.code for node in alive}
        self.say(f"ended: {codes}")
        if any(code != expected for code in codes.values()):
            self.problems.append(f"exit codes {codes}, not {expected}")

    def say(self, text: str) -> None:
        """Prints what happens, with the step at which it does."""
        step = max((node.steps for node in self.nodes if node.lives), default=0)
        print(f"{time.strftime('%H:%M:%S')}  step {step:6d}  {text}", flush=True)

    def judge(self) -> dict[str, Any]:
        """Adds what the nodes' records show to the problems; returns figures."""
        records = [node.events() for node in self.nodes]
        for number, events in enumerate(records):
            self.problems += self._judge_steps(number, events)
        evaluations = [[event for event in events if event["event"] == "eval"] for events in records]
        distances = [e["consensus_distance"] for events in evaluations for e in events if e["consensus_distance"]]
        if not all(distance <= MAX_DISTANCE for distance in distances):  # which what is no number is not
            self.problems.append(f"the nodes were {max(distances)} from their mean")
        last = {(events[-1]["step"], events[-1]["eval_loss"]) for events in evaluations}
        if len(last) != 1 or evaluations[0][-1]["weights"] != "outer":
            self.problems.append(f"the last evaluations differ: {last}")
        return {
            **self.counts,
            "evaluations of the mean of the nodes": len(distances),
            "largest distance from the mean": f"{max(distances):.3g}",
            "last distance from the mean": f"{distances[-1]:.3g}",
            "last step": evaluations[0][-1]["step"],
            "accuracy of the last mean": f"{evaluations[0][-1]['eval_accuracy']:.1%}",
        }

    def _begin(self, node: Node) -> Event:
        begun = node.lives[-1].begun
        return next(event for event in node.events("start") if event["time"] > begun)

    def _judge_steps(self, number: int, events: Sequence[Event]) -> list[str]:
        problems, step = [], -1
        for event in events:
            if event["event"] == "start":
                step = event["step"]
            elif event["event"] == "train" and "loss" in event:
                if event["step"] != step + 1:
                    problems.append(f"node {number} took step {event['step']} after {step}")
                step = event["step"]
                if not math.isfinite(event["loss"]):
                    problems.append(f"node {number}: the loss of step {step} is {event['loss']}")
        return problems


def torment(graph: Graph, restarts: int, faults: int, rng: random.Random) -> None:
    """Starts all nodes `restarts` + 1 times, with so many faults between two starts."""
    for _ in range(restarts):
        graph.start()
        for _ in range(faults):
            graph.pause(rng.uniform(0.5, 4))
            harm_one(graph, rng)
        graph.pause(rng.uniform(0.5, 6))
        if rng.random() < 0.5:
            graph.say("all are killed")
            graph.kill(range(NUM_NODES))
            continue
        victim = rng.randrange(1, NUM_NODES)
        graph.say(f"node {victim} is killed for good")
        graph.kill([victim])
        graph.pause(rng.uniform(8, 15))  # so that the others go on, and write checkpoints that it lacks
        others = [number for number in range(NUM_NODES) if number != victim]
        if rng.random() < 0.5:
            graph.say("the others are killed")
            graph.kill(others)
        else:
            graph.say("the others are asked to stop")
            for number in [rng.choice(others)] if graph.is_in_step else others:
                graph.nodes[number].ask_to_stop()
            graph.end(expected=3)
    finish(graph)


def harm_one(graph: Graph, rng: random.Random) -> None:
    """One fault, after which all nodes take part again."""
    fault = rng.choice(["kill", "kill", "stop", "long stop"])
    number = rng.randrange(1 if fault != "stop" else 0, NUM_NODES)
    graph.say(f"{fault} of node {number}")
    if fault == "stop":
        graph.stop_briefly(number, rng.uniform(0.2, 0.5) * EXCHANGE_TIMEOUT)
        return
    if fault == "kill":
        graph.kill([number])
        graph.pause(rng.choice([0, rng.uniform(0, 5)]))
    else:
        graph.stop_for_long(number)
    graph.bring_back(number)


def finish(graph: Graph) -> None:
    """Starts all nodes for the last time; they end after some more steps."""
    chosen = graph.resumption()
    graph.start(f"training.max_steps={(chosen.step if chosen else 0) + LAST_STEPS}")
    graph.end(expected=0)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=6, help="of all nodes")
    parser.add_argument("--faults", type=int, default=4, help="between two starts of all nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="decentlam")
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--folder", type=Path, help="where to run; default: a temporary folder, kept if it fails")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, leave_in_order)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-nodes-"))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    figures: dict[str, Any] = {}
    run = run_file(folder.resolve(), args.method)
    run["launch"]["num_processes"] = args.ranks
    with Graph(folder.resolve(), run) as graph:
        try:
            torment(graph, args.restarts, args.faults, random.Random(args.seed))
            figures = graph.judge()
        except (RuntimeError, TimeoutError) as error:
            graph.problems.append(str(error))
            figures = dict(graph.counts)
    print()
    for name, value in {**figures, "minutes": f"{(time.monotonic() - begun) / 60:.1f}"}.items():
        print(f"  {name:48} {value}")
    for problem in itertools.islice(graph.problems, 20):
        print(f"violated: {problem}", file=sys.stderr)
    if graph.problems:
        print(f"the nodes' records are in {folder}", file=sys.stderr)
    sys.exit(bool(graph.problems))


if __name__ == "__main__":
    main()
