"""The command line of a training script: a run file and what overrides it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.load import VARIABLES, read_run_file

R = TypeVar("R", bound=BaseRun)


def parse_command_line(kind: type[R], program: str, description: str, argv: Sequence[str] | None = None) -> R:
    """Reads the run file that the command line names, with its overrides.

    Args:
        kind: of run.
        program: its name, for `--help`.
        description: what it does.
        argv: default: the process's.

    Raises:
        ConfigError: when the run file or an override is wrong.
    """
    given = vars(make_parser(program, description).parse_intermixed_args(argv))
    return load_given(kind, given)


def load_given(kind: type[R], given: Mapping[str, Any]) -> R:
    """The run file of parsed arguments, with its overrides.

    Raises:
        ConfigError: when the run file or an override is wrong.
    """
    keys = {name: kind.setting(name) for name in VARIABLES}
    keys |= {"name": "name", "output": "output", "resume": "launch.resume"}
    shorthands = [f"{key}={json.dumps(given[name])}" for name, key in keys.items() if given[name] is not None]
    return read_run_file(kind, given["run_file"], [*given["overrides"], *shorthands])


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """What every training script understands."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog="Start it with torchrun, accelerate launch or deepspeed; `hf-diloco launch` starts all islands at once."
        " Command line beats environment beats file.",
    )
    parser.add_argument(
        "run_file", type=Path, metavar="RUN.yaml", help="model, data, training and outer loop; or `quickstart`"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as training.max_steps=200")
    parser.add_argument(
        "--island", "--node", type=int, help="this island's, or node's, number, from 0 (HF_DILOCO_ISLAND)"
    )
    parser.add_argument(
        "--num-islands", "--num-nodes", type=int, help="islands, or nodes, in the run (HF_DILOCO_NUM_ISLANDS)"
    )
    parser.add_argument("--rendezvous", metavar="URL", help="where they meet: tcp://HOST:PORT (HF_DILOCO_RENDEZVOUS)")
    parser.add_argument("--name", help="the run folder is OUTPUT/NAME")
    parser.add_argument("--output", metavar="FOLDER", help="the folder of run folders")
    parser.add_argument("--resume", metavar="auto|never|FOLDER", help="where training begins; {island} is replaced")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # given by some launchers
    return parser
