"""Prometheus metrics: counted once, shown under our names and under vLLM's.

What it decides
    A page shows one moment: every number is read once, whatever names it goes by.
    The only labels are the model, the tenant, why an answer ended, what moves between ranks, and
    what a preemption did; tenants are those of the tenants file, so the number of series is
    bounded.

Kept true (tests/unit/serve/http/test_operations.py)
    Generated tokens are those of all usages, and of answers that were given up. Every histogram
    counts as many values as there were requests.

Sources
    vLLM 0.32, ``vllm/v1/metrics/loggers.py``: names, and the buckets of latencies.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.stats import ITERATION_TOKENS

_FIRST_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5, 10)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

_VLLM = {
    "equipoise_requests_running": "vllm:num_requests_running",
    "equipoise_requests_waiting": "vllm:num_requests_waiting",
    "equipoise_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "equipoise_prefix_cache_queries": "vllm:prefix_cache_queries",
    "equipoise_prefix_cache_hits": "vllm:prefix_cache_hits",
    "equipoise_preemptions": "vllm:num_preemptions",
    "equipoise_prompt_tokens": "vllm:prompt_tokens",
    "equipoise_generation_tokens": "vllm:generation_tokens",
    "equipoise_request_success": "vllm:request_success",
    "equipoise_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "equipoise_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "equipoise_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "equipoise_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "equipoise_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "equipoise_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "equipoise_request_longest_tokens": "vllm:request_max_num_generation_tokens",
    "equipoise_iteration_tokens": "vllm:iteration_tokens_total",
    "equipoise_request_prompt_tokens": "vllm:request_prompt_tokens",
    "equipoise_request_generation_tokens": "vllm:request_generation_tokens",
    "equipoise_admission_rejections": "vllm:admission_rejections",
}
"""vLLM's names for what it measures, too."""

_OUR_LABELS = ("tenant", "mode")
"""Labels that vLLM's metrics of these names do not have."""

_REASONS = ("stop", "length", "abort", "error")
_REFUSALS = ("queue_full", "rate_limit", "draining", "connections", "key", "engine")


class Metrics:
    """All metrics of one server."""

    def __init__(self, engine: EngineLoop, model: str, tenants: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self._model, self._tenants = model, [*tenants]
        by_tenant = ("model_name", "tenant")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.", by_tenant)
        self._generated = self._counter("generation_tokens", "Tokens generated.", by_tenant)
        self._unanswered = self._counter(
            "unanswered_tokens",
            "Tokens generated for answers that were given up, so that no usage names them.",
            by_tenant,
        )
        self._success = self._counter(
            "request_success", "Answers by why they ended.", ("model_name", "finished_reason")
        )
        self._refused = self._counter(
            "admission_rejections", "Requests that were not taken.", ("model_name", "reason")
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to an answer's first token.", _FIRST_S
        )
        self._next = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", _NEXT_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of an answer.", _WHOLE_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "From an answer's arrival to its first iteration.",
            _FIRST_S,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "From an answer's first iteration to its first token.",
            _FIRST_S,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From an answer's first token to its last.", _WHOLE_S
        )
        self._longest = self._histogram(
            "request_longest_tokens", "Tokens of the longest answer of a request.", _TOKENS
        )
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", _TOKENS
        )
        for tenant in self._tenants:
            for each in (self._prompt, self._generated, self._unanswered):
                each.labels(model, tenant)
        for reason in _REASONS:
            self._success.labels(model, reason)
        for reason in _REFUSALS:
            self._refused.labels(model, reason)
        self._registry.register(_EngineCollector(engine, model, self._tenants))

    def _counter(self, name: str, words: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"equipoise_{name}", words, labels, registry=self._registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        kind = Histogram(
            f"equipoise_{name}", words, ("model_name",), registry=self._registry, buckets=buckets
        )
        return kind.labels(self._model)

    def count_prompt(self, tenant: str, tokens: int) -> None:
        """A prompt was taken."""
        self._prompt.labels(self._model, tenant).inc(tokens)
        self._prompts.observe(tokens)

    def count_first(self, tenant: str, seconds: float, waited_s: float) -> None:
        """An answer's first token came, these seconds after the request.

        Args:
            tenant: Whose it is.
            seconds: All of them.
            waited_s: Those of them that passed before its first iteration.
        """
        self._generated.labels(self._model, tenant).inc()
        self._first.observe(seconds)
        self._queue.observe(waited_s)
        self._prefill.observe(max(0.0, seconds - waited_s))

    def count_next(self, tenant: str, seconds: float) -> None:
        """A further token came, these seconds after the last one."""
        self._generated.labels(self._model, tenant).inc()
        self._next.observe(seconds)

    def count_answer(self, reason: str, tokens: int, seconds: float, decode_s: float) -> None:
        """An answer ended, these seconds after the request.

        Args:
            reason: Why.
            tokens: Of the answer.
            seconds: All of them.
            decode_s: Those of them between its first token and its last.
        """
        if tokens:
            self._decode.observe(decode_s)
        self._success.labels(self._model, reason).inc()
        self._answers.observe(tokens)
        self._whole.observe(seconds)

    def count_longest(self, tokens: int) -> None:
        """A request is over; its longest answer had this many tokens."""
        self._longest.observe(tokens)

    def count_unanswered(self, tenant: str, tokens: int) -> None:
        """Tokens that no usage names."""
        self._unanswered.labels(self._model, tenant).inc(tokens)

    def count_refusal(self, reason: str) -> None:
        """A request was not taken; a reason is one of ``_REFUSALS``."""
        self._refused.labels(self._model, reason).inc()

    def write(self) -> bytes:
        """The text that ``/metrics`` answers."""
        seen = [*self._registry.collect()]
        return generate_latest(_Seen(seen)) + generate_latest(_Seen(map(_mirror, seen)))


class _EngineCollector(Collector):
    """What the engine knows, asked for when somebody looks."""

    def __init__(self, engine: EngineLoop, model: str, tenants: Iterable[str]) -> None:
        self._engine, self._model, self._tenants = engine, model, [*tenants]

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, words, value in (
            ("requests_running", "Requests that hold pages.", stats.running),
            ("requests_waiting", "Requests that wait for pages.", stats.waiting),
            (
                "kv_cache_usage_ratio",
                "Share of pages that requests hold.",
                stats.used_pages / max(1, stats.pages),
            ),
            ("kv_cache_pages", "Pages of the pool.", stats.pages),
            ("nano_batches_gain_ratio", "1 if none pays here.", self._engine.nano.gain),
            (
                "fairness_gap",
                "Most less least weighted service of the tenants that wait, in predicted seconds.",
                stats.fairness_gap_s if len(self._tenants) > 1 else None,
            ),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"equipoise_{name}", words, labels=["model_name"])
                gauge.add_metric([self._model], value)
                yield gauge
        for name, words, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.asked_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.cached_tokens),
            ("iterations", "Iterations of the engine.", stats.iterations),
            ("iteration_predicted_seconds", "Sum of their predictions.", stats.predicted_s),
            ("iteration_measured_seconds", "What they took.", stats.measured_s),
        ):
            yield self._counter(name, words, {(): value})
        words = "How often a request lost its pages, by what became of their contents."
        lost: dict[tuple[str, ...], float]
        lost = {(mode,): float(times) for mode, times in stats.preemptions.items()}
        yield self._counter("preemptions", words, lost, "mode")
        served: dict[tuple[str, ...], float]
        served = {(each,): stats.served_s.get(each, 0.0) for each in self._tenants}
        words = "Predicted seconds of work that a tenant was served."
        yield self._counter("tenant_service_seconds", words, served, "tenant")
        moved: dict[tuple[str, ...], float]
        moved = {(variant,): float(sent) for variant, sent in stats.moved_bytes.items()}
        words = "Bytes that ranks have sent each other for attention, by what moved."
        yield self._counter("context_bytes", words, moved, "variant")
        tokens = HistogramMetricFamily(
            "equipoise_iteration_tokens", "New tokens of an iteration.", labels=["model_name"]
        )
        bounds = [*map(floatToGoString, ITERATION_TOKENS), "+Inf"]
        counts = accumulate(stats.iteration_tokens)
        tokens.add_metric([self._model], [*zip(bounds, counts, strict=True)], stats.tokens)
        yield tokens

    def _counter(
        self, name: str, words: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        counter = CounterMetricFamily(f"equipoise_{name}", words, labels=["model_name", *labels])
        for named, value in values.items():
            counter.add_metric([self._model, *named], value)
        return counter


class _Seen(Collector):
    """Numbers that were read already."""

    def __init__(self, metrics: Iterable[Metric | None]) -> None:
        self._metrics = [each for each in metrics if each is not None]

    def collect(self) -> list[Metric]:
        return self._metrics


def _mirror(metric: Metric) -> Metric | None:
    """The same numbers under vLLM's name, if it has one; tenants and ways to preempt are summed."""
    theirs = _VLLM.get(metric.name)
    if theirs is None:
        return None
    copy = Metric(theirs, metric.documentation, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        labels = {k: v for k, v in sample.labels.items() if k not in _OUR_LABELS}
        name = theirs + sample.name.removeprefix(metric.name)
        key = name, tuple(sorted({**labels, "engine": "0"}.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    copy.samples = [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
    return copy
