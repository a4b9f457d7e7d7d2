"""What the outer loop costs training on the device: at rest, and with a streamed exchange under way."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import overhead
from benchmarks.accelerator.setting import Figure, Setting
from hf_diloco import DiLoCoCallback, DiLoCoConfig
from hf_diloco.cli.devices import free_ports
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.open import open_session
from tests.processes import Processes

NUM_FRAGMENTS = 3


def training(setting: Setting) -> Iterator[Figure]:
    """tokens/s of a Trainer with the callback, no round in reach, over the same Trainer without it."""
    shape = overhead.Shape(
        device=setting.device,
        hidden_size=setting.choose(1024, 32),
        num_layers=setting.choose(8, 1),
        length=setting.choose(512, 16),
        batch=setting.choose(16, 2),
    )
    logging.getLogger("hf_diloco").setLevel(logging.ERROR)  # each turn would say again that no round is in reach
    turn, _ = overhead.make_turn(setting.choose(40, 6), shape)
    plain: list[float] = []
    outer: list[float] = []
    for number in range(setting.choose(8, 2)):
        order: list[tuple[list[float], list[Any]]] = [(plain, []), (outer, [DiLoCoCallback(sync_every=10**6)])]
        for times, callbacks in order if number % 2 else reversed(order):
            times += turn(callbacks)
    tokens = shape.batch * shape.length
    without, with_callback = tokens / statistics.median(plain), tokens / statistics.median(outer)
    yield Figure("tokens/s without the callback", without)
    yield Figure("tokens/s with it", with_callback)
    yield Figure("with over without", with_callback / without, at_least=0.995)


def streamed(setting: Setting) -> Iterator[Figure]:
    """Steps with fragments in int8 always on their way to an island in another process, over steps without."""
    (port,) = free_ports(1)
    between = setting.choose(100, 4)
    config: dict[str, Any] = {
        "num_islands": 2,
        "rendezvous": f"tcp://127.0.0.1:{port}",
        "sync_every": NUM_FRAGMENTS * between,
        "num_fragments": NUM_FRAGMENTS,
        "fragment_sync_delay": between - 1,
        "payload": "int8",
    }
    order: dict[str, Any] = {
        "device": setting.device,
        "folder": str(setting.folder),
        "width": setting.choose(4096, 64),
        "depth": setting.choose(2, 1),
        "rows": setting.choose(4096, 4),
        "num_steps": setting.choose(12, 6) * between,
        "num_warm_steps": NUM_FRAGMENTS * between,  # each fragment once: connections, compiled loops
        "config": config,
    }
    setting.folder.mkdir(parents=True, exist_ok=True)
    if setting.is_rehearsal:
        torch.set_num_threads(1)  # the other island takes a core
    model = _make_model(order)
    step = _make_step(model, order)
    gc.collect()
    gc.freeze()  # a full collection takes 0.3 s; when it comes would decide the figure
    before = _seconds_a_step(step, setting, between)
    fragment = sum(parameter.numel() for parameter in model.parameters()) / NUM_FRAGMENTS
    config["rate_limit"] = max(1.0, 8 * fragment / (0.5 * before * between) / 1e6)  # on its way half of the time
    with Processes() as processes:
        command = [sys.executable, "-m", "benchmarks.accelerator.speed", json.dumps(order)]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        peer = processes.spawn(command, env=environment)
        seconds_with, reports = _run_island(order, 0, model, step, setting)
        peer.wait(timeout=120)
    after = _seconds_a_step(step, setting, between)
    exchanging = sum(report.seconds_exchanging for report in reports)
    seconds_in_all = seconds_with * (order["num_steps"] - order["num_warm_steps"])
    yield Figure("parameters", NUM_FRAGMENTS * fragment)
    yield Figure("fragments exchanged", len(reports), at_least=3, is_exact=True)
    yield Figure("ms a step, before and after", 500 * (before + after))
    yield Figure("share of the time that an exchange was under way", exchanging / seconds_in_all)
    yield Figure("Mbit/s that this island sent at most", config["rate_limit"])
    yield Figure("speed with the exchange over without", (before + after) / 2 / seconds_with, at_least=0.98)


def _make_model(order: dict[str, Any]) -> nn.Module:
    """As many equal blocks as fragments."""
    torch.manual_seed(0)
    width = order["width"]
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.Sequential(*(layer for _ in range(order["depth"]) for layer in (nn.Linear(width, width), nn.Tanh())))
        for _ in range(NUM_FRAGMENTS)
    )
    return model.to(order["device"])


def _make_step(model: nn.Module, order: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(order["rows"], order["width"], device=order["device"])

    def step() -> None:
        optimizer.zero_grad()
        values = data
        with torch.autocast(order["device"], torch.bfloat16):
            for layer in model.get_submodule("layers").children():
                values = layer(values)
        (values.float() - data).square().mean().backward()
        optimizer.step()

    return step


def _seconds_a_step(step: Callable[[], None], setting: Setting, num_steps: int) -> float:
    def run() -> None:
        for _ in range(num_steps):
            step()

    return setting.seconds(run, 2) / num_steps


def _run_island(
    order: dict[str, Any], number: int, model: nn.Module, step: Callable[[], None], setting: Setting
) -> tuple[float, list[Any]]:
    """Seconds a step, capture and landing of fragments included; and the rounds that ended."""
    session = open_session(DiLoCoConfig(**order["config"], island=number), IslandGroup())
    session.join(open_shards(model, None, 1), Path(order["folder"]) / f"streamed-{number}")
    reports: list[Any] = []
    begin = time.perf_counter()
    num_warm = order["num_warm_steps"]
    for number_of_step in range(order["num_steps"]):
        if number_of_step == num_warm:
            setting.synchronize()
            reports, begin = [], time.perf_counter()
        step()
        session.outer.count_step()
        if session.is_due():
            reports += session.advance()
    setting.synchronize()
    seconds = (time.perf_counter() - begin) / (order["num_steps"] - num_warm)
    reports += session.drain()
    session.leave(finished=True)
    return seconds, reports


def _peer(order: dict[str, Any]) -> None:
    """The other island, which has nothing to compute."""
    order["device"] = "cpu"
    torch.set_num_threads(1)
    _run_island(order, 1, _make_model(order), lambda: None, Setting("cpu", Path(order["folder"])))


if __name__ == "__main__":
    _peer(json.loads(sys.argv[1]))
