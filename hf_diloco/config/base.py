"""Common parts of settings: types of values, the environment, and error messages."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, ValidationError, WrapValidator

from hf_diloco.errors import ConfigError
from hf_diloco.methods.outer import METHODS
from hf_diloco.methods.outer.base import is_auto
from hf_diloco.utils.public_keys import parse_public
from hf_diloco.utils.redact import redact
from hf_diloco.utils.settings import Block
from hf_diloco.utils.text import nearest
from hf_diloco.utils.urls import check_specific

ENV_ISLAND = "HF_DILOCO_ISLAND"
ENV_NUM_ISLANDS = "HF_DILOCO_NUM_ISLANDS"
ENV_RENDEZVOUS = "HF_DILOCO_RENDEZVOUS"
ENV_FOLDER = "HF_DILOCO_FOLDER"  # set by `hf-diloco launch -- COMMAND`, which looks there for an island's progress
_ENVIRONMENT = {
    "island": ENV_ISLAND,
    "num_islands": ENV_NUM_ISLANDS,
    "node": ENV_ISLAND,
    "num_nodes": ENV_NUM_ISLANDS,
    "rendezvous": ENV_RENDEZVOUS,
}

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

Count = Annotated[int, Field(ge=1)]

C = TypeVar("C", bound="StrictModel")


def from_env(name: str, default: Any) -> Callable[[], Any]:
    """Returns a default factory that reads the environment; an empty variable counts as unset."""
    return lambda: os.environ.get(name) or default


def is_given(config: BaseModel, name: str) -> bool:
    """Whether a setting was passed or is in the environment, rather than a default."""
    return name in config.model_fields_set or bool(os.environ.get(_ENVIRONMENT.get(name, "")))


def need_number(config: BaseModel, count: int, unit: str = "island") -> None:
    """Raises `ConfigError` if there are several islands or nodes, and this one has no number."""
    if count > 1 and not is_given(config, unit):
        raise ConfigError(
            f"there are {count} {unit}s, and this one has no number: set {ENV_ISLAND} (or {unit}=) on each to another "
            f"number from 0 to {count - 1}"
        )


class StrictModel(Block):
    """A block of settings that reports every problem as a `ConfigError`."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self))) from None


def choose_config(kind: type[C], config: object, settings: Mapping[str, Any], example: str) -> C:
    """Returns the settings that a caller passed as one object, or by name.

    Args:
        kind: class of the settings.
        config: the object, or None.
        settings: those by name.
        example: a correct call, for the error message.

    Raises:
        ConfigError: both are given, or a setting is wrong.
        TypeError: the object is of another class.
    """
    if config is None:
        return kind(**settings)
    if not isinstance(config, kind):
        raise TypeError(f"settings are given by name or as a {kind.__name__}, got {config!r}: write {example}")
    if settings:
        raise ConfigError(f"give either a {kind.__name__} or settings by name, not both ({', '.join(settings)})")
    return config


def describe(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Describes each problem: the setting, the error, the value, and for unknown keys the nearest known one."""
    return "; ".join(describe_problem(problem, model, prefix) for problem in error.errors())


def describe_problem(problem: Any, model: type[BaseModel], prefix: str = "") -> str:
    """Describes one of `ValidationError.errors()`."""
    name = prefix + ".".join(str(part) for part in problem["loc"])
    shown = redact(problem["input"], name)
    if problem["type"] == "extra_forbidden":
        hint = _suggestion(str(problem["loc"][-1]), block_at(model, problem["loc"]))
        return f"unknown setting {name}={shown!r}{hint}"
    if problem["type"] in ("model_type", "dict_type"):
        block = block_at(model, (*problem["loc"], None))
        known = f" ({', '.join(sorted(block.model_fields))})" if block else ""
        remedy = "; give it some, or leave it out" if shown is None else ""
        return f"{name}: expected a block of `key: value` lines{known}, got {shown!r}{remedy}"
    message = "expected the name of a file" if problem["type"] == "path_type" else problem["msg"]
    message = message.removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "missing":  # the input is the whole enclosing block
        return f"{name}: {message}"
    if problem["type"] == "value_error":  # the validator's message names the value
        return f"{name}: {message}{origin(name, problem['input'])}" if name else message
    is_one = problem["type"] == "list_type" and isinstance(shown, str)
    remedy = f": write {name}={_one_in_list(shown)}" if is_one else ""
    return f"{name}: {message}, got {shown!r}{origin(name, problem['input'])}{remedy}"


def _one_in_list(text: str) -> str:
    """Formats a list of one text in YAML: most regular expressions need quotes."""
    import yaml

    return yaml.safe_dump([text], default_flow_style=True, width=math.inf, allow_unicode=True).strip()


def origin(name: str, value: Any) -> str:
    """Names the environment variable that a value came from; "" for other values."""
    variable = _ENVIRONMENT.get(name.rpartition(".")[2])
    return f" (from {variable})" if variable and value and os.environ.get(variable) == value else ""


def block_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """Returns the (nested) block in which an unknown key was found; None if its keys are not known."""
    block: type[BaseModel] | None = model
    for part in location[:-1]:
        block = _blocks_in(block).get(str(part)) if block else None
    return block


def _blocks_in(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Returns the fields that are blocks themselves, including optional ones."""
    found = {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _suggestion(key: str, block: type[BaseModel] | None) -> str:
    """Suggests what an unknown key may mean: a key of this block, or of one inside it."""
    if block is None:
        return ""
    inside = [f"{name}.{key}" for name, inner in _blocks_in(block).items() if key in inner.model_fields]
    meant = f" (did you mean {' or '.join(inside)}?)" if inside else nearest(key, block.model_fields)
    return meant or f" (known: {', '.join(sorted(block.model_fields))})"


# Types of values, besides plain ones


def _or_auto(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if is_auto(value) else check(value)


def tell_of_auto(schema: dict[str, Any]) -> None:
    """Adds "auto" to the JSON schema of a number."""
    number = {name: schema.pop(name) for name in [*schema] if name == "type" or "imum" in name.lower()}
    schema["anyOf"] = [number, {"const": "auto"}]


def _as_lists(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {island: [keys] if isinstance(keys, str) else keys for island, keys in value.items()}


def _tell_of_one(schema: dict[str, Any]) -> None:
    """Adds a single string to the JSON schema of a list of strings."""
    several = {name: schema.pop(name) for name in [*schema]}
    schema["anyOf"] = [{"type": "string"}, several]


def _check_named(value: Any) -> Any:
    if value == "":  # as a path it would be the working directory
        raise ValueError("'' is no file: give the name of a file, or leave it out")
    return value


def _check_key(text: str) -> str:
    parse_public(text)
    return text.strip()


OwnAddress = Annotated[str, AfterValidator(check_specific)]
"""An address of this machine that others can reach."""

SecretFile = Annotated[Path, BeforeValidator(_check_named)]
"""A file that only its owner may read."""

PublicKey = Annotated[str, AfterValidator(_check_key)]
Identities = Annotated[
    dict[
        Annotated[int, Field(ge=0)],
        Annotated[list[PublicKey], Field(min_length=1, json_schema_extra=_tell_of_one)],
    ],
    BeforeValidator(_as_lists),
]
"""Public keys by island or node."""


def _as_plain(value: Any, check: Callable[[Any], Any]) -> Any:
    try:
        return check(value)
    except ValidationError:  # it has one error for each type of the union
        raise ValueError(f"expected a number, text, true or false, got {value!r}") from None


Option = Annotated[bool | int | float | str, WrapValidator(_as_plain)]
OptionOrNone = Annotated[bool | int | float | str | None, WrapValidator(_as_plain)]
"""Values of `options`."""

# Plain numbers once `OuterMethod.choose` has replaced "auto", before anything is computed with them.
OuterRate = Annotated[float, Field(gt=0, le=10), WrapValidator(_or_auto), PlainSerializer(lambda value: value)]
OuterMomentum = Annotated[float, Field(ge=0, lt=1), WrapValidator(_or_auto), PlainSerializer(lambda value: value)]


def tell_of_own(schema: dict[str, Any]) -> None:
    """Adds FILE.py:CLASS to the JSON schema of a name."""
    known = {name: schema.pop(name) for name in [*schema] if name in ("type", "enum")}
    schema["anyOf"] = [known, {"type": "string", "pattern": r"\.py:\w+$"}]


def list_methods(schema: dict[str, Any]) -> None:
    """Puts the names of all outer methods into a JSON schema."""
    schema["enum"] = list(METHODS)
    tell_of_own(schema)


PLAIN_PAYLOAD = "fp32"
"""The lossless payload. Settings with it are read without torch, which codecs import."""


def list_payloads(schema: dict[str, Any]) -> None:
    """Puts the names of all codecs into a JSON schema."""
    from hf_diloco.codecs import BUILT_IN

    schema["enum"] = list(BUILT_IN)
    tell_of_own(schema)


def _check_payload(name: str) -> str:
    if name != PLAIN_PAYLOAD:
        from hf_diloco.codecs import find_codec

        find_codec(name)
    return name


Payload = Annotated[str, AfterValidator(_check_payload)]
"""The name of a codec, or of a user's own class."""
