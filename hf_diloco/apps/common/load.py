"""Reads and checks run files, with overrides from a training script's command line.

Precedence: command line, environment, file, default.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hf_diloco.apps.common.arguments import is_training_argument, training_takes_null
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.paths import get_at, resolve_paths
from hf_diloco.apps.common.shipped import find_run_file
from hf_diloco.apps.common.yaml_file import KeyPath, nearest_line, parse_override, read_yaml, set_at
from hf_diloco.config.base import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS, block_at, describe_problem
from hf_diloco.errors import ConfigError
from hf_diloco.utils.redact import redact
from hf_diloco.utils.settings import alternatives

R = TypeVar("R", bound=BaseRun)

VARIABLES = {"island": ENV_ISLAND, "num_islands": ENV_NUM_ISLANDS, "rendezvous": ENV_RENDEZVOUS}
"""Environment variables for identity and rendezvous of islands or nodes; see `BaseRun.setting`."""

_COMMAND_LINE = "command line: "


def read_run_file(kind: type[R], path: str | Path, overrides: Sequence[str] = ()) -> R:
    """Reads and checks a run file.

    Args:
        kind: its class.
        path: the YAML file; or the name of one that comes with the package; or the `run.json` of an earlier run. Files
            that it names are searched next to it, then in the working directory.
        overrides: `key.sub=value` items from the command line, with YAML values; later ones win. Null removes the
            file's value of a setting that cannot be null.

    Raises:
        ConfigError: the file has mistakes; the message has each with its value and its place.
    """
    path = find_run_file(path)
    values, lines = read_yaml(path)
    if not values:
        raise ConfigError(
            f"{path}: is empty; a run file needs at least `training: {{max_steps: 200}}`, and `hf-diloco configs show "
            "quickstart` prints one"
        )
    origins: dict[KeyPath, str] = {key: f"{path}, line {line}: " for key, line in lines.items()}
    if path.name == "run.json":
        values.pop("versions", None)  # recorded by the run, but not a setting
    _check_meeting(kind, values, origins)  # the environment adds to it below
    resolve_paths(values, kind.files, (path.parent, Path()), origins)
    for key, variable in VARIABLES.items():
        if os.environ.get(variable):
            block, name = kind.setting(key).split(".")
            set_at(values, (block, name), os.environ[variable])
            origins[block, name] = f"environment variable {variable}: "
    for item in overrides:
        key_path, value = parse_override(item)
        set_at(values, key_path, value)
        if value is None and not _takes_null(kind, key_path):
            del get_at(values, key_path[:-1])[key_path[-1]]
            origins.pop(key_path, None)
            continue
        origins[key_path] = _COMMAND_LINE
        _check_meeting(kind, values, origins)
        _drop_alternatives(kind, values, key_path, origins)
    values.setdefault("name", path.stem)
    resolve_paths(values, kind.files, (Path(), path.parent), origins)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe(kind, error, origins, str(path))) from None


def _check_meeting(kind: type[BaseRun], values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> None:
    if not isinstance(meeting := values.get(kind.meeting_name), dict | None):
        place = origins[kind.meeting_name,]
        raise ConfigError(f"{place}{kind.meeting_name}: expected a block of `key: value` lines, got {meeting!r}")


def _drop_alternatives(
    kind: type[BaseRun], values: dict[str, Any], given: KeyPath, origins: dict[KeyPath, str]
) -> None:
    """Removes alternatives of a setting given on the command line: `model.path=...` replaces the file's preset."""
    group = kind.alternatives.get(given[0], ())
    if len(given) < 2 or given[1] not in group:
        return
    for other in group:
        if other != given[1] and origins.get((given[0], other)) != _COMMAND_LINE:
            values[given[0]].pop(other, None)


def _takes_null(kind: type[BaseRun], path: KeyPath) -> bool:
    """Whether a setting may be null; True for settings that are unknown or checked elsewhere."""
    if path[0] == "training" and len(path) == 2:
        return training_takes_null(path[1])
    block = block_at(kind, path)
    field = block.model_fields.get(path[-1]) if block else None
    return field is None or type(None) in alternatives(field.annotation)


def _describe(kind: type[BaseRun], error: ValidationError, origins: dict[KeyPath, str], file: str) -> str:
    """Returns the problems in one line, each with its setting's place."""
    texts = []
    for problem in error.errors():
        # The message of a block's validator begins with the setting's name.
        inside = re.match(r"(?:Value error, )?(\w*)", problem["msg"])
        names = (*problem["loc"], inside[1]) if inside else problem["loc"]
        place = nearest_line(origins, names) or f"{file}: "
        texts.append(f"{place}{_misplaced(problem) or describe_problem(problem, kind)}")
    return "; ".join(texts)


def _misplaced(problem: ErrorDetails) -> str:
    """Returns a message for a Trainer setting outside the block `training`; "" for any other problem."""
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden" or not is_training_argument(key):
        return ""
    return f"unknown setting {key}={redact(problem['input'], key)!r} (did you mean training.{key}?)"


def parse_command_line(kind: type[R], program: str, description: str, argv: Sequence[str] | None = None) -> R:
    """Reads the run file that the command line names, with its overrides; see `read_run_file`."""
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
    given = vars(parser.parse_intermixed_args(argv))
    _check_kind(kind, given["run_file"])
    return read_run_file(kind, given["run_file"], [*given["overrides"], *shorthands(kind, given)])


def _check_kind(kind: type[BaseRun], path: Path) -> None:
    """Raises `ConfigError` if a run file is of another task, as otherwise all its settings would count as unknown."""
    other = kind_of(path)
    if other is not kind and other.meeting_name in read_yaml(find_run_file(path))[0]:
        raise ConfigError(
            f"{path} is no run file for {kind.module}: start it by {other.module}, or by `hf-diloco launch`, which "
            "takes either"
        )


def shorthands(kind: type[BaseRun], given: Mapping[str, Any]) -> list[str]:
    """Converts options that every run file has to overrides; skips those that are None."""
    keys = {name: kind.setting(name) for name in VARIABLES}
    keys |= {"name": "name", "output": "output", "resume": "launch.resume"}
    return [f"{key}={json.dumps(given[name])}" for name, key in keys.items() if given[name] is not None]


def kind_of(path: str | Path) -> type[BaseRun]:
    """Returns a run file's class: image classifiers have a `gossip` block. For errors see `read_yaml`."""
    from hf_diloco.apps.lm.runfile import RunFile
    from hf_diloco.apps.vision.runfile import VisionRun

    values, _ = read_yaml(find_run_file(path))
    return VisionRun if VisionRun.meeting_name in values else RunFile
