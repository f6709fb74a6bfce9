"""A running server as its metrics tell: now, and over the last half hour.

Why
    Metrics are sums since the server began. People ask about the last minute: how long a first
    token takes now, who is served, how full the cache is.

What it decides
    Metrics are fetched every two seconds for as long as the dashboard runs, so that a page that is
    opened later has the past. Quantiles and rates are over the last minute. Our names come before
    vLLM's, so that nothing counts twice where a server writes both. A server that began anew counts
    from there.

Kept true (tests/unit/dash/web/test_serving.py)
    Without requests in a minute there is no latency, not zero; bytes and tokens are never negative.
    The gap between tenants is the server's own if it has one, else the most less the least that a
    tenant was served in the minute, of those that were served.
"""

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from equipoise.base.errors import SpecError
from equipoise.dash.sample import plain_list
from equipoise.observe.prometheus import Histogram, Samples, histogram, parse_metrics

Table = dict[str, Any]

EVERY_S = 2.0
_WINDOW_S = 60.0
_POINTS = 900
_MOST_BYTES = 8 << 20
_TIMEOUT_S = 3.0
_MOST_NAMES = 16
"""Tenants, and variants of context parallelism, that have lines of their own."""

KEY = "EQUIPOISE_API_KEY"
"""Environment variable with the key of a server that guards its metrics."""

GAUGES = {
    "running": ("equipoise_requests_running", "vllm:num_requests_running"),
    "waiting": ("equipoise_requests_waiting", "vllm:num_requests_waiting"),
    "kv_share": (
        "equipoise_kv_cache_usage_ratio",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ),
    "fairness_gap": ("equipoise_fairness_gap",),
}
COUNTERS = {
    "prompt_tokens_per_s": ("equipoise_prompt_tokens_total", "vllm:prompt_tokens_total"),
    "generation_tokens_per_s": (
        "equipoise_generation_tokens_total",
        "vllm:generation_tokens_total",
    ),
    "requests_per_s": ("equipoise_request_success_total", "vllm:request_success_total"),
    "preemptions_per_s": ("equipoise_preemptions_total", "vllm:num_preemptions_total"),
    "rejections_per_s": (
        "equipoise_admission_rejections_total",
        "vllm:admission_rejections_total",
    ),
    "prefix_queries_per_s": (
        "equipoise_prefix_cache_queries_total",
        "vllm:prefix_cache_queries_total",
    ),
    "prefix_hits_per_s": ("equipoise_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
}
LATENCIES = {
    "first_token": (
        "equipoise_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ),
    "next_token": (
        "equipoise_inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "whole": (
        "equipoise_e2e_request_latency_seconds",
        "vllm:e2e_request_latency_seconds",
    ),
}
SERVICE = ("equipoise_prompt_tokens_total", "equipoise_generation_tokens_total")
"""Counters whose sum is what a tenant was served."""
CONTEXT = ("equipoise_context_bytes_total",)
"""Bytes that context parallelism sent, by variant."""

PREEMPTIONS = ("equipoise_preemptions_total",)
"""How often requests lost their pages, by mode: ``swap`` or ``recompute``."""


@dataclass(frozen=True, slots=True)
class Look:
    """Sums and gauges at one time."""

    t: float
    """Seconds since the dashboard began."""
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    tenants: Mapping[str, float]
    """Tokens of prompts and answers of each tenant, since the server began."""
    context: Mapping[str, float]
    """Bytes that context parallelism sent, by variant."""


def look(samples: Samples, t: float) -> Look:
    """What this dashboard shows of a page of metrics."""
    known = {
        key: sum(samples[name].values())
        for key, names in (GAUGES | COUNTERS).items()
        if (name := next((each for each in names if each in samples), None))
    }
    if "kv_share" in known:  # several engines report a share each
        name = next(each for each in GAUGES["kv_share"] if each in samples)
        known["kv_share"] /= len(samples[name])
    histograms = {}
    for key, names in LATENCIES.items():
        whole = next((one for name in names if (one := histogram(samples, name))), None)
        if whole:
            histograms[key] = whole
    return Look(
        t,
        {key: known[key] for key in GAUGES if key in known},
        {key: known[key] for key in COUNTERS if key in known}
        | {
            f"preemptions_by_{mode}_per_s": times
            for mode, times in _by_label(samples, PREEMPTIONS, "mode").items()
        },
        histograms,
        _by_label(samples, SERVICE, "tenant"),
        _by_label(samples, CONTEXT, "variant"),
    )


def _by_label(samples: Samples, names: tuple[str, ...], label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name in names:
        for labels, value in samples.get(name, {}).items():
            if owner := dict(labels).get(label):
                sums[owner] = sums.get(owner, 0.0) + value
    return sums


@dataclass(slots=True)
class Series:
    """Points of the last half hour, each over its last minute."""

    looks: deque[Look] = field(default_factory=deque)
    points: deque[Table] = field(default_factory=lambda: deque(maxlen=_POINTS))

    def add(self, now: Look) -> None:
        """Add a look, and the point that it makes with the one a minute before it."""
        while len(self.looks) > 1 and self.looks[1].t <= now.t - _WINDOW_S:
            self.looks.popleft()
        if self.looks and _began_anew(self.looks[-1], now):
            self.looks.clear()
        before = self.looks[0] if self.looks else None
        self.looks.append(now)
        self.points.append(_point(before, now))


def _began_anew(before: Look, now: Look) -> bool:
    return any(now.counters.get(key, value) < value for key, value in before.counters.items())


def _point(before: Look | None, now: Look) -> Table:
    point: Table = {"t": now.t, **now.gauges}
    took_s = now.t - before.t if before else 0.0
    for key, whole in now.histograms.items():
        recent = whole.since(before.histograms.get(key)) if before else None
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            point[f"{key}_{name}_s"] = recent.quantile(share) if recent else math.nan
        point[f"{key}_mean_s"] = recent.sum / recent.count if recent and recent.count else math.nan
    rates: tuple[tuple[Callable[[Look], Mapping[str, float]], str], ...] = (
        (lambda each: each.counters, ""),
        (lambda each: each.tenants, "tenant "),
        (lambda each: each.context, "context "),
    )
    for values, prefix in rates:
        then = values(before) if before else {}
        for key, value in values(now).items():
            known = before is not None and took_s > 0
            point[prefix + key] = (value - then.get(key, 0.0)) / took_s if known else math.nan
    served = [rate for key, rate in point.items() if key.startswith("tenant ") and rate > 0]
    if len(served) > 1:
        point["served_gap"] = max(served) - min(served)
    return point


class Serving:
    """A server whose metrics are fetched until the process ends."""

    def __init__(self, url: str) -> None:
        self.url = metrics_url(url)
        self._series = Series()
        self._sentence = "Not asked yet."
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._began_s = time.monotonic()

    def start(self) -> None:
        """Fetch now and then, in a thread of its own."""
        threading.Thread(target=self._follow, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Fetch no more."""
        self._is_over.set()

    def fetch(self) -> None:
        """Fetch once; what is wrong becomes the sentence."""
        try:
            seen = look(parse_metrics(get_metrics(self.url)), time.monotonic() - self._began_s)
            known = seen.gauges or seen.counters or seen.histograms
            sentence = "" if known else f"{self.url} has no metrics of a model server."
        except (OSError, ValueError) as fault:
            seen, sentence = None, explain_silence(self.url, fault)
        with self._lock:
            self._sentence = sentence
            if seen and not sentence:
                self._series.add(seen)

    def as_json(self) -> bytes:
        """What the page shows of the server."""
        with self._lock:
            return json.dumps(
                {"url": _shown(self.url), "sentence": self._sentence, **tell(self._series)},
                allow_nan=False,
                separators=(",", ":"),
            ).encode()

    def _follow(self) -> None:
        while not self._is_over.is_set():
            self.fetch()
            self._is_over.wait(EVERY_S)


def tell(series: Series) -> Table:
    """Columns of a series, the newest values, and what each tenant was served."""
    points = list(series.points)
    keys = list(dict.fromkeys(key for point in points for key in point if key != "t"))
    columns = {key: [float(point.get(key, math.nan)) for point in points] for key in keys}
    last = series.looks[-1] if series.looks else None
    tenants = dict(sorted((last.tenants if last else {}).items(), key=lambda each: -each[1]))
    rates = {key: columns.get(f"tenant {key}", [math.nan])[-1] for key in tenants}
    return {
        "t": plain_list([point["t"] for point in points]),
        "columns": {
            key: plain_list(column)
            for key, column in columns.items()
            if not key.startswith(("tenant ", "context "))
        },
        "tenants": [
            {
                "name": key,
                "tokens": plain_list(tokens),
                "tokens_per_s": plain_list(rates[key]),
                "line": plain_list(columns.get(f"tenant {key}", [])),
            }
            for key, tokens in list(tenants.items())[:_MOST_NAMES]
        ],
        "tenants_left_out": max(0, len(tenants) - _MOST_NAMES),
        "context": [
            {
                "name": key,
                "bytes": plain_list(value),
                "line": plain_list(columns.get(f"context {key}", [])),
            }
            for key, value in list((last.context if last else {}).items())[:_MOST_NAMES]
        ],
    }


def metrics_url(text: str) -> str:
    """The whole address of a server's metrics.

    Raises:
        SpecError: not an address.

    >>> metrics_url("127.0.0.1:8000")
    'http://127.0.0.1:8000/metrics'
    """
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(whole)
        is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_known = None
    if not is_known or any(letter <= " " for letter in whole):
        raise SpecError(
            f'--metrics "{text}" is not the address of a server. Give one such as '
            "http://127.0.0.1:8000/metrics."
        )
    return parts._replace(path="/metrics").geturl() if parts.path in ("", "/") else whole


def get_metrics(url: str) -> str:
    """The text that a server answers at the whole address of its metrics.

    Raises:
        OSError, ValueError: it does not answer, or not with metrics.
    """
    request = urllib.request.Request(url, headers={"Accept": "text/plain"})  # noqa: S310
    if key := os.environ.get(KEY):
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            data: bytes = answer.read(_MOST_BYTES + 1)
            left = answer.length  # None where only the end of the connection says it
    except http.client.IncompleteRead:
        data, left = b"", 1
    except http.client.HTTPException:
        raise ValueError("it does not speak HTTP") from None
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES >> 20} MiB of metrics")
    if left:  # the last number may be a part of one
        raise ValueError("its text was cut short")
    return data.decode("utf-8", errors="replace")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The address that was given is asked, and no other."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def explain_silence(url: str, fault: Exception) -> str:
    """Why there are no metrics, as a sentence."""
    where = _shown(url)
    if isinstance(fault, urllib.error.HTTPError):
        fix = f" Put its key into the environment variable {KEY}." if fault.code == 401 else ""
        return f"{where} answers {fault.code} instead of metrics.{fix}"
    reason = fault.reason if isinstance(fault, urllib.error.URLError) else fault
    said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return f"{where} does not answer: {said}."


def _shown(url: str) -> str:
    """An address without a password."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
