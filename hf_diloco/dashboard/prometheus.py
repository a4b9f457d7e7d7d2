"""A run's figures as Prometheus reads them, by the library `prometheus-client`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_diloco.dashboard.source import Look
from hf_diloco.report.island import TimeSplit, exchanges, total
from hf_diloco.status.models import RunStatus

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from hf_diloco.report.read import IslandRun, Run
    from hf_diloco.report.summary import Report

HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

Samples = Mapping[Any, float | None]
"""Values by the tuple of what the labels are."""


def exposition(look: Look) -> bytes:
    """What `/metrics` answers."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Figures(look))
    return generate_latest(registry)


class _Figures:
    """Collects the figures of one look; those that are not known are left out."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        look = self._look
        yield self._gauge("problems", "What could not be read at the last look.", {(): len(look.problems)})
        if look.run and look.report:
            yield from self._of_folder(look.run, look.report)
        if look.status:
            yield from self._of_store(look.status)

    def _of_folder(self, run: Run, report: Report) -> Iterator[Metric]:
        islands = {(str(one.island),): one for one in report.islands}
        now = {(str(number),): entry for number, entry in self._look.now.items()}
        yield self._gauge("eval_loss", "Evaluation loss of the outer weights, in nats.", {(): report.eval_loss})
        steps = {name: one.steps for name, one in islands.items()}
        yield self._gauge("recorded_step", "Optimizer steps that the record goes to.", steps, "island")
        rounds = {name: one.num_rounds for name, one in islands.items()}
        yield self._gauge("rounds", "Rounds on record.", rounds, "island")
        losses = {name: one.train_loss for name, one in islands.items()}
        yield self._gauge("train_loss", "Last training loss, in nats.", losses, "island")
        current = {name: one.progress.step for name, one in now.items()}
        yield self._gauge("step", "Optimizer steps done.", current, "island")
        ages = {name: one.age for name, one in now.items()}
        yield self._gauge("progress_age_seconds", "Since it last said where it stands.", ages, "island")
        speeds = {(*name, one.progress.unit): one.progress.tokens_per_second for name, one in now.items()}
        yield self._gauge("speed", "Tokens or images a second, recently.", speeds, "island", "unit")
        for kind in ("bytes_sent", "bytes_received"):
            sums = {(str(island.island),): _everything(island, kind) for island in run.islands}
            yield self._counter(kind, "Payload of all rounds.", sums, "island")
        times = {name: (one.seconds or TimeSplit()).parts() for name, one in islands.items()}
        seconds = {(*name, part): spent for name, parts in times.items() for part, spent in parts.items()}
        yield self._counter("seconds", "Where the time went.", seconds, "island", "part")

    def _of_store(self, status: RunStatus) -> Iterator[Metric]:
        islands = {(str(one.island),): one for one in status.islands}
        yield self._gauge("store_round", "Rounds committed.", {(): status.round})
        yield self._gauge("store_refused_objects", "Objects that were refused.", {(): len(status.refused)})
        stored = {(kind,): size for kind, size in status.stored.model_dump().items()}
        yield self._gauge("store_bytes", "What lies in the store.", stored, "kind")
        alive = {name: one.presence == "alive" for name, one in islands.items()}
        yield self._gauge("store_island_alive", "Whether its sign of life was seen to change.", alive, "island")
        lag = {name: one.lag for name, one in islands.items()}
        yield self._gauge("store_island_lag", "Rounds behind the newest committed one.", lag, "island")
        speeds = {name: one.tokens_per_second for name, one in islands.items()}
        yield self._gauge("store_island_tokens_per_second", "Of the whole island, recently.", speeds, "island")

    def _gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily(f"hf_diloco_{name}", text, labels=["run", *labels]), samples)

    def _counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily(f"hf_diloco_{name}", text, labels=["run", *labels]), samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
        for labels, value in samples.items():
            if value is not None:
                family.add_metric([self._look.name, *labels], float(value))
        return family


def _everything(island: IslandRun, kind: str) -> int | None:
    """All bytes of an island. What a resume threw away counts too, so that the figure never falls."""
    return total([0, *(getattr(one, kind) for section in island.sections for one in exchanges(section))])
