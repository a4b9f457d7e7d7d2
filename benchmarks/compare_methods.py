"""Which outer method learns best, each with its rates tuned? Real text, a small Llama, islands on this machine.

    python -m benchmarks.compare_methods --data 'en/c4-train.*.json.gz' --eval-data 'en/c4-validation.*.json.gz'
    python -m benchmarks.compare_methods --study one-island --batch 4 --steps 600 --data ...
    python -m benchmarks.compare_methods --quick

Two studies. In each all methods take equal steps on equally many tokens, from equal random weights:

    islands      4 islands, the same steps between rounds. "synchronous" is one island with the batch of all four
    one-island   AdamW alone, and with an outer step after every 5, 20 or 100 of its steps

Inner and outer settings of a method are tuned together on one seed: from the paper's values, or near them, to the
neighbour on a grid, in one setting or two, for as long as the evaluation loss falls. The best are then run with other
seeds, which change the weights at the start and the order of the data: no seed of the table was tuned on. What is best
on one seed may be at the edge of what is stable: --back-off 1 shows the others at half the inner rate.

    loss         of the outer weights on held-out text: mean and standard deviation over the seeds
    against      difference to the first row with the same seed: mean and standard deviation
    runs         that tuning took; * marks a best setting at the edge of its grid
    MB           sent by an island in a run, as a mesh would send them

Islands are threads which exchange in memory, and train one after the other; their sessions, methods and codecs are
those of a real run. Every run that ends is a line of --record: a program that was stopped goes on from there.
Without --data the text is the documentation that comes with Python.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, get_cosine_schedule_with_warmup

from benchmarks.texts import Corpus, add_arguments, check_arguments, draw_batches
from benchmarks.tuning import Grid, Record, Values, climb, describe, spread
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DivergedError
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.open import MemoryTransport
from tests.islands import run_islands

TUNING_SEED = 0
INNER = "learning_rate"
"""The inner optimizer's; what else is tuned are settings of the outer loop."""
OPTIONS = "options."
INNER_RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
INNER_START = 8e-3
MOMENTA = [0.2, 0.4, 0.6, 0.8, 0.9]
NOTHING: dict[str, Any] = {}
NEVER = 10**9
"""Steps between rounds: there is one at the end."""


@dataclass(frozen=True)
class Method:
    """A row: settings of the outer loop that are fixed, those that are tuned, and where tuning begins."""

    name: str
    num_islands: int
    diloco: Mapping[str, Any]
    grid: Grid
    start: Values


def make_method(
    name: str, num_islands: int, diloco: dict[str, Any], grid: Grid = NOTHING, start: Values = NOTHING
) -> Method:
    """A row whose inner learning rate is tuned with what else is."""
    return Method(name, num_islands, diloco, {INNER: INNER_RATES, **grid}, {INNER: INNER_START, **start})


def methods_of_islands(num_islands: int, sync_every: int) -> list[Method]:
    """The rows of the study of islands."""
    every = {"sync_every": sync_every}
    return [
        make_method("Local SGD", num_islands, {**every, "outer_lr": 1.0, "outer_momentum": 0.0}),
        make_method(
            "DiLoCo",
            num_islands,
            every,
            {"outer_lr": [0.3, 0.5, 0.7, 1.0, 1.4], "outer_momentum": MOMENTA},
            {"outer_lr": 0.7, "outer_momentum": 0.6},
        ),
        make_method(
            "SlowMo",
            num_islands,
            {**every, "method": "slowmo"},
            {"outer_lr": [0.5, 0.7, 1.0, 1.4], "outer_momentum": MOMENTA},
            {"outer_lr": 1.0, "outer_momentum": 0.6},
        ),
        make_method(
            "Overlap-Local-SGD",
            num_islands,
            {**every, "method": "overlap-local-sgd"},
            {"options.pull": [0.15, 0.3, 0.6, 0.8, 1.0], "outer_momentum": [0.0, *MOMENTA]},
            {"options.pull": 0.6, "outer_momentum": 0.6},
        ),
        make_method(
            "SparseLoCo",
            num_islands,
            {**every, "method": "sparseloco"},
            {"outer_lr": [0.5, 0.7, 1.0, 1.4, 2.0]},
            {"outer_lr": 1.0},
        ),
        alone("synchronous"),
    ]


def methods_of_one_island() -> list[Method]:
    """The rows of the study of one island."""
    rows = [alone("AdamW")]
    for every in (5, 20, 100):
        rows += [
            make_method(
                f"Lookahead, H={every}",
                1,
                {"sync_every": every, "method": "slowmo", "outer_momentum": 0.0},
                {"outer_lr": [0.3, 0.5, 0.7, 0.85]},
                {"outer_lr": 0.7},
            ),
            make_method(
                f"SNOO, H={every}",
                1,
                {"sync_every": every},
                {"outer_lr": [0.3, 0.5, 0.7, 1.0], "outer_momentum": MOMENTA},
                {"outer_lr": 0.7, "outer_momentum": 0.6},
            ),
        ]
    return rows


def alone(name: str) -> Method:
    """One island with an outer step that changes nothing."""
    return make_method(name, 1, {"sync_every": NEVER, "outer_lr": 1.0, "outer_momentum": 0.0})


# One run


@dataclass(frozen=True)
class Task:
    """What all runs of a study have in common.

    Attributes:
        batch: sequences in a step, of all islands together.
        text: a hash of the evaluation text.
    """

    steps: int
    batch: int
    sequence_length: int
    hidden_size: int
    vocab_size: int
    text: str = ""


class Island:
    """One island's model, AdamW, cosine schedule and order of its share.

    Args:
        model: what it trains.
        task: how long, and in steps of which size.
        config: of its outer loop.
        rate: the inner learning rate.
        seed: of the run.
        share: its sequences.

    Attributes:
        model: what it trains.
        bytes_sent: so far.
    """

    def __init__(
        self, model: PreTrainedModel, task: Task, config: DiLoCoConfig, rate: float, seed: int, share: torch.Tensor
    ) -> None:
        self.model = model
        self.bytes_sent = 0
        self._config = config
        self._steps = task.steps
        self._share = share
        batch = task.batch // config.num_islands
        self._order = draw_batches(len(share), task.steps, batch, 1000 * seed + config.island)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._schedule = get_cosine_schedule_with_warmup(self._optimizer, task.steps // 10, task.steps)

    def train(self, transport: MemoryTransport, folder: Path, turn: threading.Lock) -> None:
        """Takes all steps; between rounds only while no other island does, as threads would disturb each other."""
        session = FixedSession(self._config, IslandGroup(), transport=transport)
        session.num_steps = self._steps
        try:
            session.join(open_shards(self.model, self._optimizer), folder)
            done = 0
            while done < self._steps:
                with turn:
                    is_due = False
                    while done < self._steps and not is_due:
                        self._step(self._share[self._order[done]])
                        done += 1
                        session.outer.count_step()
                        is_due = session.is_due(is_last=done == self._steps)
                if is_due:
                    self.bytes_sent += sum(report.bytes_sent for report in session.advance(done == self._steps))
            session.leave(finished=True)
        except BaseException:
            session.leave(finished=False)
            raise

    def _step(self, rows: torch.Tensor) -> None:
        self.model(input_ids=rows, labels=rows).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()


def make_model(task: Task, seed: int) -> LlamaForCausalLM:
    """Equal weights for equal seeds."""
    config = LlamaConfig(
        vocab_size=task.vocab_size,
        hidden_size=task.hidden_size,
        intermediate_size=11 * task.hidden_size // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=task.sequence_length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def train(task: Task, method: Method, values: Values, seed: int, corpus: Corpus) -> dict[str, float]:
    """Trains all islands; returns the evaluation loss, bytes that an island sent, and seconds of processor time."""
    num_islands = method.num_islands
    diloco = {**method.diloco, **{name: value for name, value in values.items() if name != INNER}}
    options = {name.removeprefix(OPTIONS): diloco.pop(name) for name in list(diloco) if name.startswith(OPTIONS)}
    shares = [corpus.share(number, num_islands) for number in range(num_islands)]
    begin = time.process_time()
    islands = []
    for number, share in enumerate(shares):
        place = {"num_islands": num_islands, "island": number, "rendezvous": "tcp://in-memory:1"}
        config = DiLoCoConfig(options=options, **place, **diloco)
        islands.append(Island(make_model(task, seed), task, config, values[INNER], seed, share))
    try:
        train_together(islands)
        loss = evaluate(islands[0].model, corpus.evaluation)
    except DivergedError:
        loss = math.inf
    finite = loss if math.isfinite(loss) else math.inf
    return {"loss": finite, "bytes_sent": islands[0].bytes_sent, "seconds": time.process_time() - begin}


def train_together(islands: Sequence[Island]) -> None:
    """Has islands that exchange in memory take all their steps.

    Raises:
        DivergedError: values are not finite any more.
    """
    network, store, turn = MemoryNetwork(len(islands), timeout=600), ValueStore.in_memory(), threading.Lock()

    def live(number: int) -> None:
        islands[number].train(MemoryTransport(network, store, number), Path(folder) / str(number), turn)

    with tempfile.TemporaryDirectory() as folder:
        run_islands(len(islands), live, timeout=3600)


@torch.no_grad()
def evaluate(model: nn.Module, blocks: torch.Tensor, batch: int = 64) -> float:
    """Mean loss of a token, of (sequences, length), `batch` sequences at a time."""
    losses = [float(model(input_ids=part, labels=part).loss) * len(part) for part in blocks.split(batch)]
    return sum(losses) / len(blocks)


# The table


@dataclass
class Row:
    """What came of a method: its best settings, runs of its tuning, and what the seeds gave."""

    method: Method
    best: Values
    num_tried: int
    losses: list[float]
    bytes_sent: float


class Study:
    """Tunes methods and compares them.

    Args:
        args: of the program.
        task: what is trained.
        corpus: on which text.
    """

    def __init__(self, args: argparse.Namespace, task: Task, corpus: Corpus) -> None:
        self._task = task
        self._corpus = corpus
        self._record = Record(args.record)
        self._seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + args.seeds)
        self._back_off = args.back_off

    def measure(self, method: Method) -> Row:
        """Tunes a method, and runs the best settings with other seeds."""
        tried = partial(self._run, method, seed=TUNING_SEED)
        best, num_tried = climb(method.grid, method.start, lambda values: tried(values)["loss"])
        rates = method.grid.get(INNER, [best[INNER]])
        shown = {**best, INNER: rates[max(0, rates.index(best[INNER]) - self._back_off)]}
        outcomes = [self._run(method, shown, seed) for seed in self._seeds]
        return Row(method, shown, num_tried, [one["loss"] for one in outcomes], outcomes[0]["bytes_sent"])

    def _run(self, method: Method, values: Values, seed: int) -> dict[str, float]:
        def execute() -> dict[str, float]:
            outcome = train(self._task, method, values, seed, self._corpus)
            print(f"{method.name}: {describe(values, {})}, seed {seed}: {outcome['loss']:.4f}", flush=True)
            return outcome

        what = {"task": asdict(self._task), "num_islands": method.num_islands, "diloco": dict(method.diloco)}
        return self._record.get({**what, "values": dict(values), "seed": seed}, execute)


def make_table(rows: Sequence[Row], title: str) -> Table:
    """One row a method, in the order given."""
    table = Table(title=title)
    for column in ("", "settings", "loss", "against", "runs", "MB"):
        table.add_column(column, justify="left" if column in ("", "settings") else "right")
    for row in rows:
        differences = [mine - first for mine, first in zip(row.losses, rows[0].losses, strict=True)]
        table.add_row(
            row.method.name,
            describe(row.best, row.method.grid),
            spread(row.losses),
            "" if row is rows[0] else spread(differences, "{:+.4f}"),
            str(row.num_tried),
            f"{row.bytes_sent / 1e6:.2f}" if row.bytes_sent else "",
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse(argv)
    torch.set_num_threads(1)
    logging.getLogger("hf_diloco").setLevel(logging.ERROR)
    corpus = Corpus(args)
    task = Task(args.steps, args.batch, args.sequence_length, args.hidden_size, corpus.vocab_size, corpus.hash)
    study = Study(args, task, corpus)
    is_of_islands = args.study == "islands"
    methods = methods_of_islands(args.islands, args.sync_every) if is_of_islands else methods_of_one_island()
    size = sum(parameter.numel() for parameter in make_model(task, 0).parameters())
    title = (
        f"{f'{args.islands} islands, H={args.sync_every}' if is_of_islands else 'one island'}: {size:,} parameters, "
        f"{task.steps} steps of {task.batch} x {task.sequence_length} tokens, {args.seeds} seeds"
    )
    rows = []
    for method in methods:
        if args.only and not any(word in method.name for word in args.only):
            continue
        chosen = Method(**{**vars(method), "grid": {}}) if args.quick else method
        rows.append(study.measure(chosen))
        Console(width=140).print(make_table(rows, title))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; --quick replaces defaults alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--study", choices=["islands", "one-island"], default="islands")
    parser.add_argument("--only", nargs="*", default=[], help="only methods whose names hold one of these words")
    parser.add_argument("--record", type=Path, default=Path("runs/compare_methods.jsonl"), help="runs that have ended")
    parser.add_argument("--quick", action="store_true", help="a short form, untuned: shows that everything runs")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--sync-every", type=int, default=10, help="steps between the rounds of several islands")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step, of all islands together")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3, help="that the best settings are shown on")
    parser.add_argument("--back-off", type=int, default=0, help="places that the inner rate goes down for those seeds")
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(steps=20, sync_every=5, hidden_size=32, vocab_size=512, eval_sequences=16, seeds=2)
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    if args.batch % args.islands:
        parser.error(f"--batch {args.batch} is no multiple of --islands {args.islands}")
    return args


if __name__ == "__main__":
    main()
