"""1-bit LAMB beside LAMB: what a step takes on a slow link, and masked language modelling by steps and by bytes.

    python -m benchmarks.onebit_lamb link
    python -m benchmarks.onebit_lamb learn --data 'en/c4-train.*.json.gz' --eval-data 'en/c4-validation.*.json.gz'
    python -m benchmarks.onebit_lamb learn --quick

Ranks are processes under DDP and Gloo. Bytes are those that the kernel counts on rank 0's connections, without TCP's
own. LAMB is the same optimizer that never compresses; DDP averages its gradients in fp32 or, as is usual, in fp16, as
in the warm-up of 1-bit LAMB.

`link`: ranks in networks of their own, on links of --rate Mbit/s and --rtt ms (`benchmarks/links.py`). Medians of
seconds a step; "alone" is a step without any exchange.

`learn`: BERT, small, from equal random weights. The learning rate of each optimizer is tuned on one seed, to the
neighbour on a grid for as long as the loss falls; the best are run with other seeds.

    loss           on held-out text, same masks for all: mean and standard deviation over the seeds
    MB             sent by rank 0
    at its bytes   LAMB's loss when it had sent what 1-bit LAMB sends in all, by the evaluation before
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

from benchmarks.links import Links, enter_network
from benchmarks.orders import Workers, answer_orders, reach_store
from benchmarks.texts import Corpus, add_arguments, check_arguments, draw_batches
from benchmarks.tuning import Record, climb, describe, spread
from hf_diloco.apps.data.packing import Masking
from hf_diloco.optimizers.onebit.lamb import OneBitLamb
from hf_diloco.optimizers.onebit.optimizer import average_gradients, average_gradients_in_fp16
from tests.processes import Processes
from tests.programs.onebit_ranks import bytes_sent

TIMEOUT = 3600.0
TUNING_SEED = 0
RATES = [2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2]
MASK_SHARE = 0.15
NUM_EVALUATIONS = 12
FREEZE_ON_LINK = 2
"""Steps that do not count."""
HOOKS = {"fp32": average_gradients, "fp16": average_gradients_in_fp16}


@dataclass(frozen=True)
class Shape:
    """Of a BERT."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    sequence_length: int

    def make(self, seed: int) -> BertForMaskedLM:
        """Equal weights for equal seeds; without dropout, so that ranks need no random states."""
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=4 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            max_position_embeddings=self.sequence_length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForMaskedLM(config)


@dataclass(frozen=True)
class Training:
    """One training; `freeze_step` None never compresses, and `reduce` names one of `HOOKS`."""

    shape: Shape
    steps: int
    batch: int
    freeze_step: int | None
    reduce: str
    rate: float
    beta2: float = 0.999
    seed: int = 0
    evaluations: int = 0


# One rank's process


class Rank:
    """Does what it is asked for; all answers are dicts."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._train = self._evaluation = torch.empty(0)

    def load(self, path: str) -> dict[str, Any]:
        """Takes the sequences of all ranks to train on, and those to evaluate on, from a file."""
        data = torch.load(path, weights_only=True)
        self._train, self._evaluation = data["train"][self._number], data["evaluation"]
        return {}

    def train(self, training: dict[str, Any]) -> dict[str, Any]:
        """Trains; returns each step's seconds and bytes, and the losses that were asked for, by step."""
        what = Training(**{**training, "shape": Shape(**training["shape"])})
        model = what.shape.make(what.seed)
        optimizer = OneBitLamb(groups_of(model), lr=what.rate, betas=(0.9, what.beta2), freeze_step=what.freeze_step)
        schedule = get_linear_schedule_with_warmup(optimizer, what.steps // 10, what.steps)
        trained = self._wrap(model, optimizer, what.reduce)
        order = draw_batches(self._train.shape[1], what.steps, what.batch, 1000 * what.seed + self._number)
        seconds, sent, losses = [], [], {}
        for step in range(what.steps):
            dist.barrier()
            begin, before = time.monotonic(), bytes_sent()
            ids, labels = self._train[:, order[step]]
            trained(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            seconds.append(time.monotonic() - begin)
            sent.append(bytes_sent() - before)
            schedule.step()
            optimizer.zero_grad()
            is_due = what.evaluations * (step + 1) // what.steps > what.evaluations * step // what.steps
            if is_due and self._number == 0:
                losses[step + 1] = evaluate(model, self._evaluation)
        return {"seconds": seconds, "sent": sent, "losses": losses}

    def _wrap(self, model: torch.nn.Module, optimizer: OneBitLamb, reduce: str) -> torch.nn.Module:
        if reduce not in HOOKS:
            return model
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(optimizer, HOOKS[reduce])
        return wrapped


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases and norms do not."""
    trained = list(model.parameters())
    return [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.01},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model: torch.nn.Module, sequences: torch.Tensor) -> float:
    """Mean loss of a hidden token; `sequences` are (2, sequences, length)."""
    total, count = 0.0, 0
    for ids, labels in sequences.split(64, dim=1):
        hidden = int((labels >= 0).sum())
        total += float(model(input_ids=ids, labels=labels).loss) * hidden
        count += hidden
    return total / count


def run_rank(number: int, num_ranks: int, host: str, port: int) -> None:
    """Answers until the program that asks kills this process."""
    print("up", flush=True)  # from now on this process has a network of its own, where it gets one
    torch.set_num_threads(1)
    store = reach_store(host, port, TIMEOUT)
    group = PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=number, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT))
    answer_orders(store, number, Rank(number))


# All ranks


class Ranks:
    """Processes that train together; on links of their own, or on this machine.

    Args:
        args: of the program.
        processes: where they are started.
        links: to join them to, if any.
    """

    def __init__(self, args: argparse.Namespace, processes: Processes, links: Links | None = None) -> None:
        host = links.host if links else "127.0.0.1"
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "benchmarks.onebit_lamb", args.what, "--port", str(store.port)]
        command += ["--host", host, "--ranks", str(args.ranks)]
        started = []
        for number in range(args.ranks):
            device = f"in{number}" if links else "lo"
            inside = ["unshare", "--net"] if links else []
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device}
            started.append(processes.spawn([*inside, *command, "--rank", str(number)], env=env))
        for number, process in enumerate(started):
            process.wait_for("up")
            if links:
                links.join(number, process.pid)
                links.shape(number, args.rate, args.rtt)
        self._workers = Workers(store, started)

    def load(self, train: Sequence[torch.Tensor], evaluation: torch.Tensor) -> None:
        """Gives each rank its sequences, (2, sequences, length): what is shown, and labels."""
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"train": list(train), "evaluation": evaluation}, Path(folder) / "data.pt")
            self._workers.ask("load", path=str(Path(folder) / "data.pt"))

    def train(self, training: Training) -> dict[str, Any]:
        """Has all of them train; returns rank 0's answer."""
        return self._workers.ask("train", training=asdict(training))[0]


# What a step takes


def measure_link(args: argparse.Namespace, ranks: Ranks) -> Table:
    """A row for each way of averaging."""
    shape = Shape(args.hidden_size, args.layers, args.vocab_size, args.sequence_length)
    size = sum(parameter.numel() for parameter in shape.make(0).parameters())
    tokens = torch.randint(shape.vocab_size, (2, 64, shape.sequence_length))
    ranks.load([tokens] * args.ranks, tokens)
    table = Table(title=f"{args.ranks} ranks, {size / 1e6:.1f}M parameters, {args.rate:g} Mbit/s, {args.rtt:g} ms")
    for column in ("", "s a step", "least, most", "LAMB in fp16 takes", "MB sent a step"):
        table.add_column(column, justify="right" if column else "left")
    found = {}
    for name, freeze_step, reduce in (
        ("alone", None, "none"),
        ("LAMB, fp32", None, "fp32"),
        ("LAMB, fp16", None, "fp16"),
        ("1-bit LAMB", FREEZE_ON_LINK, "fp16"),
    ):
        steps = FREEZE_ON_LINK + args.steps
        found[name] = ranks.train(Training(shape, steps, args.batch, freeze_step, reduce, rate=1e-4))
    fp16 = statistics.median(found["LAMB, fp16"]["seconds"][FREEZE_ON_LINK:])
    for name, answer in found.items():
        seconds, sent = answer["seconds"][FREEZE_ON_LINK:], answer["sent"][FREEZE_ON_LINK:]
        median = statistics.median(seconds)
        table.add_row(
            name,
            f"{median:.3f}",
            f"{min(seconds):.3f}, {max(seconds):.3f}",
            f"{fp16 / median:.2f}x",
            f"{statistics.mean(sent) / 1e6:.3f}",
        )
    return table


# Loss by steps and by bytes


class Study:
    """Tunes both optimizers and compares them.

    Args:
        args: of the program.
        ranks: that train; they have their sequences.
        vocab_size: tokens that there are.
        text: a hash of the evaluation text.
    """

    def __init__(self, args: argparse.Namespace, ranks: Ranks, vocab_size: int, text: str) -> None:
        self._args = args
        self._ranks = ranks
        self._shape = Shape(args.hidden_size, args.layers, vocab_size, args.sequence_length)
        self._text = text
        self._record = Record(args.record)

    def run(self, freeze_step: int | None, rate: float, seed: int) -> dict[str, Any]:
        """Losses by step, and bytes of each step."""
        args = self._args
        training = Training(
            self._shape, args.steps, args.batch, freeze_step, "fp16", rate, args.beta2, seed, NUM_EVALUATIONS
        )

        def execute() -> dict[str, Any]:
            answer = self._ranks.train(training)
            name = "1-bit LAMB" if freeze_step else "LAMB"
            print(f"{name}: rate {rate:g}, seed {seed}: {last_loss(answer):.4f}", flush=True)
            return {key: answer[key] for key in ("losses", "sent")}

        what = {**asdict(training), "ranks": args.ranks, "text": self._text}
        return self._record.get(what, execute)

    def tune(self, freeze_step: int | None) -> tuple[dict[str, float], int]:
        """The best learning rate, and how many were tried."""
        grid = {} if self._args.quick else {"rate": RATES}
        return climb(grid, {"rate": 1e-2}, lambda one: last_loss(self.run(freeze_step, one["rate"], TUNING_SEED)))


def measure_learning(args: argparse.Namespace, study: Study) -> Table:
    """A row for each optimizer."""
    freeze_step = max(2, round(args.warm_up * args.steps))
    tokens = f"{args.ranks} x {args.batch} x {args.sequence_length} tokens"
    table = Table(title=f"{args.steps} steps of {tokens}, {freeze_step} before the freeze, {args.seeds} seeds")
    for column in ("", "best", "tried", "loss", "against", "MB", "LAMB sends", "at its bytes"):
        table.add_column(column, justify="left" if column in ("", "best") else "right")
    seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + args.seeds)
    lamb: list[dict[str, Any]] = []
    for name, freeze in (("LAMB", None), ("1-bit LAMB", freeze_step)):
        best, num_tried = study.tune(freeze)
        answers = [study.run(freeze, best["rate"], seed) for seed in seeds]
        lamb = lamb or answers
        losses = [last_loss(one) for one in answers]
        sent = sum(answers[0]["sent"])
        pairs = list(zip(answers, lamb, strict=True))
        table.add_row(
            name,
            describe(best, {"rate": RATES}),
            str(num_tried),
            spread(losses),
            spread([last_loss(mine) - last_loss(other) for mine, other in pairs], "{:+.4f}") if freeze else "",
            f"{sent / 1e6:.2f}",
            f"{sum(lamb[0]['sent']) / sent:.2f}x",
            spread([loss_at(other, sum(mine["sent"])) for mine, other in pairs]) if freeze else "",
        )
        for step in answers[0]["losses"]:
            print(f"{name}, step {step}: {spread([one['losses'][step] for one in answers])}")
    return table


def last_loss(answer: dict[str, Any]) -> float:
    """At the end; infinite where training has diverged."""
    loss = float(list(answer["losses"].values())[-1])
    return loss if math.isfinite(loss) else math.inf


def loss_at(answer: dict[str, Any], num_bytes: int) -> float:
    """At the last evaluation before more bytes were sent; infinite if there was none."""
    sent = list(itertools.accumulate(answer["sent"]))
    return next(
        (loss for step, loss in reversed(answer["losses"].items()) if sent[int(step) - 1] <= num_bytes), math.inf
    )


def load_text(args: argparse.Namespace, ranks: Ranks) -> Study:
    """Gives the ranks masked sequences."""
    corpus = Corpus(args, is_masked=True)
    hide = Masking(corpus.tokenizer.mask_token_id, corpus.vocab_size, MASK_SHARE, seed=0)

    def masked(sequences: torch.Tensor) -> torch.Tensor:
        shown = hide([{"input_ids": one} for one in sequences])
        return torch.stack([shown["input_ids"], shown["labels"]])

    shares = [masked(corpus.share(number, args.ranks)) for number in range(args.ranks)]
    ranks.load(shares, masked(corpus.evaluation))
    return Study(args, ranks, corpus.vocab_size, corpus.hash)


def main() -> None:
    """Runs the benchmark."""
    args = parse()
    if args.rank is not None:
        run_rank(args.rank, args.ranks, args.host, args.port)
        return
    if args.what == "link":
        enter_network("benchmarks.onebit_lamb", sys.argv[1:])
    with Processes() as processes:
        ranks = Ranks(args, processes, Links(processes) if args.what == "link" else None)
        table = measure_link(args, ranks) if args.what == "link" else measure_learning(args, load_text(args, ranks))
    Console(width=119).print(table)


def parse() -> argparse.Namespace:
    """The command line; what is chosen decides its defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["link", "learn"])
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="a short form, untuned: shows that everything runs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step of one rank")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100.0, help="link: Mbit/s of each rank")
    parser.add_argument("--rtt", type=float, default=20.0, help="link: milliseconds to another rank and back")
    parser.add_argument("--warm-up", type=float, default=0.165, help="learn: share of the steps before the freeze")
    parser.add_argument("--beta2", type=float, default=0.999, help="learn: decay of the second moments")
    parser.add_argument("--seeds", type=int, default=3, help="learn: that the best rates are shown on")
    parser.add_argument("--record", type=Path, default=Path("runs/onebit_lamb.jsonl"), help="learn: its ended runs")
    for name, kind in (("--rank", int), ("--host", str), ("--port", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    known = parser.parse_known_args()[0]
    if known.what == "link":
        parser.set_defaults(ranks=4, steps=8, batch=2, hidden_size=256, layers=4, vocab_size=6000, sequence_length=32)
    elif known.quick:
        parser.set_defaults(steps=24, batch=4, hidden_size=32, vocab_size=512, eval_sequences=16, seeds=2)
    args = parser.parse_args()
    check_arguments(parser, args)
    return args


if __name__ == "__main__":
    main()
