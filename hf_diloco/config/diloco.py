"""Settings of the outer loop: names, ranges, defaults, and the error message if one is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from hf_diloco.config import checks
from hf_diloco.config.base import (
    ENV_ISLAND,
    ENV_NUM_ISLANDS,
    ENV_RENDEZVOUS,
    PLAIN_PAYLOAD,
    Identities,
    OptionOrNone,
    OuterMomentum,
    OuterRate,
    OwnAddress,
    Payload,
    Seconds,
    SecretFile,
    StrictModel,
    describe,
    from_env,
    list_methods,
    list_payloads,
    tell_of_auto,
)
from hf_diloco.methods.outer import find_method
from hf_diloco.utils.urls import check_store_url, is_object_store, split_tcp_url


class DiLoCoConfig(StrictModel):
    """Settings of the outer loop; the defaults are those of DiLoCo's paper (arXiv 2311.08105), or of `method`'s.

    Raises:
        ConfigError: on an unknown key, a wrong type or a value out of range, naming each.
    """

    method: str = Field(
        default="diloco",
        description="what a round computes: one of these, or FILE.py:CLASS of your own; defaults below are diloco's, "
        "others have their own (docs/methods.md)",
        json_schema_extra=list_methods,
    )
    options: dict[str, OptionOrNone] = Field(default={}, description="settings that only this method has")
    sync_every: int = Field(
        default=500, ge=1, description="inner optimizer steps between synchronisations (the paper's H)"
    )
    outer_lr: OuterRate = Field(
        default=0.7,
        description="learning rate of the outer step; auto: by the number of islands",
        json_schema_extra=tell_of_auto,
    )
    outer_momentum: OuterMomentum = Field(
        default=0.9,
        description="momentum of the outer step; auto: by the number of islands and of rounds",
        json_schema_extra=tell_of_auto,
    )
    nesterov: bool = Field(default=True, description="Nesterov form of the outer momentum")
    payload: Payload = Field(
        default="fp32",
        description="number format of the pseudo-gradients on the wire; sums are always fp32. topk sends 64 values of "
        "4,096 in 2 bits, sign 1 bit per value. Or FILE.py:CLASS of your own",
        json_schema_extra=list_payloads,
    )
    error_feedback: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of what the payload left out that is added to the next pseudo-gradient. Default: 0.95 for "
        "topk and 1 for sign, which need it, else 0",
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
        default=[], description="regular expressions of parameter names, one per fragment, instead of fragment_order"
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
        f"s3://BUCKET/PREFIX, gs://…, az://…, file:///DIR or http://HOST:PORT/NAME [{ENV_RENDEZVOUS}]",
    )
    exchange: Literal["mesh", "bucket"] | None = Field(
        default=None,
        description="how pseudo-gradients travel: mesh (directly between islands) or bucket (through the object "
        "store, or through island 0); default: mesh over tcp://, else bucket",
    )
    max_islands: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="most islands that may ever take part, and number of shares of the data; default: num_islands. If "
        "more, islands come and go",
    )
    min_islands: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="fewest islands with which a round takes place. If fewer than num_islands, islands come and go. "
        "Default: more than half of them where islands come and go, else all",
    )
    grace: float = Field(
        default=30.0,
        ge=0,
        le=24 * 3600,
        description="where islands come and go: seconds that a round waits for late ones once min_islands are there",
    )
    snapshot_every: int = Field(
        default=20, ge=1, description="store: rounds between snapshots of the outer state, from which islands join"
    )
    keep_rounds: int = Field(
        default=2, ge=1, description="store: rounds of pseudo-gradients kept beyond the newest snapshot"
    )
    outlier_factor: float | None = Field(
        default=10.0,
        gt=1,
        description="store: leave out a pseudo-gradient whose norm is over this many times the usual; null: never",
    )
    key_file: SecretFile | None = Field(
        default=None,
        description="file with the run's key, which authenticates what islands tell each other, and encrypts what "
        "goes directly between them [HF_DILOCO_KEY, the key]",
    )
    encrypt: bool = Field(
        default=True,
        description="with a key: encrypt what goes directly between islands; false: only authenticate it, where a VPN "
        "encrypts",
    )
    encrypt_store: bool = Field(
        default=False, description="with a key, store: encrypt its contents, so that whoever keeps it cannot read them"
    )
    require_key: bool = Field(default=False, description="refuse to start without a key")
    identity_file: SecretFile | None = Field(
        default=None,
        description="file with this island's private key, which signs what it says; {island} in its name stands for "
        "the island's number [HF_DILOCO_IDENTITY, the key]",
    )
    identities: Identities = Field(
        default_factory=dict,
        description="with a key: public keys of each island, as 0: ed25519:…; nobody else takes part. A list of "
        "several, or `KEY until ROUND`, replaces a key (docs/security.md)",
    )
    bind_address: OwnAddress | None = Field(
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
        description="mesh: meet at a public address, where strangers can disturb, and without a key read and alter",
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
        try:
            defaults = find_method(str(values.get("method", "diloco"))).defaults
        except ValueError:  # `_check_method` reports it
            defaults = {}
        return {**defaults, **values}

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "eager_updates" in values:
            raise ValueError(
                f"eager_updates={values['eager_updates']}: this is a method of its own now; remove eager_updates, and "
                "set method=eager if it was true"
            )
        return values

    @field_validator("method")
    @classmethod
    def _check_method(cls, name: str) -> str:
        find_method(name)
        return name

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if is_object_store(url):
            return check_store_url(url)
        split_tcp_url(url)
        return url

    @model_validator(mode="after")
    def _check_exchange(self) -> DiLoCoConfig:
        self._check_options()
        checks.check_method(self)
        checks.check_feedback(self)
        checks.check_fragments(self)
        return self

    def _check_options(self) -> None:
        own = find_method(self.method).Options
        if self.options and not own.model_fields:
            raise ValueError(f"options={self.options}: method={self.method} has no settings of its own; remove them")
        try:
            own.model_validate(self.options)
        except ValidationError as error:
            raise ValueError(describe(error, own, "options.")) from None

    @model_validator(mode="after")
    def _check_islands(self) -> DiLoCoConfig:
        checks.check_islands(self)
        if self.num_shares > 1 and self.rendezvous is None:
            raise ValueError(
                f"{self.num_shares} islands need a place to meet: set rendezvous (or {ENV_RENDEZVOUS}) to "
                "tcp://HOST:PORT, where HOST is island 0's machine as the other islands see it, or to an object store"
            )
        checks.check_meeting(self)
        return self

    @property
    def feedback_decay(self) -> float:
        """Share of the residual that is added to the next pseudo-gradient."""
        return self.default_feedback if self.error_feedback is None else self.error_feedback

    @property
    def default_feedback(self) -> float:
        """`feedback_decay` if `error_feedback` is not set: above 0 for payloads that leave out most values."""
        if self.payload == PLAIN_PAYLOAD:
            return 0.0
        from hf_diloco.codecs import find_codec

        return find_codec(self.payload).feedback_decay

    @property
    def is_streaming(self) -> bool:
        """Whether a round covers only a part of the model, or ends some steps after it began."""
        return self.num_fragments > 1 or self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether rounds run behind the inner steps."""
        return self.delay > 0 or self.anticipates

    @property
    def anticipates(self) -> bool:
        """Whether an island applies its own part of a round at once; see `OuterMethod`."""
        return find_method(self.method).anticipates

    @property
    def delay(self) -> int:
        """Inner steps between the start of a background round and its end."""
        return find_method(self.method).delay(self)

    @property
    def goes_back_together(self) -> bool:
        """Whether all islands resume from one common round."""
        return self.num_islands > 1 and not self.meets_in_store

    @property
    def meets_in_store(self) -> bool:
        """Whether the islands meet in a store, where they may come and go."""
        return self.rendezvous is not None and (is_object_store(self.rendezvous) or bool(checks.wants_store(self)))

    @property
    def meets_at_island_0(self) -> bool:
        """Whether island 0 hosts that store, at tcp://HOST:PORT."""
        return self.rendezvous is not None and self.meets_in_store and not is_object_store(self.rendezvous)

    @property
    def encrypts_store(self) -> bool:
        """Whether the store's contents are encrypted for holders of the key."""
        return self.encrypt_store and self.meets_in_store

    @property
    def is_direct(self) -> bool:
        """Whether pseudo-gradients travel directly between the islands."""
        if self.exchange is not None:
            return self.exchange == "mesh"
        return self.rendezvous is None or not is_object_store(self.rendezvous)

    @property
    def num_shares(self) -> int:
        """Number of islands that may ever take part, and of shares of the data."""
        return self.max_islands or self.num_islands

    @property
    def quorum(self) -> int:
        """Fewest islands with which a round takes place, where islands come and go."""
        return self.min_islands or self.num_islands // 2 + 1

    def bytes_per_second(self, num_ranks: int) -> float | None:
        """Returns the bytes per second that each of an island's ranks may send; None: no limit."""
        return None if self.rate_limit is None else self.rate_limit * 1e6 / 8 / num_ranks

    @property
    def longest_wait(self) -> float:
        """Seconds that an island's ranks may have to wait while their leader waits for other islands."""
        return max(self.join_timeout, self.sync_timeout) + 2 * self.exchange_timeout
