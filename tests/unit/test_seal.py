"""Sealed records: what an island of the run wrote opens in its place, and nothing else does anywhere."""

from __future__ import annotations

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hf_diloco.errors import ConfigError, ForgedError
from hf_diloco.store.credentials import load_key
from hf_diloco.store.signing import ENV_KEY, MAX_RECORD_BYTES, Seal

KEY, RUN, PATH = b"0123456789abcdef", "run-1", "rounds/7/offers/2-1-0.json"
BODY: dict[str, Any] = {
    "weight": 1.5,
    "island": 2,
    "objects": [{"path": "payloads/7/2-1/rank-0.bin", "digests": ["ab"]}],
}
NUM_MUTATIONS = 10_000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(params=[KEY, b""], ids=["key", "no key"])
def seal(request: pytest.FixtureRequest) -> Seal:
    return Seal(request.param, RUN)


def of_another_run(seal: Seal, run: str) -> Seal:
    """One with the same key."""
    return Seal(KEY if seal.has_key else b"", run)


def refused(seal: Seal, data: bytes, path: str = PATH) -> str:
    with pytest.raises(ForgedError) as caught:
        seal.open(path, data)
    return str(caught.value)


@given(body=st.dictionaries(st.text(), json_values, max_size=5), path=st.text(max_size=50).filter(str.isascii))
@settings(max_examples=100)
def test_bodies_come_back(body: dict[str, Any], path: str) -> None:
    seal = Seal(KEY, RUN)
    assert seal.open(path, seal.wrap(path, body)) == body


def test_half_a_surrogate_pair_comes_back() -> None:
    seal = Seal(KEY, RUN)
    assert seal.open(PATH, seal.wrap(PATH, {"\ud800": "\udfff"})) == {"\ud800": "\udfff"}


def test_equal_bodies_are_equal_bytes(seal: Seal) -> None:
    assert seal.wrap(PATH, {"a": 1, "b": 2}) == seal.wrap(PATH, {"b": 2, "a": 1})


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": float("inf")}, {"x": "y" * MAX_RECORD_BYTES}])
def test_what_cannot_be_sealed(seal: Seal, body: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        seal.wrap(PATH, body)


# Forgeries


def test_other_places_runs_and_keys(seal: Seal) -> None:
    data = seal.wrap(PATH, BODY)
    assert seal.open(PATH, data) == BODY
    for path in ("rounds/6/offers/2-1-0.json", "rounds/7/offers/3-1-0.json", PATH + "/", "", PATH[:-1]):
        assert path in refused(seal, data, path)
    refused(Seal(KEY if not seal.has_key else b"", RUN), data)
    refused(Seal(b"another key of 26 bytes...", RUN), data)
    refused(of_another_run(seal, "run-2"), data)
    refused(of_another_run(seal, ""), data)


def test_parts_do_not_run_into_each_other(seal: Seal) -> None:
    for run, path in (("run-1r", "ounds/7"), ("run-", "1rounds/7"), ("", "run-1rounds/7")):
        refused(of_another_run(seal, run), seal.wrap("rounds/7", BODY), path)


def test_changed_bodies(seal: Seal) -> None:
    record = json.loads(seal.wrap(PATH, BODY))
    for old, new in (("1.5", "2.5"), ('"island"', '"insula"'), ("}", " }"), ("{", '{"extra":1,')):
        assert "not sealed with this run's key" in refused(
            seal, json.dumps({**record, "body": record["body"].replace(old, new, 1)}).encode()
        )
    for mac in ("", "0" * 64, record["mac"][:-1], record["mac"].upper(), record["mac"] + "0", "é" * 64, "\ud800" * 64):
        refused(seal, json.dumps({**record, "mac": mac}).encode())
    for other in (
        {**record, "more": 1},
        {"body": record["body"]},
        {"mac": record["mac"]},
        {**record, "mac": None},
        {**record, "body": BODY},
    ):
        refused(seal, json.dumps(other).encode())


def test_cut_short(seal: Seal) -> None:
    data = seal.wrap(PATH, BODY)
    for length in range(len(data)):
        refused(seal, data[:length])
    refused(seal, data + b"x")
    refused(seal, data + data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 1000,
        b"null",
        b"[]",
        b'"text"',
        b"NaN",
        b"[" * 100_000,
        b'{"body":' * 50_000,
        b'{"body": "{}", "mac": ' + b"9" * 100_000 + b"}",
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf{}",
        b'{"body": "\\ud800", "mac": "' + b"0" * 64 + b'"}',
        pickle.dumps({"body": "{}", "mac": "0" * 64}),
        pickle.dumps(BODY, protocol=0),
        b"cos\nsystem\n(S'exit 1'\ntR.",
    ],
    ids=range(15),
)
def test_what_never_was_a_record(seal: Seal, data: bytes) -> None:
    refused(seal, data)


def test_too_large(seal: Seal) -> None:
    assert "4194304" in refused(seal, seal.wrap(PATH, BODY) + b" " * MAX_RECORD_BYTES)


@pytest.mark.parametrize("text", ["[1]", "null", "{", "NaN", '{"x": NaN}', '{"x": -Infinity}', "[" * 100_000])
def test_sealed_text_that_is_no_object(seal: Seal, text: str) -> None:
    """Only a holder of the key can write these: they are refused all the same, with the same error."""
    refused(seal, json.dumps({"body": text, "mac": seal.mac(PATH, text.encode())}).encode())


def mutation(generator: random.Random, good: bytes) -> bytes:
    """A record with a few changes of a kind that a bad disk, a bug, or somebody with other intentions might make."""
    data = bytearray(good)
    for _ in range(generator.randint(1, 4)):
        where = generator.randrange(len(data) + 1)
        match generator.randrange(7):
            case 0:
                data[where : where + 1] = bytes([generator.randrange(256)])
            case 1 if where < len(data):
                data[where] ^= 1 << generator.randrange(8)
            case 2:
                del data[where : where + generator.randint(1, 20)]
            case 3:
                data[where:where] = generator.randbytes(generator.randint(1, 20))
            case 4:
                data[where:where] = data[: generator.randint(0, 40)]
            case 5:
                del data[where:]
            case _:
                data[where:where] = generator.choice(
                    [b"{", b"}", b'"', b"\\", b"\\u0000", b"NaN", b"[[[[", b"1e999", b"\0"]
                )
    return bytes(data)


def test_ten_thousand_mutations(seal: Seal) -> None:
    generator = random.Random(20240611)
    good = seal.wrap(PATH, BODY)
    record = json.loads(good)
    num_refused = 0
    for number in range(NUM_MUTATIONS):
        if number % 2:
            data = mutation(generator, good)
        else:  # well-formed outside, another text or code inside
            part = "mac" if number % 4 else "body"
            inner = mutation(generator, record[part].encode()).decode("latin1")
            data = json.dumps({**record, part: inner}).encode()
        if _same(data, record):  # such as a blank more between the two
            continue
        refused(seal, data)
        num_refused += 1
    assert num_refused > 0.95 * NUM_MUTATIONS


def _same(data: bytes, record: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(data) == record)
    except (ValueError, RecursionError):
        return False


@given(data=st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=600)
def test_arbitrary_bytes(data: bytes) -> None:
    refused(Seal(KEY, RUN), data)


@given(body=st.text(), mac=st.text() | st.text("0123456789abcdef", min_size=64, max_size=64))
@settings(max_examples=600)
def test_arbitrary_parts(body: str, mac: str) -> None:
    refused(Seal(KEY, RUN), json.dumps({"body": body, "mac": mac}).encode())


# The key


def test_the_key_is_not_shown() -> None:
    seal = Seal(KEY, RUN)
    assert KEY.decode() not in repr(seal) + str(seal)
    assert KEY.hex() not in repr(seal)
    assert "with a key" in repr(seal)
    assert "without a key" in repr(Seal(b"", RUN))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            copied(seal)
    with pytest.raises(ForgedError) as caught:
        seal.open(PATH, b"{}")
    assert KEY.decode() not in str(caught.value)


def test_key_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_KEY, "the environment's is not asked for")
    path = tmp_path / "key"
    path.write_bytes(b"  " + KEY + b" \r\na comment\n")
    path.chmod(0o600)
    assert load_key(path) == KEY
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=r"key_file=.*key: other users .* can read it: chmod 600") as caught:
            load_key(path)
        assert KEY.decode() not in str(caught.value)


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_KEY, raising=False)
    assert load_key(None) == b""
    monkeypatch.setenv(ENV_KEY, " ")
    assert load_key(None) == b""
    monkeypatch.setenv(ENV_KEY, f"{KEY.decode()}\n")
    assert load_key(None) == KEY


def test_keys_that_do_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_KEY, "too-short")
    with pytest.raises(
        ConfigError, match=rf"{ENV_KEY}: the run's key has 9 bytes, fewer than 16: .*keys make --shared"
    ) as caught:
        load_key(None)
    assert "too-short" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"key_file=.*absent: No such file"):
        load_key(tmp_path / "absent")
    with pytest.raises(ConfigError, match="key_file"):
        load_key(tmp_path)
    path = tmp_path / "key"
    path.touch(mode=0o600)
    for content, number in ((b"", "0"), (b"\n" + KEY, "0"), (b"short\n", "5"), (b" " * 40, "0")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"key_file=.*key has {number} bytes"):
            load_key(path)
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        load_key(path)
    with pytest.raises(ConfigError, match="fewer than 16"):
        Seal(b"short", RUN)
