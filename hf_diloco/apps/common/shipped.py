"""The run files that come with the package, and the files they name: `configs/` of the repository and the wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import nearest

_INSIDE = Path(__file__).parents[2] / "configs"
SHIPPED = _INSIDE if _INSIDE.is_dir() else _INSIDE.parents[1] / "configs"
"""The folder `configs`: inside the installed package, or next to it in a checkout."""


def shipped_files() -> list[str]:
    """Returns all files that come with the package, as paths relative to `configs`."""
    found = (path for path in SHIPPED.rglob("*") if path.suffix in (".yaml", ".json"))
    return sorted(path.relative_to(SHIPPED).as_posix() for path in found)


def shipped_names() -> list[str]:
    """Returns the names of the shipped run files, such as `quickstart` and `recipes/diloco`; top-level ones first."""
    run_files = [file for file in shipped_files() if file.endswith(".yaml") and not file.startswith("accelerate/")]
    return sorted((file.removesuffix(".yaml") for file in run_files), key=lambda name: (name.count("/"), name))


def find_run_file(given: str | Path) -> Path:
    """Returns the run file that a user names: a path, or the name of one that comes with the package.

    An existing file takes precedence over a name. Returns the path of any other missing file unchanged. Raises
    `ConfigError` if `given` is a script, a program or a setting; or neither a file nor a known name.
    """
    path, names = Path(given), shipped_names()
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a script, not a run file: `hf-diloco launch --islands 2 -- python {path}` starts islands of it"
        )
    if path.exists():
        return path
    if path.as_posix() in names:
        return SHIPPED / f"{path.as_posix()}.yaml"
    if "=" in path.parts[0]:
        raise ConfigError(f"{given} is a setting, not a run file: the run file comes first, as `quickstart {given}`")
    meant = path.as_posix().removesuffix(".yaml").removeprefix("configs/")
    if meant in names:
        raise ConfigError(
            f"{path}: no such file; {meant} (without .yaml) names the one that comes with hf-diloco, and "
            f"`hf-diloco configs copy {meant}` copies it to configs/"
        )
    if path.as_posix() == path.name and shutil.which(path.name):
        raise ConfigError(
            f"{path} is a program, not a run file: put `--` before a command of your own, as in `hf-diloco launch "
            f"--islands 2 -- {path} ...`"
        )
    if not path.suffix:
        raise ConfigError(
            f"{path}: neither a file nor the name of a run file that comes with hf-diloco{nearest(meant, names)}; "
            "`hf-diloco configs ls` lists them"
        )
    return path
