"""Fixes the environment before torch is imported, where DeepSpeed would fail or be silently disabled."""

from __future__ import annotations

import os
import socket
import sys

from hf_diloco.errors import ConfigError

ENV_DEBUG = "HF_DILOCO_DEBUG"  # show tracebacks of expected errors
ENV_LAUNCHED = "HF_DILOCO_LAUNCHED"  # set by `hf-diloco launch`, which draws its own progress bars
STOPPED = 3  # exit code of an island or node that stopped on request, with a checkpoint

_TRUE = {"1", "true", "yes", "y", "t", "on"}
_OF_LAUNCHERS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND")
"""With these `accelerate launch` tells its processes to shard or compile; other processes may inherit them."""


def prepare_environment(wants_deepspeed: bool) -> None:
    """Makes a plain `python train_lm.py` a world of one rank, and unsets variables that would change how it trains.

    Raises `ConfigError` if the environment has only some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    given = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if os.environ.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        _forget_launcher()
    elif len(given) < 4:
        missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(given)
        raise ConfigError(
            f"the environment sets {', '.join(given)} but not {', '.join(sorted(missing))}: start the island with "
            "torchrun, accelerate launch or deepspeed, or unset them"
        )
    if wants_deepspeed and os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE:
        # Accelerate would silently train plain DDP; TrainingArguments(use_cpu=True) works.
        del os.environ["ACCELERATE_USE_CPU"]
        print("note: ACCELERATE_USE_CPU is unset for this process, because it would drop DeepSpeed", file=sys.stderr)
    if not wants_deepspeed and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _TRUE:
        print(
            "note: deepspeed is null in the run file, but the launcher turned DeepSpeed on: its configuration is used",
            file=sys.stderr,
        )


def _forget_launcher() -> None:
    """Unsets inherited variables of a launcher that did not start this process: the run file decides how to train."""
    for name in _OF_LAUNCHERS:
        value = os.environ.pop(name, "").lower()
        if value in _TRUE or (name == "ACCELERATE_DYNAMO_BACKEND" and value not in ("", "no")):
            print(f"note: {name} is unset for this process, which no launcher has started", file=sys.stderr)


def is_leader() -> bool:
    """Whether this process is rank 0 of its island."""
    return os.environ.get("RANK", "0") == "0"
