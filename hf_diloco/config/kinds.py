"""Kinds of values that settings have, besides plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WrapValidator

from hf_diloco.methods.outer import METHODS
from hf_diloco.utils.own_files import is_own
from hf_diloco.utils.public_keys import parse_public
from hf_diloco.utils.urls import check_specific

AUTO = "auto"


def _or_auto(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, str) and value == AUTO else check(value)


def tell_of_auto(schema: dict[str, Any]) -> None:
    """Adds "auto" to the JSON schema of a number."""
    number = {name: schema.pop(name) for name in [*schema] if name == "type" or "imum" in name.lower()}
    schema["anyOf"] = [number, {"const": AUTO}]


def _as_lists(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {island: [keys] if isinstance(keys, str) else keys for island, keys in value.items()}


def _check_key(text: str) -> str:
    parse_public(text)
    return text.strip()


OwnAddress = Annotated[str, AfterValidator(check_specific)]
"""An address of this machine that others can reach."""

PublicKey = Annotated[str, AfterValidator(_check_key)]
Identities = Annotated[
    dict[Annotated[int, Field(ge=0)], Annotated[list[PublicKey], Field(min_length=1)]], BeforeValidator(_as_lists)
]
"""Public keys by island, or by node."""

# Numbers once `OuterMethod.choose` has put one in the place of "auto", before anything is computed with them.
OuterRate = Annotated[float, Field(gt=0, le=10), WrapValidator(_or_auto), PlainSerializer(lambda value: value)]
OuterMomentum = Annotated[float, Field(ge=0, lt=1), WrapValidator(_or_auto), PlainSerializer(lambda value: value)]


def _or_own(value: Any, check: Callable[[Any], Any]) -> Any:
    if not (isinstance(value, str) and is_own(value)):
        return check(value)
    from hf_diloco.codecs import find_codec

    find_codec(value)
    return value


def tell_of_own(schema: dict[str, Any]) -> None:
    """Adds FILE.py:CLASS to the JSON schema of a name."""
    known = {name: schema.pop(name) for name in [*schema] if name in ("type", "enum")}
    schema["anyOf"] = [known, {"type": "string", "pattern": r"\.py:\w+$"}]


def list_methods(schema: dict[str, Any]) -> None:
    """Puts the names of all outer methods into a JSON schema."""
    schema["enum"] = list(METHODS)
    tell_of_own(schema)


Payload = Annotated[
    Literal["fp32", "bf16", "fp16", "int8", "int4", "fp4", "topk", "sign"],
    WrapValidator(_or_own),
    PlainSerializer(lambda value: value),
]
