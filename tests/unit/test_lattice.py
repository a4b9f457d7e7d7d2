"""Lattice codes: exact to half a step in range, found out beyond it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings, strategies as st

from hf_diloco.codecs import lattice
from hf_diloco.codecs.lattice import CHECK_VALUES, LatticeCodec
from hf_diloco.errors import ConfigError, PayloadError, UnsupportedError

SIZES = [0, 1, 7, CHECK_VALUES - 1, CHECK_VALUES, CHECK_VALUES + 1, 3 * CHECK_VALUES + 5, lattice.TILE_VALUES + 3]
Q = {1: 256, 2: 65536}


def encoded(codec: LatticeCodec, values: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, payload)
    return payload


def decoded(codec: LatticeCodec, payload: torch.Tensor, near: torch.Tensor) -> tuple[torch.Tensor, int]:
    out = torch.full_like(near, float("nan"))
    return out, codec.decode(payload, near, out)


@pytest.mark.parametrize("code_bytes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**32),
    step=st.floats(1e-6, 10.0),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
)
@settings(max_examples=40)
def test_what_is_in_range_comes_back_to_half_a_step(
    code_bytes: int, dtype: torch.dtype, size: int, seed: int, step: float, scale: float
) -> None:
    codec, generator = LatticeCodec(code_bytes, step), torch.Generator().manual_seed(seed)
    near = scale * torch.randn(size, generator=generator, dtype=torch.float64)
    apart = (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1) * 0.999 * codec.reach
    near, values = near.to(dtype), (near + apart).to(dtype)
    rounding = torch.finfo(dtype).eps * (values.double().abs() + step)
    values = torch.where((values.double() - near.double()).abs() < codec.reach, values, near)
    out, num_failed = decoded(codec, encoded(codec, values), near)
    assert num_failed == 0
    assert ((out.double() - values.double()).abs() <= step / 2 + rounding).all()


@pytest.mark.parametrize("code_bytes", [1, 2])
@given(
    size=st.sampled_from(SIZES[1:]),
    seed=st.integers(0, 2**32),
    times=st.floats(1.0, 1e4),
    direction=st.sampled_from([-1.0, 1.0]),
)
@settings(max_examples=40)
def test_one_value_out_of_range_is_found_and_its_block_alone_left_out(
    code_bytes: int, size: int, seed: int, times: float, direction: float
) -> None:
    codec, rng = LatticeCodec(code_bytes, 0.01), np.random.default_rng(seed)
    near = torch.tensor(rng.standard_normal(size))
    values = near.clone()
    where = int(rng.integers(size))
    values[where] += direction * times * 0.01 * (Q[code_bytes] + 1.001) / 2
    out, num_failed = decoded(codec, encoded(codec, values), near)
    assert num_failed == 1
    block = slice(where // CHECK_VALUES * CHECK_VALUES, (where // CHECK_VALUES + 1) * CHECK_VALUES)
    assert torch.equal(out[block], near[block])
    kept = torch.ones(size, dtype=torch.bool)
    kept[block] = False
    assert ((out - values)[kept].abs() <= 0.005 + 1e-12).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(-1e6, 1e6), st.floats(1e-3, 1e3))
def test_nothing_is_silently_wrong(values: list[float], near: float, step: float) -> None:
    """Whatever the distance: right to half a step, or reported."""
    codec, a = LatticeCodec(1, step), torch.tensor(values, dtype=torch.float64)
    out, num_failed = decoded(codec, encoded(codec, a), torch.full_like(a, near))
    if num_failed:
        assert float((a - near).abs().max()) >= codec.reach * (1 - 1e-12)
        assert (out == near).all()
    else:
        assert ((out - a).abs() <= step / 2 * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("code_bytes", [1, 2])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 0.125, -3.7, 1e-30, 12345.678])
def test_constants(code_bytes: int, value: float) -> None:
    codec, values = LatticeCodec(code_bytes, 2.0**-8), torch.full((CHECK_VALUES + 9,), value)
    out, num_failed = decoded(codec, encoded(codec, values), values)
    assert num_failed == 0
    assert len(out.unique()) == 1
    assert abs(float(out[0]) - value) <= 2.0**-9 + 1e-3 * (abs(value) > 1e4)
    again, _ = decoded(codec, encoded(codec, out), values)
    assert torch.equal(again, out), "a point of the lattice is itself"


@pytest.mark.parametrize("code_bytes", [1, 2])
def test_the_bytes_are_those_of_the_equation(code_bytes: int) -> None:
    """Enc(a) = round(a / ε) mod q, in NumPy; and the checksums of the integers, in front."""
    values, q = np.random.default_rng(0).standard_normal(CHECK_VALUES + 100) * 50, Q[code_bytes]
    values[:1000] = (np.arange(1000) + 0.5) * 0.01  # half steps: multiplying by 1 / ε would round some otherwise
    integers = np.rint(values / 0.01).astype(np.int64)
    codes = (integers % q).astype({1: "<u1", 2: "<u2"}[code_bytes])
    seed = int(np.float64(0.01).view(np.uint64))
    halves = integers[:CHECK_VALUES], integers[CHECK_VALUES:]
    sums = [xxhash.xxh3_64_intdigest(block.tobytes(), seed) for block in halves]
    expected = np.array(sums, "<u8").tobytes() + codes.tobytes()
    payload = encoded(LatticeCodec(code_bytes, 0.01), torch.tensor(values))
    assert payload.numpy().tobytes() == expected
    near = values + np.random.default_rng(1).uniform(-0.4, 0.4, len(values)) * q * 0.01
    out, _ = decoded(LatticeCodec(code_bytes, 0.01), payload, torch.tensor(near))
    formula = 0.01 * (codes + q * np.rint((near / 0.01 - codes) / q))
    np.testing.assert_allclose(out.numpy(), formula, rtol=1e-15, atol=1e-12)


def test_the_format_stays() -> None:
    """Nodes of several versions of this package understand each other, or this digest is changed on purpose."""
    values = (torch.arange(10_000, dtype=torch.float64) - 5000) * 0.37
    payloads = [encoded(LatticeCodec(code_bytes, 0.25), values).numpy().tobytes() for code_bytes in (1, 2)]
    assert (
        hashlib.sha256(b"".join(payloads)).hexdigest()
        == "d109d8011e03262b7209a908119b7a8b93665fb3cc16e814f1da3d73074f2edc"
    )


def test_overhead_is_small_and_codes_are_one_or_two_bytes() -> None:
    for code_bytes in (1, 2):
        num_bytes = LatticeCodec(code_bytes, 0.1).num_bytes(1_000_000)
        assert code_bytes * 1_000_000 < num_bytes < code_bytes * 1_000_000 * 1.002


def test_a_damaged_code_is_found() -> None:
    codec, values = LatticeCodec(1, 0.01), torch.randn(3 * CHECK_VALUES)
    payload = encoded(codec, values)
    payload[-CHECK_VALUES] ^= 1
    out, num_failed = decoded(codec, payload, values)
    assert num_failed == 1
    assert torch.equal(out[-CHECK_VALUES:], values[-CHECK_VALUES:])


def test_another_step_at_the_other_end_is_found() -> None:
    """The integers are the right ones there, as the models are near: it is the step that tells."""
    values = torch.randn(2 * CHECK_VALUES)
    _, num_failed = decoded(LatticeCodec(2, 0.02), encoded(LatticeCodec(2, 0.01), values), values)
    assert num_failed == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, lattice.TILE_VALUES + 1])
def test_what_is_not_finite_is_refused(bad: float, where: int) -> None:
    values = torch.zeros(lattice.TILE_VALUES + 5)
    values[where] = bad
    with pytest.raises(UnsupportedError, match=f"value {where:,} is {bad}.*diverged"):
        encoded(LatticeCodec(2, 0.01), values)


def test_a_receiver_that_is_not_finite_takes_nothing() -> None:
    codec, near = LatticeCodec(1, 0.01), torch.tensor([1.0, float("nan"), float("inf"), 1e38])
    out, num_failed = decoded(codec, encoded(codec, torch.ones(4)), near)
    assert num_failed == 1
    torch.testing.assert_close(out, near, rtol=0, atol=0, equal_nan=True)


def test_a_value_that_is_too_large_for_the_step_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"value 1 is -1e\+30.*lattice_step=0.01.*larger"):
        encoded(LatticeCodec(2, 0.01), torch.tensor([0.0, -1e30]))


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf"), 5e-324])
def test_a_step_must_be_a_positive_number(step: float) -> None:
    with pytest.raises(ConfigError, match="lattice_step"):
        LatticeCodec(1, step)


def test_codes_have_one_or_two_bytes() -> None:
    with pytest.raises(ConfigError, match="code_bytes=3"):
        LatticeCodec(3, 0.1)


def test_a_payload_of_another_size_is_refused() -> None:
    codec, values = LatticeCodec(1, 0.1), torch.zeros(10)
    with pytest.raises(PayloadError, match="same quantization"):
        codec.decode(encoded(LatticeCodec(2, 0.1), values), values, torch.empty(10))
    with pytest.raises(PayloadError, match="18"):
        codec.encode(values, torch.empty(5, dtype=torch.uint8))
