import math
import random

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from equipoise.observe.prometheus import Histogram as Read
from equipoise.observe.prometheus import histogram, parse_metrics


def page() -> str:
    registry = CollectorRegistry()
    Gauge("a_gauge", "One.", registry=registry).set(1e-7)
    counter = Counter("tokens", "Many.", ["tenant"], registry=registry)
    counter.labels('a "quoted"\\ {tenant}=1,b="2"\nof two lines').inc(3)
    counter.labels("plain").inc(5)
    seconds = Histogram("wait_seconds", "Long.", ["m"], registry=registry, buckets=(0.1, 1, 10))
    draw = random.Random(0)
    for _ in range(100):
        seconds.labels(draw.choice("xy")).observe(draw.expovariate(1.0))
    return generate_latest(registry).decode()


def test_it_reads_what_the_official_client_writes() -> None:
    text = page()
    expected: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            expected.setdefault(sample.name, {})[key] = sample.value
    assert parse_metrics(text) == expected


def test_a_histogram_is_the_sum_of_its_labels() -> None:
    whole = histogram(parse_metrics(page()), "wait_seconds")
    assert whole is not None and whole.count == 100
    assert whole.bounds == (0.1, 1.0, 10.0, math.inf)
    assert 0.1 < whole.quantile(0.5) < 1.0 < whole.quantile(0.99)
    assert histogram({}, "wait_seconds") is None


def test_quantiles_are_of_what_came_since() -> None:
    bounds = (1.0, 2.0, math.inf)
    before, now = Read(bounds, (10.0, 10.0, 10.0), 5.0), Read(bounds, (10.0, 14.0, 14.0), 11.0)
    recent = now.since(before)
    assert recent.count == 4 and recent.sum == 6.0 and recent.quantile(0.5) == 1.5
    assert before.since(now) == before  # the server began anew
    assert math.isnan(now.since(now).quantile(0.5))
    assert Read(bounds, (0.0, 0.0, 3.0), 30.0).quantile(0.5) == 2.0


def test_lines_that_are_none_are_left_out() -> None:
    text = 'what\n# TYPE a gauge\na{ 1\nb 2 1700000000\nc NaN\nd one\n\ne{x="1",} 3\n'
    samples = parse_metrics(text)
    assert samples["b"] == {(): 2.0} and samples["e"] == {(("x", "1"),): 3.0}
    assert math.isnan(samples["c"][()]) and set(samples) == {"b", "c", "e"}
