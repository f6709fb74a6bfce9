"""What no schedule of a replica's iterations can undercut, request by request.

Why
    Simulating a trace takes a second; a bound takes a millisecond. Most layouts are so far from the
    best that their bound says so.

What it decides
    *Alone*: a prompt takes at least the cheapest way to cut it into chunks, and every later token
    one iteration that reads its whole context. Neither needs a scheduler's consent.

    *Crowded*: an iteration takes at least the sum of its requests' shares, with each token at the
    least seconds a token of any iteration. So replicas are no faster than one machine that is as
    fast as all together, which serves what needs least first and may interrupt: no schedule has
    less mean latency. Of a pipeline the busiest stage counts.

    Prefixes that a tenant's requests share count as cached, for all of them.

Kept true (tests/unit/plan/serving/test_bounds.py, by Hypothesis)
    No simulated request is faster than alone; no simulated mean is below the crowded bound.

Sources
    Shortest remaining processing time has the least mean latency: Schrage, Operations Research 16
    (1968).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.cost.serving import CurvePrice, StagedPrice, read_points
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.spec.device.serving import Points
from equipoise.spec.request_trace import TracedRequest

_ROUNDING = 1.0 - 1e-9
"""Sums in another order differ by less."""

_MOST_STEPS = 512
"""Pages of the longest prompt whose cuts are tried; longer ones are bounded by the token."""

_FAR = 1 << 24
"""More tokens than an iteration has."""


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """A trace as arrays, one entry a request."""

    arrival_s: Floats
    prompt: Floats
    """Tokens of prompts."""
    fresh: Floats
    """Those of them that no cache can have."""
    output: Floats
    most: Floats
    """Tokens that each may generate."""

    @classmethod
    def of(cls, trace: Sequence[TracedRequest]) -> "Sizes":
        """The sizes of a trace's requests, in its order."""
        prompt = np.array([each.prompt_tokens for each in trace], dtype=np.float64)
        shared = np.array([each.prefix_tokens for each in trace], dtype=np.float64)
        output = np.array([each.output_tokens for each in trace], dtype=np.float64)
        most = np.array([each.most_tokens for each in trace], dtype=np.float64)
        return cls(
            np.array([each.arrival_s for each in trace], dtype=np.float64),
            prompt,
            np.maximum(1.0, prompt - shared),
            output,
            np.where(output > 0, np.maximum(most, output), 0.0),
        )

    @property
    def later(self) -> Floats:
        """Tokens after the first."""
        return np.maximum(0.0, self.output - 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """Seconds that each request takes at least on one replica, whatever else is there."""

    prompt_s: Floats
    """From arrival to the first token."""
    later_s: Floats
    """From there to the last token."""
    prompt_work_s: Floats
    """Share that its prompt has in the iterations of the busiest stage."""
    later_work_s: Floats
    """Likewise its later tokens."""


def floor_of(price: CurvePrice | StagedPrice, limits: BatchSettings, sizes: Sizes) -> Floor:
    """The floor of a trace on one replica of a price."""
    stages = price.stages if isinstance(price, StagedPrice) else (price,)
    floors = [_stage_floor(each, limits, sizes) for each in stages]
    busiest = max(floors, key=lambda each: (each.prompt_work_s + each.later_work_s).sum())
    prompt_s = sum((each.prompt_s for each in floors), np.zeros_like(sizes.prompt))
    later_s = sum((each.later_s for each in floors), np.zeros_like(sizes.prompt))
    if isinstance(price, StagedPrice):
        hops = len(stages) - 1
        prompt_s = prompt_s + hops * price.hop.latency_s
        prompt_s = prompt_s + hops * price.hop.token_s * sizes.fresh
        later_s = later_s + hops * price.hop.seconds(1) * sizes.later
    return Floor(
        _ROUNDING * prompt_s,
        _ROUNDING * later_s,
        _ROUNDING * busiest.prompt_work_s,
        _ROUNDING * busiest.later_work_s,
    )


def least_mean_s(arrival_s: Floats, work_s: Floats, speed: float) -> float:
    """The least mean latency of any schedule of these works on machines of this speed together.

    >>> least_mean_s(np.array([0.0, 0.0]), np.array([1.0, 3.0]), 2.0)
    1.25
    """
    order = np.argsort(arrival_s, kind="stable")
    at, works = arrival_s[order].tolist(), (work_s[order] / speed).tolist()
    left: list[float] = []
    now_s = total_s = 0.0
    for arrived_s, until_s, work in zip(at, [*at[1:], np.inf], works, strict=True):
        now_s = max(now_s, arrived_s)
        heappush(left, work)
        while left and now_s < until_s:
            if now_s + left[0] <= until_s:
                now_s += heappop(left)
                total_s += now_s
            else:
                heapreplace(left, left[0] - (until_s - now_s))
                now_s = until_s
    return _ROUNDING * (total_s - float(arrival_s.sum())) / len(at)


def _stage_floor(price: CurvePrice, limits: BatchSettings, sizes: Sizes) -> Floor:
    curve = price.curve
    context_s = curve.pair_s + curve.kv_token_s
    fresh, prompt, later = sizes.fresh, sizes.prompt, sizes.later
    pairs = fresh * (prompt - fresh) + fresh * (fresh + 1) / 2
    once_s = read_points(curve.logits, 1)
    samples = np.minimum(1.0, sizes.output)
    rest_s = curve.pair_s * pairs + curve.kv_token_s * prompt + curve.sequence_s
    cut = _Cut(curve.tokens, limits.page_tokens)
    prompt_s = cut.least_s(fresh) + rest_s + once_s * samples
    contexts = later * prompt + later * (later + 1) / 2
    attention_s = context_s * contexts
    each_s = read_points(curve.tokens, 1) + once_s + curve.sequence_s
    alone_s = attention_s
    if price.exchange is not None:
        sent_s = np.array(
            [
                price.exchange.attention_s(0.0, 1, tokens, are_single=True)
                for tokens in prompt.tolist()
            ]
        )
        alone_s = np.maximum(attention_s, sent_s * later)
    head_s, token_s = _least_ratio(curve.logits), _least_ratio(curve.tokens)
    return Floor(
        prompt_s,
        each_s * later + alone_s,
        token_s * fresh + rest_s + head_s * samples,
        (token_s + head_s + curve.sequence_s) * later + attention_s,
    )


class _Cut:
    """Seconds of the cheapest way to cut tokens into chunks of whole pages and a rest."""

    def __init__(self, points: Points, page_tokens: int) -> None:
        # A chunk takes at least what its whole pages do.
        once_s = np.array(
            [read_points(points, max(1, page * page_tokens)) for page in range(_MOST_STEPS + 1)]
        )
        least_s = np.zeros(_MOST_STEPS + 1)
        for page in range(1, _MOST_STEPS + 1):
            least_s[page] = np.min(once_s[1 : page + 1] + least_s[page - 1 :: -1])
        self._least_s = least_s
        self._page_tokens = page_tokens
        self._first_s = read_points(points, 1)
        self._token_s = _least_ratio(points)

    def least_s(self, tokens: Floats) -> Floats:
        """Seconds of each number of tokens."""
        pages = (tokens // self._page_tokens).astype(np.int64)
        cut_s = self._least_s[np.minimum(pages, _MOST_STEPS)]
        return np.maximum(np.maximum(cut_s, self._first_s), self._token_s * tokens)


def _least_ratio(points: Points) -> float:
    """The least seconds a row.

    Between points seconds are linear, so a ratio has its extremes at the points and at the ends.
    """
    rows = [1, _FAR, *(each for each, _ in points)]
    return min(read_points(points, each) / each for each in rows)
