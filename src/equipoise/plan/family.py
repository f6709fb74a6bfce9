"""What choices of one family take at least, by their kernels' own times.

Why
    A device's peak is a third away from what its kernels reach. Choices that differ only in their
    schedule, their copies or what travels between context ranks run the same kernels, so those are
    priced once, and a bound within a few percent prunes almost everything.

What it decides
    A *family* shares every column but zero (of 0, 1, 2) and the context strategy. Of several
    context ranks the core takes its share of the time on one rank, and nothing for messages. A
    pipeline's ranks each take their work, the passes that must come before it, and those that must
    come after.

Kept true (tests/unit/plan/test_bound.py)
    The bound never exceeds ``sim.step.price_step``, whatever is chosen and however documents fall.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.cost.step import Floats, StepOptions
from equipoise.plan.bound import bubble
from equipoise.plan.choice import Choice
from equipoise.schedule.pipeline import place_in_loop, place_in_v
from equipoise.schedule.pipeline_strategies import IN_V
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.machine import Machine
from equipoise.sim.parts import BatchParts, StepParts, split_layers
from equipoise.spec.layout import Layout
from equipoise.spec.model import ModelSpec

Batches = Sequence[Sequence[int]]
"""One data-parallel rank's micro-batches: documents' lengths [tokens]."""

_BINS = 4
"""Of micro-batches by their tokens, of which each takes at least what its least one does."""

_FLOAT = 1.0 - 1e-9
"""Sums in another order."""


class LeastCore:
    """The attention core shared out over context ranks as evenly as can be, with no messages."""

    def __init__(
        self, model: ModelSpec, layout: Layout, options: StepOptions, machine: Machine
    ) -> None:
        alone = Layout(tp=layout.tp)
        if layout.cp > 1:  # what is shared out runs in tiles, and never writes its scores
            stack = dataclasses.replace(options.stack, attention="flash")
            options = dataclasses.replace(options, stack=stack)
        self._ranks = layout.cp
        self._core = AttentionCore(model, alone, options, machine, machine.context_links(alone))

    def price(self, doc_tokens: Sequence[int] | Floats) -> CoreTimes:
        """A share of one rank's core."""
        if self._ranks == 1:
            return self._core.price(doc_tokens)
        whole = self._core.price(doc_tokens)
        return CoreTimes(
            whole.tokens / self._ranks,
            whole.forward_s / self._ranks,
            whole.backward_s / self._ranks,
            0.0,
            0.0,
        )


def least_parts(model: ModelSpec, machine: Machine, choice: Choice) -> StepParts:
    """Parts of micro-batches that are never above those of the choice; its own without cp."""
    layout, options = choice.layout, choice.options
    core = LeastCore(model, layout, options, machine) if layout.cp > 1 else None
    return StepParts(model, machine, layout, options, core=core)


class _GivenCore:
    """Tokens and times of the core that are looked up by a micro-batch's first number."""

    def __init__(self, times: Sequence[CoreTimes]) -> None:
        self._times = times

    def price(self, doc_tokens: Sequence[int] | Floats) -> CoreTimes:
        """Of the micro-batch of that number."""
        return self._times[int(doc_tokens[0])]


def least_busy_s(
    model: ModelSpec, machine: Machine, choice: Choice, batches: Batches
) -> tuple[float, float]:
    """Work of all stages at least, and the part of it that one micro-batch does before weights.

    Micro-batches are put into bins by their tokens: layers of each take what they take of the
    fewest, and the core what it takes of all the bin's documents at once.

    Returns:
        Over all micro-batches; and forward with gradient of the input of one [s].
    """
    layout = choice.layout
    core = LeastCore(model, layout, choice.options, machine)
    order = sorted(batches, key=sum)
    bins = [part for part in np.array_split(np.arange(len(order)), _BINS) if len(part)]
    if sum(order[0]) == sum(order[-1]):
        bins = [np.arange(len(order))]
    times = []
    for part in bins:
        fewest = sum(order[int(part[0])]) / layout.cp
        alike = order[int(part[0])] == order[int(part[-1])]
        documents = [x for at in part.tolist() for x in order[at]] if not alike else order[part[0]]
        together = core.price(documents)
        share = len(part) if not alike else 1
        times.append(
            CoreTimes(fewest, together.forward_s / share, together.backward_s / share, 0.0, 0.0)
        )
    parts = StepParts(model, machine, layout, choice.options, core=_GivenCore(times))
    busy, once = 0.0, np.inf
    for at, part in enumerate(bins):
        priced = parts.price(np.array([at]))
        kinds: dict[int, list[float]] = {}
        for layer in priced.layers:
            kinds.setdefault(id(layer), [0.0, float(layer.sum()), float(layer[:2].sum())])[0] += 1
        whole = sum(count * every for count, every, _ in kinds.values())
        first = sum(count * some for count, _, some in kinds.values())
        busy += len(part) * (whole + float(priced.first.sum() + priced.last.sum()))
        once = min(once, first)
    return _FLOAT * busy, _FLOAT * once


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Seconds of forward, gradient of input, gradient of weights, of one rank's micro-batches."""

    layers: Floats
    """float64 [distinct micro-batches, layers, 3]."""
    first: Floats
    """float64 [distinct micro-batches, 3]."""
    last: Floats
    counts: Floats
    """How many micro-batches are like each, float64 [distinct]."""
    typical: BatchParts
    """The micro-batch that layers are split for."""
    is_own: bool
    """Whether these are the choice's own, and not below them."""
    splits: dict[tuple[str, int], StageSplit] = field(default_factory=dict)
    """What was split before, by the stack's way and the number of stages."""

    @property
    def busy_s(self) -> float:
        """Of all micro-batches on all stages."""
        whole = self.layers.sum(axis=(1, 2)) + self.first.sum(axis=1) + self.last.sum(axis=1)
        return float(self.counts @ whole)

    def split(self, options: StepOptions, stages: int) -> StageSplit:
        """Layers to stages."""
        key = options.stack.split, stages
        if key not in self.splits:
            self.splits[key] = split_layers(self.typical, options, stages)
        return self.splits[key]


def read_passes(parts: StepParts, batches: Batches, *, is_own: bool) -> Passes:
    """Passes of one rank's micro-batches.

    Args:
        parts: From ``least_parts``, or the choice's own.
        batches: Of any data-parallel rank; ``[window] * micro_batches`` of full windows.
        is_own: Which of the two; without cp they are the same.
    """
    distinct: dict[tuple[int, ...], int] = {}
    for batch in batches:
        key = tuple(sorted(batch))
        distinct[key] = distinct.get(key, 0) + 1
    priced = [parts.price(np.asarray(key)) for key in distinct]
    known: dict[int, Floats] = {}
    for each in priced:
        known |= {id(layer): layer.sum(axis=1) for layer in each.layers if id(layer) not in known}
    return Passes(
        np.array([[known[id(layer)] for layer in each.layers] for each in priced]),
        np.array([each.first.sum(axis=1) for each in priced]),
        np.array([each.last.sum(axis=1) for each in priced]),
        np.array(list(distinct.values()), dtype=np.float64),
        _typical(distinct, priced),
        is_own,
    )


def least_step_s(choice: Choice, passes: Passes, micro_batches: int) -> float:
    """Time that a step takes at least.

    Args:
        choice: Layout and options.
        passes: Of any of its data-parallel ranks.
        micro_batches: Of that rank.

    Cost: some 0.1 ms.
    """
    layout, options = choice.layout, choice.options
    span = passes.busy_s / layout.pp
    if layout.pp > 1:
        if options.schedule == "1f1b" and len(passes.counts) == 1:
            span *= float(bubble(layout.pp, micro_batches))
        if passes.is_own:
            span = max(span, _by_ranks(choice, passes, micro_batches))
    return _FLOAT * span / (1.0 - options.residuals.step_share)


def _typical(distinct: dict[tuple[int, ...], int], priced: list[BatchParts]) -> BatchParts:
    """The micro-batch of median squares, as ``sim.step`` takes it."""
    weights = [sum(length**2 for length in key) for key in distinct]
    counts = list(distinct.values())
    middle, seen = sum(counts) // 2, 0
    for at in sorted(range(len(weights)), key=lambda at: weights[at]):
        seen += counts[at]
        if seen > middle:
            return priced[at]
    return priced[-1]


def _by_ranks(choice: Choice, passes: Passes, micro_batches: int) -> float:
    """The rank whose own work, and what must come before and after it, takes longest."""
    layout, options = choice.layout, choice.options
    stages = layout.pp * options.virtual
    split = passes.split(options, stages)
    table = np.add.reduceat(passes.layers, split.edges[:-1], axis=1)
    table[:, 0] += passes.first
    table[:, -1] += passes.last
    least = table.min(axis=0)
    in_v = options.schedule in IN_V
    place = place_in_v(layout.pp) if in_v else place_in_loop(layout.pp, stages)
    busy = np.zeros(layout.pp)
    np.add.at(busy, place, np.tensordot(passes.counts, table.sum(axis=2), axes=1))
    hops = passes.typical.hop_s * np.arange(layout.pp) * (len(passes.counts) == 1)
    before = np.concatenate(([0.0], np.cumsum(least[: layout.pp - 1, 0]))) + hops
    back = least[: layout.pp - 1, 1:].sum(axis=1)
    after = np.concatenate(([0.0], np.cumsum(back))) + hops
    if options.schedule in ("1f1b", "interleaved"):
        return float((before + busy + after).max())
    span = before + busy
    if options.virtual == 1:
        # Forwards that a rank runs ahead hide a part of its wait for the first gradient.
        ahead = (layout.pp - 1 - np.arange(layout.pp)) * (2 if options.schedule == "zb-h2" else 1)
        ahead = np.minimum(ahead, micro_batches - 1)
        later = least[:, :2].sum(axis=1)
        downstream = later.sum() - np.cumsum(later) + 2 * hops[::-1]
        waits = downstream - ahead * table.max(axis=0)[:, 0]
        span = span + np.maximum(waits, 0.0)
    return float(span.max())
