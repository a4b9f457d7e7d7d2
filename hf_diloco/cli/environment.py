"""`hf-diloco env`: what a report of a bug should say of the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from hf_diloco import __version__
from hf_diloco.cli.devices import cuda_devices, num_cores
from hf_diloco.utils import text
from hf_diloco.utils.redact import redact

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "obstore", "numba", "numpy", "pydantic")
_PREFIXES = ("HF_DILOCO_", "GLOO_", "NCCL_", "OMP_", "CUDA_VISIBLE", "ACCELERATE_", "DS_", "TORCH_")


def run_env(as_json: bool) -> None:
    """Runs `hf-diloco env`. Secrets in the environment are left out."""
    facts = describe_environment()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        print(f"{name:<{width}}{value}")


def describe_environment() -> dict[str, str]:
    """Names and values, in the order in which they are read."""
    import psutil

    return {
        "hf-diloco": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": _cuda(),
        "gpus": ", ".join(cuda_devices()) or "none",
        "cores": str(num_cores()),
        "memory": text.size(psutil.virtual_memory().total),
        **{name: str(redact(value, name)) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    """That PyTorch was built for; its name says it without an import."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    return torch.version.cuda or "none: a PyTorch for CPUs"
