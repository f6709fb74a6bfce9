"""The price of a serving engine's iteration, from its curves.

Why
    The scheduler fills iterations up to a predicted time and charges tenants predicted seconds; the
    simulator's clock is the same number.

What it decides
    Between measured points seconds are linear; below the first they are those of the first; beyond
    the last they follow the last two. A tenant is charged what its tokens cost in well-filled
    iterations: prompt tokens at the last point's mean, generated ones at that of 32 sequences,
    plus attention's terms. Fixed costs of thinly filled iterations are nobody's.

    Ranks that share sequences send each other either keys and values or queries, whichever takes
    less; the ring runs beside attention, what comes home afterwards does not. Queries of single
    tokens may go to all ranks at once instead, beside which a rank computes only its own rows. A
    pipeline's price is that of one pass through all of its stages.

Kept true (tests/unit/cost/test_serving.py)
    Points are met; seconds never fall as a size grows; shares add up over ranges that touch.

Sources
    What is sent between ranks: pass-KV and pass-Q of arXiv:2411.01783; single tokens as
    ``serve.longctx.gathered`` has them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from equipoise.spec.device.serving import Points, ServingCurve
from equipoise.spec.serving import IterationWork, chunk_pairs

_STEP, _FASTEST = 0.05, 16.0
"""How far one iteration moves the pace of a price, and how far all of them may."""

_FILLED_DECODES = 32
"""Sequences that decode together in a well-filled iteration."""


@dataclass(frozen=True, slots=True)
class ContextExchange:
    """What ranks that share sequences send each other in an iteration, over all layers."""

    ring_s: float
    """Latency of the rings' hops [s]."""
    kv_token_s: float
    """One token's keys and values, once round the ring [s]."""
    query_token_s: float
    """One new token's queries, once round the ring [s]."""
    home_s: float
    """Latency of sending partial outputs home [s]."""
    home_token_s: float
    """Partial outputs of one new token on their way home [s]."""
    gather_token_s: float
    """Queries of one new token to all ranks at once, with the latency of ``home_s`` [s]."""
    ranks: int

    def attention_s(
        self, alone_s: float, tokens: int, kv_tokens: int, *, are_single: bool = False
    ) -> float:
        """Attention with what is sent, by the fastest way [s].

        Args:
            alone_s: Attention itself, on each rank [s].
            tokens: New tokens of the iteration.
            kv_tokens: Rows of keys and values that it reads.
            are_single: Whether each sequence has one new token.
        """
        pass_kv_s = max(alone_s, self.ring_s + self.kv_token_s * kv_tokens)
        ring_s = self.ring_s + self.query_token_s * tokens
        home_s = self.home_s + self.home_token_s * tokens
        fastest_s = min(pass_kv_s, max(alone_s, ring_s) + home_s)
        if not are_single:
            return fastest_s
        own_s = alone_s / self.ranks
        own_s = max(own_s, self.home_s + self.gather_token_s * tokens) + alone_s - own_s
        return min(fastest_s, own_s + home_s)


class CurvePrice:
    """Prices iterations by a curve; equal sizes are looked up once."""

    def __init__(self, curve: ServingCurve, exchange: ContextExchange | None = None) -> None:
        self.curve = curve
        self.exchange = exchange
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
        tokens, pairs, kv_tokens, sequences, logits, chunks, chunk_kv_tokens = work
        tokens_s = self._tokens_s.get(tokens)
        if tokens_s is None:
            tokens_s = self._tokens_s[tokens] = read_points(self.curve.tokens, tokens)
        logits_s = self._logits_s.get(logits)
        if logits_s is None:
            logits_s = self._logits_s[logits] = self._head_s(logits)
        curve = self.curve
        pairs_s, kv_s = curve.pair_s * pairs, curve.kv_token_s * kv_tokens
        chunks_s = 0.0
        if chunks:
            # One call is in the curve. All single tokens share one, and each chunk has its own.
            later_calls = chunks - 1 if chunks == sequences else chunks
            chunks_s = curve.chunk_kv_token_s * chunk_kv_tokens + curve.call_s * later_calls
        if self.exchange is not None:
            attention_s = self.exchange.attention_s(
                pairs_s + kv_s + chunks_s, tokens, kv_tokens, are_single=tokens == sequences
            )
            return tokens_s + logits_s + attention_s + curve.sequence_s * sequences
        return tokens_s + logits_s + pairs_s + kv_s + curve.sequence_s * sequences + chunks_s

    def decodes_s(self, work: IterationWork, iterations: int) -> list[float]:
        """This iteration and those after it, in which every sequence reads one token more [s].

        To the last bit as ``iteration_s`` of each.
        """
        if self.exchange is not None:
            return [self.iteration_s(work.after(step)) for step in range(iterations)]
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


class PacedPrice:
    """A price whose iterations follow those that were measured.

    A curve may have been measured while others used the cores, or be used while they do. Shares of
    tenants stay as they are: charges must add up, and fairness compares them with each other.

    >>> price = PacedPrice(CurvePrice(ServingCurve(((1, 1.0),), ((1, 0.0),), 0.0, 0.0, 0.0, 0.0)))
    >>> work = IterationWork(tokens=1, pairs=0, kv_tokens=0, sequences=0, logits=0)
    >>> for _ in range(40):
    ...     price.note(price.iteration_s(work), 3.0)
    >>> round(price.iteration_s(work), 3)
    3.0
    """

    def __init__(self, price: CurvePrice, *, is_measured: bool = True) -> None:
        """Follow a price.

        Args:
            price: Where it begins.
            is_measured: Whether the price's curve was measured; else it is an estimate.
        """
        self.follow(price)
        self.is_measured = is_measured

    def follow(self, price: CurvePrice) -> None:
        """Go on with a measured price; only while nobody has been charged by the one before."""
        self._price, self._pace, self.is_measured = price, 1.0, True
        self.prompt_s, self.output_s, self.swap_s = price.prompt_s, price.output_s, price.swap_s

    def iteration_s(self, work: IterationWork) -> float:
        """One whole iteration [s]."""
        return self._pace * self._price.iteration_s(work)

    def note(self, predicted_s: float, measured_s: float) -> None:
        """An iteration's seconds, as predicted by this and as measured.

        Each moves the pace by a twentieth at most: one that something else held up counts little.
        """
        if predicted_s > 0:
            moved = min(1 + _STEP, max(1 / (1 + _STEP), measured_s / predicted_s))
            self._pace = min(_FASTEST, max(1 / _FASTEST, self._pace * moved))


@dataclass(frozen=True, slots=True)
class Hop:
    """What goes from one stage of a pipeline to the next."""

    latency_s: float
    token_s: float
    """One new token's activations [s]."""

    def seconds(self, tokens: int) -> float:
        """An iteration's new tokens [s]."""
        return self.latency_s + self.token_s * tokens


class StagedPrice:
    """Prices iterations that pass through the stages of a pipeline one after the other."""

    def __init__(self, stages: Sequence[CurvePrice], hop: Hop) -> None:
        self.stages = tuple(stages)
        self.hop = hop

    def stages_s(self, work: IterationWork) -> list[float]:
        """What each stage computes of an iteration [s]."""
        return [stage.iteration_s(work) for stage in self.stages]

    def iteration_s(self, work: IterationWork) -> float:
        """One iteration, from the first stage to the last [s]."""
        between_s = (len(self.stages) - 1) * self.hop.seconds(work.tokens)
        return sum(self.stages_s(work)) + between_s

    def prompt_s(self, start: int, tokens: int) -> float:
        """The share of prompt tokens [start, start + tokens) in well-filled iterations [s]."""
        return sum(stage.prompt_s(start, tokens) for stage in self.stages)

    def output_s(self, start: int, tokens: int) -> float:
        """Likewise tokens that are generated one by one, each of which reads its context [s]."""
        return sum(stage.output_s(start, tokens) for stage in self.stages)

    def swap_s(self, tokens: int) -> float:
        """Moving keys and values of this many tokens, one way; stages move theirs together [s]."""
        return max(stage.swap_s(tokens) for stage in self.stages)


def rising_points(points: Iterable[tuple[int, float]]) -> Points:
    """The same points, none below an earlier one: more rows never take less time.

    Noise in a measurement would otherwise make what is read beyond the last one negative.

    >>> rising_points([(1, 2.0), (3, 1.0)])
    ((1, 2.0), (3, 2.0))
    """
    rows, seconds = zip(*points, strict=True)
    return tuple(zip(rows, accumulate(seconds, max), strict=True))


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
