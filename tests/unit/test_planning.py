"""`hf-diloco estimate`: its equations, its simulated time line beside published figures, and the command."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st
from typer.testing import CliRunner

from benchmarks.planning import METHODS, MODELS, PUBLISHED, TOLERANCE, Method, Model, simulate
from hf_diloco.apps.lm.runfile import DiLoCoBlock
from hf_diloco.cli.main import app
from hf_diloco.codecs import CODECS
from hf_diloco.errors import ConfigError
from hf_diloco.planning.equations import (
    CODING_SECONDS,
    FIRST_WINDOW_BYTES,
    TCP_SHARE,
    TRIPS,
    WINDOW_BYTES,
    Link,
    model_memory,
    outer_exchange,
    outer_memory,
    ring_all_reduce,
)
from hf_diloco.planning.estimate import TARGET, Way, estimate_row, exchange_of, make_estimate, own_way
from hf_diloco.planning.quantities import bit_rate, duration, parse_count, parse_rate, parse_seconds
from hf_diloco.planning.scenario import Scenario
from hf_diloco.planning.simulator import Schedule, least_rate, least_sync_every, utilisation
from hf_diloco.transport.base import bytes_to_send
from tests.processes import ROOT, run


def make_scenario(num_parameters: int = 10**9, rate: float = 1e9, rtt: float = 0.0, **diloco: Any) -> Scenario:
    block = DiLoCoBlock(**{"num_islands": 2, "island": 0, "sync_every": 100, **diloco})
    return Scenario("", num_parameters, 10**7, 24, block, Link(rate, rtt), 1.0)


# The simulated time line


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_simulator_reproduces_the_published_bit_rates(model: Model, method: Method) -> None:
    cells = simulate(model, method)
    assert [cell.published for cell in cells] == list(PUBLISHED[model.name, method.name])
    assert not [cell for cell in cells if cell.factor > TOLERANCE]


def test_the_table_has_15_rows() -> None:
    assert len(PUBLISHED) == len(MODELS) * len(METHODS) == 15


def test_training_that_waits_for_each_exchange() -> None:
    assert utilisation(0.5, Schedule(10), 5.0) == pytest.approx(0.5)
    assert utilisation(0.5, Schedule(10), 2.0, latency=3.0) == pytest.approx(0.5)
    assert utilisation(0.5, Schedule(10, num_fragments=5), 1.0) == pytest.approx(0.5)


def test_steps_that_go_on_hide_as_much_as_they_take() -> None:
    assert utilisation(0.5, Schedule(10, delay=4), 2.0) == pytest.approx(1.0)
    assert utilisation(0.5, Schedule(10, delay=4), 7.0) == pytest.approx(0.5)


def test_a_link_carries_one_exchange_at_a_time() -> None:
    busy = utilisation(1.0, Schedule(4, num_fragments=4, delay=3), 2.0)
    assert busy == pytest.approx(0.5), "with an exchange of 2 s after each step of 1 s"
    every_step = Schedule(4, num_fragments=4, delay=3)
    assert utilisation(1.0, every_step, 0.5, latency=0.4) == pytest.approx(1.0)
    assert utilisation(1.0, every_step, 0.9, latency=1.1) == pytest.approx(0.5), "rounds follow one another"


def test_data_parallelism_hides_what_fits_behind_the_backward_pass() -> None:
    every_step = Schedule(by_layer=True)
    hidden = utilisation(1.0, every_step, 0.5, num_layers=100)
    assert hidden == pytest.approx(1 / 1.005), "only the first layer's share is waited for"
    assert utilisation(1.0, every_step, 10.0, num_layers=100) == pytest.approx(1 / (1 / 3 + 0.02 / 3 + 10), rel=1e-3)


@settings(max_examples=40)
@given(
    sync_every=st.integers(4, 60),
    fragments=st.integers(1, 4),
    delay=st.integers(0, 3),
    seconds=st.floats(0, 100),
    by_layer=st.booleans(),
)
@example(sync_every=4, fragments=4, delay=2, seconds=1.125, by_layer=False)
def test_utilisation_is_a_share_and_falls_with_the_exchange(
    sync_every: int, fragments: int, delay: int, seconds: float, by_layer: bool
) -> None:
    schedule = Schedule(sync_every, fragments, delay, by_layer)
    share = utilisation(1.0, schedule, seconds, num_layers=8)
    assert 0 < share <= 1 + 1e-9
    assert utilisation(1.0, schedule, 2 * seconds, num_layers=8) <= share + 1e-9
    measured = sync_every * max(2, -(-10 // sync_every))
    carried = measured * fragments // sync_every - (delay + 1)  # so many may be under way at the end, and none before
    bound = measured / max(measured, carried * seconds)
    assert share <= bound + 1e-9, "the link is never busy for longer than there is time"


def test_exchanges_fall_where_the_rounds_of_a_run_do() -> None:
    from hf_diloco.outer.schedule import step_of

    config = DiLoCoBlock(num_islands=2, island=0, sync_every=100, num_fragments=8)
    schedule, step, found = Schedule(100, 8), 0, []
    for _ in range(20):
        step, _fragment = schedule.next_exchange(step + 1)
        found.append(step)
    assert found == [step_of(config, number) for number in range(1, 21)]


def test_the_least_that_reaches() -> None:
    assert least_rate(0.5, lambda rate: rate / 100, 1, 1000) == pytest.approx(50, rel=0.011)
    assert least_rate(0.5, lambda rate: 0.4, 1, 1000) is None
    assert least_sync_every(0.95, lambda steps: steps / (steps + 5), 1, 10_000) == 95
    assert least_sync_every(0.95, lambda steps: 0.2, 1, 10_000) is None


# Equations


def test_bytes_are_those_that_the_mesh_would_send() -> None:
    for name, codec in CODECS.items():
        for num_islands in (2, 3, 8):
            way = Way("DiLoCo", name, 100)
            exchange = exchange_of(make_scenario(8 << 20, num_islands=num_islands), way)
            assert exchange.bytes_sent == pytest.approx(bytes_to_send(8 << 20, num_islands, codec), rel=1e-3)


def test_seconds_of_a_link() -> None:
    assert Link(8e9).seconds(1e9) == pytest.approx(1 / TCP_SHARE)
    far = Link(1e9, 0.1, restarts=False)
    assert far.seconds(1e9) == pytest.approx(1e9 / (WINDOW_BYTES / 0.1)), "one connection cannot fill it"
    assert Link(1e9, 0.1, 8, restarts=False).seconds(1e9) == pytest.approx(8 / TCP_SHARE)
    assert far.seconds(1e9, num_peers=8) == pytest.approx(8 / TCP_SHARE), "eight to each of as many islands do as well"
    assert [link.useful_connections for link in (far, Link(1e6, 0.1, 3), Link(1e12, 0.1))] == [5, 3, 64]


def test_far_islands_are_told_to_open_connections() -> None:
    far = make_scenario(rate=1e9, rtt=0.1, payload="int4", sync_every=160)
    assert estimate_row(far, own_way(far)).rate_for_target is None, "however fast the link"
    assert "set payload: int4, connections: 5 for" in make_estimate(far).advice


def test_slow_start_costs_round_trips() -> None:
    link = Link(200e6, 0.05)
    rate = TCP_SHARE * 200e6 / 8
    windows = [FIRST_WINDOW_BYTES * 2**n for n in range(7)]
    assert windows[-1] < rate * 0.05 <= 2 * windows[-1]
    assert link.seconds(100e6) == pytest.approx(7 * 0.05 + (100e6 - sum(windows)) / rate)
    assert link.seconds(1000) < 0.001


def test_ways_of_an_exchange() -> None:
    link = Link(8e6 / TCP_SHARE)
    assert outer_exchange(1e6, 4, link, "direct", False).bytes_sent == pytest.approx(1.5e6)
    assert outer_exchange(1e6, 4, link, "direct", True).bytes_sent == pytest.approx(3e6)
    bucket = outer_exchange(1e6, 4, link, "bucket", False)
    assert (bucket.bytes_sent, bucket.bytes_received) == (1e6, 3e6)
    assert bucket.seconds == pytest.approx(4), "first one, then the other"
    assert outer_exchange(1e6, 1, link, "direct", False).seconds == 0
    ring = ring_all_reduce(1e6, 4, replace(link, rtt=0.1))
    assert ring.bytes_sent == pytest.approx(1.5e6)
    assert ring.seconds == pytest.approx(1.5 + 6 * 0.05), "six stages, with half a round trip each"


@pytest.mark.parametrize(
    ("diloco", "trips"),
    [
        ({}, 2),
        ({"num_islands": 4}, 2.5),
        ({"num_islands": 4, "payload": "sign"}, 2),
        ({"rendezvous": "tcp://a:1", "min_islands": 1}, TRIPS["island 0"]),
        ({"rendezvous": "file:///a", "exchange": "mesh"}, TRIPS["store"]),
        ({"rendezvous": "file:///a"}, TRIPS["bucket"]),
    ],
)
def test_trips_of_an_exchange(diloco: dict[str, Any], trips: float) -> None:
    far, near = make_scenario(rtt=0.1, **diloco), make_scenario(rtt=0.0, **diloco)
    coding = exchange_of(near, own_way(near)).latency
    assert exchange_of(far, own_way(far)).latency - coding == pytest.approx(0.1 * trips)


@pytest.mark.parametrize(("payload", "num_ranks"), [("fp32", 1), ("int8", 1), ("fp4", 4)])
def test_each_rank_codes_its_own_values(payload: str, num_ranks: int) -> None:
    near = replace(make_scenario(rtt=0.0, payload=payload), num_ranks=num_ranks)
    seconds = 0.0 if payload == "fp32" else CODING_SECONDS * near.num_parameters / num_ranks
    assert exchange_of(near, own_way(near)).latency == pytest.approx(seconds)


def test_memory_of_model_states() -> None:
    none = (False, False)
    assert model_memory(10**9, 10**7, 4, None, none) == (16e9, 0)
    assert model_memory(10**9, 10**7, 4, 0, none) == (16e9, 0)
    assert model_memory(10**9, 10**7, 4, 1, none) == (7e9, 0)
    accelerator, _ = model_memory(10**9, 10**7, 4, 2, none)
    assert accelerator == pytest.approx(2e9 + 18e9 / 4)
    accelerator, host = model_memory(10**9, 10**7, 4, 3, (True, True))
    assert accelerator == pytest.approx(4e7)
    assert host == pytest.approx(18e9 * 1.5 / 4)


def test_memory_of_the_outer_state() -> None:
    diloco = outer_memory(1e9, 1, 1, False, 1) - outer_memory(0, 1, 1, False, 1)
    assert diloco == pytest.approx(12e9), "outer parameters, momentum, and what is exchanged"
    streaming = outer_memory(1e9, 1, 1, False, 4) - outer_memory(0, 1, 1, False, 4)
    assert streaming == pytest.approx(9e9), "one fragment is exchanged at a time"
    assert outer_memory(1e9, 4, 1, True, 1) - outer_memory(0, 4, 1, True, 1) == pytest.approx(5e9)


# Quantities


@pytest.mark.parametrize(("text", "value"), [("1b", 10**9), ("350M", 350_000_000), ("7e9", 7 * 10**9), ("1.5k", 1500)])
def test_counts(text: str, value: int) -> None:
    assert parse_count(text, "--params") == value


@pytest.mark.parametrize(
    ("text", "value"), [("200M", 2e8), ("10G", 1e10), ("1.5Gbit/s", 1.5e9), ("100 Mbps", 1e8), ("1e9", 1e9)]
)
def test_rates(text: str, value: float) -> None:
    assert parse_rate(text, "--bandwidth") == value


@pytest.mark.parametrize(("text", "value"), [("80ms", 0.08), ("1.5s", 1.5), ("2min", 120), ("0s", 0), ("50us", 5e-5)])
def test_times(text: str, value: float) -> None:
    assert parse_seconds(text, "--rtt") == pytest.approx(value)


def test_what_is_no_quantity() -> None:
    for text in ("", "b", "-1b", "0", "1x", "nan", "1e99"):
        with pytest.raises(ConfigError, match="--params"):
            parse_count(text, "--params")
    for text in ("", "200MB", "fast", "0", "200", "-5M", "10MM"):
        with pytest.raises(ConfigError, match="--bandwidth"):
            parse_rate(text, "--bandwidth")
    for text in ("80", "ms", "-1s", "1 day", "inf s"):
        with pytest.raises(ConfigError, match="--rtt"):
            parse_seconds(text, "--rtt")


def test_quantities_as_text() -> None:
    assert [bit_rate(value) for value in (2e8, 1.5e9, 999)] == ["200 Mbit/s", "1.5 Gbit/s", "999 bit/s"]
    assert bit_rate(999_600) == "1 Mbit/s", "as it is rounded"
    assert [duration(value) for value in (0.08, 0.0, 2.0)] == ["80 ms", "0 s", "2 s"]


# The estimate


def test_what_reaches_the_target_is_what_the_row_says() -> None:
    scenario = make_scenario(rate=1e9)
    row = estimate_row(scenario, Way("DiLoCo", "bf16", 100))
    assert row.sync_every_for_target is not None
    assert row.rate_for_target is not None
    at = estimate_row(scenario, Way("DiLoCo", "bf16", row.sync_every_for_target)).utilisation
    below = estimate_row(scenario, Way("DiLoCo", "bf16", row.sync_every_for_target - 1)).utilisation
    assert below < TARGET <= at
    assert estimate_row(scenario.with_link(row.rate_for_target), row.way).utilisation >= TARGET
    assert row.stall_seconds == pytest.approx(row.exchange_seconds)
    assert row.utilisation == pytest.approx(100 / (100 + row.exchange_seconds))


@pytest.mark.parametrize(
    ("rate", "diloco", "sentence"),
    [
        (1e15, {}, "Exchange gradients at every step"),
        (10e9, {}, "Keep these settings"),
        (5e9, {}, "set payload: bf16 for"),
        (3e9, {}, "set payload: int8 for"),
        (1e6, {}, "no setting reaches"),
        (10e9, {"num_islands": 1}, "One island exchanges nothing"),
        (200e6, {}, "fragment_sync_delay: 5"),
        (200e6, {"method": "slowmo"}, "set payload: fp4 and sync_every"),
    ],
)
def test_advice(rate: float, diloco: dict[str, Any], sentence: str) -> None:
    assert sentence in make_estimate(make_scenario(rate=rate, **diloco)).advice


def test_advice_is_the_way_that_needs_the_fewest_steps_between_rounds() -> None:
    short_steps = replace(make_scenario(10**6, rate=200e6, rtt=0.16, sync_every=5), step_seconds=0.03)
    estimate = make_estimate(short_steps)
    steps = {(row.way.method, row.way.payload): row.sync_every_for_target or 0 for row in estimate.rows}
    assert steps["overlap", "fp4"] > 1000 > steps["DiLoCo", "fp4"], "each fragment takes round trips"
    assert "; set payload: fp4, connections: 2 and sync_every: " in estimate.advice


# The command


def estimate(*arguments: str | Path) -> str:
    program = [sys.executable, "-m", "hf_diloco.cli", "estimate"]
    return run([*program, *arguments], env={"NO_COLOR": "1", "COLUMNS": "100"}).output


def test_estimate_by_numbers() -> None:
    output = estimate("--params", "1b", "--islands", "4", "--bandwidth", "200M", "--rtt", "80ms")
    assert "1.00B parameters, 4 islands" in output
    assert "a step takes 1 s (--step-time)" in output
    rows = [line for line in output.splitlines() if any(f" {payload} " in line for payload in CODECS)]
    assert len(rows) == 1 + 2 + 3 * len(CODECS)
    assert "set payload: fp4, num_fragments: 8, fragment_sync_delay: 5" in output


def test_estimate_of_one_island() -> None:
    output = estimate("--params", "1b", "--islands", "1")
    assert "1.00B parameters, 1 island of 1 rank" in output
    assert "GB on the accelerator" in output
    assert "Nothing travels between islands, as there is one: --islands 2" in output
    assert "utilisation" not in output


@pytest.mark.distributed
def test_estimate_of_a_run_file(tmp_path: Path) -> None:
    picture = tmp_path / "estimate.svg"
    path = ROOT / "configs" / "quickstart.yaml"
    output = estimate(
        path,
        f"output={tmp_path}",
        "--bandwidth",
        "10M",
        "--step-time",
        "200ms",
        "--price",
        "2",
        "--draw",
        picture,
        "--json",
    )
    found = json.loads(output[: output.rindex("}") + 1])
    own = found["rows"][0]
    assert found["num_parameters"] == 1_066_112
    assert own["method"] == "this run"
    assert own["bytes_sent"] == 4 * 1_066_112
    assert own["price"] == pytest.approx(60 * 2 * 4 * 1_066_112 * 2 / 1e9)
    assert found["assumed"] == ["round trips of 50ms (--rtt)"]
    assert "<svg" in picture.read_text()


@pytest.mark.distributed
def test_a_run_with_a_record_has_its_step_time(tmp_path: Path) -> None:
    folder = tmp_path / "known" / "island-0"
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    # It begins at step 100, what was before left behind, and resumes at 115, in the middle of a round.
    for first, end, seconds in ((100, 110, 5.0), (110, 120, 5.0), (115, 120, 2.5), (120, 130, 5.0)):
        if first % 10 or not lines:
            lines.append({"event": "start", "time": 0, "step": first})
        lines.append({"event": "sync", "time": 1, "step": end, "round": end // 10, "seconds_computing": seconds})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_file = tmp_path / "run.yaml"
    values = {"name": "known", "output": str(tmp_path), "training": {"max_steps": 30}}
    values["diloco"] = {"num_islands": 2, "rate_limit": 100}
    run_file.write_text(yaml.safe_dump(values))
    found = json.loads(estimate(run_file, "--bandwidth", "1G", "--rtt", "1ms", "--json"))
    assert found["step_seconds"] == pytest.approx(0.5)
    assert found["link"]["bits_per_second"] == 1e8, "no more than the run may send"
    assert not found["assumed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a run file, or --params"),
        (["--params", "many"], "--params many"),
        (["--params", "1b", "--bandwidth", "200MB"], "bits, not bytes"),
        (["--params", "1b", "--payload", "int7"], "payload"),
        (["--params", "1b", "--step-time", "0s"], "--step-time 0s"),
        (["--params", "1b", "--step-time", "1e-300s"], "--step-time 1e-300s"),
        (["--params", "1b", "--price", "inf"], "--price inf"),
        (["--params", "1b", "--price", "1e300"], "--price 1e+300"),
        (["--params", "1b", "--draw", "x.txt"], "x.txt"),
        (["missing.yaml"], "missing.yaml"),
        (["--params", "1b", "diloco.sync_every=3"], "diloco.sync_every=3 is a setting"),
        ([str(ROOT / "configs/quickstart.yaml"), "--islands", "4"], "--islands"),
        ([str(ROOT / "configs/vision/quickstart.yaml")], "hf-diloco topology"),
    ],
)
def test_wrong_commands_say_what_to_do(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        CliRunner().invoke(app, ["estimate", *arguments], catch_exceptions=False)
