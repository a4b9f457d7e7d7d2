"""Settings of the outer loop: names, ranges, defaults, and the text of the error when one is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)

from hf_diloco import config_checks as checks
from hf_diloco.addresses import check_specific
from hf_diloco.errors import ConfigError, RendezvousError
from hf_diloco.methods.outer import METHODS
from hf_diloco.redact import redact
from hf_diloco.store_url import STORE_SCHEMES, check_store_url, is_object_store
from hf_diloco.text import nearest

ENV_ISLAND = "HF_DILOCO_ISLAND"
ENV_NUM_ISLANDS = "HF_DILOCO_NUM_ISLANDS"
ENV_RENDEZVOUS = "HF_DILOCO_RENDEZVOUS"
_ENVIRONMENT = {"island": ENV_ISLAND, "num_islands": ENV_NUM_ISLANDS, "rendezvous": ENV_RENDEZVOUS}

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


AUTO = "auto"


def _or_auto(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, str) and value == AUTO else check(value)


def _tell_of_auto(schema: dict[str, Any]) -> None:
    number = {name: schema.pop(name) for name in [*schema] if name == "type" or "imum" in name.lower()}
    schema["anyOf"] = [number, {"const": AUTO}]


# Numbers once `OuterMethod.choose` has put one in the place of "auto", before anything is computed with them.
OuterRate = Annotated[float, Field(gt=0, le=10), WrapValidator(_or_auto), PlainSerializer(lambda value: value)]
OuterMomentum = Annotated[float, Field(ge=0, lt=1), WrapValidator(_or_auto), PlainSerializer(lambda value: value)]

C = TypeVar("C", bound="StrictModel")


def from_env(name: str, default: Any) -> Callable[[], Any]:
    """A default that the environment may set; an empty variable counts as unset."""
    return lambda: os.environ.get(name) or default


def is_given(config: BaseModel, name: str) -> bool:
    """Whether a setting was passed or is in the environment, and is not a default."""
    return name in config.model_fields_set or bool(os.environ.get(_ENVIRONMENT.get(name, "")))


def need_number(config: BaseModel, num_islands: int, unit: str = "island") -> None:
    """Raises `ConfigError` if one of several islands or nodes was not told which one it is."""
    if num_islands > 1 and not is_given(config, "island"):
        raise ConfigError(
            f"there are {num_islands} {unit}s, and this one has no number: set {ENV_ISLAND} (or island=) on each to "
            f"another number from 0 to {num_islands - 1}"
        )


class StrictModel(BaseModel):
    """A settings block: unknown keys are errors, and every problem is reported as a `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self))) from None


class DiLoCoConfig(StrictModel):
    """Settings of the outer loop; the defaults are those of DiLoCo's paper (arXiv 2311.08105), or of `method`'s.

    Raises:
        ConfigError: on an unknown key, a wrong type or a value out of range, naming each.
    """

    method: str = Field(
        default="diloco",
        description="what a round computes; defaults below are diloco's, others have their own (docs/methods.md)",
        json_schema_extra={"enum": list(METHODS)},
    )
    options: dict[str, bool | int | float | str | None] = Field(
        default={}, description="settings that only this method has"
    )
    sync_every: int = Field(
        default=500, ge=1, description="inner optimizer steps between synchronisations (the paper's H)"
    )
    outer_lr: OuterRate = Field(
        default=0.7,
        description="learning rate of the outer step; auto: by the number of islands",
        json_schema_extra=_tell_of_auto,
    )
    outer_momentum: OuterMomentum = Field(
        default=0.9,
        description="momentum of the outer step; auto: by the number of islands and of rounds",
        json_schema_extra=_tell_of_auto,
    )
    nesterov: bool = Field(default=True, description="Nesterov form of the outer momentum")
    payload: Literal["fp32", "bf16", "fp16", "int8", "int4", "fp4", "topk", "sign"] = Field(
        default="fp32",
        description="number format of the pseudo-gradients on the wire; sums are always fp32. topk sends 64 values of "
        "4,096 in 2 bits, sign 1 bit a value",
    )
    error_feedback: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of what the payload left out that is added to the next pseudo-gradient; 0: none. Default: "
        "topk 0.95, sign 1, which need it, else 0",
    )
    weight_by: Literal["uniform", "examples", "tokens"] = Field(
        default="uniform", description="how islands' pseudo-gradients are weighted in the average"
    )
    num_fragments: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="parts of the model that synchronise one at a time, each every sync_every steps",
    )
    fragment_order: Literal["strided", "sequential"] = Field(
        default="strided",
        description="which transformer blocks a fragment takes: strided (block l to fragment l mod num_fragments) or "
        "sequential (successive ones)",
    )
    fragment_patterns: list[str] = Field(
        default=[],
        description="regular expressions of parameter names, one a fragment, instead of fragment_order",
    )
    fragment_sync_delay: int = Field(
        default=0,
        ge=0,
        description="inner steps that go on while a round is under way in the background; 0: training waits for it",
    )
    fragment_update_alpha: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="with fragment_sync_delay: share of its own weights that an island keeps when a round ends",
    )
    eager_updates: bool = Field(
        default=False,
        description="a round takes this island's own pseudo-gradient at once and the others' one round later, so that "
        "the exchange passes behind a whole round's inner steps",
    )
    eval_weights: Literal["outer", "inner"] = Field(
        default="outer",
        description="which weights the Trainer evaluates between rounds: outer (those of the last round, equal on all "
        "islands) or inner (this island's own)",
    )
    num_islands: int = Field(
        default_factory=from_env(ENV_NUM_ISLANDS, 1),
        ge=1,
        le=1024,
        description=f"islands in the run [{ENV_NUM_ISLANDS}]",
    )
    island: int = Field(
        default_factory=from_env(ENV_ISLAND, 0), ge=0, description=f"this island's number, from 0 [{ENV_ISLAND}]"
    )
    rendezvous: str | None = Field(
        default_factory=from_env(ENV_RENDEZVOUS, None),
        description="where the islands meet: tcp://HOST:PORT, where HOST is island 0; or an object store, "
        f"s3://BUCKET/PREFIX, gs://…, az://… or file:///DIR [{ENV_RENDEZVOUS}]",
    )
    exchange: Literal["mesh", "bucket"] | None = Field(
        default=None,
        description="how pseudo-gradients travel: mesh (directly between islands) or bucket (through the object "
        "store); default: bucket where islands meet in a store, else mesh",
    )
    max_islands: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="bucket: islands that may ever take part, and shares of the data; default: num_islands",
    )
    min_islands: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="bucket: islands without which no round takes place; default: more than half of num_islands",
    )
    grace: float = Field(
        default=30.0,
        ge=0,
        le=24 * 3600,
        description="bucket: seconds that a round waits for late islands once min_islands are there",
    )
    snapshot_every: int = Field(
        default=20, ge=1, description="bucket: rounds between snapshots of the outer state, from which islands join"
    )
    keep_rounds: int = Field(
        default=2, ge=1, description="bucket: rounds of pseudo-gradients kept beyond the newest snapshot"
    )
    outlier_factor: float | None = Field(
        default=10.0,
        gt=1,
        description="bucket: leave out a pseudo-gradient whose norm is so many times the usual; null: never",
    )
    key_file: Path | None = Field(
        default=None,
        description="bucket: file with the run's key, which authenticates what islands write [HF_DILOCO_KEY, the key]",
    )
    bind_address: str | None = Field(
        default=None,
        description="local address for traffic between islands; default: the one that reaches the rendezvous",
    )
    connections: int = Field(
        default=1,
        ge=1,
        le=64,
        description="mesh: connections between two islands; several carry more over a link with long round trips or "
        "losses",
    )
    rate_limit: float | None = Field(
        default=None,
        gt=0,
        description="Mbit/s that an island may send, so that other traffic has room on the link; null: no limit",
    )
    allow_public_address: bool = Field(
        default=False,
        description="mesh: meet at a public address, though traffic is neither encrypted nor authenticated",
    )
    join_timeout: Seconds = Field(default=600.0, description="seconds to wait for all islands at the start")
    sync_timeout: Seconds = Field(
        default=1800.0, description="seconds to wait for a late island before a synchronisation"
    )
    exchange_timeout: Seconds = Field(
        default=600.0, description="seconds that one exchange of pseudo-gradients may take"
    )

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_of_method(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        method = METHODS.get(str(values.get("method", "diloco")))
        return {**(method.defaults if method else {}), **values}

    @field_validator("method")
    @classmethod
    def _check_method(cls, name: str) -> str:
        if name not in METHODS:
            raise ValueError(f"{name!r}: no such method{nearest(name, METHODS)}; there are {', '.join(METHODS)}")
        return name

    @field_validator(
        "sync_every",
        "outer_lr",
        "outer_momentum",
        "error_feedback",
        "num_fragments",
        "fragment_sync_delay",
        "fragment_update_alpha",
        "num_islands",
        "island",
        "max_islands",
        "min_islands",
        "grace",
        "snapshot_every",
        "keep_rounds",
        "outlier_factor",
        "connections",
        "rate_limit",
        "join_timeout",
        "sync_timeout",
        "exchange_timeout",
        mode="before",
    )
    @classmethod
    def _refuse_booleans(cls, value: Any) -> Any:
        if isinstance(value, bool):  # which Python, and so pydantic, takes for 0 and 1
            raise ValueError(f"input should be a number, got {value}")
        return value

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if is_object_store(url):
            try:
                return check_store_url(url)
            except RendezvousError as error:
                raise ValueError(str(error)) from None
        split_tcp_url(url)
        return url

    @field_validator("bind_address")
    @classmethod
    def _check_bind_address(cls, address: str | None) -> str | None:
        return address and check_specific(address)

    @model_validator(mode="after")
    def _check_exchange(self) -> DiLoCoConfig:
        self._check_options()
        checks.check_method(self)
        checks.check_feedback(self)
        checks.check_fragments(self)
        return self

    def _check_options(self) -> None:
        own = METHODS[self.method].Options
        if self.options and not own.model_fields:
            raise ValueError(f"options={self.options}: method={self.method} has no settings of its own; remove them")
        try:
            own.model_validate(self.options)
        except ValidationError as error:
            raise ValueError(describe(error, own, "options.")) from None

    @model_validator(mode="after")
    def _check_islands(self) -> DiLoCoConfig:
        checks.check_islands(self.island, self.num_islands, self.max_islands, self.min_islands)
        if self.num_shares > 1 and self.rendezvous is None:
            raise ValueError(
                f"{self.num_shares} islands need a place to meet: set rendezvous (or {ENV_RENDEZVOUS}) to "
                "tcp://HOST:PORT, where HOST is island 0's machine as the other islands see it, or to an object store"
            )
        checks.check_meeting(self)
        return self

    @property
    def feedback_decay(self) -> float:
        """Share of what the payload left out that is added to the next pseudo-gradient."""
        return checks.FEEDBACK_DECAYS.get(self.payload, 0.0) if self.error_feedback is None else self.error_feedback

    @property
    def is_streaming(self) -> bool:
        """Whether rounds are of a part of the model, or end some steps after they began."""
        return self.num_fragments > 1 or self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether rounds are carried out behind the inner steps."""
        return self.delay > 0 or self.eager_updates

    @property
    def delay(self) -> int:
        """Inner steps between the beginning of a round that is carried out behind them and its end."""
        return METHODS[self.method].delay(self)

    @property
    def meets_in_store(self) -> bool:
        """Whether the islands meet in an object store, where they may come and go."""
        return self.rendezvous is not None and is_object_store(self.rendezvous)

    @property
    def is_direct(self) -> bool:
        """Whether pseudo-gradients travel directly between the islands."""
        return self.exchange == "mesh" or not self.meets_in_store

    @property
    def num_shares(self) -> int:
        """Islands that may ever take part: as many shares the data is cut into."""
        return self.max_islands or self.num_islands

    @property
    def quorum(self) -> int:
        """Islands without which no round takes place."""
        return self.min_islands or self.num_islands // 2 + 1

    def bytes_per_second(self, num_ranks: int) -> float | None:
        """What each of an island's ranks may send."""
        return None if self.rate_limit is None else self.rate_limit * 1e6 / 8 / num_ranks

    @property
    def longest_wait(self) -> float:
        """Seconds that an island's ranks may have to wait while their leader waits for other islands."""
        return max(self.join_timeout, self.sync_timeout) + 2 * self.exchange_timeout


def split_tcp_url(url: str) -> tuple[str, int]:
    """Returns host and port of a `tcp://HOST:PORT` address.

    Raises:
        ValueError: when it is anything else, or HOST stands for every interface of a machine.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # an unclosed bracket, a port that is no number or too large
        parts, port = None, None
    if parts and parts.scheme != "tcp":
        raise ValueError(
            f"rendezvous {url!r}: the scheme must be tcp, as in tcp://10.0.0.1:29400, or an object store's: "
            f"{', '.join(STORE_SCHEMES)}"
        )
    if not parts or not parts.hostname or not port or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"rendezvous {url!r}: expected tcp://HOST:PORT with a port from 1 to 65535")
    return check_specific(parts.hostname), port


def choose_config(kind: type[C], config: object, settings: Mapping[str, Any], example: str) -> C:
    """The settings that a caller gave as one object, or by name.

    Args:
        kind: of the settings.
        config: the object, or None.
        settings: those by name.
        example: a right call, for the error message.

    Raises:
        ConfigError: both are given, or a setting is wrong.
        TypeError: the object is of another kind.
    """
    if config is None:
        return kind(**settings)
    if not isinstance(config, kind):
        raise TypeError(f"settings are given by name or as a {kind.__name__}, got {config!r}: write {example}")
    if settings:
        raise ConfigError(f"give either a {kind.__name__} or settings by name, not both ({', '.join(settings)})")
    return config


def describe(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """One line a problem: the setting, what is wrong, the value, and for unknown keys the nearest known one."""
    return "; ".join(_describe_one(problem, model, prefix) for problem in error.errors())


def _describe_one(problem: Any, model: type[BaseModel], prefix: str) -> str:
    name = prefix + ".".join(str(part) for part in problem["loc"])
    shown = redact(problem["input"], name)
    if problem["type"] == "extra_forbidden":
        hint = _suggestion(str(problem["loc"][-1]), _fields_at(model, problem["loc"]))
        return f"unknown setting {name}={shown!r}{hint}"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":  # the validator's own text names the value
        return f"{name}: {message}" if name else message
    return f"{name}: {message}, got {shown!r}{_origin(name, problem['input'])}"


def _origin(name: str, value: Any) -> str:
    """Where a value came from that nobody passed."""
    variable = _ENVIRONMENT.get(name.rpartition(".")[2])
    return f" (from {variable})" if variable and os.environ.get(variable) == value else ""


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """The known keys of the (nested) block that an unknown key was found in."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _suggestion(key: str, known: list[str]) -> str:
    return nearest(key, known) or (f" (known: {', '.join(sorted(known))})" if known else "")
