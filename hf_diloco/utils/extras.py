"""Optional libraries: the extra of this package that installs each, and one error if it is missing."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from hf_diloco.errors import ConfigError

EXTRAS = {
    "PIL": "vision",
    "deepspeed": "deepspeed",
    "gguf": "gguf",
    "matplotlib": "report",
    "numba": "compiled",
    "prometheus_client": "dashboard",
    "timm": "timm",
    "torchvision": "timm",
}
"""Modules, and the extra that installs each."""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found; imports nothing."""
    try:
        return find_spec(module) is not None
    except ValueError:  # it is in sys.modules without a spec
        return True


def installed_version(package: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def need(what: str, *modules: str) -> None:
    """Raises `ConfigError`, with the command that installs them, if modules of `EXTRAS` are missing; `what`, as a user
    wrote it, needs them."""
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        extras = ",".join(sorted({EXTRAS[module] for module in missing}))
        raise ConfigError(f'{what} needs {" and ".join(missing)}: pip install "hf-diloco[{extras}]"')


def import_deepspeed_quietly() -> None:
    """Imports DeepSpeed without its warning, on stdout, that this machine has no accelerator: `doctor` reports that.
    All its other warnings stay, also later."""
    keep_deepspeed_quiet()
    import deepspeed  # noqa: F401


def keep_deepspeed_quiet() -> None:
    """Suppresses that warning also for a library that may import DeepSpeed later."""
    # DeepSpeed gets this same logger and adds its handlers
    logging.getLogger("DeepSpeed").addFilter(_is_worth_telling)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")
