"""Averages of vectors in memory: against their equation, and both forms against each other."""

from __future__ import annotations

import pytest
import torch

from hf_diloco.gossip import averages
from hf_diloco.gossip.averages import Vectors, mean_, mix_


def make_vectors(number: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=generator, dtype=dtype) for _ in range(number)]


WEIGHTS = [[], [0.5], [1 / 3, 1 / 3], [0.25, 0.125], [0.5, 0.5], [0.1, 0.2, 0.3], [1 / 8] * 7]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("size", [1, 2047, 10_001])
def test_a_mix_is_the_weighted_sum(weights: list[float], size: int) -> None:
    own, *others = make_vectors(1 + len(weights), size, torch.float64)
    out = torch.empty_like(own)
    mix_(out, own, list(zip(weights, others, strict=True)))
    expected = (1 - sum(weights)) * own
    for weight, other in zip(weights, others, strict=True):
        expected += weight * other
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weights", WEIGHTS[1:], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loop_does_what_pytorchs_operations_do(
    weights: list[float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are what runs on an accelerator. Where a processor rounds products and sums apart, last bits differ."""
    own, *others = make_vectors(1 + len(weights), 10_001, dtype)
    out, expected = torch.empty_like(own), torch.empty_like(own)
    mix_(out, own, list(zip(weights, others, strict=True)))
    monkeypatch.setattr(averages, "is_compiled_for", lambda _: False)
    mix_(expected, own, list(zip(weights, others, strict=True)))
    torch.testing.assert_close(out, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("weights", [[0.25, 0.125], [0.5, 0.5], [1.0]], ids=str)
def test_the_machine_code_is_that_of_the_loop(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Numba leaves to Python where it is told so."""
    own, *others = make_vectors(1 + len(weights), 2_500, torch.float32)
    out, expected = torch.empty_like(own), torch.empty_like(own)
    mix_(out, own, list(zip(weights, others, strict=True)))
    monkeypatch.delitem(vars(averages.mix_on_processor), "machine_code")
    monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    mix_(expected, own, list(zip(weights, others, strict=True)))
    torch.testing.assert_close(out, expected, rtol=0, atol=16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("weights", WEIGHTS[1:], ids=str)
def test_a_mix_does_not_depend_on_how_vectors_are_cut(weights: list[float]) -> None:
    own, *others = make_vectors(1 + len(weights), 10_001, torch.float32)
    out, cut = torch.empty_like(own), torch.empty_like(own)
    mix_(out, own, list(zip(weights, others, strict=True)))
    for low, high in ((0, 3), (3, 4_100), (4_100, 10_001)):
        mix_(cut[low:high], own[low:high], [(w, other[low:high]) for w, other in zip(weights, others, strict=True)])
    assert torch.equal(cut, out)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_who_agrees_stays_to_the_last_bit(weights: list[float]) -> None:
    own = make_vectors(1, 10_001, torch.float32)[0] * 1e3
    out = torch.empty_like(own)
    mix_(out, own, [(weight, own.clone()) for weight in weights])
    assert torch.equal(out, own)


def test_all_of_the_weight_takes_the_other_exactly() -> None:
    own, other = make_vectors(2, 100, torch.float32)
    out = torch.empty_like(own)
    mix_(out, own, [(1.0, other)])
    assert torch.equal(out, other)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_mean_is_one(number: int) -> None:
    vectors: Vectors = make_vectors(number, 10_001, torch.float64)
    out = torch.empty(10_001, dtype=torch.float64)
    mean_(out, vectors)
    torch.testing.assert_close(out, torch.stack(list(vectors)).mean(0), rtol=0, atol=1e-15)
