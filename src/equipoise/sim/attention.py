"""Seconds of the attention core of each micro-batch, shared over context ranks or not.

What it decides
    Documents are shared out by ``balance.context.sharding``, and what travels is written and priced
    by ``schedule.attention.schedule``: the same functions that a run calls. A micro-batch whose
    documents were priced before is not priced again. Of a step with many distinct ones on several
    context ranks the first few are replayed; of the others the shares are made, and waiting is what
    the replayed ones waited for each second of computing.

    Where some layers have a window, every layer takes what the mean layer does. A document there
    takes what causal documents of one length take that have as many tokens and pairs. What travels
    between context ranks, and what ranks that share documents compute, is that of layers that read
    all.

Kept true (tests/unit/sim/test_parts.py)
    One context rank pays no traffic; two packs of equal tokens and other documents differ;
    several ranks are never faster than their share of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.balance.context.price import ContextPrice
from equipoise.balance.context.sharding import split_context
from equipoise.balance.context.split import ContextSplit
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.step.layer import Rates
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.cost.work import windowed_pairs
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import (
    BACKWARD_OVER_FORWARD,
    LinkPrice,
    Links,
    price_attention,
    replay_pass,
)
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.strategies import write_attention
from equipoise.sim.gangs import GangCore, TurnGang, make_core
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, WindowSpec

_MOST_REPLAYED = 8
"""Distinct micro-batches of a step whose messages are replayed."""

_SCORE_BYTES = (9.0, 11.0)
"""Bytes a pair and head that softmax and dropout read and write, forward and backward, in 16
bits with a dropout mask. What products read and write is in their own time."""


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """The attention core of one micro-batch in one layer, of the context rank that ends last."""

    tokens: float
    """Tokens of the context rank that has most."""
    forward_s: float
    """Computing."""
    backward_s: float
    forward_exposed_s: float
    """Waiting for keys, queries and peers."""
    backward_exposed_s: float

    @property
    def passes_s(self) -> tuple[float, float]:
        """Forward and backward, waiting included."""
        return self.forward_s + self.forward_exposed_s, self.backward_s + self.backward_exposed_s


@dataclass(frozen=True, slots=True)
class ContextLinks:
    """What connects the ranks of a context group."""

    near: LinkPrice
    """Between neighbours."""
    far: LinkPrice | None = None
    """Between ranks of different nodes, where some share one."""
    ranks_per_node: int | None = None
    """Ranks of the group that share a node; with ``far``."""

    def slowed(self, times: float) -> "ContextLinks":
        """The same links at a part of their bandwidth."""
        near, far = (
            each and replace(each, bytes_per_s=each.bytes_per_s / times)
            for each in (self.near, self.far)
        )
        return ContextLinks(near or self.near, far, self.ranks_per_node)


Splits = dict[tuple[bytes, ContextPrice | None], ContextSplit]
"""By documents' lengths, int64, and what ``auto`` chose by."""


def merges_s(
    merge_bytes: float,
    elements: float,
    heads: int,
    kv_heads: int,
    *,
    chunks: int,
    bytes_per_s: float,
) -> tuple[float, float]:
    """Seconds in which what chunks of keys give is added up, forward and backward.

    Args:
        merge_bytes: ``Stack.merge_bytes``.
        elements: Of one head's queries on this rank.
        heads: Query heads of this rank; outputs and their gradients have as many.
        kv_heads: Key/value heads of this rank.
        chunks: Chunks of keys.
        bytes_per_s: That memory moves.

    >>> merges_s(10.0, 1e6, 2, 1, chunks=3, bytes_per_s=1e9)
    (0.04, 0.08)
    """
    one = merge_bytes * elements * (chunks - 1) / bytes_per_s
    return one * heads, one * (heads + 2 * kv_heads)


class AttentionCore:
    """Prices micro-batches, each distinct one once."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        options: StepOptions,
        rates: Rates,
        links: ContextLinks,
        *,
        splits: Splits | None = None,
        price: ContextPrice | None = None,
    ) -> None:
        """What a setting's cores are priced by.

        Args:
            model: Sizes.
            layout: Degrees.
            options: Everything else.
            rates: Of kernels.
            links: Between context ranks.
            splits: Micro-batches that were shared out before, over as many ranks; is added to.
            price: What ``auto`` chooses by.
        """
        self._model, self._layout, self._options = model, layout, options
        self._rates, self._links = rates, links.slowed(options.residuals.traffic)
        self._splits = {} if splits is None else splits
        self._price = price
        self._known: dict[bytes, CoreTimes] = {}
        self._gangs: dict[TurnGang, GangCore] = {}
        self._replayed: list[tuple[float, CoreTimes]] = []

    def price(self, doc_tokens: Sequence[int] | Floats) -> CoreTimes:
        """The core of one micro-batch's documents [tokens]."""
        lengths = np.sort(np.asarray(doc_tokens, dtype=np.int64))
        key = lengths.tobytes()
        if key not in self._known:
            alone = self._layout.cp == 1 or not lengths.any()
            self._known[key] = self._alone(lengths) if alone else self._shared(lengths)
        return self._known[key]

    def price_tiles(self, doc_tokens: Ints, pairs: Ints) -> CoreTimes:
        """The core of a micro-batch whose pieces read earlier micro-batches of the same rank.

        Args:
            doc_tokens: Length of each piece, int64 [pieces].
            pairs: Of each tile of a piece and an earlier one of its document, int64 [tiles].
        """
        key = doc_tokens.tobytes() + b"|" + pairs.tobytes()
        if key not in self._known:
            alike = np.concatenate((doc_tokens, np.sqrt(2.0 * pairs)))
            forward = float(self._documents_s(alike).sum())
            backward = float(self._documents_s(alike, backward=True).sum())
            self._known[key] = CoreTimes(float(doc_tokens.sum()), forward, backward, 0.0, 0.0)
        return self._known[key]

    def gang(self, gang: TurnGang, links: Links) -> GangCore:
        """The core of ranks that share documents; of one gang always the same.

        Args:
            gang: Of two ranks or more.
            links: Between its ranks.
        """
        if gang not in self._gangs:
            self._gangs[gang] = make_core(
                gang, self._write_gang, self.tiles_ns, links, self._wire, self._kv_heads
            )
        return self._gangs[gang]

    def _write_gang(self, gang: TurnGang) -> AttentionSchedule:
        return write_attention(
            "needed-kv",
            gang.home,
            gang.doc_tokens,
            heads=-(-self._model.heads // self._layout.tp),
            kv_heads=self._kv_heads,
        )

    def tiles_ns(self, pairs: Floats, rounds: Ints, *, backward: bool = False) -> Floats:
        """Tiles, each at the rate of a causal document of as many pairs [ns].

        Args:
            pairs: Of each, in all heads, float64 [tiles].
            rounds: Which run together, int64 [tiles].
            backward: Which pass.
        """
        alike = np.sqrt(2.0 * np.maximum(pairs, 0.5))
        together = np.bincount(rounds, alike)[rounds].astype(np.float64)
        return 1e9 * self._causal_s(alike, backward=backward, pack_tokens=together)

    @property
    def _wire(self) -> Wire:
        width = (self._model.score_width + self._model.head_width) // 2
        return Wire(width, element_bytes(self._options.precision))

    @property
    def _kv_heads(self) -> int:
        """Key/value heads of this rank's kernels and messages."""
        model, tp = self._model, self._layout.tp
        if self._options.stack.repeats_keys:
            return -(-model.heads // tp)
        return max(1, model.kv_heads // tp)

    def _alone(self, lengths: Ints) -> CoreTimes:
        forward, backward = self.price_each(lengths.astype(np.float64))
        whole = float(forward.sum()), float(backward.sum())
        return CoreTimes(float(lengths.sum()), *whole, 0.0, 0.0)

    def price_each(
        self, doc_tokens: Floats, *, pack_tokens: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Forward and backward of each document on one context rank, float64 [documents] [s].

        Args:
            doc_tokens: Of one pack, float64 [documents] [tokens].
            pack_tokens: Of packs that they are in, likewise, where they are not all of one.
        """
        if self._options.stack.attention == "unfused":
            return self._unfused(doc_tokens)
        forward, backward = (
            self._documents_s(doc_tokens, backward=back, pack_tokens=pack_tokens)
            for back in (False, True)
        )
        return forward, backward

    def _unfused(self, lengths: Floats) -> tuple[Floats, Floats]:
        """Scores of whole windows, written and read: masked pairs cost as much as others."""
        model, rates, residuals = self._model, self._rates, self._options.residuals
        heads = -(-model.heads // self._layout.tp)
        forward, backward = np.zeros((2, len(lengths)))
        for at, tokens in enumerate(lengths.tolist()):
            rows, width = heads * tokens, model.head_width
            scores = rates.product_s(rows, tokens, width, fp8=False)
            values = rates.product_s(rows, width, tokens, fp8=False)
            products = (scores + values) * residuals.products
            moved = rows * tokens / rates.bytes_per_s * residuals.moves
            forward[at] = products + _SCORE_BYTES[0] * moved
            backward[at] = 2 * products + _SCORE_BYTES[1] * moved
        return forward, backward

    def _documents_s(
        self, lengths: Floats, *, backward: bool = False, pack_tokens: Floats | None = None
    ) -> Floats:
        """Whole documents in the mean layer, this rank's heads [s]."""
        whole = self._causal_s(lengths, backward=backward, pack_tokens=pack_tokens)
        window = self._model.window
        if window is None:
            return whole
        windowed = self._windowed_s(window, lengths, backward=backward, pack_tokens=pack_tokens)
        return np.asarray(whole + window.share * (np.minimum(windowed, whole) - whole))

    def _windowed_s(
        self, window: WindowSpec, lengths: Floats, *, backward: bool, pack_tokens: Floats | None
    ) -> Floats:
        """Documents in a layer with a window, as causal ones of as many tokens and pairs [s]."""
        tokens = np.maximum(lengths, 1.0)
        alike = np.maximum(2.0 * windowed_pairs(window, tokens) / tokens - 1.0, 1.0)
        together = np.full(len(tokens), tokens.sum()) if pack_tokens is None else pack_tokens
        each = self._causal_s(alike, backward=backward, pack_tokens=together)
        return np.asarray(tokens / alike * each)

    def _causal_s(
        self, lengths: Floats, *, backward: bool = False, pack_tokens: Floats | None = None
    ) -> Floats:
        """Whole causal documents, this rank's heads [s]."""
        model, tp, options = self._model, self._layout.tp, self._options
        slower = options.residuals.attention * self._rates.attention_slowdown(
            options.stack.attention, wider_scores=model.score_width != model.head_width
        )
        return slower * self._rates.attention_s(
            lengths,
            -(-model.heads // tp),
            self._kv_heads,
            model.head_width,
            backward=backward,
            pack_tokens=pack_tokens,
            score_width=model.score_width,
        )

    def _shared(self, lengths: Ints) -> CoreTimes:
        key = lengths.tobytes(), self._price
        if key not in self._splits:
            self._splits[key] = split_context(
                lengths,
                self._layout.cp,
                self._options.sharding,
                ranks_per_node=self._links.ranks_per_node or self._layout.cp,
                price=self._price,
            )
        split = self._splits[key]
        # What the rank with most pairs computes, at the rate of whole documents.
        counted = float(self._documents_s(lengths.astype(np.float64)).sum())
        counted *= split.pair_skew / self._layout.cp
        if len(self._replayed) < _MOST_REPLAYED:
            times = self._replay(lengths, split)
            self._replayed.append((counted, times))
            return times
        whole = sum(each for each, _ in self._replayed) or 1.0
        forward, backward, forward_waits, backward_waits = (
            counted / whole * sum(getattr(each, name) for _, each in self._replayed)
            for name in ("forward_s", "backward_s", "forward_exposed_s", "backward_exposed_s")
        )
        tokens = float(split.tokens.max())
        return CoreTimes(tokens, forward, backward, forward_waits, backward_waits)

    def _replay(self, lengths: Ints, split: ContextSplit) -> CoreTimes:
        model, layout, options = self._model, self._layout, self._options
        schedule = write_attention(
            options.context_strategy,
            split.pieces,
            lengths,
            heads=-(-model.heads // layout.tp),
            kv_heads=self._kv_heads,
            ranks_per_node=self._links.ranks_per_node,
        )
        priced = price_attention(
            schedule,
            self.tiles_ns,
            self._links.near,
            self._wire,
            node_link=self._links.far,
            ranks_per_node=self._links.ranks_per_node,
        )
        compute = float(priced.compute_ns.max()) / (1 + BACKWARD_OVER_FORWARD) * 1e-9
        own = self._mean_layer_s(compute, lengths, split)
        forward, backward = float(priced.forward_ns.max()), float(priced.backward_ns.max())
        waits = (
            max(0.0, forward * 1e-9 - compute),
            max(0.0, backward * 1e-9 - BACKWARD_OVER_FORWARD * compute),
        )
        if options.stack.context_waits:
            waits = self._travel_s(schedule)
        merges = merges_s(
            options.stack.merge_bytes,
            float(split.tokens.max()) * self._wire.head_width,
            -(-model.heads // layout.tp),
            self._kv_heads,
            chunks=layout.cp,
            bytes_per_s=self._rates.bytes_per_s / options.residuals.moves,
        )
        return CoreTimes(
            float(split.tokens.max()),
            own,
            self._backward_ratio(lengths) * own,
            waits[0] + merges[0],
            waits[1] + merges[1],
        )

    def _mean_layer_s(self, causal_s: float, lengths: Ints, split: ContextSplit) -> float:
        """The mean layer on the context rank that has most, of causal ones' seconds [s]."""
        window = self._model.window
        if window is None:
            return causal_s
        tokens = lengths.astype(np.float64)
        windowed = self._windowed_s(window, tokens, backward=False, pack_tokens=None)
        mine = float(windowed.sum()) * float(split.tokens.max()) / float(tokens.sum())
        return causal_s + window.share * (min(mine, causal_s) - causal_s)

    def _travel_s(self, schedule: AttentionSchedule) -> tuple[float, float]:
        """What travels in each pass if nothing is computed beside it [s]."""
        near, far, ranks = self._links.near, self._links.far, self._layout.cp
        per_node = ranks if far is None else self._links.ranks_per_node or ranks
        links = Links(near, far or near, tuple(rank // per_node for rank in range(ranks)))
        idle = np.zeros((ranks, max(map(len, schedule.rounds))))
        out, back = (
            1e-9
            * float(replay_pass(schedule, idle, links, self._wire, is_backward=way).ends_ns.max())
            for way in (False, True)
        )
        # Keys once more; and a sum of gradients makes one hop more than there are other ranks.
        return out, out + back * ranks / (ranks - 1)

    def _backward_ratio(self, lengths: Ints) -> float:
        """Backward over forward of these documents on the device's own curves."""
        documents = lengths[-1:].astype(np.float64)
        forward = float(self._documents_s(documents).sum())
        return float(self._documents_s(documents, backward=True).sum()) / forward
