"""What an island leaves in its run's folder for people: run.json."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import hf_diloco
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.utils.files import write_json
from hf_diloco.utils.redact import redact

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers")


def write_run_json(run: BaseRun) -> None:
    """Writes the resolved settings, less secrets, and the versions of everything that matters to the run folder."""
    write_json(run.folder / "run.json", {**redact(run.model_dump(mode="json")), "versions": versions()})


def versions() -> dict[str, str | None]:
    """Versions of Python, this package and what it stands on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "hf_diloco": hf_diloco.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
