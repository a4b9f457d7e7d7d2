"""Settings of decentralised training: the method, its graph, and the rendezvous of the nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hf_diloco.config.base import (
    ENV_ISLAND,
    ENV_NUM_ISLANDS,
    ENV_RENDEZVOUS,
    PLAIN_PAYLOAD,
    Identities,
    Option,
    OwnAddress,
    Seconds,
    SecretFile,
    StrictModel,
    from_env,
    tell_of_own,
)
from hf_diloco.methods.outer.base import Buffers
from hf_diloco.utils.settings import Block
from hf_diloco.utils.text import nearest
from hf_diloco.utils.urls import is_object_store, split_tcp_url

_OF_TRAINING = {"weight_decay": "weight_decay", "lr": "learning_rate"}
"""Arguments of every method that the Trainer sets."""


def _list_graphs(schema: dict[str, Any]) -> None:
    from hf_diloco.methods.topology import GRAPHS, SUFFIXES

    schema["enum"] = list(GRAPHS)
    tell_of_own(schema)
    schema["anyOf"].append({"type": "string", "pattern": rf"({'|'.join(map(re.escape, SUFFIXES))})$"})


def _list_payloads(schema: dict[str, Any]) -> None:
    schema["enum"] = _payloads()


def _payloads() -> list[str]:
    """Built-in codecs that nodes can use for differences to replicas: those that need no error feedback."""
    from hf_diloco.codecs import BUILT_IN, CODECS

    return [name for name in BUILT_IN if not CODECS[name].needs_feedback]


class SlowMoSettings(Block):
    """SlowMo on top of the method (arXiv 1910.00643); the defaults are the paper's for gossip with SGD."""

    sync_every: int = Field(default=48, ge=1, description="steps of the method between outer steps (τ)")
    outer_lr: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="slow learning rate, of the outer step (α)"
    )
    outer_momentum: float = Field(default=0.7, ge=0, lt=1, description="slow momentum, of the outer step (β)")
    average: bool = Field(
        default=True,
        description="begin outer steps with an exact average over all nodes; false: each node takes its own "
        "parameters, and sends nothing",
    )
    inner_buffers: Buffers = Field(
        default="zero",
        description="what becomes of the method's momentum after an outer step: zero, keep, or average over the nodes",
    )

    @model_validator(mode="after")
    def _check_buffers(self) -> SlowMoSettings:
        if self.inner_buffers == "average" and not self.average:
            raise ValueError(
                "inner_buffers=average needs the average over all nodes, which average=false leaves out: set "
                "inner_buffers to zero or keep, or average to true"
            )
        return self

    @property
    def record(self) -> dict[str, Any]:
        """The settings that the record of a run shares with the outer loop of islands."""
        return {"outer_method": "slowmo", **self.model_dump(include={"sync_every", "outer_lr", "outer_momentum"})}


class GossipConfig(StrictModel):
    """Settings of decentralised training. A node is an island: one process, or several ranks with DDP inside.

    Raises:
        ConfigError: on an unknown key, a wrong type or a value out of range, naming each.
    """

    method: str = Field(
        default="decentlam",
        description="what nodes compute at each step: the name of a method (docs/vision.md, Methods), or "
        "FILE.py:CLASS of your own",
    )
    topology: str = Field(
        default="ring",
        description="who averages with whom: one of these, a file of weights (see hf-diloco topology), or "
        "FILE.py:CLASS of your own",
        json_schema_extra=_list_graphs,
    )
    topology_seed: int = Field(default=0, description="seed of random matchings")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="β; default: the method's (0.9)")
    nesterov: bool | None = Field(default=None, description="Nesterov form of the momentum, where the method has one")
    lars: float = Field(
        default=0.0, ge=0, le=1, description="layer-wise scaling for large batches (LARS's η, 0.001); 0: none"
    )
    options: dict[str, Option] = Field(
        default={},
        description="the method's own settings, such as combine_first, omega, average_momentum, local_steps",
    )
    slowmo: SlowMoSettings | None = Field(
        default=None,
        description="slow momentum over the method (SlowMo): an outer step every sync_every steps; {}: with its "
        "defaults; null: none",
    )
    payload: str = Field(
        default=PLAIN_PAYLOAD,
        description="number format in which vectors travel; below fp32, of their differences to replicas that the "
        "neighbours keep",
        json_schema_extra=_list_payloads,
    )
    buffers: Literal["average", "local"] = Field(
        default="average",
        description="statistics of batch normalisation in the model that is evaluated and saved: the mean over the "
        "nodes, or each node's own",
    )
    eval_weights: Literal["average", "local"] = Field(
        default="average", description="which weights the Trainer evaluates: the mean over the nodes, or this node's"
    )
    num_nodes: int = Field(
        default_factory=from_env(ENV_NUM_ISLANDS, 1),
        ge=1,
        le=1024,
        description=f"nodes of the graph [{ENV_NUM_ISLANDS}]",
    )
    node: int = Field(
        default_factory=from_env(ENV_ISLAND, 0), ge=0, description=f"this node's number, from 0 [{ENV_ISLAND}]"
    )
    rendezvous: str | None = Field(
        default_factory=from_env(ENV_RENDEZVOUS, None),
        description=f"where the nodes meet: tcp://HOST:PORT, where HOST is node 0 [{ENV_RENDEZVOUS}]",
    )
    bind_address: OwnAddress | None = Field(
        default=None,
        description="local address for traffic between nodes; default: the one that reaches the rendezvous",
    )
    rate_limit: float | None = Field(default=None, gt=0, description="Mbit/s that a node may send; null: no limit")
    allow_public_address: bool = Field(
        default=False,
        description="meet at a public address, where strangers can disturb, and without a key read and alter",
    )
    key_file: SecretFile | None = Field(
        default=None,
        description="file with the run's key, which authenticates and encrypts what nodes tell each other "
        "[HF_DILOCO_KEY, the key]",
    )
    encrypt: bool = Field(
        default=True, description="with a key: encrypt; false: only authenticate, where a VPN encrypts"
    )
    require_key: bool = Field(default=False, description="refuse to start without a key")
    identity_file: SecretFile | None = Field(
        default=None,
        description="file with this node's private key, which signs what it says; {node} in its name stands for the "
        "node's number [HF_DILOCO_IDENTITY, the key]",
    )
    identities: Identities = Field(
        default_factory=dict,
        description="with a key: public keys of each node, as 0: ed25519:…; nobody else takes part",
    )
    join_timeout: Seconds = Field(default=600.0, description="seconds to wait for all nodes at the start")
    exchange_timeout: Seconds = Field(
        default=120.0, description="seconds that a step waits for a neighbour before it goes on without it"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_names_of_islands(cls, values: Any) -> Any:
        for old, new in (("num_islands", "num_nodes"), ("island", "node")):
            if isinstance(values, Mapping) and old in values:
                raise ValueError(
                    f"{old}={values[old]}: nodes are not called islands any more; say {new}={values[old]}"
                )
        return values

    @field_validator("payload")
    @classmethod
    def _check_payload(cls, name: str) -> str:
        if name == PLAIN_PAYLOAD or name in (known := _payloads()):
            return name
        from hf_diloco.codecs import BUILT_IN

        if name in BUILT_IN:
            raise ValueError(
                f"{name} leaves out most of a difference, so that nodes would drift apart without a consensus "
                f"step below 1, which is not offered: give one of {', '.join(known)}"
            )
        raise ValueError(f"{name!r}: no such number format{nearest(name, known)}; there are {', '.join(known)}")

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Option]) -> dict[str, Option]:
        for name, place in _OF_TRAINING.items():
            if name in options:
                raise ValueError(f"{name} has no effect here: set it in TrainingArguments (training.{place})")
        if own := next((name for name in options if name in cls.model_fields), None):
            raise ValueError(f"{own} is a setting of its own: write {own}: {options[own]} beside options")
        return options

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, url: str | None) -> str | None:
        if url is not None and is_object_store(url):
            raise ValueError(
                f"rendezvous {url!r}: nodes exchange after every step, for which an object store is too slow; give "
                "tcp://HOST:PORT, where HOST is node 0's machine"
            )
        if url is not None:
            split_tcp_url(url)
        return url

    @model_validator(mode="after")
    def _check_nodes(self) -> GossipConfig:
        if self.node >= self.num_nodes:
            raise ValueError(f"node={self.node}: nodes are numbered from 0 to {self.num_nodes - 1} (num_nodes - 1)")
        self._check_meeting()
        return self

    def _check_meeting(self) -> None:
        if self.num_nodes > 1 and self.rendezvous is None:
            raise ValueError(
                f"{self.num_nodes} nodes need a place to meet: set rendezvous (or {ENV_RENDEZVOUS}) to "
                "tcp://HOST:PORT, where HOST is node 0's machine as the others see it"
            )

    @property
    def method_settings(self) -> dict[str, Any]:
        """Arguments of the optimizer that were set, apart from learning rate and weight decay."""
        given = {"momentum": self.momentum, "nesterov": self.nesterov, "lars": self.lars or None}
        return {**{name: value for name, value in given.items() if value is not None}, **self.options}

    @property
    def encrypts_store(self) -> bool:
        """Always False: nodes write nothing to an object store."""
        return False

    @property
    def longest_wait(self) -> float:
        """Seconds that a node's ranks may have to wait while their leader waits for other nodes."""
        return self.join_timeout + (self.num_nodes + 4) * self.exchange_timeout  # see `MeshNeighbours`

    def bytes_per_second(self) -> float | None:
        """Returns the limit on what a node sends; None: no limit."""
        return None if self.rate_limit is None else self.rate_limit * 1e6 / 8
