"""Seconds from measured curves: a price per token, and one per document by its length.

Why
    Counting FLOP says a document of 64 tokens has a hundredth of the attention of one of
    640; the kernel says a fortieth, because short documents waste tiles and launches. The
    balance that counts is in seconds, so the price of a document's attention is measured at
    a few lengths on the machine that will run it, and read off in between.

What it decides
    Loads are whole nanoseconds, so that every rank that holds the same curve packs alike.

Kept true (tests/unit/cost/test_curve.py)
    Loads are positive, grow with length, and meet the measured points.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.cost.work import Ints, causal_pairs, pair_flop
from equipoise.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Forward and backward time of one rank: ``fixed + tokens + attention by length``.

    ``measured`` is False for a curve derived from FLOP alone, whose unit is arbitrary.
    """

    fixed_ns: float
    ns_per_token: float
    doc_tokens: tuple[float, ...]
    doc_ns: tuple[float, ...]
    peak_flop_per_s: float
    measured: bool

    def document_ns(self, doc_tokens: Ints) -> Ints:
        """Load of each document, its linear layers included [ns], at least 1.

        Between measured lengths the attention time is interpolated in log-log; beyond the
        ends it continues with the square of the length.
        """
        lengths = np.maximum(np.asarray(doc_tokens, dtype=np.float64), 1.0)
        known, known_ns = np.array(self.doc_tokens), np.array(self.doc_ns)
        attention = np.exp(np.interp(np.log(lengths), np.log(known), np.log(known_ns)))
        attention *= np.where(lengths > known[-1], (lengths / known[-1]) ** 2, 1.0)
        attention *= np.where(lengths < known[0], lengths / known[0], 1.0)
        total = np.rint(attention + self.ns_per_token * lengths)
        loads: Ints = np.maximum(total, 1.0).astype(np.int64)
        return loads

    def micro_batch_s(self, doc_tokens: npt.NDArray[np.int64]) -> float:
        """Predicted forward and backward of one micro-batch [s]."""
        if not len(doc_tokens):
            return self.fixed_ns * 1e-9
        return (self.fixed_ns + float(self.document_ns(doc_tokens).sum())) * 1e-9


def counted_curve(model: ModelSpec, *, flop_per_s: float = 1e12) -> LoadCurve:
    """The curve of a machine on which every useful FLOP costs the same.

    It needs no measurement; ``equipoise pack`` uses it. ``flop_per_s`` scales all loads
    alike and moves no document.
    """
    spacing = np.unique(np.geomspace(1, 1 << 20, 161).astype(np.int64))
    pairs = causal_pairs(spacing).astype(np.float64)
    per_flop_ns = 1e9 / flop_per_s
    return LoadCurve(
        fixed_ns=0.0,
        ns_per_token=6 * model.matmul_params * per_flop_ns,
        doc_tokens=tuple(float(value) for value in spacing),
        doc_ns=tuple(float(value) for value in 3 * pair_flop(model) * pairs * per_flop_ns),
        peak_flop_per_s=flop_per_s,
        measured=False,
    )
