"""What the wire does to a value."""

from __future__ import annotations

import runpy
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_diloco import codecs
from hf_diloco.codecs import CODECS, Codec, base
from hf_diloco.codecs.compiled import Loops, compiled
from hf_diloco.codecs.fp4 import Fp4Codec
from hf_diloco.codecs.int4 import Int4Codec
from hf_diloco.codecs.int8 import Int8Codec
from hf_diloco.codecs.sign import SignCodec
from hf_diloco.codecs.topk import TopKCodec
from hf_diloco.errors import UnsupportedError

FP16_MAX = 65504.0
FLT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny  # the smallest normal number
CASTS = ["fp32", "bf16", "fp16"]
SCALED = ["int8", "int4", "fp4"]  # close to every value
BLOCKS = [*SCALED, "topk", "sign"]
ALL = [*CASTS, *BLOCKS]
BLOCK_VALUES = {"fp32": 1, "bf16": 1, "fp16": 1, "int8": 256, "int4": 128, "fp4": 128, "topk": 4096, "sign": 4096}
BLOCK_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 260, "int4": 66, "fp4": 66, "topk": 116, "sign": 516}

any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
vectors = st.lists(any_float32, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32))
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, TINY / 2, TINY, -TINY, 1.0, -1.0, 3e-30, 2e35, FLT_MAX, -FLT_MAX]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


@st.composite
def long_vectors(draw: st.DrawFn, with_not_finite: bool = False) -> torch.Tensor:
    """Sizes around borders of blocks, distributions of many kinds and scales, and some special values in between."""
    near = st.sampled_from([0, 128, 256, 512, 4096, 8192]).flatmap(lambda n: st.integers(max(0, n - 2), n + 2))
    size = draw(near | st.integers(0, 9000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["gaussian", "heavy", "sparse", "constant", "zero", "grid", "bits"]))
    if kind == "bits":  # any exponent, subnormal numbers too
        bits = torch.randint(0, 0x7F80_0000, (size,), generator=generator, dtype=torch.int32)
        values = bits.view(torch.float32) * torch.randint(0, 2, (size,), generator=generator).mul(2).sub(1)
    elif kind in ("constant", "zero"):
        values = torch.full((size,), draw(st.sampled_from(SPECIAL)) if kind == "constant" else 0.0)
    else:
        values = torch.randn(size, generator=generator)
        if kind == "heavy":
            values = values / torch.rand(size, generator=generator).clamp_min(1e-3)
        elif kind == "sparse":
            values *= torch.rand(size, generator=generator) < draw(st.sampled_from([0.001, 0.01, 0.1]))
        elif kind == "grid":
            values = values.mul(2).round()
        values *= draw(st.sampled_from([1.0, 1e-3, 1e-40, 1e-37, 1e-20, 1e20, 1e36]))
        values.clamp_(-FLT_MAX, FLT_MAX)
    special = st.sampled_from(SPECIAL + (NOT_FINITE if with_not_finite else []))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 9000), special), max_size=6)):
        if size:
            values[place % size] = value
    return values


def encode(name: str, values: torch.Tensor) -> torch.Tensor:
    code = torch.full((CODECS[name].num_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    CODECS[name].encode(values, code)
    return code


def decode(name: str, code: torch.Tensor, size: int) -> torch.Tensor:
    values = torch.full((size,), 7.0)
    CODECS[name].decode(code, values)
    return values


def without_nan(name: str, values: torch.Tensor) -> torch.Tensor:
    """NaN has many patterns of bits, and a cast may choose any."""
    return torch.where(values.isnan(), 1.0, values) if name in CASTS else values


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    return decode(name, encode(name, values), values.numel())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def gaussian(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3


def heavy_tailed(size: int, seed: int = 0) -> torch.Tensor:
    """Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) / torch.randn(3, size, generator=generator).square().mean(0).sqrt()


def relative_error(name: str, values: torch.Tensor) -> float:
    return float((round_trip(name, values).double() - values).norm() / values.double().norm())


# The table of all codecs.


def test_names() -> None:
    assert sorted(CODECS) == sorted(ALL)
    assert all(codec.name == name for name, codec in CODECS.items())


@pytest.mark.parametrize("name", ALL)
def test_bytes_on_the_wire(name: str) -> None:
    codec = CODECS[name]
    assert codec.block_values == BLOCK_VALUES[name]
    assert codec.block_bytes == BLOCK_BYTES[name]
    assert codec.num_bytes(0) == 0
    assert codec.num_bytes(1) == codec.num_bytes(codec.block_values) == codec.block_bytes
    assert codec.num_bytes(3 * codec.block_values + 1) == 4 * codec.block_bytes
    assert codec.is_exact == (name == "fp32")
    assert codec.needs_feedback == (name in ("topk", "sign"))
    assert base.TILE_VALUES % codec.block_values == 0
    assert codec.block_values & (codec.block_values - 1) == 0


def test_a_big_endian_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codecs.__file__
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedError, match="little-endian"):
        runpy.run_path(codecs.__file__)


# What all of them have in common.


@pytest.mark.parametrize("name", ALL)
@given(values=long_vectors(with_not_finite=True))
@settings(max_examples=50)
def test_equal_values_have_equal_code_and_are_left_alone(name: str, values: torch.Tensor) -> None:
    values = without_nan(name, values)
    before = values.clone()
    code = encode(name, values)
    assert torch.equal(code, encode(name, before))
    assert same_bits(values, before)
    assert same_bits(decode(name, code, values.numel()), decode(name, code.clone(), values.numel()))
    assert torch.equal(code, encode(name, values)), "decoding left the code alone, and no buffer was mixed up"


@pytest.mark.parametrize("name", ALL)
@given(values=long_vectors(with_not_finite=True), data=st.data())
@settings(max_examples=50)
def test_code_can_be_cut_where_blocks_begin(name: str, values: torch.Tensor, data: st.DataObject) -> None:
    values = without_nan(name, values)
    size, codec = values.numel(), CODECS[name]
    num_blocks = -(-size // codec.block_values)
    cuts = sorted({0, num_blocks, *data.draw(st.lists(st.integers(0, num_blocks), max_size=3))})
    code, decoded = encode(name, values), round_trip(name, values)
    for first, last in pairwise(cuts):
        low, high = first * codec.block_values, min(size, last * codec.block_values)
        piece = code[codec.locate(low, last * codec.block_values)]
        assert torch.equal(piece, encode(name, values[low:high]))
        assert same_bits(decode(name, piece, high - low), decoded[low:high])


@pytest.mark.parametrize("name", ALL)
def test_long_vectors_are_coded_in_tiles(name: str) -> None:
    """More than one tile of a round trip, and a partial block after them."""
    codec, size = CODECS[name], base.TILE_VALUES + 3 * 4096 + 17
    values = gaussian(size)
    code, decoded = encode(name, values), round_trip(name, values)
    step = 5 * 4096
    for low in range(0, size, step):
        piece = code[codec.num_bytes(low) : codec.num_bytes(low) + codec.num_bytes(min(step, size - low))]
        assert torch.equal(piece, encode(name, values[low : low + step]))
        assert same_bits(decode(name, piece, min(step, size - low)), decoded[low : low + step])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_values_may_lie_anywhere(name: str, skipped: int) -> None:
    """For both forms of a codec; see below."""
    values = gaussian(10_000)
    for codec in {CODECS[name], ON_ACCELERATORS.get(name, CODECS[name])}:
        target = torch.full((values.numel() + 5,), 7.0)
        code = torch.zeros(codec.num_bytes(values.numel() - skipped), dtype=torch.uint8)
        codec.encode(values[skipped:], code)
        codec.decode(code, target[skipped : values.numel()])
        assert same_bits(target[skipped : values.numel()], round_trip(name, values[skipped:].clone()))
        assert bool((target[:skipped] == 7).all())
        assert bool((target[values.numel() :] == 7).all())


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_written_beyond_the_code(name: str) -> None:
    size = 2 * BLOCK_VALUES[name] + 1
    num_bytes = CODECS[name].num_bytes(size)
    buffer = torch.full((num_bytes + 8,), 0xA5, dtype=torch.uint8)
    CODECS[name].encode(gaussian(size), buffer[4 : 4 + num_bytes])
    assert bool((buffer[:4] == 0xA5).all())
    assert bool((buffer[4 + num_bytes :] == 0xA5).all())


@pytest.mark.parametrize("name", ALL)
def test_several_threads_at_once(name: str) -> None:
    inputs = [gaussian(300_000 + 1111 * seed, seed) for seed in range(4)]
    expected = [(encode(name, values), round_trip(name, values)) for values in inputs]

    def work(index: int) -> bool:
        code = encode(name, inputs[index])
        decoded = decode(name, code, inputs[index].numel())
        return torch.equal(code, expected[index][0]) and same_bits(decoded, expected[index][1])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [number % 4 for number in range(24)]))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_vector(name: str) -> None:
    assert encode(name, torch.empty(0)).numel() == 0
    assert decode(name, torch.empty(0, dtype=torch.uint8), 0).numel() == 0


@pytest.mark.parametrize("name", ALL)
@given(values=long_vectors())
@settings(max_examples=50)
def test_what_was_decoded_once_stays_as_it_is(name: str, values: torch.Tensor) -> None:
    """So an average of equal values that travels twice is not rounded twice."""
    if name == "topk":  # in a mean, what is 2^-46 of the largest is lost
        values = torch.where(values.abs() < values.abs().max() * 2**-40, 0, values) if values.numel() else values
    once = round_trip(name, values)
    assert torch.equal(round_trip(name, once), once)


@pytest.mark.parametrize("name", ALL)
@given(values=long_vectors())
@settings(max_examples=50)
def test_finite_values_stay_finite(name: str, values: torch.Tensor) -> None:
    beyond_bf16 = values.abs() > torch.finfo(torch.bfloat16).max
    assert bool((round_trip(name, values).isfinite() | (beyond_bf16 if name == "bf16" else False)).all())


@pytest.mark.parametrize("name", BLOCKS)
@given(values=long_vectors(with_not_finite=True))
def test_a_block_that_is_not_finite_shows(name: str, values: torch.Tensor) -> None:
    decoded = round_trip(name, values)
    for block, result in zip(values.split(BLOCK_VALUES[name]), decoded.split(BLOCK_VALUES[name]), strict=True):
        if block.isfinite().all():
            assert bool(result.isfinite().all())
        else:
            assert not result.isfinite().any()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF, 0x7F800000, -0x800000])
def test_every_nan_and_infinity_shows(name: str, bits: int) -> None:
    values = gaussian(BLOCK_VALUES[name])
    values[77] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert not round_trip(name, values).isfinite().any()
    if name in SCALED:
        assert scales_of(name, encode(name, values)) == float("inf")


@pytest.mark.parametrize("name", BLOCKS)
def test_zeros_decode_to_zeros(name: str) -> None:
    values = torch.tensor([0.0, -0.0] * 3000)
    assert torch.equal(round_trip(name, values), values)


# The two forms of a codec: loops on a processor, and PyTorch's operations, which accelerators have too.

ON_ACCELERATORS: dict[str, Codec] = {
    "int8": Int8Codec(compiled=False),
    "int4": Int4Codec(compiled=False),
    "fp4": Fp4Codec(compiled=False),
    "topk": TopKCodec(compiled=False),
    "sign": SignCodec(compiled=False),
}


@pytest.mark.parametrize("name", BLOCKS)
@given(values=long_vectors())
@settings(max_examples=200)
def test_both_forms_code_alike(name: str, values: torch.Tensor) -> None:
    code = torch.zeros(CODECS[name].num_bytes(values.numel()), dtype=torch.uint8)
    ON_ACCELERATORS[name].encode(values, code)
    assert torch.equal(code, encode(name, values))


@pytest.mark.parametrize("name", BLOCKS)
@given(values=long_vectors(with_not_finite=True))
def test_both_forms_show_what_is_not_finite(name: str, values: torch.Tensor) -> None:
    code, decoded = torch.zeros(CODECS[name].num_bytes(values.numel()), dtype=torch.uint8), torch.zeros_like(values)
    ON_ACCELERATORS[name].encode(values, code)
    ON_ACCELERATORS[name].decode(code, decoded)
    assert torch.equal(decoded.nan_to_num(7.0), round_trip(name, values).nan_to_num(7.0))


@pytest.mark.parametrize("name", ["int8", "int4", "fp4", "sign"])  # topk may name a value twice, and the last counts
@given(seed=st.integers(0, 2**32), size=st.integers(0, 9000))
@settings(max_examples=50)
def test_both_forms_decode_any_bytes_alike(name: str, seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 256, (CODECS[name].num_bytes(size),), dtype=torch.uint8, generator=generator)
    decoded = torch.zeros(size)
    ON_ACCELERATORS[name].decode(code, decoded)
    assert torch.equal(decoded.nan_to_num(7.0), decode(name, code, size).nan_to_num(7.0))


def test_loops_compile_where_nothing_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither beside the package nor in the user's folder: then without keeping the machine code."""

    def half(value: float) -> float:
        return value / 2

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("cannot cache function 'half': no locator available for file")

    monkeypatch.setattr("numba.core.caching.FunctionCache.__init__", refuse)
    assert compiled(half)(3.0) == 1.5


# Casts.


@given(vectors)
def test_fp32_is_exact(values: torch.Tensor) -> None:
    assert same_bits(round_trip("fp32", values), values)


@given(vectors)
def test_bf16_keeps_8_bits_and_the_range(values: torch.Tensor) -> None:
    decoded = round_trip("bf16", values)
    assert torch.equal(decoded.isnan(), values.isnan())
    normal = values.isfinite() & (values.abs() >= TINY) & decoded.isfinite()
    assert bool(((decoded - values).abs() <= values.abs() * 2**-8)[normal].all())
    tiny = values.abs() < TINY
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


@pytest.mark.parametrize("name", CASTS)
def test_zeros_keep_their_sign(name: str) -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert same_bits(round_trip(name, zeros), zeros)


# A scale for every block: int8, int4, fp4.


def scales_of(name: str, code: torch.Tensor) -> torch.Tensor:
    """The scale of every block, (n, 1) in fp64."""
    blocks = code.view(-1, BLOCK_BYTES[name])
    size, dtype = (4, torch.float32) if name in ("int8", "sign") else (2, torch.bfloat16)
    return blocks[:, :size].contiguous().view(dtype).double()


def in_blocks(name: str, values: torch.Tensor) -> torch.Tensor:
    """(n, block_values) in fp64, padded with zeros."""
    padded = torch.zeros(-(-values.numel() // BLOCK_VALUES[name]) * BLOCK_VALUES[name], dtype=torch.float64)
    padded[: values.numel()] = values
    return padded.view(-1, BLOCK_VALUES[name])


@pytest.mark.parametrize("name", SCALED)
@given(values=long_vectors())
@settings(max_examples=300)
def test_error_bounds(name: str, values: torch.Tensor) -> None:
    code, decoded = encode(name, values), round_trip(name, values)
    assert not ((decoded != 0) & (decoded.abs() < TINY)).any(), "no number that a processor may flush to zero"
    error = (in_blocks(name, decoded) - in_blocks(name, values)).abs()
    magnitudes, scale = in_blocks(name, values).abs(), scales_of(name, code)
    if name == "fp4":
        bound = torch.maximum(magnitudes / 3, scale * 2**-7) * (1 + 2**-20)
    else:
        bound = scale * (0.5 + {"int8": 2**-15, "int4": 2**-20}[name])
    assert bool((error <= bound).all())


@pytest.mark.parametrize(("name", "steps", "smallest"), [("int8", 127, 2**-126), ("int4", 7, 2**-126)])
@given(values=long_vectors())
def test_scales_are_no_larger_than_they_must(name: str, steps: int, smallest: float, values: torch.Tensor) -> None:
    scale = scales_of(name, encode(name, values))
    largest = in_blocks(name, values).abs().amax(1, keepdim=True)
    precision = {"int8": 2**-16, "int4": 2**-7}[name]
    assert bool((scale <= (largest / steps * (1 + 2**-21)).clamp_min(smallest)).all())
    assert bool((scale >= (largest / steps * (1 - precision)).clamp_min(smallest)).all())


@pytest.mark.parametrize("name", SCALED)
def test_partial_blocks_are_padded_with_zeros(name: str) -> None:
    values = gaussian(3 * 256 + 3)
    padded = torch.zeros(4 * 256)
    padded[: values.numel()] = values
    code = encode(name, values)
    assert torch.equal(encode(name, padded)[: code.numel()], code)


def test_fp4_takes_the_nearest_level() -> None:
    levels = torch.tensor([2.0**e for e in range(0, -7, -1)] + [0.0])  # of two as near, the first is the least
    values = torch.linspace(-1, 1, 128 * 40 + 1)[:-1].half().float().view(-1, 128)
    values[:, 0] = -1  # the scale
    distance = (values[:, :, None].abs() - levels).abs()
    decoded = round_trip("fp4", values.flatten()).view(-1, 128)
    assert torch.equal(decoded.abs(), levels[distance.argmin(2)])
    assert torch.equal(decoded.sign(), torch.where(decoded == 0, 0, values.sign()))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("bf16", 0.0016, 0.0017),
        ("fp16", 0.0002, 0.0004),
        ("int8", 0.0069, 0.0071),
        ("int4", 0.116, 0.118),
        ("fp4", 0.191, 0.193),
        ("topk", 0.938, 0.940),
        ("sign", 0.602, 0.604),
    ],
)
def test_error_on_gaussian_values(name: str, low: float, high: float) -> None:
    assert low < relative_error(name, gaussian(1 << 20)) < high


# sign


@given(values=long_vectors())
def test_sign_keeps_signs_and_the_mean(values: torch.Tensor) -> None:
    decoded = round_trip("sign", values)
    for low in range(0, values.numel(), 4096):
        block, result = values[low : low + 4096], decoded[low : low + 4096]
        mean = float(block.double().abs().mean())
        scale = abs(float(result[0]))
        assert mean * (1 - 2**-11) - 1e-41 <= scale <= mean * (1 + 2**-20) + 1e-44
        assert torch.equal(result, torch.where(block < 0, -scale, scale))


def test_sign_of_a_partial_block_is_not_biased_by_its_padding() -> None:
    values = torch.tensor([3.0, -3.0, 3.0])
    assert round_trip("sign", values).tolist() == [3, -3, 3]


# topk


def kept_energy(values: torch.Tensor) -> float:
    """Squares of what was kept over the squares of the 64 largest of every 4,096."""
    rows = values.view(-1, 4096)
    kept = round_trip("topk", values).view(-1, 4096) != 0
    assert bool((kept.sum(1) == 64).all())
    return float((rows.square() * kept).sum() / rows.abs().topk(64, 1).values.square().sum())


@pytest.mark.parametrize("values", [gaussian(1 << 20), heavy_tailed(1 << 20)], ids=["gaussian", "heavy"])
def test_topk_keeps_the_largest(values: torch.Tensor) -> None:
    assert kept_energy(values) > 0.99999


def test_topk_sends_most_of_what_it_keeps() -> None:
    """The error of two bits, over the squares of the 64 largest."""
    for values, limit in ((gaussian(1 << 20), 0.005), (heavy_tailed(1 << 20), 0.06)):
        rows, decoded = values.view(-1, 4096), round_trip("topk", values).view(-1, 4096)
        error = ((rows - decoded) * (decoded != 0)).square().sum()
        assert error / rows.abs().topk(64, 1).values.square().sum() < limit


@given(values=long_vectors())
def test_topk_decodes_to_two_magnitudes_and_the_right_signs(values: torch.Tensor) -> None:
    decoded = round_trip("topk", values)
    for block, result in zip(values.split(4096), decoded.split(4096), strict=True):
        kept = result != 0
        assert int(kept.sum()) <= 64
        assert len(result[kept].abs().unique()) <= 2
        assert torch.equal(block[kept].sign(), result[kept].sign())
        at_least = block.abs()[kept].min() if kept.any() else torch.tensor(0.0)
        left_out = block.abs()[~kept].max() if not kept.all() else torch.tensor(0.0)
        if int(kept.sum()) == 64:
            assert left_out <= at_least * (1 + 2**-10) + 2**-137  # subnormal numbers have less precision


@pytest.mark.parametrize("size", [5, 63, 64, 65, 4096, 4100])
@pytest.mark.parametrize("num_kept", [1, 2, 5, 63, 64])
def test_topk_of_few_values_of_two_magnitudes_is_exact(size: int, num_kept: int) -> None:
    values = torch.zeros(size)
    where = torch.randperm(min(size, 4096), generator=torch.Generator().manual_seed(0))[:num_kept]
    values[where] = torch.tensor([1.5, -0.25, 0.25])[torch.arange(where.numel()) % 3]
    assert torch.equal(round_trip("topk", values), values)


def test_topk_parts_magnitudes_where_the_error_is_least() -> None:
    values = heavy_tailed(1 << 17).view(-1, 4096)
    for row in values:
        decoded = round_trip("topk", row)
        kept = decoded != 0
        ordered = row[kept].abs().double().sort().values
        best = min(
            float((ordered[:k] - ordered[:k].mean()).square().sum() if k else 0)
            + float((ordered[k:] - ordered[k:].mean()).square().sum())
            for k in range(64)
        )
        error = float((row[kept].double() - decoded[kept]).square().sum())
        assert error <= best * 1.001 + float(ordered.square().sum()) * 2**-17  # the means are rounded to bf16


def test_topk_of_equal_values_takes_the_first() -> None:
    assert round_trip("topk", torch.full((5000,), -2.0)).nonzero().flatten().tolist() == [
        *range(64),
        *range(4096, 4160),
    ]


# The wire format: decoders written from docs/codecs.md alone, and bytes that must never change.


def read(layout: str, code: bytes, at: int = 0) -> tuple[float, ...]:
    return struct.unpack_from("<" + layout, code, at)


def bf16(code: bytes, at: int) -> float:
    return struct.unpack("<f", b"\0\0" + code[at : at + 2])[0]


def decode_int8(code: bytes) -> list[float]:
    (scale,) = read("f", code)
    return [scale * number for number in read("256b", code, 4)]


def decode_four_bits(code: bytes, levels: list[float]) -> list[float]:
    scale = bf16(code, 0)
    return [scale * levels[number] for byte in code[2:] for number in (byte & 15, byte >> 4)]


def decode_topk(code: bytes) -> list[float]:
    values = [0.0] * 4096
    larger, smaller = bf16(code, 0), bf16(code, 2)
    entries = int.from_bytes(code[4:], "little")
    for _ in range(64):
        magnitude = smaller if entries >> 12 & 1 else larger
        values[entries & 4095] = -magnitude if entries >> 13 & 1 else magnitude
        entries >>= 14
    return values


def decode_sign(code: bytes) -> list[float]:
    (scale,) = read("f", code)
    signs = int.from_bytes(code[4:], "little")
    return [-scale if signs >> place & 1 else scale for place in range(4096)]


FP4_LEVELS = [0.0] + [2.0**e for e in range(-6, 1)]
REFERENCE = {
    "int8": decode_int8,
    "int4": lambda code: decode_four_bits(code, [float(number - 8) for number in range(16)]),
    "fp4": lambda code: decode_four_bits(code, FP4_LEVELS + [-level for level in FP4_LEVELS]),
    "topk": decode_topk,
    "sign": decode_sign,
}


@pytest.mark.parametrize("name", BLOCKS)
@given(values=long_vectors())
@settings(max_examples=30)
def test_a_decoder_written_from_the_documentation_agrees(name: str, values: torch.Tensor) -> None:
    code = bytes(encode(name, values).tolist())
    expected: list[float] = []
    for low in range(0, len(code), BLOCK_BYTES[name]):
        expected += REFERENCE[name](code[low : low + BLOCK_BYTES[name]])
    decoded = round_trip(name, values)
    assert same_bits(decoded, torch.tensor(expected, dtype=torch.float64)[: values.numel()].float())


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_any_bytes_are_some_values(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 4096 + 1000
    code = torch.randint(0, 256, (CODECS[name].num_bytes(size),), dtype=torch.uint8, generator=generator)
    assert same_bits(decode(name, code, size), decode(name, code, size))


GOLDEN = [1.0, -2.0, 0.5, 0.0, -0.25, 3.0, -0.0, 0.01]
GOLDEN_CODE = {
    "fp32": "0000803f 000000c0 0000003f 00000000 000080be 00004040 00000080 0ad7233c",
    "bf16": "803f 00c0 003f 0000 80be 4040 0080 243c",
    "fp16": "003c 00c0 0038 0000 00b4 0042 0080 1f21",
    "int8": "0083c13c 2aab1500f57f0000" + 248 * "00",  # scale 0.02362; 42, -85, 21, 0, -11, 127, 0, 0
    "int4": "db3e 3a89f788" + 60 * "88",  # scale 0.4277; 10 3, 9 8, 7 15, 8 8
    "fp4": "4040 e5047b08" + 60 * "00",  # scale 3; 2^-2 -2^-1, 2^-3 0, -2^-4 1, -0 0
    # 2.5 and 0.4395; 58 times index 5, then 7, 4, 2, 0 with the smaller magnitude, 1 and 5 with the larger
    "topk": "2040e13e" + 14 * "05400150001400" + "054001700011c0 02100014001600",
    "sign": "0050583f 12" + 511 * "00",  # 0.84497; values 1 and 4 are negative
}
GOLDEN_DECODED = {
    "fp32": GOLDEN,
    "bf16": [1.0, -2.0, 0.5, 0.0, -0.25, 3.0, -0.0, 0.010009765625],
    "fp16": [1.0, -2.0, 0.5, 0.0, -0.25, 3.0, -0.0, 0.01000213623046875],
    "int8": [number * 0.02362203598022461 for number in (42, -85, 21, 0, -11, 127, 0, 0)],
    "int4": [number * 0.427734375 for number in (2, -5, 1, 0, -1, 7, 0, 0)],
    "fp4": [0.75, -1.5, 0.375, 0.0, -0.1875, 3.0, -0.0, 0.0],
    "topk": [0.439453125, -2.5, 0.439453125, 0.0, -0.439453125, 2.5, 0.0, 0.439453125],
    "sign": [0.844970703125 * sign for sign in (1, -1, 1, 1, -1, 1, 1, 1)],
}


@pytest.mark.parametrize("name", ALL)
def test_golden_bytes(name: str) -> None:
    """A change here is a change of the wire format."""
    code = encode(name, torch.tensor(GOLDEN))
    assert bytes(code.tolist()).hex() == GOLDEN_CODE[name].replace(" ", "")
    assert decode(name, code, len(GOLDEN)).tolist() == pytest.approx(GOLDEN_DECODED[name], rel=1e-7, abs=0)


def test_prepared_loops_compile_nothing_more() -> None:
    fresh: list[Any] = [compiled(loop._function) for loop in Int8Codec.loops]  # type: ignore[union-attr]
    codec = type("Fresh", (Int8Codec,), {"loops": Loops(*fresh)})()
    codec.prepare()
    code = torch.empty(codec.num_bytes(600), dtype=torch.uint8)
    codec.encode(torch.randn(600), code)
    codec.decode(code, torch.empty(600))
    assert [len(loop.machine_code.signatures) for loop in fresh] == [1, 1]
