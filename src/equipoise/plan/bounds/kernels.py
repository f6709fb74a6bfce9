"""Least passes of a micro-batch, by its kernels' own times: what the closer bounds rest on.

Why
    A device's peak is a third away from what its kernels reach. Choices that differ only in their
    schedule, their copies or what travels between context ranks run the same kernels, so those are
    priced once, and a bound within a few percent prunes almost everything.

What it relaxes (proofs: docs/predict/search.md)
    Micro-batches are bins of the fewest tokens; with several context ranks the core takes its even
    share on one rank, and nothing for messages; layers wait for no parameters. A *family* shares
    every column but the context strategy, a *group* all columns that kernels depend on.

Kept true (tests/unit/plan/bounds/test_bounds.py)
    The bounds never exceed ``sim.step.price_step``, whatever is chosen and however documents fall.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.balance.context.price import ContextPrice
from equipoise.balance.context.sharding import split_context
from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats
from equipoise.cost.step.request import TERMS, StepOptions
from equipoise.plan.bounds.memory import even_layers, is_even
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.packs import Batches, BinCores, Bins
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.divided import DividedStep, longest_chain, typical_slices
from equipoise.sim.machine import Machine
from equipoise.sim.parts import BatchParts, LayerKinds, StepParts, split_layers
from equipoise.sim.settle.sharding import auto_price
from equipoise.sim.step import typical
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

_FULL_TOKENS = 1e9
"""Tokens of a pack that fills any device."""

_ROUNDING = 1.0 + 1e-9
"""Room for sums in another order."""


class _GivenCore:
    """A core whose times are given: a micro-batch's first number is a place among them."""

    def __init__(self) -> None:
        self.times: list[CoreTimes] = []

    def price(self, doc_tokens: Sequence[int] | Floats) -> CoreTimes:
        """Times of the micro-batch of that number."""
        return self.times[int(doc_tokens[0])]


Splits = dict[tuple[int, str, str, tuple[float, ...]], StageSplit]
"""By stages, the stack's way, recomputation, and seconds of each kind of layer and both ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Seconds of forward, gradient of input, gradient of weights, of one rank's micro-batches."""

    layers: Floats
    """float64 [distinct micro-batches, layers, 3]."""
    core: Floats
    """The attention core of each forward, float64 [distinct micro-batches, layers]."""
    spared: Floats
    """What of each forward is not computed again, likewise."""
    first: Floats
    """float64 [distinct micro-batches, 3]."""
    last: Floats
    counts: Floats
    """How many micro-batches are like each, float64 [distinct]."""
    hop_s: float
    """The least micro-batch's message to the next stage [s]."""
    typical: BatchParts | None
    """The micro-batch that layers are split for, with the choice's own times; None where they are
    not known."""
    is_exact: bool
    """Whether these are the choice's own."""
    is_alike: bool
    """Whether all micro-batches have the same documents."""
    below: Floats
    """How much less forward and both gradients of a micro-batch may take in a layer than the mean
    of those like it, float64 [distinct, 2]."""
    above: Floats
    """How much more."""
    lacks: int | None = None
    """Layers that the first and the last stage together have fewer than others, at most; None
    where that is not known."""
    is_last_heavier: bool | None = None
    """Where both ends weigh less than a layer, whether the last does more; else None."""
    splits: Splits = field(default_factory=dict)
    """Known splits, of these passes or of others."""

    @property
    def busy_s(self) -> float:
        """All micro-batches on all stages [s]."""
        whole = self.layers.sum(axis=(1, 2)) + self.first.sum(axis=1) + self.last.sum(axis=1)
        return float(self.counts @ whole)

    @property
    def once_s(self) -> float:
        """Least forward and gradient of input of one micro-batch on all stages [s]."""
        whole = self.layers[..., :2].sum(axis=(1, 2))
        return float((whole + self.first[:, :2].sum(axis=1) + self.last[:, :2].sum(axis=1)).min())

    def split(self, options: StepOptions, stages: int) -> StageSplit | None:
        """Layers to stages; None where that is not known."""
        if self.typical is not None:
            kinds = {id(layer): layer for layer in self.typical.layers}.values()
            parts = (*kinds, self.typical.first, self.typical.last)
            weights = tuple(float(each.sum()) for each in parts)
            key = stages, options.stack.split, options.recompute, weights
            if key not in self.splits:
                self.splits[key] = split_layers(self.typical, options, stages)
            return self.splits[key]
        heavier = self.is_last_heavier
        if heavier is None or not is_even(options) or stages > self.layers.shape[1]:
            return None
        layers = even_layers(self.layers.shape[1], stages, is_last_heavier=heavier)
        return StageSplit(np.concatenate(([0], np.cumsum(layers))), np.zeros(stages))


class Kernels:
    """Kernels' least times; what several groups share is priced once."""

    def __init__(self, model: ModelSpec, machine: Machine) -> None:
        self._model, self._machine = model, machine
        self._cores: dict[tuple[int, bool], AttentionCore] = {}
        self._parts: dict[Layout, tuple[StepParts, _GivenCore]] = {}
        self._kinds: dict[tuple[object, ...], LayerKinds] = {}
        self._shares: dict[tuple[bytes, int, ContextPrice | None], int] = {}
        self.splits: Splits = {}

    def kinds(self, layout: Layout) -> LayerKinds:
        """Layers that were priced for this layout's groups; ``StepParts`` adds to them."""
        experts = (layout.dp, layout.order, layout.pp) if layout.ep * layout.etp > 1 else ()
        key = layout.tp, layout.cp, layout.ep, layout.etp, layout.zero == 3, experts
        return self._kinds.setdefault(key, {})

    def group_passes(self, choice: Choice, bins: Bins) -> Passes:
        """Passes of any choice of these kernels, without its recomputation and ZeRO.

        Args:
            choice: Gives tensor, context and expert ranks, micro-batch and options.
            bins: Those of any data-parallel rank.
        """
        alone, parts, core = self._alone(choice)
        return self._weigh_ends(self._price(parts, core, alone, choice.options, bins), choice, bins)

    def _alone(self, choice: Choice) -> tuple[Layout, StepParts, _GivenCore]:
        """Without stages, recomputation and what else makes layers of one group differ."""
        layout = choice.layout
        # Experts' traffic is least where ranks that share them are neighbours.
        dp = max(1, -(-layout.ep * layout.etp // (layout.tp * layout.cp)))
        alone = dataclasses.replace(layout, zero=1, replicas=1, pp=1, dp=dp)
        if alone not in self._parts:
            options = dataclasses.replace(choice.options, recompute="none", offload="none")
            core = _GivenCore()
            self._parts[alone] = self._make(alone, options, core), core
        return alone, *self._parts[alone]

    def family_passes(self, choice: Choice, bins: Bins, *, own: StepParts | None = None) -> Passes:
        """Passes that are never above the choice's own.

        Layers of a bin's micro-batches take what they take of the fewest tokens, and the core the
        mean of what it takes.

        Args:
            choice: Layout and options.
            bins: Those of any data-parallel rank.
            own: The choice's own parts, with which layers are split as they will be.
        """
        layout, options, core = choice.layout, choice.options, _GivenCore()
        if layout.cp > 1 or not bins.is_alike:  # what is waited for depends on each one's own core
            options = dataclasses.replace(options, offload="none")
        parts = self._make(layout, options, core)
        passes = self._price(parts, core, layout, options, bins)
        if own is None:
            return self._weigh_ends(passes, choice, bins)
        median = own.price(bins.typical.astype(np.float64))
        return dataclasses.replace(passes, typical=median, splits=self.splits)

    def _make(self, layout: Layout, options: StepOptions, core: _GivenCore) -> StepParts:
        kinds = self.kinds(layout)
        return StepParts(self._model, self._machine, layout, options, core=core, kinds=kinds)

    def _price(
        self,
        parts: StepParts,
        given: _GivenCore,
        layout: Layout,
        options: StepOptions,
        bins: Bins,
    ) -> Passes:
        cores, priced = self._cores_of(layout, options, bins), []
        for tokens, mean in zip(bins.tokens, cores.mean.T / layout.cp, strict=True):
            forward, backward = mean.tolist()
            given.times.append(CoreTimes(tokens / layout.cp, forward, backward, 0.0, 0.0))
            priced.append(parts.price(np.array([len(given.times) - 1])))
        is_exact = bins.is_alike and layout.cp == 1
        passes = _collect(priced, bins.counts, None, is_exact=is_exact, is_alike=bins.is_alike)
        # Forward, and backward with the core that it may compute again.
        below, above = (np.cumsum(each, axis=0).T for each in (cores.below, cores.above))
        return dataclasses.replace(passes, below=below / layout.cp, above=above / layout.cp)

    def _cores_of(self, layout: Layout, options: StepOptions, bins: Bins) -> BinCores:
        """As if all documents were one pack: more fill a device better, so none is faster."""
        key = layout.tp, layout.cp > 1
        if key not in bins.cores:
            core = self._core(layout, options)
            documents = bins.documents.astype(np.float64)
            # Tiles may be more than these, and fill a device better, but none of them is longer.
            full = np.full(len(documents), _FULL_TOKENS) if bins.is_divided else None
            bins.cores[key] = bins.sum_cores(core.price_each(documents, pack_tokens=full))
        return bins.cores[key]

    def _core(self, layout: Layout, options: StepOptions) -> AttentionCore:
        """On one rank; what context ranks share runs in tiles, and never writes its scores."""
        key = layout.tp, layout.cp > 1
        if key not in self._cores:
            alone = Layout(tp=layout.tp)
            if layout.cp > 1:
                stack = dataclasses.replace(options.stack, attention="flash")
                options = dataclasses.replace(options, stack=stack)
            links = self._machine.context_links(alone)
            machine = self._machine.at(options.precision)
            self._cores[key] = AttentionCore(self._model, alone, options, machine, links)
        return self._cores[key]

    def _weigh_ends(self, passes: Passes, choice: Choice, bins: Bins) -> Passes:
        """With the tokens that layers are split for, and layers as light as without attention.

        Layers of a choice take that or more, for it recomputes, attends and waits for parameters;
        its embedding and head take just that.
        """
        ranks, lengths, options = choice.layout.cp, bins.typical, choice.options
        price = auto_price(self._model, self._machine, choice.layout, options)
        key = lengths.tobytes(), ranks, price
        if key not in self._shares:
            most = int(lengths.sum())
            if ranks > 1:
                split = split_context(
                    lengths, ranks, options.sharding, ranks_per_node=ranks, price=price
                )
                most = int(split.tokens.max())
            self._shares[key] = most
        _, parts, given = self._alone(choice)
        given.times.append(CoreTimes(float(self._shares[key]), 0.0, 0.0, 0.0, 0.0))
        bare = parts.price(np.array([len(given.times) - 1]))
        lightest = min(float(layer.sum()) for layer in bare.layers)
        first, last = float(bare.first.sum()), float(bare.last.sum())
        lacks = sum(1 + int(_ROUNDING * end / lightest) for end in (first, last))
        is_alike = len({id(layer) for layer in bare.layers}) == 1
        # Timed parts weigh what they were timed to.
        is_sure = is_alike and lacks == 2 and self._machine.device.curve_file is None
        is_sure = is_sure and abs(last - first) > (_ROUNDING - 1.0) * last
        heavier = last > first if is_sure else None
        return dataclasses.replace(passes, lacks=lacks, is_last_heavier=heavier)


def divided_passes(
    parts: StepParts, step: DividedStep, layout: Layout, splits: Splits | None = None
) -> Passes:
    """The choice's own passes of a step whose documents are divided.

    Divided over ranks, those of the chain of gangs that is the step; over time, those of the
    pipeline with most work, whose order of micro-batches is not known.

    Args:
        parts: The choice's own.
        step: Its documents, as ``plan.space.packs`` has them.
        layout: Degrees.
        splits: Splits of others, to be shared.
    """
    if step.turns:
        priced = longest_chain(parts, step, layout).batches
        median = priced[0]
    else:
        middle = typical_slices(step.rows[0])
        priced = tuple(parts.price_slices(each.doc_tokens, each.pairs) for each in step.rows[0])
        median = parts.price_slices(middle.doc_tokens, middle.pairs)
    is_exact = bool(step.turns)
    passes = _collect(priced, [1.0] * len(priced), median, is_exact=is_exact, is_alike=False)
    return passes if splits is None else dataclasses.replace(passes, splits=splits)


def own_passes(parts: StepParts, batches: Batches, splits: Splits | None = None) -> Passes:
    """The choice's own passes; knows splits of others, and adds to them."""
    distinct: dict[tuple[int, ...], float] = {}
    for batch in batches:
        key = tuple(sorted(batch))
        distinct[key] = distinct.get(key, 0.0) + 1
    priced = [parts.price(np.asarray(key)) for key in distinct]
    counts = list(distinct.values())
    median = parts.price(typical([batches]))
    passes = _collect(priced, counts, median, is_exact=True, is_alike=len(distinct) == 1)
    return passes if splits is None else dataclasses.replace(passes, splits=splits)


def _collect(
    priced: Sequence[BatchParts],
    counts: Sequence[float] | Floats,
    typical: BatchParts | None,
    *,
    is_exact: bool,
    is_alike: bool,
) -> Passes:
    layers = [layer for each in priced for layer in each.layers]
    _, first, kind_of = np.unique(
        np.fromiter(map(id, layers), np.int64, len(layers)), return_index=True, return_inverse=True
    )
    index = kind_of.reshape(len(priced), -1)
    every = np.stack([layers[at] for at in first])
    return Passes(
        every.sum(axis=2)[index],
        every[:, 0, TERMS.index("attention")][index],
        np.array([each.spared_s or np.zeros(len(each.layers)) for each in priced]),
        np.array([each.first.sum(axis=1) for each in priced]),
        np.array([each.last.sum(axis=1) for each in priced]),
        np.asarray(counts, dtype=np.float64),
        min(each.hop_s for each in priced),
        typical,
        is_exact,
        is_alike,
        *np.zeros((2, len(priced), 2)),
    )
