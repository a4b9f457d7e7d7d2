"""Common parts of all blocks of settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import one_line


class Block(BaseModel):
    """A block of settings: refuses unknown keys, and true and false, which Python takes for 1 and 0, as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        if _is_boolean_for_number(value, cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"input should be a number, got {value}")
        return value

    def changed(self) -> list[str]:
        """The settings with other values than their defaults; `run.json` has all, and may stand for the run file."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()]


@contextmanager
def refusing(what: str, errors: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
    """Converts these errors of a library that rejects settings to a `ConfigError` with the reason."""
    try:
        yield
    except errors as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def compile_pattern(setting: str, pattern: str) -> re.Pattern[str]:
    """Compiles a regular expression from a setting; raises `ConfigError` if it is invalid."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{setting}: {pattern!r} is no regular expression ({error}); correct it") from None


def _is_boolean_for_number(value: Any, annotation: Any) -> bool:
    """Whether a value, or an item of it, is true or false although its type allows numbers and no booleans."""
    if isinstance(value, list | tuple):
        return any(_is_boolean_for_number(item, kind) for item in value for kind in get_args(annotation))
    kinds = alternatives(annotation)
    return isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds)


def alternatives(annotation: Any) -> list[Any]:
    """Returns the types of a union, without their `Annotated` metadata."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return alternatives(arguments[0])
    if origin in (Union, UnionType):
        return [kind for argument in arguments for kind in alternatives(argument)]
    return [annotation]
