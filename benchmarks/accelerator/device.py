"""What this package's own code costs on the device: copies, memory, gossip methods."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from benchmarks import gossip_step
from benchmarks.accelerator.setting import Figure, Setting
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner import open_shards
from hf_diloco.inner.device_copies import page_lock
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import AlignedPartition
from hf_diloco.methods.gossip import METHODS
from hf_diloco.rounds.open import open_session
from tests.processes import ROOT


def suite(setting: Setting) -> Iterator[Figure]:
    """The device parts of the suite."""
    env = {**os.environ, "HF_DILOCO_TEST_DEVICE": setting.device}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/device"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
    yield Figure("exit code of pytest tests/device", done.returncode, at_most=0, is_exact=True)


def copies(setting: Setting) -> Iterator[Figure]:
    """GB/s of reading and writing the masters, over one page-locked copy of as much: the bus."""
    values = setting.choose(250_000_000, 1_000_000)
    model = make_model(values, setting)
    partition = AlignedPartition(open_shards(model, None), IslandGroup())
    size = partition.numel
    host, locked = torch.zeros(size), torch.zeros(size)
    flat = torch.zeros(size, device=setting.device)
    on_cuda = setting.device == "cuda"
    bus_host = torch.zeros(size, pin_memory=on_cuda)
    if on_cuda:
        page_lock(locked)
        yield Figure("pages of host memory are locked", float(locked.is_pinned()), at_least=1, is_exact=True)
    gigabytes = 4 * size / 1e9
    ways: list[tuple[str, torch.Tensor, torch.Tensor, Callable[[torch.Tensor], None]]] = [
        ("to the host", bus_host, flat, partition.gather),
        ("to the device", flat, bus_host, partition.scatter),
    ]
    for name, target, source, own in ways:
        fastest = gigabytes / setting.seconds(partial(target.copy_, source, non_blocking=True))
        yield Figure(f"{name}: the bus, GB/s", fastest)
        reached = gigabytes / setting.seconds(partial(own, locked))
        yield Figure(f"{name}: masters in {len(model)} tensors, GB/s", reached)
        yield Figure(f"{name}: share of the bus", reached / fastest, at_least=0.9)
        pageable = gigabytes / setting.seconds(partial(own, host), 2)
        yield Figure(f"{name}: without locked pages, GB/s", pageable)


def memory(setting: Setting) -> Iterator[Figure]:
    """Bytes a parameter that the outer loop has on the device: kept, and at its peak in a round."""
    for dtype, at_most in ((torch.float32, 0.0), (torch.bfloat16, 0.5)):
        model = make_model(setting.choose(100_000_000, 1_000_000), setting, dtype)
        size = sum(parameter.numel() for parameter in model)
        session = open_session(DiLoCoConfig(num_islands=1, sync_every=1), IslandGroup())
        before = _allocated(setting)
        session.join(open_shards(model, torch.optim.SGD(model.parameters())), setting.folder)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            session.outer.count_step()
            session.sync()
        kind = str(dtype).removeprefix("torch.")
        kept, peak = ((bytes_ - before) / size for bytes_ in (_allocated(setting), _peak(setting)))
        yield Figure(f"{kind}: kept on the device, bytes a parameter", kept, at_most=0.0, is_exact=True)
        yield Figure(
            f"{kind}: peak in a round, bytes a parameter",
            peak,
            at_most=at_most,
            note="" if dtype is torch.float32 else "a tensor at a time in fp32",
        )


def gossip(setting: Setting) -> Iterator[Figure]:
    """Each decentralised method's update, and a training step with it."""
    args = argparse.Namespace(
        values=setting.choose(102_400_000, 16_000),
        tensors=160,
        repeats=setting.choose(20, 2),
        busy=False,
        device=setting.device,
        batch=setting.choose(64, 1),
        train_steps=setting.choose(20, 1),
    )
    threads = torch.get_num_threads()
    methods = list(METHODS)
    figures = gossip_step.measure_arithmetic(methods, args, threads)
    copying = 2 * 4 * args.values / figures["copy"]["update"]
    yield Figure("copying, GB/s read and written", copying / 1e9)
    for name in methods:
        least = gossip_step.VECTORS[name] * 4 * args.values / copying
        if name == "swarm-sgd":  # published to the host, and taken from there: each at every second step
            least += 4 * args.values / _bus(args.values, setting)
        yield Figure(f"{name}: share of that bandwidth", least / figures[name]["update"], at_least=0.7)
    trained = ["dsgd", "dmsgd", "decentlam"]
    seconds = gossip_step.measure_training(trained, args, threads)
    yield Figure("dsgd: a training step of ResNet-50, ms", 1e3 * seconds["dsgd"])
    for name in trained[1:]:
        yield Figure(f"{name}: training step over dsgd's", seconds[name] / seconds["dsgd"], at_most=1.05)


def _bus(num_values: int, setting: Setting) -> float:
    """Bytes a second between page-locked host memory and the device."""
    there = torch.zeros(num_values, device=setting.device)
    host = torch.zeros(num_values, pin_memory=setting.device == "cuda")
    return host.nbytes / setting.seconds(partial(host.copy_, there, non_blocking=True))


def make_model(num_values: int, setting: Setting, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """A hundred tensors on the device."""
    return nn.ParameterList(
        nn.Parameter(torch.ones(num_values // 100, dtype=dtype, device=setting.device)) for _ in range(100)
    )


def _allocated(setting: Setting) -> int:
    return torch.cuda.memory_allocated() if setting.device == "cuda" else 0


def _peak(setting: Setting) -> int:
    return torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0
