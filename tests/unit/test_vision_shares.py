"""Shares are disjoint, of equal size and the same in every process; their skew grows as alpha falls."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_diloco.apps.vision.build import assign_shares, draw_proportions
from hf_diloco.apps.vision.images import IntArray
from hf_diloco.errors import ConfigError
from tests.processes import ROOT

LABELS = np.repeat(np.arange(10, dtype=np.int64), 600)


def digest(shares: list[IntArray]) -> str:
    return hashlib.sha256(b"".join(share.tobytes() for share in shares)).hexdigest()


def distances(labels: IntArray, shares: list[IntArray]) -> list[float]:
    """Total variation between the classes of each node and those of all: 0 is alike, 0.9 one class of ten."""
    whole = np.bincount(labels) / len(labels)
    own = [np.bincount(labels[share], minlength=len(whole)) / len(share) for share in shares]
    return [float(np.abs(part - whole).sum() / 2) for part in own]


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    num_nodes=st.integers(1, 9),
    kind=st.sampled_from(["iid", "dirichlet"]),
    alpha=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_disjoint_equal_and_nearly_complete(
    labels: list[int], num_nodes: int, kind: str, alpha: float, seed: int
) -> None:
    array = np.array(labels, dtype=np.int64)
    if len(labels) < num_nodes:
        with pytest.raises(ConfigError, match="cannot be divided among"):
            assign_shares(array, num_nodes, kind, alpha, seed)  # type: ignore[arg-type]
        return
    shares = assign_shares(array, num_nodes, kind, alpha, seed)  # type: ignore[arg-type]
    assert [len(share) for share in shares] == [len(labels) // num_nodes] * num_nodes
    used = np.concatenate(shares)
    assert len(set(used.tolist())) == len(used)
    assert len(labels) - len(used) < num_nodes
    assert set(used.tolist()) <= set(range(len(labels)))


def test_skew_grows_as_alpha_falls() -> None:
    alphas = [1000.0, 100.0, 10.0, 1.0, 0.1]
    skews = [
        np.mean([distances(LABELS, assign_shares(LABELS, 8, "dirichlet", alpha, seed)) for seed in range(5)])
        for alpha in alphas
    ]
    assert skews == sorted(skews)
    iid = np.mean(distances(LABELS, assign_shares(LABELS, 8, "iid", 1.0, 0)))
    assert skews[0] < iid + 0.05
    assert skews[1] < 0.2
    assert skews[-1] > 0.6


def test_proportions_are_those_of_the_dirichlet_distribution() -> None:
    """The part of a class is Beta(alpha * p, alpha * (1 - p)), whose mean and variance are known."""
    available, alpha = np.array([100, 300, 600], dtype=np.int64), 4.0
    drawn = draw_proportions(available, 20_000, alpha, np.random.RandomState(0))
    p = available / 1000
    np.testing.assert_allclose(drawn.sum(axis=1), 1)
    np.testing.assert_allclose(drawn.mean(axis=0), p, atol=0.01)
    np.testing.assert_allclose(drawn.var(axis=0), p * (1 - p) / (alpha + 1), rtol=0.05)


def test_a_vanishing_alpha_gives_every_node_one_class() -> None:
    drawn = draw_proportions(np.array([100, 300], dtype=np.int64), 1000, 1e-300, np.random.RandomState(0))
    assert sorted(set(drawn.reshape(-1).tolist())) == [0, 1]
    assert drawn[:, 1].mean() == pytest.approx(0.75, abs=0.05)


def test_no_node_is_left_with_the_rest() -> None:
    """Taken one after the other, the last nodes' shares would be what others left, whatever their proportions."""
    misses = np.zeros(8)
    available = np.bincount(LABELS)
    for seed in range(30):
        wanted = draw_proportions(available, 8, 1.0, np.random.RandomState(seed))
        shares = assign_shares(LABELS, 8, "dirichlet", 1.0, seed)
        own = np.stack([np.bincount(LABELS[share], minlength=10) / len(share) for share in shares])
        misses += np.abs(own - wanted).sum(axis=1) / 2 / 30
    assert misses[-1] < misses[0] + 0.1


def test_the_seed_decides() -> None:
    for kind in ("iid", "dirichlet"):
        first, again, other = (digest(assign_shares(LABELS, 4, kind, 1.0, seed)) for seed in (1, 1, 2))
        assert first == again
        assert first != other


@pytest.mark.real_start  # hash seeds differ
@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_is_the_same_in_a_fresh_process(kind: str) -> None:
    names = "from tests.unit.test_vision_shares import LABELS, assign_shares, digest"
    call = f"digest(assign_shares(LABELS, 8, {kind!r}, 0.5, 7))"
    command = [sys.executable, "-c", f"{names}; print({call})"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.strip() == digest(assign_shares(LABELS, 8, kind, 0.5, 7))  # type: ignore[arg-type]
