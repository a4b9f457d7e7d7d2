"""Two islands on one device under each engine; and a Llama that islands train on, against training without islands.

An island is a process, as on a cluster: torchrun with one rank, NCCL inside (Gloo on a processor), Gloo between. All
of them see the same device, as `hf-diloco launch` has it where there is one.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accelerator.setting import Figure, Setting
from hf_diloco.apps.data.embedded import cached_documents, embedded_documents
from hf_diloco.cli.devices import free_ports
from hf_diloco.cli.plan import island_environment
from hf_diloco.report import load_run, summarise
from tests.equivalence.runs import events, losses, make_corpus, zero
from tests.processes import Processes


def _offloaded(stage: int) -> dict[str, Any]:
    """ZeRO with what it shards in host memory; its optimizer is PyTorch's, so that nothing is compiled."""
    blocks: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if stage == 3:
        blocks["offload_param"] = blocks["offload_optimizer"]
    settings = zero(stage)
    zeros = {**settings["zero_optimization"], **blocks}
    return {**settings, "zero_optimization": zeros, "zero_force_ds_cpu_optimizer": False}


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("DDP", {}),
    "ZeRO-1": ("ZeRO-1", {"deepspeed": zero(1)}),
    "ZeRO-2": ("ZeRO-2", {"deepspeed": zero(2)}),
    "ZeRO-3": ("ZeRO-3", {"deepspeed": zero(3)}),
    "FSDP2": ("FSDP2", {"fsdp": {}}),
    "ZeRO-2-offloaded": ("ZeRO-2", {"deepspeed": _offloaded(2)}),
    "ZeRO-3-offloaded": ("ZeRO-3", {"deepspeed": _offloaded(3)}),
    "FSDP2-offloaded": ("FSDP2", {"fsdp": {"cpu_offload": True}}),
}
"""What the records call each, and its blocks of the run file. One rank under DDP counts as plain."""

AT_ONCE = 4
"""Engines that train at the same time on a GPU: most of what each takes is its start."""

DOCUMENTED = ("torch", "transformers", "sympy", "pandas", "networkx", "numpy")
"""Packages that are there, whose docstrings, with Python's own, are 20 MB of English: no text is read thrice."""

LOSS_TOLERANCE = 0.05
"""Of a training loss near 6: sums in bf16 differ in their order, and FSDP2 keeps more in bf16 than autocast does."""


def train(
    setting: Setting, runs: dict[str, dict[str, Any]], num_islands: int, use_cpu: bool, torchrun: bool = False
) -> dict[str, Path]:
    """Runs the islands of some run files, all at once and on one device.

    Args:
        setting: where.
        runs: the settings of each run file, by the run's name.
        num_islands: of each.
        use_cpu: train on the processor, also where there is a GPU.
        torchrun: an island's one rank is started by torchrun.

    Returns:
        The folders of the runs.

    Raises:
        AssertionError: an island failed; with its output.
    """
    setting.folder.mkdir(parents=True, exist_ok=True)
    launch = {"use_cpu": use_cpu, "resume": "never"}
    ports = iter(free_ports(len(runs) * (1 + num_islands)))
    with Processes() as processes:
        islands = []
        for name, settings in runs.items():
            whole = {
                "name": name,
                "output": str(setting.folder / "runs"),
                "sample": None,
                **settings,
                "launch": launch,
            }
            path = setting.folder / f"{name}.yaml"
            path.write_text(yaml.safe_dump(whole))
            rendezvous = f"tcp://127.0.0.1:{next(ports)}" if num_islands > 1 else None
            for number in range(num_islands):
                ranks = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", str(next(ports))]
                command = [sys.executable, *(ranks if torchrun else []), "train_lm.py", str(path)]
                environment = island_environment(number, num_islands, rendezvous, 1 if use_cpu else 4, [])
                islands.append(processes.spawn(command, env=environment))
        for island in islands:
            island.wait(timeout=400)
    return {name: setting.folder / "runs" / name for name in runs}


def engines(setting: Setting) -> Iterator[Figure]:
    """Two islands under each engine in bf16, and one run on the processor to compare with."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    width = setting.choose(256, 32)
    settings: dict[str, Any] = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        },
        "tokenizer": {"train": {"vocab_size": 320}},
        "data": {
            "source": "files",
            "files": [str(make_corpus(setting.folder))],
            "sequence_length": 32,
            "num_eval_sequences": 8,
        },
        "training": {
            "max_steps": 8,
            "per_device_train_batch_size": 4,
            "learning_rate": 1.0e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": True,
        },
        "diloco": {"num_islands": 2, "sync_every": 4},
    }
    reference = losses(train(setting, {"processor": settings}, 2, use_cpu=True)["processor"])
    runs = {}
    for name, (_, blocks) in ENGINES.items():
        if name.startswith("ZeRO") and importlib.util.find_spec("deepspeed") is None:
            yield Figure(f"{name}: losses", None, note="deepspeed is not installed")
        elif setting.is_rehearsal and "offloaded" in name:  # all is in host memory already
            yield Figure(f"{name}: losses", None, note="needs a GPU")
        else:
            runs[name] = {**settings, **blocks}
    at_once = setting.choose(AT_ONCE, 1)
    for first in range(0, len(runs), at_once):
        batch = dict(list(runs.items())[first : first + at_once])
        for name, folder in train(setting, batch, 2, setting.is_rehearsal, torchrun=True).items():
            yield from _compared(name, folder, reference)


def _compared(name: str, folder: Path, reference: list[float]) -> Iterator[Figure]:
    """Whether the islands of a run agreed, and how near they came to the losses of the processor."""
    shards = ENGINES[name][0]
    said = events(folder, "start")[0]["shards"]
    assert said.startswith((shards, "plain") if name == "DDP" else shards), f"{name}: trained as {said}"
    hashes = [[record["outer_hash"] for record in events(folder, "sync", island)] for island in range(2)]
    equal = sum(one == other for one, other in zip(*hashes, strict=True))
    yield Figure(f"{name}: rounds after which both islands are equal, of 2", equal, at_least=2, is_exact=True)
    furthest = max(abs(mine - theirs) for mine, theirs in zip(losses(folder), reference, strict=True))
    yield Figure(
        f"{name}: largest difference of a loss from the processor's", furthest, at_most=LOSS_TOLERANCE, is_exact=True
    )


def make_text(setting: Setting) -> Path:
    """The docstrings of Python and of large packages, a document a line."""
    specs = [importlib.util.find_spec(name) for name in DOCUMENTED]
    folders = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
    with ProcessPoolExecutor() as pool:  # parsing takes seconds each
        found = pool.map(cached_documents, folders, itertools.repeat(None))
        documents = dict.fromkeys(itertools.chain(embedded_documents(), *found))
    setting.folder.mkdir(parents=True, exist_ok=True)
    path = setting.folder / "docstrings.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def llama(setting: Setting) -> Iterator[Figure]:
    """A Llama of 60M parameters that one island has warmed up: four islands, synchronous training, and one island."""
    source = (
        {"source": "embedded"} if setting.is_rehearsal else {"source": "files", "files": [str(make_text(setting))]}
    )
    steps, batch = setting.choose(400, 8), setting.choose(16, 2)
    vocabulary = {"vocab_size": setting.choose(8192, 512), "max_megabytes": setting.choose(16, 0.1)}
    begin: dict[str, Any] = {
        "model": {"preset": setting.choose("llama-60m", "llama-tiny")},
        "tokenizer": {"train": vocabulary},
    }

    def run(name: str, islands: int, steps: int, batch: int, **diloco: Any) -> float:
        alone = {"sync_every": steps, "outer_lr": 1.0, "outer_momentum": 0.0}
        settings: dict[str, Any] = {
            **begin,
            "data": {**source, "sequence_length": 128, "num_eval_sequences": setting.choose(256, 8)},
            "training": {
                "max_steps": steps,
                "per_device_train_batch_size": batch,
                "per_device_eval_batch_size": 32,
                "learning_rate": 1.0e-3,
                "adam_beta2": 0.95,
                "weight_decay": 0.1,
                "lr_scheduler_type": "cosine",
                "warmup_steps": steps // 10,
                "logging_steps": max(1, steps // 20),
                "save_strategy": "no",
                "bf16": True,
            },
            "diloco": {"num_islands": islands, **(diloco or alone)},
        }
        report = summarise(load_run(train(setting, {name: settings}, islands, setting.is_rehearsal)[name]))
        assert report.eval_loss is not None, f"{name}: no evaluation"
        return report.eval_loss

    yield Figure("warm, as all others begin: evaluation loss", run("warm", 1, steps, batch))
    begin = {"model": {"path": str(setting.folder / "runs" / "warm" / "model")}}
    own = run("one-island", 1, steps, batch)
    yield Figure("one island, a quarter of the tokens: evaluation loss", own)
    synchronous = run("synchronous", 1, steps, 4 * batch)
    yield Figure("synchronous, all tokens in batches of four islands", synchronous)
    every = setting.choose(20, 4)
    diloco = run("diloco", 4, steps, batch, sync_every=every, outer_lr=0.7, outer_momentum=0.5)
    yield Figure("DiLoCo, all tokens, 4 islands", diloco)
    yield Figure("DiLoCo over one island", diloco / own, at_most=1.0)
    share = (own - diloco) / (own - synchronous)
    yield Figure("share of the way from one island to synchronous", share, at_least=0.5)
