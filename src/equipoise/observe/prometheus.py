"""Read a server's metrics: the text format of Prometheus, and quantiles of its histograms.

Sources
    The format: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
    Quantiles: linear within a bucket, as Prometheus' own ``histogram_quantile``.

Kept true (tests/unit/observe/test_prometheus.py)
    Text that Prometheus' own client writes is read as that client wrote it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]
"""Names and values of a sample's labels, in order of their names."""

Samples = dict[str, dict[Labels, float]]
"""Values by name and labels."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$", re.ASCII)
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?', re.ASCII)
_ESCAPED = re.compile(r"\\(.)")


def parse_metrics(text: str) -> Samples:
    r"""Samples of a page of metrics; lines that are none are left out.

    >>> parse_metrics('# HELP a An a.\na{b="c"} 2\n')
    {'a': {(('b', 'c'),): 2.0}}
    """
    samples: Samples = {}
    for line in text.split("\n"):  # a label may hold other marks of lines
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        samples.setdefault(sample[1], {})[tuple(sorted(_labels(sample[2] or "")))] = value
    return samples


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for label in _LABEL.finditer(text):
        yield label[1], _ESCAPED.sub(lambda mark: "\n" if mark[1] == "n" else mark[1], label[2])


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations up to each upper bound, cumulative, of all label sets together."""

    bounds: tuple[float, ...]
    """Upper bounds, ascending; the last is infinite."""
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """All observations."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: "Histogram | None") -> "Histogram":
        """What was observed since an earlier look; all of it if the server began anew."""
        if before is None or before.bounds != self.bounds or before.count > self.count:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - before.sum)

    def quantile(self, share: float) -> float:
        """The value below which a share of the observations lies; NaN without observations.

        >>> Histogram((1.0, 2.0, math.inf), (0.0, 4.0, 4.0), 6.0).quantile(0.5)
        1.5
        """
        if not self.count > 0:
            return math.nan
        rank = share * self.count
        low, below = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank:
                if math.isinf(bound):
                    return low
                inside = count - below
                return low + (bound - low) * ((rank - below) / inside if inside else 1.0)
            low, below = bound, count
        return low


def histogram(samples: Mapping[str, Mapping[Labels, float]], name: str) -> Histogram | None:
    """The histogram of a name, summed over its labels; None if there is none."""
    counts: dict[float, float] = {}
    for labels, value in samples.get(f"{name}_bucket", {}).items():
        bound = dict(labels).get("le", "")
        try:
            counts[float(bound)] = counts.get(float(bound), 0.0) + value
        except ValueError:
            continue
    if not counts:
        return None
    bounds = tuple(sorted(counts))
    total = sum(samples.get(f"{name}_sum", {}).values())
    return Histogram(bounds, tuple(counts[bound] for bound in bounds), total)
