"""Puts right, before torch is imported, what keeps DeepSpeed from running or makes it vanish silently."""

from __future__ import annotations

import os
import socket
import sys

from hf_diloco.errors import ConfigError

ENV_DEBUG = "HF_DILOCO_DEBUG"  # show tracebacks of expected errors
ENV_LAUNCHED = "HF_DILOCO_LAUNCHED"  # set by `hf-diloco launch`, which draws its own progress bars
STOPPED = 3  # exit code of an island or node: ended on request, with a checkpoint to go on from

_TRUE = {"1", "true", "yes", "y", "t", "on"}
_OF_LAUNCHERS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND")
"""With these `accelerate launch` tells its processes to shard or to compile; others may inherit them."""


def prepare_environment(wants_deepspeed: bool) -> None:
    """Makes a plain `python train_lm.py` a world of one rank, and unsets what would have it train otherwise.

    Raises:
        ConfigError: when a launcher gave only a part of what makes a world.
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
        # accelerate would train plain DDP and say nothing; TrainingArguments(use_cpu=True) is what works.
        del os.environ["ACCELERATE_USE_CPU"]
        print("note: ACCELERATE_USE_CPU is unset for this process, because it would drop DeepSpeed", file=sys.stderr)
    if not wants_deepspeed and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _TRUE:
        print(
            "note: deepspeed is null in the run file, but the launcher turned DeepSpeed on: its configuration is used",
            file=sys.stderr,
        )


def _forget_launcher() -> None:
    """Unsets what a launcher that has not started this process has left: the run file says how to train."""
    for name in _OF_LAUNCHERS:
        value = os.environ.pop(name, "").lower()
        if value in _TRUE or (name == "ACCELERATE_DYNAMO_BACKEND" and value not in ("", "no")):
            print(f"note: {name} is unset for this process, which no launcher has started", file=sys.stderr)


def is_leader() -> bool:
    """Whether this process is rank 0 of its island."""
    return os.environ.get("RANK", "0") == "0"
