"""What the wire does to a value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hf_diloco.codecs import CODECS

FP16_MAX = 65504.0
any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
vectors = st.lists(any_float32, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32))


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    codec = CODECS[name]
    code = codec.encode(values, torch.empty(values.numel(), dtype=codec.wire_dtype))
    assert code.dtype == codec.wire_dtype
    assert code.nbytes == codec.num_bytes(values.numel())
    return codec.decode(code, torch.full((values.numel(),), 7.0))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(vectors)
def test_fp32_is_exact(values: torch.Tensor) -> None:
    assert same_bits(round_trip("fp32", values), values)


def test_fp32_copies_nothing() -> None:
    values = torch.ones(5)
    codec = CODECS["fp32"]
    code = codec.encode(values, torch.empty(5))
    assert code.data_ptr() == values.data_ptr()
    assert codec.decode(code, torch.empty(5)).data_ptr() == values.data_ptr()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_16_bit_codec_fills_the_buffers_it_is_given(name: str) -> None:
    codec = CODECS[name]
    buffer, out = torch.empty(9, dtype=codec.wire_dtype), torch.empty(9)
    values = torch.arange(5.0)
    code = codec.encode(values, buffer)
    assert code.data_ptr() == buffer.data_ptr()
    assert code.numel() == 5
    decoded = codec.decode(code, out)
    assert decoded.data_ptr() == out.data_ptr()
    assert decoded.tolist() == values.tolist() == [0, 1, 2, 3, 4]


@given(vectors)
def test_bf16_keeps_8_bits_and_the_range(values: torch.Tensor) -> None:
    decoded = round_trip("bf16", values)
    assert torch.equal(decoded.isnan(), values.isnan())
    normal = values.isfinite() & (values.abs() >= torch.finfo(torch.float32).tiny) & decoded.isfinite()
    assert bool(((decoded - values).abs() <= values.abs() * 2**-8)[normal].all())
    tiny = values.abs() < torch.finfo(torch.float32).tiny
    assert bool(((decoded - values).abs() <= 2**-134)[tiny].all()), "half of bf16's smallest step"
    beyond = values.isfinite() & decoded.isinf()
    assert bool((values.abs() > torch.finfo(torch.bfloat16).max)[beyond].all())
    assert torch.equal(decoded[values.isinf()], values[values.isinf()])


@given(vectors)
def test_fp16_keeps_11_bits_and_clamps(values: torch.Tensor) -> None:
    decoded = round_trip("fp16", values)
    assert torch.equal(decoded.isnan(), values.isnan())
    assert not decoded.isinf().any()
    large = values.abs() >= FP16_MAX
    assert torch.equal(decoded[large], values[large].sign() * FP16_MAX)
    known = ~values.isnan() & ~large
    bound = (values.abs() * 2**-11).clamp(min=2**-25)  # below 2**-14 fp16 is subnormal: steps of 2**-24
    assert bool(((decoded - values).abs() <= bound)[known].all())


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_zeros_keep_their_sign(name: str) -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert same_bits(round_trip(name, zeros), zeros)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@given(values=vectors)
def test_what_was_decoded_once_stays_as_it_is(name: str, values: torch.Tensor) -> None:
    """So an average of equal values that travels twice is not rounded twice."""
    once = round_trip(name, values).clone()
    assert torch.equal(round_trip(name, once).nan_to_num(nan=1.5), once.nan_to_num(nan=1.5))


@pytest.mark.parametrize(("name", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_on_the_wire(name: str, size: int) -> None:
    assert CODECS[name].num_bytes(1000) == size * 1000
    assert CODECS[name].is_exact == (size == 4)
    assert CODECS[name].name == name


def test_values_are_left_alone() -> None:
    values = torch.tensor([1e9, -1e9, 1.00001])
    before = values.clone()
    for name in CODECS:
        round_trip(name, values)
    assert same_bits(values, before)
