"""A run's figures in Prometheus's text format, by the library `prometheus-client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hf_diloco.dashboard.source import Look
from hf_diloco.report.island import TimeSplit, exchanged
from hf_diloco.status.models import RunStatus

if TYPE_CHECKING:
    from prometheus_client import Metric

    from hf_diloco.report.read import Run
    from hf_diloco.report.summary import Report

COUNTERS = ("bytes_sent", "bytes_received", "seconds")
HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

T = TypeVar("T")

Samples = Mapping[Any, float | None]
"""Values by the tuple of their label values."""


def exposition(look: Look) -> bytes:
    """Returns the body of `/metrics`."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Figures(look))
    return generate_latest(registry)


class _Figures:
    """Collects the figures of one look; leaves out unknown ones."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        look = self._look
        yield self._family("problems", "What could not be read at the last look.", {(): len(look.problems)})
        if look.run and look.report:
            yield from self._of_folder(look.run, look.report)
        if look.status:
            yield from self._of_store(look.status)

    def _of_folder(self, run: Run, report: Report) -> Iterator[Metric]:
        islands, now = {one.island: one for one in report.islands}, self._look.now
        yield self._family("eval_loss", "Evaluation loss of the outer weights, in nats.", {(): report.eval_loss})
        yield self._each("recorded_step", "Optimizer steps that the record goes to.", islands, lambda one: one.steps)
        yield self._each("rounds", "Rounds on record.", islands, lambda one: one.num_rounds)
        yield self._each("train_loss", "Last training loss, in nats.", islands, lambda one: one.train_loss)
        yield self._each("step", "Optimizer steps done.", now, lambda one: one.progress.step)
        yield self._each("progress_age_seconds", "Since it last said where it stands.", now, lambda one: one.age)
        speeds = {(str(name), one.progress.unit): one.progress.tokens_per_second for name, one in now.items()}
        yield self._family("speed", "Tokens or images a second, recently.", speeds, "island", "unit")
        records, payload = {one.island: one for one in run.islands}, "Payload of all rounds."
        yield self._each("bytes_sent", payload, records, lambda one: exchanged(one, "bytes_sent"))
        yield self._each("bytes_received", payload, records, lambda one: exchanged(one, "bytes_received"))
        times = {name: (one.seconds or TimeSplit()).parts() for name, one in islands.items()}
        seconds = {(str(name), part): spent for name, parts in times.items() for part, spent in parts.items()}
        yield self._family("seconds", "Where the time went.", seconds, "island", "part")

    def _of_store(self, status: RunStatus) -> Iterator[Metric]:
        islands = {one.island: one for one in status.islands}
        yield self._family("store_round", "Rounds committed.", {(): status.round})
        yield self._family("store_refused_objects", "Objects that were refused.", {(): len(status.refused)})
        stored = {(kind,): size for kind, size in status.stored.model_dump().items()}
        yield self._family("store_bytes", "What lies in the store.", stored, "kind")
        alive = "Whether its heartbeat was seen to change."
        yield self._each("store_island_alive", alive, islands, lambda one: one.presence == "alive")
        yield self._each("store_island_lag", "Rounds behind the newest committed one.", islands, lambda one: one.lag)
        speed = "Of the whole island, recently."
        yield self._each("store_island_tokens_per_second", speed, islands, lambda one: one.tokens_per_second)

    def _each(self, name: str, text: str, islands: Mapping[int, T], figure: Callable[[T], float | None]) -> Metric:
        """Returns a family with one value per island."""
        return self._family(name, text, {(str(number),): figure(one) for number, one in islands.items()}, "island")

    def _family(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
        family = kind(f"hf_diloco_{name}", text, labels=["run", *labels])
        for values, figure in samples.items():
            if figure is not None:
                family.add_metric([self._look.name, *values], float(figure))
        return family
