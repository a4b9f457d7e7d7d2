"""What runs on an accelerator: the same numbers there as on the processor.

`python -m benchmarks.accelerator --only suite` runs these with HF_DILOCO_TEST_DEVICE=cuda. Elsewhere the device is
the processor, so that what is written here runs in every suite, if with less to prove.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gossip_step import StandIn
from hf_diloco.codecs import CODECS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.gossip.published import MemoryPublished, VersionedBuffer
from hf_diloco.inner import open_shards
from hf_diloco.inner.device_copies import LEAST_LOCKED_BYTES, copy_all, page_lock
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import AlignedPartition, LanePartition
from hf_diloco.methods.gossip import METHODS, make_optimizer
from hf_diloco.optimizers.onebit.all_reduce import SignFeedback, num_bit_bytes, unpack
from hf_diloco.rounds.open import open_session
from hf_diloco.rounds.session import BaseSession

DEVICE = torch.device(os.environ.get("HF_DILOCO_TEST_DEVICE", "cpu"))
ON_CUDA = DEVICE.type == "cuda"
SIZES = [(257, 33), (1,), (1024, 300), (7,)]


def make_model(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """Parameters of uneven sizes, on the device."""
    generator = torch.Generator().manual_seed(1)
    return nn.ParameterList(nn.Parameter(torch.randn(*size, generator=generator).to(DEVICE, dtype)) for size in SIZES)


def flat(model: nn.ParameterList) -> torch.Tensor:
    return torch.cat([parameter.detach().float().cpu().flatten() for parameter in model])


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_copies_arrive_as_plain_ones_do(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(5000).to(source)
    there = torch.zeros(5000, dtype=target, device=DEVICE)
    copy_all([(there[low : low + 999], values[low : low + 999]) for low in range(0, 5000, 999)])
    assert torch.equal(there.cpu(), values.to(target))
    back = torch.zeros(5000, dtype=source)
    copy_all([(back[1000:], there[1000:]), (back[:1000], there[:1000])])
    assert torch.equal(back, there.cpu().to(source))


def test_published_payloads_lie_in_memory_that_the_device_reaches_by_itself() -> None:
    all_versioned = [VersionedBuffer() for _ in range(2)]
    nodes = [MemoryPublished(all_versioned, node) for node in range(2)]
    payloads = [torch.full((LEAST_LOCKED_BYTES,), node, dtype=torch.uint8, device=DEVICE) for node in range(2)]
    for node, payload in zip(nodes, payloads, strict=True):
        node.publish(payload)
    taken, _ = nodes[0].pull(1)
    assert taken is not None
    assert torch.equal(taken, payloads[1].cpu())
    with all_versioned[1].newest() as shown:
        assert shown is not None
        assert (shown.is_pinned(), taken.is_pinned()) == (ON_CUDA, ON_CUDA)


def test_copies_wait_for_what_was_queued_before() -> None:
    size = 2048 if ON_CUDA else 64
    matrix = torch.eye(size, device=DEVICE)
    for _ in range(200):  # takes the device longer than it takes to queue
        matrix = matrix @ torch.eye(size, device=DEVICE)
    host = torch.zeros(size, size)
    copy_all([(host, matrix)])
    assert torch.equal(host, torch.eye(size))


@pytest.mark.skipif(not ON_CUDA, reason="there is no CUDA device to lock pages for")
def test_locked_pages_keep_what_is_in_them_and_are_let_go() -> None:
    vector = torch.arange(LEAST_LOCKED_BYTES, dtype=torch.float32)
    assert page_lock(vector) is vector
    assert vector.is_pinned()
    assert page_lock(vector).is_pinned()
    assert torch.equal(vector, torch.arange(LEAST_LOCKED_BYTES, dtype=torch.float32))
    small = torch.zeros(8)
    assert not page_lock(small).is_pinned()
    del vector
    again = page_lock(torch.zeros(LEAST_LOCKED_BYTES))
    assert again.is_pinned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_lanes", [0, 1, 3])
def test_masters_are_read_and_written_where_they_lie(dtype: torch.dtype, num_lanes: int) -> None:
    model = make_model(dtype)
    shards = open_shards(model, None)
    assert shards.is_on_cuda == ON_CUDA
    ranks = IslandGroup()
    partition = LanePartition(shards, ranks, num_lanes) if num_lanes else AlignedPartition(shards, ranks)
    vector = torch.empty(partition.numel)
    partition.gather(vector)
    assert torch.equal(vector, flat(model))
    partition.scatter(vector.mul_(-2))
    assert torch.equal(flat(model), vector)  # a power of two: exact in bf16, too


@pytest.mark.parametrize("settings", [{}, {"method": "slowmo"}, {"outer_momentum": 0.0}])
def test_an_outer_step_is_that_of_the_processor(settings: dict[str, object], tmp_path: Path) -> None:
    results = []
    for device in (DEVICE, torch.device("cpu")):
        model = make_model().to(device)
        session = _join(model, tmp_path, settings)
        for _ in range(3):
            for parameter in model:
                parameter.data.mul_(0.5)
            session.outer.count_step()
            session.sync()
        results.append((flat(model), session.outer.outer_hash))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_outer_weights_are_shown_and_hidden(tmp_path: Path) -> None:
    model = make_model()
    session = _join(model, tmp_path, {})
    first = flat(model)
    for parameter in model:
        parameter.data.add_(1)
    trained = flat(model)
    held = session.outer.show()
    assert torch.equal(flat(model), first)
    session.outer.hide(held)
    assert torch.equal(flat(model), trained)


def _join(model: nn.ParameterList, folder: Path, settings: dict[str, object]) -> BaseSession:
    session = open_session(DiLoCoConfig(num_islands=1, sync_every=1, **settings), IslandGroup())
    session.join(open_shards(model, torch.optim.SGD(model.parameters(), lr=0.1)), folder)
    return session


@pytest.mark.parametrize("name", sorted(CODECS))
def test_code_is_that_of_the_processor(name: str) -> None:
    codec, values = CODECS[name], torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    codes = []
    for device in (DEVICE, torch.device("cpu")):
        code = torch.zeros(codec.num_bytes(10_000), dtype=torch.uint8, device=device)
        codec.encode(values.to(device), code)
        decoded = torch.empty(10_000, device=device)
        codec.decode(code, decoded)
        codes.append((code.cpu(), decoded.cpu()))
    assert torch.equal(codes[0][0], codes[1][0])
    assert torch.equal(codes[0][1], codes[1][1])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_gossip_steps_are_those_of_the_processor(name: str) -> None:
    results = []
    for device in (DEVICE, torch.device("cpu")):
        model = make_model().to(device)
        torch.manual_seed(4)
        neighbours = StandIn(flat(model).numel(), device)
        optimizer = make_optimizer(name, model.parameters(), neighbours, lr=0.1)
        for _ in range(3):
            for parameter in model:
                parameter.grad = torch.full_like(parameter, 0.01)
            optimizer.step()
        results.append(flat(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_one_bit_compression_is_that_of_the_processor() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    results = []
    for device in (DEVICE, torch.device("cpu")):
        feedback = SignFeedback(4096, device)
        bits = torch.zeros(num_bit_bytes(4096), dtype=torch.uint8, device=device)
        for _ in range(2):
            scale = feedback.add_and_pack(values.to(device), [bits], 4096)
        out = torch.zeros(4096, device=device)
        unpack(bits, 1.0, out)
        results.append((bits.cpu(), out.cpu(), scale))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-6)
