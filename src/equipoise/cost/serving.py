"""The price of a serving engine's iteration, from its curve.

Why
    The scheduler fills iterations up to a predicted time and charges tenants predicted seconds; the
    simulator's clock is the same number.

What it decides
    Between measured points seconds are linear; below the first they are those of the first; beyond
    the last they follow the last two. A tenant is charged what its tokens cost in well-filled
    iterations: prompt tokens at the last point's mean, generated ones at that of 32 sequences,
    plus attention's terms. Fixed costs of thinly filled iterations are nobody's.

Kept true (tests/unit/cost/test_serving.py)
    Points are met; seconds never fall as a size grows; shares add up over ranges that touch.
"""

from bisect import bisect_right

from equipoise.spec.device.serving import Points, ServingCurve
from equipoise.spec.serving import IterationWork, chunk_pairs

_FILLED_DECODES = 32
"""Sequences that decode together in a well-filled iteration."""


class CurvePrice:
    """Prices iterations by a curve; equal sizes are looked up once."""

    def __init__(self, curve: ServingCurve) -> None:
        self.curve = curve
        self._tokens_s: dict[int, float] = {0: 0.0}
        self._logits_s: dict[int, float] = {0: 0.0}
        most, last_s = curve.tokens[-1]
        head_s = self._head_s(_FILLED_DECODES) / _FILLED_DECODES
        self._prompt_token_s = last_s / most
        self._output_token_s = read_points(curve.tokens, _FILLED_DECODES) / _FILLED_DECODES
        self._output_token_s += head_s + curve.sequence_s
        self._context_s = curve.pair_s + curve.kv_token_s

    def iteration_s(self, work: IterationWork) -> float:
        """One whole iteration [s]."""
        tokens_s = self._tokens_s.get(work.tokens)
        if tokens_s is None:
            tokens_s = self._tokens_s[work.tokens] = read_points(self.curve.tokens, work.tokens)
        logits_s = self._logits_s.get(work.logits)
        if logits_s is None:
            logits_s = self._logits_s[work.logits] = self._head_s(work.logits)
        curve = self.curve
        return (
            tokens_s
            + logits_s
            + curve.pair_s * work.pairs
            + curve.kv_token_s * work.kv_tokens
            + curve.sequence_s * work.sequences
        )

    def decodes_s(self, work: IterationWork, iterations: int) -> list[float]:
        """This iteration and those after it, in which every sequence reads one token more [s].

        To the last bit as ``iteration_s`` of each.
        """
        curve, grown = self.curve, work.sequences
        rows_s = self.iteration_s(IterationWork(work.tokens, 0, 0, 0, work.logits))
        pair_s, kv_s, sequences_s = curve.pair_s, curve.kv_token_s, curve.sequence_s * grown
        pairs, kv_tokens = work.pairs, work.kv_tokens
        return [
            rows_s + pair_s * (pairs + step) + kv_s * (kv_tokens + step) + sequences_s
            for step in range(0, iterations * grown, grown)
        ]

    def prompt_s(self, start: int, tokens: int) -> float:
        """The share of prompt tokens [start, start + tokens) in well-filled iterations [s]."""
        return self._prompt_token_s * tokens + self.curve.pair_s * chunk_pairs(start, tokens)

    def output_s(self, start: int, tokens: int) -> float:
        """Likewise tokens that are generated one by one, each of which reads its context [s]."""
        pairs = tokens * start + tokens * (tokens + 1) // 2
        return self._output_token_s * tokens + self._context_s * pairs

    def swap_s(self, tokens: int) -> float:
        """Moving the keys and values of this many tokens, one way [s]."""
        return self.curve.swap_token_s * tokens

    def _head_s(self, rows: int) -> float:
        return read_points(self.curve.logits, rows)


def read_points(points: Points, rows: int) -> float:
    """Seconds of this many rows: linear between points, and beyond the last two.

    >>> read_points(((1, 2.0), (3, 4.0)), 2), read_points(((1, 2.0), (3, 4.0)), 5)
    (3.0, 6.0)
    """
    if rows <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * rows / points[0][0]
    at = min(bisect_right(points, (rows, float("inf"))), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)
