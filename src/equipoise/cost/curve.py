"""The load curve of a rank: seconds per token, and per document by its pairs.

Why
    By FLOP, a document of 64 tokens has a hundredth of the attention of one of 640; by the
    clock a fortieth, because short documents waste tiles and launches. Balance has to hold in
    seconds, so a document's attention is measured at a few lengths on the machine that will run
    it, and interpolated.

What it decides
    Loads are whole nanoseconds, so that ranks with the same curve pack alike. Part of a document
    costs its tokens plus the attention of a whole document with as many pairs. Where only some
    tokens are learned, the others save what they do not take of the vocabulary head.

Kept true (tests/unit/cost/test_curve.py)
    Loads are positive, grow with length, and meet the measured points; a counted curve is
    the exact count, windows included; an infinite break-even length balances tokens, one near 0
    squares.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.base.shown import shown
from equipoise.cost.work import causal_pairs, pair_flop, token_weights, windowed_pairs
from equipoise.spec.model.presets import ModelSpec, WindowSpec
from equipoise.spec.pack import Pieces, lengths_of


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Forward and backward time of one rank: ``fixed + tokens + attention by pairs``.

    ``measured`` is False for a curve derived from counts alone, whose unit is arbitrary.
    """

    fixed_ns: float
    ns_per_token: float
    doc_tokens: tuple[float, ...]
    doc_ns: tuple[float, ...]
    peak_flop_per_s: float
    measured: bool
    busy_share: float = 1.0
    """Share of its processor that the worst-placed rank had during the measurement: 1 unless
    other programs also ran."""
    head_ns: float = 0.0
    """The part of ``ns_per_token`` that a token without a label saves; 0 where not measured."""

    @property
    def plain(self) -> "LoadCurve":
        """The curve without anything but numbers, for a journal."""
        return self

    def saved_ns(self, pieces: Pieces) -> Ints:
        """What pieces of documents save by tokens without a label [ns], int64[pieces]."""
        return np.zeros(len(pieces), dtype=np.int64)

    def pieces_ns(self, pieces: Pieces) -> Ints:
        """Load of each piece, as a document of its own [ns]; at least 1."""
        whole = self.document_ns(lengths_of(pieces))
        loads: Ints = np.maximum(whole - self.saved_ns(pieces), 1)
        return loads

    def attention_ns(self, pairs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Attention time of documents, or parts of documents, by their pairs [ns].

        Interpolated in log-log between measured lengths; beyond the last it grows with the
        pairs, below the first with their square root, as the length does.
        """
        count = np.asarray(pairs, dtype=np.float64)
        known, log_known, log_ns = _points(tuple(self.doc_tokens), tuple(self.doc_ns))
        inside = np.maximum(count, 1.0)
        attention = np.exp(np.interp(np.log(inside), log_known, log_ns))
        attention *= np.maximum(inside / known[-1], 1.0)
        attention *= np.sqrt(np.minimum(inside / known[0], 1.0))
        return np.where(count > 0, attention, 0.0)

    def document_ns(self, doc_tokens: Ints) -> Ints:
        """Load of each document, with its linear layers [ns]; at least 1."""
        lengths = np.maximum(np.asarray(doc_tokens, dtype=np.int64), 1)
        return self._total_ns(lengths, self.attention_ns(causal_pairs(lengths)))

    def slice_ns(self, starts: Ints, stops: Ints) -> Ints:
        """Load of the queries ``[start, stop)`` of each document, which read from its start [ns].

        Args:
            starts: First query of each slice, counted from the document's first token.
            stops: One past its last query.
        """
        starts, stops = np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)
        return self._total_ns(stops - starts, self.slice_attention_ns(starts, stops))

    def slice_attention_ns(self, starts: Ints, stops: Ints) -> npt.NDArray[np.float64]:
        """Attention time of the queries ``[start, stop)`` of each document [ns]."""
        return self.attention_ns(causal_pairs(stops) - causal_pairs(starts))

    def shared_attention_ns(self, doc_tokens: Ints, ranks: Ints) -> npt.NDArray[np.float64]:
        """Attention time on each of the ranks that share a document evenly [ns]."""
        return self.attention_ns(causal_pairs(doc_tokens) / ranks)

    def _total_ns(self, tokens: Ints, attention_ns: npt.NDArray[np.float64]) -> Ints:
        total = np.rint(attention_ns + self.ns_per_token * tokens)
        loads: Ints = np.maximum(total, 1.0).astype(np.int64)
        return loads

    @property
    def break_even_tokens(self) -> float:
        """Length S* at which attention takes as long as everything paid per token [tokens].

        ``inf`` if tokens always cost more, 0 if they never do.
        """
        low, high = 0.0, 1e12
        if self.attention_ns(high * high / 2) < self.ns_per_token * high:
            return float("inf")
        for _ in range(200):
            middle = (low + high) / 2
            if self.attention_ns(middle * (middle + 1) / 2) < self.ns_per_token * middle:
                low = middle
            else:
                high = middle
        return low


def require_curve(curve: LoadCurve) -> None:
    """Refuse a curve that somebody wrote, or a file that was damaged, whose prices mean nothing.

    Raises:
        SpecError: lengths do not rise from above 0, have not a time each, or a time is negative or
            not finite.
    """
    try:
        lengths = np.array([0.0, *curve.doc_tokens], dtype=np.float64)
        times = np.array([*curve.doc_ns, curve.fixed_ns, curve.ns_per_token, curve.head_ns], float)
        is_sound = len(lengths) - 1 == len(curve.doc_ns) > 0
    except (TypeError, ValueError):
        is_sound = False
    if not (is_sound and np.all(np.diff(lengths) > 0) and np.all((times >= 0) & (times < np.inf))):
        raise SpecError(
            "A load curve has rising lengths above 0 (doc_tokens), a time for each (doc_ns), and "
            "no time that is negative or not finite. fit_curve makes one from measured samples."
        )


@functools.lru_cache(maxsize=64)
def _points(
    doc_tokens: tuple[float, ...], doc_ns: tuple[float, ...]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The pairs of measured lengths, and the logarithms of these and of their times.

    A packer asks for the prices of a few documents thousands of times per step.
    """
    lengths = np.array(doc_tokens)
    known = lengths * (lengths + 1) / 2
    return known, np.log(known), np.log(doc_ns)


@dataclass(frozen=True, slots=True)
class MaskedCurve(LoadCurve):
    """A curve over documents of which only some tokens have a label.

    >>> curve = MaskedCurve(0.0, 5.0, (1.0,), (0.0,), 1.0, True, head_ns=2.0, labels=np.ones_like)
    >>> LoadCurve.document_ns(curve, np.array([4])).tolist()
    [20]
    """

    labels: Callable[[Pieces], Ints] | None = None
    """Counts the labels of each piece."""

    @property
    def plain(self) -> LoadCurve:
        """The curve without what counts labels."""
        names = (field.name for field in dataclasses.fields(LoadCurve))
        return LoadCurve(**{name: getattr(self, name) for name in names})

    def saved_ns(self, pieces: Pieces) -> Ints:
        """What pieces of documents save by tokens without a label [ns], int64[pieces]."""
        if self.labels is None or not len(pieces):
            return np.zeros(len(pieces), dtype=np.int64)
        unlabelled = lengths_of(pieces) - self.labels(pieces)
        saved: Ints = np.rint(self.head_ns * unlabelled).astype(np.int64)
        return saved


def price_labels(curve: LoadCurve, labels: Callable[[Pieces], Ints] | None) -> LoadCurve:
    """A curve that charges for the vocabulary head only where a token has a label.

    Args:
        curve: Measured with every token labelled.
        labels: Counts the labels of each piece; None if every token has one.
    """
    if labels is None or not curve.head_ns:
        return curve
    names = (field.name for field in dataclasses.fields(LoadCurve))
    return MaskedCurve(**{name: getattr(curve, name) for name in names}, labels=labels)


@dataclass(frozen=True, slots=True)
class WindowedCurve(LoadCurve):
    """A counted curve of a model in which some layers read a part of the text."""

    window: WindowSpec | None = None

    def attention_ns(self, pairs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Attention time of whole documents by their causal pairs [ns]."""
        count = np.asarray(pairs, dtype=np.float64)
        lengths = (np.sqrt(8.0 * count + 1.0) - 1.0) / 2.0
        return LoadCurve.attention_ns(self, self._read(count, lengths))

    def slice_attention_ns(self, starts: Ints, stops: Ints) -> npt.NDArray[np.float64]:
        """Attention time of the queries ``[start, stop)`` of each document [ns]."""
        first, last = (
            self._read(causal_pairs(at).astype(np.float64), at.astype(np.float64))
            for at in (starts, stops)
        )
        return LoadCurve.attention_ns(self, last - first)

    def shared_attention_ns(self, doc_tokens: Ints, ranks: Ints) -> npt.NDArray[np.float64]:
        """Attention time on each of the ranks that share a document evenly [ns]."""
        whole: npt.NDArray[np.float64] = self.attention_ns(causal_pairs(doc_tokens)) / ranks
        return whole

    def _read(
        self, pairs: npt.NDArray[np.float64], lengths: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Pairs that the mean layer reads of documents of these causal pairs and lengths."""
        if self.window is None:
            return pairs
        return pairs + self.window.share * (windowed_pairs(self.window, lengths) - pairs)


def counted_curve(
    model: ModelSpec, *, flop_per_s: float = 1e12, expert_skew: float = 1.0
) -> LoadCurve:
    """The curve of a machine on which every useful FLOP costs the same.

    It needs no measurement; ``equipoise pack`` uses it.

    Args:
        model: Sizes.
        flop_per_s: Only scales all loads.
        expert_skew: Rows of the fullest of the ranks that share experts, over the mean [ratio]:
            all of them wait for it, so a token's experts cost this many times their FLOP.

    Raises:
        SpecError: the model is none, the rate is not above 0, or the skew below 1.
    """
    if not isinstance(model, ModelSpec):
        raise SpecError(f'model is {shown(model)}. Give a ModelSpec, such as preset("llama3-8b").')
    is_number = isinstance(flop_per_s, int | float | np.number) and not isinstance(flop_per_s, bool)
    if not is_number or not 0 < flop_per_s < np.inf:
        raise SpecError(f"flop_per_s is {shown(flop_per_s)}. Give a number above 0.")
    if not 1.0 <= expert_skew < np.inf:
        raise SpecError(f"expert_skew is {expert_skew:g}. Give a ratio from 1 (balanced).")
    per_flop_ns = 1e9 / flop_per_s
    curve = LoadCurve(
        fixed_ns=0.0,
        ns_per_token=6 * token_weights(model, expert_skew=expert_skew) * per_flop_ns,
        doc_tokens=(1.0,),
        doc_ns=(3 * pair_flop(model) * per_flop_ns,),
        peak_flop_per_s=flop_per_s,
        measured=False,
    )
    if model.window is None:
        return curve
    names = (field.name for field in dataclasses.fields(LoadCurve))
    return WindowedCurve(**{name: getattr(curve, name) for name in names}, window=model.window)


def break_even_curve(break_even_tokens: float) -> LoadCurve:
    """The curve ``tokens + 2 x pairs / S``: attention meets the linear layers at length S.

    Args:
        break_even_tokens: S, above 0; ``inf`` counts only tokens.

    Raises:
        SpecError: S is not above 0.

    >>> break_even_curve(1000).document_ns(np.array([999])).tolist()
    [1998000000]
    """
    if not break_even_tokens > 0:
        raise SpecError(
            f"The break-even length is {break_even_tokens:g} tokens. Give one above 0: published "
            f"ones lie near 30,000 to 200,000, and inf counts only tokens."
        )
    # In thousandths of the price of a token and a pair together, so that a tiny S cannot overflow.
    of_token = 1e6 if np.isinf(break_even_tokens) else 1e6 * min(1.0, break_even_tokens / 1e3)
    of_pair = max(1e-300, 2 * of_token / break_even_tokens)
    return LoadCurve(0.0, of_token, (1.0,), (of_pair,), 1.0, measured=False)
