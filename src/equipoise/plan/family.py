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
from equipoise.cost.step import TERMS, Floats, StepOptions
from equipoise.plan.choice import Choice
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.machine import Machine
from equipoise.sim.parts import BatchParts, StepParts, split_layers
from equipoise.spec.layout import Layout
from equipoise.spec.model import ModelSpec

Batches = Sequence[Sequence[int]]
"""One data-parallel rank's micro-batches: documents' lengths [tokens]."""

_BINS = 4
"""Of micro-batches by their tokens, of which each takes at least what its least one does."""


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


class _GivenCore:
    """Tokens and times of the core that are looked up by a micro-batch's first number."""

    def __init__(self, times: Sequence[CoreTimes]) -> None:
        self._times = times

    def price(self, doc_tokens: Sequence[int] | Floats) -> CoreTimes:
        """Of the micro-batch of that number."""
        return self._times[int(doc_tokens[0])]


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Seconds of forward, gradient of input, gradient of weights, of one rank's micro-batches."""

    layers: Floats
    """float64 [distinct micro-batches, layers, 3]."""
    core: Floats
    """The attention core of each forward, float64 [distinct micro-batches, layers]."""
    first: Floats
    """float64 [distinct micro-batches, 3]."""
    last: Floats
    counts: Floats
    """How many micro-batches are like each, float64 [distinct]."""
    hop_s: float
    """Of the least micro-batch's message to the next stage."""
    typical: BatchParts | None
    """The micro-batch that layers are split for, with the choice's own times; None where they are
    not known."""
    is_exact: bool
    """Whether these are the choice's own."""
    splits: dict[tuple[str, int], StageSplit] = field(default_factory=dict)
    """What was split before, by the stack's way and the number of stages."""

    @property
    def busy_s(self) -> float:
        """Of all micro-batches on all stages."""
        whole = self.layers.sum(axis=(1, 2)) + self.first.sum(axis=1) + self.last.sum(axis=1)
        return float(self.counts @ whole)

    @property
    def once_s(self) -> float:
        """Forward and gradient of input of one micro-batch on all stages, at least."""
        whole = self.layers[..., :2].sum(axis=(1, 2))
        return float((whole + self.first[:, :2].sum(axis=1) + self.last[:, :2].sum(axis=1)).min())

    def split(self, typical: BatchParts, options: StepOptions, stages: int) -> StageSplit:
        """Layers to stages."""
        key = options.stack.split, stages
        if key not in self.splits:
            self.splits[key] = split_layers(typical, options, stages)
        return self.splits[key]


def least_passes(
    model: ModelSpec,
    machine: Machine,
    choice: Choice,
    batches: Batches,
    *,
    own: StepParts | None = None,
) -> Passes:
    """Passes that are never above the choice's own.

    Micro-batches are put into bins by their tokens: layers of each take what they take of the
    fewest, and the core its share of what it takes of all the bin's documents at once.

    Args:
        model: Sizes.
        machine: Device and links.
        choice: Layout and options.
        batches: Of any data-parallel rank; ``[window] * micro_batches`` of full windows.
        own: The choice's own parts, with which layers are split as they will be.
    """
    core = LeastCore(model, choice.layout, choice.options, machine)
    order = sorted(batches, key=sum)
    is_alike = order[0] == order[-1]
    bins = np.array_split(np.arange(len(order)), 1 if is_alike else _BINS)
    bins = [part for part in bins if len(part)]
    times = []
    for part in bins:
        documents = order[0] if is_alike else [x for at in part.tolist() for x in order[at]]
        share = 1 if is_alike else len(part)
        together = core.price(documents)
        times.append(
            CoreTimes(
                sum(order[int(part[0])]) / choice.layout.cp,
                together.forward_s / share,
                together.backward_s / share,
                0.0,
                0.0,
            )
        )
    parts = StepParts(model, machine, choice.layout, choice.options, core=_GivenCore(times))
    priced = [parts.price(np.array([at])) for at in range(len(bins))]
    counts = [float(len(part)) for part in bins]
    typical = None if own is None else own.price(_typical(batches))
    return _collect(priced, counts, typical, is_exact=is_alike and choice.layout.cp == 1)


def own_passes(parts: StepParts, batches: Batches) -> Passes:
    """The choice's own passes."""
    distinct: dict[tuple[int, ...], float] = {}
    for batch in batches:
        key = tuple(sorted(batch))
        distinct[key] = distinct.get(key, 0.0) + 1
    priced = [parts.price(np.asarray(key)) for key in distinct]
    counts = list(distinct.values())
    return _collect(priced, counts, parts.price(_typical(batches)), is_exact=True)


def _collect(
    priced: Sequence[BatchParts],
    counts: Sequence[float],
    typical: BatchParts | None,
    *,
    is_exact: bool,
) -> Passes:
    distinct = {id(layer): layer for each in priced for layer in each.layers}
    sums = {key: layer.sum(axis=1) for key, layer in distinct.items()}
    cores = {key: layer[0, TERMS.index("attention")] for key, layer in distinct.items()}
    return Passes(
        np.array([[sums[id(layer)] for layer in each.layers] for each in priced]),
        np.array([[cores[id(layer)] for layer in each.layers] for each in priced]),
        np.array([each.first.sum(axis=1) for each in priced]),
        np.array([each.last.sum(axis=1) for each in priced]),
        np.array(counts, dtype=np.float64),
        min(each.hop_s for each in priced),
        typical,
        is_exact,
    )


def _typical(batches: Batches) -> Floats:
    """The micro-batch of median squares, as ``sim.step`` takes it."""
    order = sorted(range(len(batches)), key=lambda at: sum(x * x for x in batches[at]))
    return np.asarray(batches[order[len(order) // 2]], dtype=np.float64)
