"""Estimates what each way of exchanging would cost a run, by `planning.equations` and `planning.simulator`; with
advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_diloco.methods.outer import find_method, make_method
from hf_diloco.planning import equations
from hf_diloco.planning.quantities import bit_rate
from hf_diloco.planning.scenario import Scenario
from hf_diloco.planning.simulator import Schedule, least_rate, least_sync_every, utilisation
from hf_diloco.utils import text

TARGET = 0.95
"""The utilisation that the advice aims for."""

STREAMING_FRAGMENTS, STREAMING_DELAY = 8, 5
"""Assumed by streaming rows if the run does not stream: a delay of 5 steps costs next to no quality (arXiv
2501.18512)."""

_MOST_SEARCHED = 100_000
_RATES = (1e5, 1e15)
_GRADIENTS = {"fp32": 4, "bf16": 2}
_SECONDS_A_DAY = 86_400

_BY_CHANGE = tuple((method, payload) for method in ("DiLoCo", "overlap") for payload in ("bf16", "int8", "fp4"))
"""Ordered by how little they change training."""

_MOST_STEPS = 1000
"""Most steps between rounds: beyond, quality falls (arXiv 2311.08105)."""

_DRAWN = {("every step", "bf16"), ("DiLoCo", "fp32"), ("streaming", "fp32"), ("overlap", "fp32"), ("overlap", "fp4")}
"""The ways that the figure shows besides the run's own."""

_NUM_POINTS = 60
_DECADES = 2.5  # of rates drawn on either side of the link's rate


@dataclass(frozen=True)
class Way:
    """A way of exchanging.

    Attributes:
        method: "every step", "DiLoCo", "streaming", "overlap", or "this run".
        payload: the number format on the wire.
        sync_every, num_fragments, delay: see `DiLoCoConfig`.
    """

    method: str
    payload: str
    sync_every: int
    num_fragments: int = 1
    delay: int = 0


@dataclass(frozen=True)
class Row:
    """The cost of a way for an island.

    Attributes:
        way: the way.
        bytes_sent, bytes_received: in a round of the whole model.
        exchange_seconds: of one exchange: of a fragment, or of the whole model.
        stall_seconds: during which training pauses in a round of the whole model.
        utilisation: share of the time in which the island computes.
        sync_every_for_target: the fewest steps between rounds that reach `TARGET`; None if no number does.
        rate_for_target: the lowest bits a second that reach it with the given `sync_every`; None if no rate does.
        bytes_sent_a_day: of training.
        price_a_day: of all islands' traffic, if the price is known.
        price: the same, for the whole run.
    """

    way: Way
    bytes_sent: float
    bytes_received: float
    exchange_seconds: float
    stall_seconds: float
    utilisation: float
    sync_every_for_target: int | None
    rate_for_target: float | None
    bytes_sent_a_day: float
    price_a_day: float | None
    price: float | None


@dataclass(frozen=True)
class Estimate:
    """All rows, the run's own first.

    Attributes:
        scenario: the input.
        rows: one for each way.
        memory: of a rank.
        advice: one sentence.
    """

    scenario: Scenario
    rows: tuple[Row, ...]
    memory: equations.Memory
    advice: str

    @property
    def own(self) -> Row:
        """The row of the run as it is set up."""
        return self.rows[0]

    def as_dict(self) -> dict[str, Any]:
        """Returns values for JSON: names with units in SI, and None for unknown values."""
        scenario = self.scenario
        return {
            "name": scenario.name or None,
            "num_parameters": scenario.num_parameters,
            "num_islands": scenario.num_islands,
            "link": asdict(scenario.link),
            "step_seconds": scenario.step_seconds,
            "target": TARGET,
            "assumed": list(scenario.assumed),
            "rows": [{**asdict(row.way), **{k: v for k, v in asdict(row).items() if k != "way"}} for row in self.rows],
            "memory": asdict(self.memory),
            "advice": self.advice,
        }


def make_estimate(scenario: Scenario) -> Estimate:
    """Estimates the run as it is set up, and all other ways."""
    rows = tuple(estimate_row(scenario, way) for way in (own_way(scenario), *all_ways(scenario)))
    return Estimate(scenario, rows, memory_of(scenario), advise(scenario, rows))


def own_way(scenario: Scenario) -> Way:
    """Returns the way of the run's own settings."""
    diloco = scenario.diloco
    return Way("this run", diloco.payload, diloco.sync_every, diloco.num_fragments, diloco.delay)


def all_ways(scenario: Scenario) -> Iterator[Way]:
    """Yields data parallelism, and DiLoCo, streaming, and streaming behind the inner steps with every payload."""
    from hf_diloco.codecs import CODECS

    diloco = scenario.diloco
    fragments = diloco.num_fragments if diloco.num_fragments > 1 else min(STREAMING_FRAGMENTS, diloco.sync_every)
    delay = min(diloco.fragment_sync_delay or STREAMING_DELAY, diloco.sync_every - 1)
    yield from (Way("every step", payload, 1) for payload in _GRADIENTS)
    yield from (Way("DiLoCo", payload, diloco.sync_every) for payload in CODECS)
    yield from (Way("streaming", payload, diloco.sync_every, fragments) for payload in CODECS)
    yield from (Way("overlap", payload, diloco.sync_every, fragments, delay) for payload in CODECS)


def exchange_of(scenario: Scenario, way: Way) -> equations.Exchange:
    """Returns one exchange of one fragment."""
    if way.method == "every step":
        return equations.ring_all_reduce(
            scenario.num_parameters * _GRADIENTS[way.payload], scenario.num_islands, scenario.link
        )
    from hf_diloco.codecs import find_codec
    from hf_diloco.transport.base import averaged_by_all

    codec = find_codec(way.payload)
    num_values = -(-scenario.num_parameters // way.num_fragments)
    num_bytes = codec.num_bytes(num_values)
    by_all = averaged_by_all(scenario.num_islands, codec)
    exchange = equations.outer_exchange(num_bytes, scenario.num_islands, scenario.link, scenario.way, by_all)
    if num_bytes >= equations.OUTER_BYTES * num_values or not exchange.bytes_sent:
        return exchange
    return replace(exchange, latency=exchange.latency + equations.CODING_SECONDS * num_values / scenario.num_ranks)


def utilisation_of(scenario: Scenario, way: Way) -> float:
    """Returns the share of its time in which an island computes."""
    exchange = exchange_of(scenario, way)
    schedule = Schedule(way.sync_every, way.num_fragments, way.delay, by_layer=way.method == "every step")
    times = exchange.link_seconds, exchange.latency
    return utilisation(scenario.step_seconds, schedule, *times, scenario.num_layers)


def estimate_row(scenario: Scenario, way: Way) -> Row:
    """Estimates the cost of a way."""
    exchange = exchange_of(scenario, way)
    share = utilisation_of(scenario, way)
    computing = way.sync_every * scenario.step_seconds
    sent = way.num_fragments * exchange.bytes_sent
    a_day = sent * _SECONDS_A_DAY * share / computing
    return Row(
        way=way,
        bytes_sent=sent,
        bytes_received=way.num_fragments * exchange.bytes_received,
        exchange_seconds=exchange.seconds,
        stall_seconds=max(0.0, computing * (1 / share - 1)),
        utilisation=share,
        sync_every_for_target=_sync_every_for_target(scenario, way),
        rate_for_target=least_rate(TARGET, lambda rate: utilisation_of(scenario.with_link(rate), way), *_RATES),
        bytes_sent_a_day=a_day,
        price_a_day=_price(scenario, a_day),
        price=_price(scenario, sent * (scenario.max_steps or 0) / way.sync_every) if scenario.max_steps else None,
    )


def memory_of(scenario: Scenario) -> equations.Memory:
    """Estimates the memory of one rank of the run."""
    diloco, size = scenario.diloco, scenario.num_parameters
    accelerator, host = equations.model_memory(
        size, scenario.largest_layer, scenario.num_ranks, scenario.stage, scenario.offload
    )
    if not diloco.enabled:
        return equations.Memory(accelerator, host, 0.0)
    num_vectors = len(make_method(diloco).vectors)
    outer = equations.outer_memory(
        size, scenario.num_ranks, num_vectors, bool(diloco.feedback_decay), diloco.num_fragments
    )
    return equations.Memory(accelerator, host, outer)


def _sync_every_for_target(scenario: Scenario, way: Way) -> int | None:
    if way.method == "every step":
        return None
    least = max(way.num_fragments, way.delay + 1)
    return least_sync_every(
        TARGET, lambda n: utilisation_of(scenario, replace(way, sync_every=n)), least, _MOST_SEARCHED
    )


def _price(scenario: Scenario, bytes_sent: float) -> float | None:
    """Returns the price of all islands' traffic."""
    return None if scenario.price is None else bytes_sent * scenario.num_islands * scenario.price / 1e9


def advise(scenario: Scenario, rows: Sequence[Row]) -> str:
    """Recommends the smallest change with which the islands compute 95 % of the time."""
    own, others = rows[0], {(row.way.method, row.way.payload): row for row in rows[1:]}
    if scenario.num_islands == 1:
        return "One island exchanges nothing: any link will do."
    every_step = others["every step", "bf16"]
    if every_step.utilisation >= TARGET:
        return (
            "Exchange gradients at every step, without an outer loop: plain data parallelism computes "
            f"{text.share(every_step.utilisation)} of the time on this link."
        )
    if own.utilisation >= TARGET:
        return f"Keep these settings: the islands compute {text.share(own.utilisation)} of the time."
    wider = scenario
    if scenario.way != "bucket":  # if the number of connections can be chosen, as many as fill the link
        wider = replace(scenario, link=replace(scenario.link, connections=scenario.link.useful_connections))
    begin = f"As it is set up, the islands compute {text.share(own.utilisation)} of the time"
    streams = find_method(scenario.diloco.method).streams
    names = [name for name in _BY_CHANGE if streams or name[0] == "DiLoCo"]
    changed = [estimate_row(wider, way) for way in (own.way, *(others[name].way for name in names))]
    for row in changed:
        if row.utilisation >= TARGET:
            return f"{begin}; set {_settings(row, wider)} for {text.share(row.utilisation)}."
    enough = [(steps, row) for row in changed if (steps := row.sync_every_for_target) and steps <= _MOST_STEPS]
    if enough:
        steps, row = min(enough, key=lambda one: one[0])  # among equals the smallest change
        return f"{begin}; set {_settings(row, wider)} and sync_every: {steps} for {text.share(TARGET)}."
    rates = [(rate, row) for row in changed if (rate := row.rate_for_target)]
    needed = ""
    if rates:
        rate, row = min(rates, key=lambda one: one[0])
        needed = f": {_settings(row, wider)} needs {bit_rate(rate)}"
    return f"{begin}; no setting reaches {text.share(TARGET)} on this link{needed}."


def _settings(row: Row, scenario: Scenario) -> str:
    """Formats a row's settings as in a run file."""
    settings = [f"payload: {row.way.payload}"]
    if scenario.link.connections > scenario.diloco.connections:
        settings.append(f"connections: {scenario.link.connections}")
    if row.way.num_fragments > 1:
        settings.append(f"num_fragments: {row.way.num_fragments}")
    if row.way.delay:
        settings.append(f"fragment_sync_delay: {row.way.delay}")
    return ", ".join(settings)


def draw(estimate: Estimate, path: Path) -> None:
    """Draws the run, data parallelism, DiLoCo, streaming and overlap with a few payloads; see `check_picture`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scenario = estimate.scenario
    here = scenario.link.bits_per_second
    rates = [here * 10 ** (_DECADES * (2 * point / _NUM_POINTS - 1)) for point in range(_NUM_POINTS + 1)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    others = [row.way for row in estimate.rows[1:] if (row.way.method, row.way.payload) in _DRAWN]
    for way in (own_way(scenario), *others):
        shares = [100 * utilisation_of(scenario.with_link(rate), way) for rate in rates]
        own = way.method == "this run"
        axes.plot(rates, shares, label=f"{way.method}, {way.payload}", linewidth=3 if own else 1.5)
    axes.axvline(here, color="0.5", linestyle=":", label=bit_rate(here))
    axes.axhline(100 * TARGET, color="0.8", linestyle="--")
    axes.set(xscale="log", xlabel="bits a second of each island's link", ylabel="utilisation, %", ylim=(0, 101))
    axes.set_title(
        f"{scenario.name or 'estimate'}: {scenario.num_islands} islands, round trip {scenario.link.rtt:g} s"
    )
    axes.legend()
    figure.savefig(path, dpi=150)
