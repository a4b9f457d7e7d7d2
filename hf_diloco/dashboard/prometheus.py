"""A run's figures as Prometheus reads them, by the library `prometheus-client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_diloco.dashboard.source import Look
from hf_diloco.report.island import TimeSplit
from hf_diloco.status.models import RunStatus
from hf_diloco.utils.extras import need

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from hf_diloco.report.summary import Report

HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

Samples = list[tuple[tuple[str, ...], float | None]]


def check_installed() -> None:
    """Raises `ConfigError` where the library is not installed."""
    need("--prometheus", "prometheus_client")


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
        yield self._gauge("problems", "What could not be read at the last look.", [((), len(look.problems))])
        if look.report:
            yield from self._of_folder(look.report)
        if look.status:
            yield from self._of_store(look.status)

    def _of_folder(self, report: Report) -> Iterator[Metric]:
        islands = [((str(island.island),), island) for island in report.islands]
        yield self._gauge("eval_loss", "Evaluation loss of the outer weights, in nats.", [((), report.eval_loss)])
        steps: Samples = [(label, island.steps) for label, island in islands]
        yield self._gauge("recorded_step", "Optimizer steps that the record goes to.", steps, "island")
        rounds: Samples = [(label, island.num_rounds) for label, island in islands]
        yield self._gauge("rounds", "Rounds on record.", rounds, "island")
        losses: Samples = [(label, island.train_loss) for label, island in islands]
        yield self._gauge("train_loss", "Last training loss, in nats.", losses, "island")
        now = [((str(number),), entry) for number, entry in self._look.now.items()]
        current: Samples = [(label, entry.progress.step) for label, entry in now]
        yield self._gauge("step", "Optimizer steps done.", current, "island")
        ages: Samples = [(label, entry.age) for label, entry in now]
        yield self._gauge("progress_age_seconds", "Since it last said where it stands.", ages, "island")
        speeds: Samples = [((*label, entry.progress.unit), entry.progress.tokens_per_second) for label, entry in now]
        yield self._gauge("speed", "Tokens or images a second, recently.", speeds, "island", "unit")
        for name in ("bytes_sent", "bytes_received"):
            # What a resume threw away counts too, so that the figure never falls.
            known = [(label, getattr(island, name), island.bytes_repeated or 0) for label, island in islands]
            sums: Samples = [(label, None if value is None else value + again) for label, value, again in known]
            yield self._counter(name, "Payload of all rounds.", sums, "island")
        times = [(label, (island.seconds or TimeSplit()).parts()) for label, island in islands]
        seconds: Samples = [((*label, part), spent) for label, parts in times for part, spent in parts.items()]
        yield self._counter("seconds", "Where the time went.", seconds, "island", "part")

    def _of_store(self, status: RunStatus) -> Iterator[Metric]:
        yield self._gauge("store_round", "Rounds committed.", [((), status.round)])
        yield self._gauge("store_refused_objects", "Objects that were refused.", [((), len(status.refused))])
        stored: Samples = [((kind,), size) for kind, size in status.stored.model_dump().items()]
        yield self._gauge("store_bytes", "What lies in the store.", stored, "kind")
        islands = [((str(island.island),), island) for island in status.islands]
        alive: Samples = [(label, island.presence == "alive") for label, island in islands]
        yield self._gauge("store_island_alive", "Whether its sign of life was seen to change.", alive, "island")
        lag: Samples = [(label, island.lag) for label, island in islands]
        yield self._gauge("store_island_lag", "Rounds behind the newest committed one.", lag, "island")
        speeds: Samples = [(label, island.tokens_per_second) for label, island in islands]
        yield self._gauge("store_island_tokens_per_second", "Of the whole island, recently.", speeds, "island")

    def _gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily(f"hf_diloco_{name}", text, labels=["run", *labels]), samples)

    def _counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily(f"hf_diloco_{name}", text, labels=["run", *labels]), samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
        for labels, value in samples:
            if value is not None:
                family.add_metric([self._look.name, *labels], float(value))
        return family
