"""Libraries that only some runs need: the extra of this package that installs each, and one error without it."""

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
"""Modules, and the extra that brings each."""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found; imports nothing."""
    try:
        return find_spec(module) is not None
    except ValueError:  # it was put into sys.modules without a specification
        return True


def installed_version(package: str) -> str | None:
    """Of a distribution; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def need(what: str, *modules: str) -> None:
    """Refuses what cannot work without a library that is missing.

    Args:
        what: the setting or option that needs it, as a user wrote it.
        modules: of `EXTRAS`.

    Raises:
        ConfigError: naming the missing modules and the command that installs them.
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        extras = ",".join(sorted({EXTRAS[module] for module in missing}))
        raise ConfigError(f'{what} needs {" and ".join(missing)}: pip install "hf-diloco[{extras}]"')


def import_deepspeed_quietly() -> None:
    """Imports DeepSpeed without its warning, on stdout, that this machine has no accelerator: `doctor` says that.

    All its other warnings stay, also later.
    """
    keep_deepspeed_quiet()
    import deepspeed  # noqa: F401


def keep_deepspeed_quiet() -> None:
    """The same for a library that may import DeepSpeed later."""
    logging.getLogger("DeepSpeed").addFilter(_is_worth_telling)  # DeepSpeed gets this logger, and adds to it


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")
