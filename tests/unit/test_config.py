"""Every setting's type, range and error text."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import ResizedCropBlock, VisionRun
from hf_diloco.config.base import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS, describe
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.methods.outer import METHODS
from hf_diloco.methods.outer.overlap_local_sgd import OverlapOptions
from hf_diloco.optimizers import OptimizerBlock
from hf_diloco.utils.redact import redact_text
from hf_diloco.utils.settings import Block
from hf_diloco.utils.urls import split_tcp_url
from tests.processes import run

TCP = "tcp://10.0.0.1:29400"
STORE = "s3://bucket/run"
INTEGERS = ("sync_every", "num_islands", "island", "snapshot_every", "keep_rounds")
NUMBERS = ("outer_lr", "outer_momentum", "join_timeout", "sync_timeout", "exchange_timeout", "grace")


def test_defaults_are_the_papers() -> None:
    config = DiLoCoConfig()
    assert (config.sync_every, config.outer_lr, config.outer_momentum, config.nesterov) == (500, 0.7, 0.9, True)
    assert (config.payload, config.weight_by) == ("fp32", "uniform")
    assert (config.num_islands, config.island, config.rendezvous, config.bind_address) == (1, 0, None, None)
    assert (config.exchange, config.max_islands, config.min_islands, config.key_file) == (None, None, None, None)
    assert (config.grace, config.snapshot_every, config.keep_rounds, config.outlier_factor) == (30, 20, 2, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sync_every", 1),
        ("sync_every", "20"),  # as an override on the command line may come
        ("outer_lr", 10),
        ("outer_lr", "7e-1"),  # as YAML reads 7e-1: a string
        ("outer_momentum", 0),
        ("outer_momentum", 0.999),
        ("nesterov", False),
        ("payload", "bf16"),
        ("payload", "fp16"),
        ("weight_by", "examples"),
        ("weight_by", "tokens"),
        ("bind_address", "10.0.0.2"),
        ("rendezvous", TCP),
        ("rendezvous", STORE),
        ("rendezvous", "gs://bucket/a/b"),
        ("rendezvous", "az://container/run"),
        ("rendezvous", "file:///shared/my%20runs"),
        ("rendezvous", "memory://here"),
        ("exchange", None),
        ("exchange", "mesh"),
        ("max_islands", 1),
        ("min_islands", 1),
        ("grace", 0),
        ("snapshot_every", 1),
        ("keep_rounds", 1),
        ("outlier_factor", 1.5),
        ("outlier_factor", None),
        ("join_timeout", 0.5),
        ("sync_timeout", 604800),
    ],
)
def test_a_good_value_is_taken(name: str, value: Any) -> None:
    taken = getattr(DiLoCoConfig(**{name: value}), name)
    assert taken == (type(taken)(value) if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("sync_every", 0, "greater than or equal to 1"),
        ("sync_every", -5, "greater than or equal to 1"),
        ("sync_every", 5.5, "valid integer"),
        ("outer_lr", 0, "greater than 0"),
        ("outer_lr", -0.7, "greater than 0"),
        ("outer_lr", 11, "less than or equal to 10"),
        ("outer_momentum", -0.1, "greater than or equal to 0"),
        ("outer_momentum", 1, "less than 1"),
        ("nesterov", "maybe", "valid boolean"),
        ("nesterov", 2, "valid boolean"),
        ("payload", "fp8", "no such number format (did you mean fp4?); there are fp32, bf16, fp16, fp4, int4"),
        ("payload", None, "input should be a valid string"),
        ("weight_by", "batches", "'uniform', 'examples' or 'tokens'"),
        ("num_islands", 0, "greater than or equal to 1"),
        ("num_islands", 1025, "less than or equal to 1024"),
        ("island", -1, "greater than or equal to 0"),
        ("rendezvous", 29400, "valid string"),
        ("rendezvous", "http://10.0.0.1:29400", "http://HOST:PORT/NAME"),
        ("rendezvous", "udp://10.0.0.1:29400", "the scheme must be tcp"),
        ("rendezvous", "10.0.0.1:29400", "the scheme must be tcp"),
        ("rendezvous", "tcp://10.0.0.1", "port from 1 to 65535"),
        ("rendezvous", "tcp://10.0.0.1:0", "port from 1 to 65535"),
        ("rendezvous", "tcp://10.0.0.1:65536", "port from 1 to 65535"),
        ("rendezvous", "tcp://10.0.0.1:abc", "port from 1 to 65535"),
        ("rendezvous", "tcp://:29400", "expected tcp://HOST:PORT"),
        ("rendezvous", "tcp://.example:29400", "expected tcp://HOST:PORT"),
        ("rendezvous", f"tcp://{'a' * 64}.example:29400", "expected tcp://HOST:PORT"),
        ("rendezvous", "tcp://me@10.0.0.1:29400", "expected tcp://HOST:PORT"),
        ("rendezvous", "tcp://10.0.0.1:29400/path", "expected tcp://HOST:PORT"),
        ("rendezvous", "tcp://a b:29400", "expected tcp://HOST:PORT"),
        ("rendezvous", "tcp://[::1:29400", "expected tcp://HOST:PORT"),
        ("rendezvous", "s3:/bucket/run", "expected file:///DIR, s3://BUCKET/PREFIX"),
        ("rendezvous", "s3://", "expected file:///DIR, s3://BUCKET/PREFIX"),
        ("rendezvous", "s3://key:secret@bucket/run", "expected file:///DIR, s3://BUCKET/PREFIX"),
        ("rendezvous", "s3://bucket/../run", "expected file:///DIR, s3://BUCKET/PREFIX"),
        ("rendezvous", "gs://bucket/run?versions=true", "expected file:///DIR, s3://BUCKET/PREFIX"),
        ("rendezvous", "gcs://bucket/run", "the scheme must be tcp"),
        ("rendezvous", "file://runs/store", "a folder needs its full path, beginning with three slashes"),
        ("rendezvous", "file:runs/store", "a folder needs its full path"),
        ("rendezvous", "file:///", "a folder needs its full path"),
        ("rendezvous", "runs/store", "or an object store's: file, s3, gs, az"),
        ("exchange", "direct", "'mesh' or 'bucket'"),
        ("max_islands", 0, "greater than or equal to 1"),
        ("max_islands", 1025, "less than or equal to 1024"),
        ("min_islands", 0, "greater than or equal to 1"),
        ("min_islands", True, "should be a number"),
        ("grace", -1, "greater than or equal to 0"),
        ("grace", 86401, "less than or equal to 86400"),
        ("snapshot_every", 0, "greater than or equal to 1"),
        ("keep_rounds", 0, "greater than or equal to 1"),
        ("outlier_factor", 1, "greater than 1"),
        ("outlier_factor", "none", "valid number"),
        ("method", "DiLoCo", "no such method (did you mean diloco?)"),
        ("fragment_patterns", "mlp", "write fragment_patterns=[mlp]"),
        ("fragment_patterns", ".*a: b", "write fragment_patterns=['.*a: b']"),
        ("key_file", "", "'' is no file: give the name of a file, or leave it out"),
        ("identity_file", "", "'' is no file: give the name of a file, or leave it out"),
        ("key_file", 5, "expected the name of a file"),
        ("bind_address", 10, "valid string"),
        ("join_timeout", 0, "greater than 0"),
        ("sync_timeout", -1, "greater than 0"),
        ("exchange_timeout", 604801, "less than or equal to 604800"),
    ],
)
def test_a_wrong_value_is_refused_with_name_value_and_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCoConfig(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name}: "), text
    assert redact_text(str(value)) in text
    assert remedy in text
    assert "\n" not in text


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
@pytest.mark.parametrize("value", ["fifty", None, [1], {}, True, math.nan])
def test_what_is_not_a_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: .*{re.escape(str(value))}"):
        DiLoCoConfig(**{name: value})


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    """The blocks of settings that a type names, with those within them."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
        for field in annotation.model_fields.values():
            yield from blocks_in(field.annotation)
    for inner in get_args(annotation):
        yield from blocks_in(inner)


def numbers_of(block: type[Block]) -> Iterator[tuple[str, Any]]:
    """The settings of a block that take numbers and no booleans, each with true in the place of a number."""
    for name, setting in block.model_json_schema()["properties"].items():
        schemas = setting.get("anyOf", [setting])
        kinds = {schema.get("type") for schema in schemas}
        items = [item for schema in schemas for item in schema.get("prefixItems", [schema.get("items", {})])]
        if kinds & {"integer", "number"} and "boolean" not in kinds:
            yield name, True
        if any(item.get("type") in ("integer", "number") for item in items):
            yield name, [True, 1]


def test_no_block_of_settings_takes_true_for_a_number() -> None:
    options = [method.Options for method in METHODS.values()]
    blocks = {block: None for root in (RunFile, VisionRun, *options) for block in blocks_in(root)}
    settings = [(block, name, value) for block in blocks for name, value in numbers_of(block)]
    assert {(ResizedCropBlock, "ratio"), (OverlapOptions, "pull"), (OptimizerBlock, "freeze_step")} <= {
        (block, name) for block, name, _ in settings
    }
    for block, name, value in settings:
        with pytest.raises(ValidationError) as caught:
            block.model_validate({name: value})
        assert f"{name}: input should be a number, got {value}" in describe(caught.value, block), block


@pytest.mark.parametrize("name", NUMBERS)
def test_infinity_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: .*less than.*got inf"):
        DiLoCoConfig(**{name: math.inf})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("syncevery", "sync_every"),
        ("outer_moment", "outer_momentum"),
        ("num_island", "num_islands"),
        ("payloads", "payload"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting {key}=7 \(did you mean {meant}\?\)"):
        DiLoCoConfig(**{key: 7})


def test_a_key_like_no_other_is_refused_with_all_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown setting zzz='x' \(known: allow_public_address, bind_address, .*, weight_by\)"
    ):
        DiLoCoConfig(**{"zzz": "x"})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"outer_lr: .*got 0; island: .*got -3; unknown setting zz=1"):
        DiLoCoConfig(**{"outer_lr": 0, "zz": 1, "island": -3})


def test_an_island_beyond_the_last_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"island 2 does not exist in a run of 2.*from 0 to 1.*correct island or num_islands"
    ):
        DiLoCoConfig(island=2, num_islands=2, rendezvous=TCP)


def test_several_islands_need_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match=rf"2 islands need a place to meet: set rendezvous \(or {ENV_RENDEZVOUS}\)"):
        DiLoCoConfig(num_islands=2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_islands": 2}, "max_islands=2 is less than num_islands=3: raise it or leave it out"),
        ({"min_islands": 4}, "min_islands=4 is more than num_islands=3: no round would take place"),
        ({"island": 3}, "island 3 does not exist in a run of 3: islands are numbered from 0 to 2"),
        ({"island": 5, "max_islands": 5}, "island 5 does not exist in a run of 5: islands are numbered from 0 to 4"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        DiLoCoConfig(**{"num_islands": 3, "rendezvous": STORE, **settings})


@pytest.mark.parametrize(
    ("name", "value", "is_direct"), [("exchange", "bucket", False), ("max_islands", 5, True), ("min_islands", 2, True)]
)
def test_island_0_keeps_a_store_for_islands_that_come_and_go_over_tcp(name: str, value: Any, is_direct: bool) -> None:
    config = DiLoCoConfig(**{"num_islands": 3, "rendezvous": TCP, name: value})
    assert (config.meets_at_island_0, config.meets_in_store, config.is_direct) == (True, True, is_direct)
    in_store = DiLoCoConfig(**{"num_islands": 3, "rendezvous": STORE, name: value})
    assert (in_store.meets_at_island_0, in_store.meets_in_store, in_store.is_direct) == (False, True, False)


def test_a_key_goes_with_every_rendezvous() -> None:
    key = Path("my.key")
    meetings: list[dict[str, Any]] = [
        {"rendezvous": TCP},
        {"rendezvous": TCP, "min_islands": 2},
        {"rendezvous": STORE},
    ]
    for settings in meetings:
        config = DiLoCoConfig(**{"num_islands": 3, "key_file": key, **settings})
        assert (config.key_file, config.encrypt, config.require_key) == (key, True, False)


def test_eager_updates_need_islands_that_stay() -> None:
    with pytest.raises(ConfigError, match=r"islands that stay, unlike with min_islands=2: "):
        DiLoCoConfig(num_islands=3, rendezvous=TCP, method="eager", min_islands=2)


def test_the_old_name_of_eager_updates_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"^eager_updates=True: .* remove eager_updates, and set method=eager"):
        DiLoCoConfig(**{"eager_updates": True})


def test_sparseloco_stands_for_its_settings() -> None:
    one = DiLoCoConfig(method="sparseloco")
    assert (one.payload, one.feedback_decay, one.outer_lr, one.outer_momentum) == ("topk", 0.95, 1.0, 0.0)
    assert not one.nesterov


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_momentum": 0.9}, r"outer_momentum=0.9: error feedback stands for the momentum"),
        ({"nesterov": True}, r"nesterov=True: error feedback stands for the momentum"),
        ({"payload": "fp4"}, r"payload=fp4 without error_feedback: method=sparseloco is about"),
        ({"outer_lr": "auto"}, r"outer_lr=auto: nobody has published"),
    ],
)
def test_what_does_not_go_with_sparseloco_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiLoCoConfig(method="sparseloco", **settings)


def test_all_islands_of_a_run_over_tcp_may_be_called_the_least_and_the_most() -> None:
    config = DiLoCoConfig(num_islands=3, min_islands=3, max_islands=3, exchange="mesh", rendezvous=TCP)
    assert (config.quorum, config.num_shares, config.meets_in_store) == (3, 3, False)


def test_one_island_that_others_are_to_join_needs_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match="4 islands need a place to meet"):
        DiLoCoConfig(max_islands=4)


def test_an_island_that_joins_later() -> None:
    config = DiLoCoConfig(num_islands=2, max_islands=4, island=3, rendezvous=STORE)
    assert (config.meets_in_store, config.num_shares) == (True, 4)


@pytest.mark.parametrize(("num_islands", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (8, 5)])
def test_the_quorum_is_more_than_half(num_islands: int, quorum: int) -> None:
    assert DiLoCoConfig(num_islands=num_islands, rendezvous=STORE).quorum == quorum


def test_an_object_store_is_named_without_a_slash_at_its_end() -> None:
    assert DiLoCoConfig(rendezvous="s3://bucket/run/").rendezvous == STORE


def test_settings_and_keys_load_neither_torch_nor_the_stores_client() -> None:
    program = "import hf_diloco.config, hf_diloco.store.signing, sys; print({'torch', 'obstore'} & set(sys.modules))"
    assert run([sys.executable, "-c", program], timeout=60).output.split() == ["set()"]


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ISLAND, "1")
    monkeypatch.setenv(ENV_NUM_ISLANDS, "3")
    monkeypatch.setenv(ENV_RENDEZVOUS, TCP)
    config = DiLoCoConfig()
    assert (config.island, config.num_islands, config.rendezvous) == (1, 3, TCP)
    assert DiLoCoConfig(island=2).island == 2, "an argument beats the environment"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS):
        monkeypatch.setenv(name, "")
    assert DiLoCoConfig().num_islands == 1


@pytest.mark.parametrize(("variable", "name"), [(ENV_ISLAND, "island"), (ENV_NUM_ISLANDS, "num_islands")])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, name: str) -> None:
    monkeypatch.setenv(variable, "first")
    with pytest.raises(ConfigError, match=rf"{name}: .*got 'first' \(from {variable}\)"):
        DiLoCoConfig()


def test_a_wrong_rendezvous_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_RENDEZVOUS, "foo")
    with pytest.raises(ConfigError, match=rf"rendezvous 'foo': the scheme must be .* \(from {ENV_RENDEZVOUS}\)$"):
        DiLoCoConfig()


def test_a_value_that_was_passed_is_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ISLAND, "0")
    with pytest.raises(ConfigError) as caught:
        DiLoCoConfig(island="first")
    assert "HF_DILOCO" not in str(caught.value)


def test_it_is_frozen() -> None:
    config = DiLoCoConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.sync_every = 3  # type: ignore[misc]
    assert config.sync_every == 500


def test_a_config_error_is_a_value_error_of_the_package() -> None:
    assert issubclass(ConfigError, DiLoCoError)
    assert issubclass(ConfigError, ValueError)


def test_the_json_schema_tells_editors_types_ranges_and_meaning() -> None:
    schema = DiLoCoConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert set(properties) == set(DiLoCoConfig.model_fields)
    assert all(entry["description"] for entry in properties.values())
    assert properties["sync_every"] | {"title": ""} == {
        "default": 500,
        "description": "inner optimizer steps between synchronisations (the paper's H)",
        "minimum": 1,
        "title": "",
        "type": "integer",
    }
    number = {"exclusiveMinimum": 0, "maximum": 10, "type": "number"}
    assert properties["outer_lr"]["anyOf"] == [number, {"const": "auto"}]
    known, own = properties["payload"]["anyOf"]
    assert known["enum"] == ["fp32", "bf16", "fp16", "fp4", "int4", "int8", "sign", "topk"]
    assert re.search(own["pattern"], "my_codec.py:Codec")


def test_settings_survive_a_round_trip() -> None:
    config = DiLoCoConfig(num_islands=3, island=2, rendezvous=TCP, payload="bf16", outer_lr=0.4)
    assert DiLoCoConfig(**config.model_dump()) == config
    assert DiLoCoConfig.model_validate_json(config.model_dump_json()) == config


def test_a_rank_waits_longer_than_its_leader_may() -> None:
    config = DiLoCoConfig(join_timeout=10, sync_timeout=100, exchange_timeout=5)
    assert config.longest_wait > 100 + 5


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [(TCP, "10.0.0.1", 29400), ("tcp://node-0.cluster:1/", "node-0.cluster", 1), ("tcp://[::1]:65535", "::1", 65535)],
)
def test_a_rendezvous_is_split_into_host_and_port(url: str, host: str, port: int) -> None:
    assert split_tcp_url(url) == (host, port)
