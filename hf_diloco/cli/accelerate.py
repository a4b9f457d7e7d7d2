"""Configures `accelerate launch` to start one island on this machine.

Every island gets a configuration file of its own in its folder, so that a user's default file of `accelerate config`,
which command line flags override only in part, has no effect. What works with Accelerate 1.15:

==================== ========= ===================== =======================================================
DeepSpeed            processes distributed_type      started by
==================== ========= ===================== =======================================================
yes                  any       DEEPSPEED             torchrun; also one process needs the variables it sets
no                   several   MULTI_GPU             torchrun; on CPU too: the Trainer then picks Gloo; also with FSDP,
                                                     which TrainingArguments turn on
no                   one       NO                    a plain child process
==================== ========= ===================== =======================================================

Not used: `--cpu` and MULTI_CPU start one process, without DeepSpeed, unless mpirun is installed. `use_cpu` stays
false: it would set ACCELERATE_USE_CPU, which makes Accelerate silently drop DeepSpeed; `use_cpu` of TrainingArguments
works.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_diloco.apps.common.yaml_file import read_yaml
from hf_diloco.errors import ConfigError


def configuration(num_processes: int, deepspeed: bool, num_machines: int = 1) -> str:
    """Returns an Accelerate configuration file for an island of `num_processes` on all its machines together."""
    several = {"deepspeed_config": {"deepspeed_multinode_launcher": "standard"}} if deepspeed else {}
    return yaml.safe_dump(
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "DEEPSPEED" if deepspeed else "MULTI_GPU" if num_processes > 1 else "NO",
            "num_processes": num_processes,
            "num_machines": num_machines,
            "machine_rank": 0,  # the command line of each machine sets it, and the main address
            "use_cpu": False,
            **({**several, "rdzv_backend": "static", "same_network": True} if num_machines > 1 else {}),
        },
        sort_keys=False,
    )


def read_configuration(path: Path, deepspeed: bool, fsdp: bool) -> dict[str, Any]:
    """Reads a user's own Accelerate configuration; raises `ConfigError` if it cannot start one island here."""
    try:
        values, _ = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"accelerate: {error} (write one with `accelerate config`)") from None
    kind = str(values.get("distributed_type", "NO"))
    if type(number := values.get("num_processes") or 1) is not int:
        raise ConfigError(f"accelerate: {path} has num_processes {number!r}: give a whole number")
    if values.get("num_machines", 1) != 1:
        raise ConfigError(
            f"accelerate: {path} spans num_machines={values['num_machines']}, but hf-diloco launch starts the "
            "processes of this machine: run `accelerate launch --config_file ... train_lm.py ...` on each machine of "
            "the island"
        )
    if deepspeed and kind != "DEEPSPEED":
        raise ConfigError(
            f"accelerate: {path} has distributed_type {kind}, but the run file has a deepspeed configuration: "
            "set distributed_type: DEEPSPEED, or deepspeed: null"
        )
    if fsdp and kind == "DEEPSPEED":
        raise ConfigError(
            f"accelerate: {path} has distributed_type {kind}, but the run file has a block fsdp: set "
            "distributed_type: FSDP or MULTI_GPU, or fsdp: null"
        )
    version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)  # Accelerate's default
    if kind == "FSDP" and str(version) != "2":
        raise ConfigError(f"accelerate: {path} is for FSDP1: set fsdp_config: {{fsdp_version: 2}}")
    if kind == "MULTI_CPU":
        raise ConfigError(
            f"accelerate: with distributed_type MULTI_CPU of {path} accelerate starts one process only: "
            "use MULTI_GPU, which starts torchrun, and launch.use_cpu: true"
        )
    return values


def command(
    config_file: Path, port: int, module: str, script_args: Sequence[str], num_processes: int | None = None
) -> list[str]:
    """Returns the command that starts one island.

    Args:
        config_file: Accelerate's configuration.
        port: where the island's own processes meet on this machine.
        module, script_args: what the processes run.
        num_processes: overrides the configuration's.
    """
    processes = [] if num_processes is None else ["--num_processes", str(num_processes)]
    launcher = [sys.executable, "-m", "hf_diloco.apps.common.island_store", "--config_file", str(config_file)]
    return [*launcher, "--main_process_port", str(port), *processes, "-m", module, *script_args]
