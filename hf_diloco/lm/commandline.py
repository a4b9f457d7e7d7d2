"""The command line of `train_lm.py`: a run file and what overrides it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hf_diloco.lm.runfile import RunFile, load_run_file

_SHORTHANDS = {
    "island": "diloco.island",
    "num_islands": "diloco.num_islands",
    "rendezvous": "diloco.rendezvous",
    "name": "name",
    "output": "output",
    "resume": "launch.resume",
}


def parse_command_line(argv: Sequence[str] | None = None) -> RunFile:
    """Reads the run file that the command line names, with its overrides.

    Raises:
        ConfigError: when the run file or an override is wrong.
    """
    given = vars(_parser().parse_intermixed_args(argv))
    shorthands = [
        f"{key}={json.dumps(value)}" for name, key in _SHORTHANDS.items() if (value := given[name]) is not None
    ]
    return load_run_file(given["run_file"], [*given["overrides"], *shorthands])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_lm.py",
        description="Train one island of a causal language model: Trainer, DeepSpeed and the DiLoCo outer loop.",
        epilog="Start it with torchrun, accelerate launch or deepspeed; `hf-diloco launch` starts all islands at once."
        " Command line beats environment beats file.",
    )
    parser.add_argument("run_file", type=Path, metavar="RUN.yaml", help="model, data, training and outer loop")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as training.max_steps=200")
    parser.add_argument("--island", type=int, help="this island's number, from 0 (HF_DILOCO_ISLAND)")
    parser.add_argument("--num-islands", type=int, help="islands in the run (HF_DILOCO_NUM_ISLANDS)")
    parser.add_argument("--rendezvous", metavar="URL", help="where they meet: tcp://HOST:PORT (HF_DILOCO_RENDEZVOUS)")
    parser.add_argument("--name", help="the run folder is OUTPUT/NAME")
    parser.add_argument("--output", metavar="FOLDER", help="the folder of run folders")
    parser.add_argument("--resume", metavar="auto|never|FOLDER", help="where training begins; {island} is replaced")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # given by some launchers
    return parser
