"""What a ranking server counts: for Prometheus, for ``/health``, and for the console.

What it decides
    A quantile is that of the last ``WINDOW`` answered requests, from the head's arrival to the
    scores, by nearest rank. Histograms cover all requests.

Kept true (tests/unit/serve/ranking/test_server.py)
    Counts are those of the requests that were sent; quantiles are those of their seconds.
"""

import math
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from equipoise.serve.ranking.batcher import Batcher

WINDOW = 8_192
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_CANDIDATES = (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
_QUANTILES = (0.5, 0.99)
_REASONS = ("draining", "connections", "queue_full", "key", "invalid", "failed")


class RankMetrics:
    """All metrics of one server."""

    def __init__(self, batcher: Batcher) -> None:
        self._registry = CollectorRegistry()
        self._model, self._batcher = batcher.model.name, batcher
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.requests = 0
        """Answered."""
        self._seconds = self._histogram(
            "rank_request_seconds", "From a request's arrival to its scores.", _SECONDS
        )
        self._sizes = self._histogram("rank_request_candidates", "Of a request.", _CANDIDATES)
        self._unknown = Counter(
            "equipoise_rank_unknown_values",
            "Values of requests that training did not have.",
            ("model_name",),
            registry=self._registry,
        ).labels(self._model)
        self._refused = Counter(
            "equipoise_rank_refusals",
            "Requests that got no ranking.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        for reason in _REASONS:
            self._refused.labels(self._model, reason)
        self._registry.register(_Passes(self))

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        kind = Histogram(
            f"equipoise_{name}", words, ("model_name",), registry=self._registry, buckets=buckets
        )
        return kind.labels(self._model)

    def count_refusal(self, reason: str) -> None:
        """A request got no ranking."""
        self._refused.labels(self._model, reason).inc()

    def count_answer(self, seconds: float, candidates: int, unknown: int) -> None:
        """A request was answered."""
        self.requests += 1
        self._last.append(seconds)
        self._seconds.observe(seconds)
        self._sizes.observe(candidates)
        self._unknown.inc(unknown)

    def quantile_s(self, share: float) -> float | None:
        """A quantile of the last requests; None before the first."""
        if not self._last:
            return None
        return sorted(self._last)[max(0, math.ceil(share * len(self._last)) - 1)]

    def words(self) -> str:
        """What the console says."""
        middle, high = (self.quantile_s(share) for share in _QUANTILES)
        if middle is None or high is None:
            return "No request was answered."
        stats = self._batcher.stats
        return (
            f"Requests: {self.requests:,}, candidates: {stats.candidates:,}, passes: "
            f"{stats.passes:,}; P50 {1000 * middle:.1f} ms, P99 {1000 * high:.1f} ms."
        )

    def write(self) -> bytes:
        """The text that ``/metrics`` answers."""
        return generate_latest(self._registry)

    def passes(self) -> Iterator[Metric]:
        """What the batcher knows, asked for when somebody looks."""
        stats = self._batcher.stats
        for name, words, value in (
            ("rank_passes", "Passes over the model.", stats.passes),
            ("rank_pass_requests", "Requests of all passes.", stats.requests),
            ("rank_pass_candidates", "Candidates of all passes.", stats.candidates),
            ("rank_pass_seconds", "What passes took.", stats.busy_s),
        ):
            counter = CounterMetricFamily(f"equipoise_{name}", words, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        gauge = GaugeMetricFamily(
            "equipoise_rank_latency_seconds",
            f"Quantiles of the last {WINDOW:,} requests.",
            labels=["model_name", "quantile"],
        )
        for share in _QUANTILES:
            if (seconds := self.quantile_s(share)) is not None:
                gauge.add_metric([self._model, f"{share:g}"], seconds)
        yield gauge


class _Passes(Collector):
    def __init__(self, metrics: RankMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.passes()
