"""Classes that settings name: those in a folder of the package, and FILE.py:CLASS in a user's own files.

Only this machine's own settings can name such a file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hf_diloco.utils.text import nearest

T = TypeVar("T")

_NAME = re.compile(r"(?P<file>.+\.py):(?P<class>[A-Za-z_]\w*)")
FORM = "FILE.py:CLASS"


def classes_in(package: str, base: type[T]) -> list[type[T]]:
    """Finds the concrete subclasses of `base` that define a `name` in the files of a package, all of which are
    imported, in the order of the files' names: a new file there needs no entry anywhere else."""
    found = []
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{file.name}")
        own = [kind for kind in vars(module).values() if getattr(kind, "__module__", None) == module.__name__]
        classes = [kind for kind in own if isinstance(kind, type) and issubclass(kind, base) and "name" in vars(kind)]
        found += [kind for kind in classes if not inspect.isabstract(kind)]
    return found


def is_own(name: str) -> bool:
    """Whether a setting names a class in a user's file."""
    return _NAME.fullmatch(name) is not None


def load_own(name: str, base: type[T]) -> type[T]:
    """Loads the subclass of `base` that a setting names as FILE.py:CLASS; FILE is relative to the working directory.

    Raises `ValueError`, with the remedy, if there is no such file or class, it is of another kind or abstract, or the
    file cannot be run.
    """
    path, wanted = _split(name)
    found = getattr(_run(path), wanted, None)
    home = f"{base.__module__}.{base.__name__}"
    if found is None:
        raise ValueError(f"{name!r}: {path} has no class {wanted}: correct the name behind the colon")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{name!r}: {wanted} is no {base.__name__}: let it inherit from {home}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ValueError(f"{name!r}: {wanted} lacks {missing}: write what {home} says of it")
    return found


def find_class(what: str, name: str, base: type[T], known: Mapping[str, type[T]], needed: Iterable[str]) -> type[T]:
    """Returns the class that a setting names: one of `known`, or one in a user's file, see `load_own`.

    Args:
        what: what such a class is called, for messages.
        needed: attributes with a text that a user's class must have; its `name` must not be one of `known`.

    Raises `ValueError`, with the remedy, if there is no such class, or it cannot be loaded.
    """
    if name in known:
        return known[name]
    if not is_own(name):
        raise no_such(what, name, known)
    found = load_own(name, base)
    for attribute in needed:
        if not isinstance(getattr(found, attribute, None), str):
            raise ValueError(
                f"{name!r}: {found.__name__} says no {attribute}: write {attribute} = '...' in the class itself; in "
                "__init__ it is too late"
            )
    if (own := getattr(found, "name", "")) in known:
        raise ValueError(f"{name!r}: {own} is a {what} of hf_diloco: give the class another name")
    return found


def no_such(what: str, name: str, known: Collection[str]) -> ValueError:
    """Returns the error for a setting that names nothing: neither one of `known` nor a class in a user's file."""
    names = ", ".join(known)
    return ValueError(f"{name!r}: no such {what}{nearest(name, known)}; there are {names}, or {FORM} of your own")


def identify(name: str) -> str:
    """Returns what all participants must agree on: the name of our class, or a class and its file's digest."""
    if not is_own(name):
        return name
    path, wanted = _split(name)
    return f"{wanted} of a file with SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _split(name: str) -> tuple[Path, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r}: expected {FORM}")
    path = Path(match["file"]).expanduser()
    if not path.is_file():
        raise ValueError(f"{name!r}: there is no file {path} (seen from {Path.cwd()}): correct the path")
    return path.resolve(), match["class"]


@cache
def _run(path: Path) -> Any:
    module_name = f"hf_diloco_own_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pydantic look names up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}; correct the file") from error
    return module
