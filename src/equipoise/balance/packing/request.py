"""``balance.pack``: from document lengths to packed steps, with their skew and its bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.batches.arguments import require_count
from equipoise.balance.batches.units import read_numbers
from equipoise.balance.packing.evaluate import (
    PackedRecord,
    PackScore,
    Setting,
    bound_ns,
    score_policy,
)
from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError, LayoutError, SpecError
from equipoise.base.fields import is_whole
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.cost.curve import counted_curve
from equipoise.cost.work import kv_bytes_per_token
from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.limits import MOST_SIZE
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.pack import Pieces
from equipoise.spec.run.spec import PackSpec


@dataclass(frozen=True, slots=True)
class PackAnswer:
    """Steps packed by one policy."""

    score: PackScore
    """Skew, gap to the bound, tokens over the cap, cuts, delays: means over the steps."""
    steps: tuple[PackedRecord, ...]
    """Which pieces each rank computes in which micro-batch, step by step."""
    bound_s: tuple[float, ...]
    """Per step, a lower bound on the heaviest rank for the same pieces [s]."""

    @property
    def skew(self) -> float:
        """Heaviest rank over the mean, mean over steps [ratio]."""
        return self.score.skew

    @property
    def gap(self) -> float:
        """Heaviest rank over its bound, minus 1, mean over steps."""
        return self.score.gap


def pack(
    documents: Sequence[int] | Ints | Setting,
    ranks: int = 1,
    policy: Policy = "by-work",
    *,
    context_tokens: int = 8192,
    max_tokens: int | None = None,
    model: ModelSpec | str = "7m",
) -> PackAnswer:
    """Pack documents for data-parallel ranks, and score the balance.

    Args:
        documents: Length of each document of one step [tokens], each >= 1; or a ``Setting``, for
            many steps, a price curve of your own, context ranks or the micro-batches of a
            pipeline, which says everything but the policy.
        ranks: Data-parallel ranks, >= 1.
        policy: A packing policy by name.
        context_tokens: Window: longer documents are cut at its multiples [tokens], >= 2.
        max_tokens: Most tokens of a micro-batch, for policies that do not fill windows; 1.25
            windows unless given.
        model: Whose FLOP are the price: sizes, or a preset's name.

    Raises:
        SpecError: no policy or preset has that name.
        DataError: there is no document, or one is empty.
        LayoutError: the documents cannot be packed for these ranks; says what can.

    >>> answer = pack([8192, 300, 300, 4000, 120, 2500, 900, 72], ranks=2, model="2m")
    >>> [[share.doc_tokens.tolist() for (share,) in rank] for rank in answer.steps[0].bins]
    [[[8192]], [[300, 300, 4000, 120, 2500, 900, 72]]]
    >>> round(answer.skew, 3), round(answer.gap, 3)
    (1.335, 0.0)
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise SpecError(
            f'No packing policy is called "{policy}". Nearest: {nearest(str(policy), POLICIES)}. '
            f"All: {', '.join(POLICIES)}."
        )
    if isinstance(documents, Setting):
        setting = documents
    else:
        if not is_whole(ranks) or ranks > MOST_SIZE:
            ranks = require_count("ranks", ranks)
        if not is_whole(context_tokens) or context_tokens > MOST_SIZE:
            context_tokens = require_count("context_tokens", context_tokens)
        if max_tokens is not None:
            max_tokens = require_count("max_tokens", max_tokens)
        if not isinstance(model, str | ModelSpec):
            raise SpecError(f"model is {shown(model)}. Give the name of a preset, or a ModelSpec.")
        if ranks < 1:
            raise LayoutError(f"balance.pack needs ranks of 1 or more, and there are {ranks}.")
        if context_tokens < 2:
            raise LayoutError(
                f"balance.pack needs windows of 2 tokens or more, and context_tokens is "
                f"{context_tokens}."
            )
        sizes = preset(model) if isinstance(model, str) else model
        pieces = _pieces(documents, context_tokens)
        step_tokens = max(2, int((pieces[:, 2] - pieces[:, 1]).sum()))
        spec = PackSpec(policy, context_tokens, step_tokens, max_tokens=max_tokens)
        kv_bytes = kv_bytes_per_token(sizes) * sizes.layers
        curve = counted_curve(sizes)
        setting = Setting([pieces], spec, ranks, curve, kv_bytes_per_token=kv_bytes)
    score, records = score_policy(policy, setting)
    bounds = (bound_ns(record, setting) / 1e9 for record in records if not record.is_flush)
    return PackAnswer(score, tuple(records), tuple(bounds))


def _pieces(doc_tokens: Sequence[int] | Ints, context_tokens: int) -> Pieces:
    """Documents in order, whole or cut at multiples of a window, int64 [pieces, 3]."""
    given = read_numbers("Lengths", doc_tokens, "[412, 96, 2048]")
    if given.ndim != 1:
        raise DataError(
            f"Lengths have shape {given.shape}. Give one number per document, such as "
            "[412, 96, 2048]."
        )
    wrong = np.flatnonzero(~(np.isfinite(given) & (given == np.floor(given))))
    if len(wrong):
        raise DataError(
            f"Document {int(wrong[0]):,} has {given[wrong[0]]:g} tokens, which is not a whole "
            "number. Count its tokens again."
        )
    if not len(given):
        raise DataError(
            "A step needs documents of 1 token or more each, and there are none. Give lengths."
        )
    if given.max() > MOST_SIZE:
        raise DataError(
            f"Document {int(given.argmax()):,} has {int(given.max()):,} tokens, more than "
            f"{MOST_SIZE:,}. Count its tokens again."
        )
    lengths = given.astype(np.int64)
    if lengths.min() < 1:
        raise DataError(
            f"A step needs documents of 1 token or more each; there are {len(lengths):,}, and the "
            f"shortest has {int(lengths.min()):,}. Leave empty ones out."
        )
    windows = -(-lengths // context_tokens)
    document = np.repeat(np.arange(len(lengths)), windows)
    window = np.arange(len(document)) - np.repeat(np.cumsum(windows) - windows, windows)
    starts = window * context_tokens
    stops = np.minimum(lengths[document], starts + context_tokens)
    return np.stack((document, starts, stops), axis=1)
