"""The tasks that a run file may be of."""

from __future__ import annotations

from pathlib import Path

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.shipped import find_run_file
from hf_diloco.apps.common.yaml_file import read_yaml


def kinds() -> dict[str, type[BaseRun]]:
    """Each kind of run, by the task's name."""
    from hf_diloco.apps.lm.runfile import RunFile
    from hf_diloco.apps.vision.runfile import VisionRun

    return {"language model": RunFile, "image classifier": VisionRun}


def kind_of(path: str | Path) -> type[BaseRun]:
    """Which kind of run a file is of: image classifiers have a `gossip` block.

    Raises:
        ConfigError: it cannot be read.
    """
    values, _ = read_yaml(find_run_file(path))
    lm, vision = kinds().values()
    return vision if vision.meeting_name in values else lm
