"""Compare packing policies: the same tokens, the same devices, and what each policy costs.

Why
    Two policies that each train "a step" may train different work: cut documents have less
    attention, and a policy that lets documents wait trains an easy step first. Their seconds say
    nothing until the work is the same.

What it decides
    Every policy packs the same run of steps, cut at every window's edge as ``plain`` cuts them, or
    nowhere (``cut = "documents"``, where ``plain`` packs whole documents by tokens), and what waits
    at the end is packed too. So useful FLOP and tokens are equal, exactly, and the ratio of seconds
    is the gain. ``plain`` is the common baseline: windows in order, each cut in chunks from both
    its ends, all keys gathered. ``in-order`` beside it differs in context sharding alone. Each
    policy runs in its own layout of the same devices (``sim.policies.setting``).

Kept true (tests/unit/sim/test_policies.py)
    Useful FLOP and tokens of all policies are equal; no total is below its bound; a policy that
    lets nothing wait has no delay; the answer depends on the request alone.

Sources
    Plain and the published gains: WLB-LLM, arXiv:2503.17924, section 7.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from equipoise.balance.packing.pack import make_packer
from equipoise.balance.packing.windows import cut_at_windows
from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.base.units import GIB
from equipoise.cost.curve import LoadCurve
from equipoise.cost.step.request import StepPrice
from equipoise.cost.work import layer_pairs, useful_flop
from equipoise.data.stream import DocumentStream, tell_apart
from equipoise.sim.divided import DividedStep, Documents, whole_tokens
from equipoise.sim.drawn import read_documents
from equipoise.sim.machine import Machine
from equipoise.sim.policies.bound import PolicyBounds
from equipoise.sim.policies.setting import (
    PLAIN,
    CompareOptions,
    Cut,
    PolicySetting,
    fitting,
    require_comparable,
    settings_of,
    share_tokens,
)
from equipoise.sim.request import StepRequest, read_step
from equipoise.sim.step import price_step
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec

MOST_STEPS = 1024


class CompareProgress(Protocol):
    """Shows progress to a user."""

    def start(self, label: str, total: int) -> None:
        """``total`` policies follow."""

    def advance(self, amount: int = 1) -> None:
        """One is done."""

    def finish(self) -> None:
        """All are."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy over all steps."""

    policy: str
    """``pack.policy``, or ``plain``."""
    layout: str
    """As ``--layout`` takes it."""
    change: str
    """What was changed so that it fits; empty if nothing had to be."""
    slice_tokens: int | None
    """Most tokens of a micro-batch of a policy that divides documents."""
    seconds: float
    """All steps."""
    bound_s: float
    """What no packing of this kind undercuts, all steps."""
    gain: float
    """Seconds of ``plain`` over these."""
    most_gain: float
    """Seconds of ``plain`` over the bound."""
    tokens: int
    useful_flop: int
    memory_gib: float
    """On the fullest rank, in any step."""
    fits: bool
    delay_mean_steps: float
    """Steps that a token waits."""
    delay_most_steps: int
    extra_steps: int
    """Steps after the last, for documents that still wait."""
    has_same_steps: bool
    """Whether each step trains the tokens that ``plain`` trains in it: the same gradient."""
    terms: dict[str, float]
    """Seconds by what they are spent on, of the rank that computes most."""


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """Policies on equal content."""

    rows: tuple[PolicyRow, ...]
    """``plain`` first."""
    steps: int
    tokens_per_step: int
    documents: int

    def row(self, policy: str) -> PolicyRow:
        """The row of a policy."""
        return next(row for row in self.rows if row.policy == policy)

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise simulate --json`` prints of several policies."""
        return dataclasses.asdict(self)


def compare_policies(
    request: StepRequest,
    policies: Sequence[str],
    *,
    steps: int = 16,
    how: CompareOptions | None = None,
    progress: CompareProgress | None = None,
) -> PolicyComparison:
    """Price several policies on the same documents and devices.

    Args:
        request: The step; its lengths are needed, its ``policy`` is not read.
        policies: Names of ``spec.catalog.POLICIES``, in the order of the rows after ``plain``.
        steps: How many consecutive steps of the stream are packed.
        how: Where documents are cut, and caps.
        progress: Shows every policy.

    Raises:
        SpecError: a policy or a number is wrong, or the request has no lengths.
        LayoutError: a policy cannot pack the step, or has no layout on these devices.
        DataError: the lengths cannot be read.

    Cost: a second for 16 steps of 4 windows; policies that solve an integer program take longer.

    >>> request = StepRequest(
    ...     "llama2-7b", "h100-sxm:16", "tp=2,cp=2,pp=4", 16384, 4, lengths="prolong"
    ... )
    >>> answer = compare_policies(request, ["by-work", "gangs"], steps=2)
    >>> [row.policy for row in answer.rows], len({row.useful_flop for row in answer.rows})
    (['plain', 'by-work', 'gangs'], 1)
    """
    if request.lengths is None:
        raise SpecError(
            "Several policies need lengths, the documents that they pack. Give lengths, or one "
            "policy or none."
        )
    if not 1 <= steps <= MOST_STEPS:
        raise SpecError(f"steps is {steps}. Give a whole number of 1 to {MOST_STEPS:,}.")
    how = how or CompareOptions()
    if how.max_tokens is not None and how.max_tokens < 2:
        raise SpecError(f"max_tokens is {how.max_tokens}. Give 2 or more.")
    asked = read_step(dataclasses.replace(request, policy=None))
    how = dataclasses.replace(how, context_strategy=request.context_strategy)
    require_comparable(list(policies), asked.layout, how.cut)
    asked.options.count_micro_batches(asked.layout)
    settings = {
        name: settings_of(name, asked.layout, asked.options, how) for name in (PLAIN, *policies)
    }
    wide = settings_of("gangs", asked.layout, asked.options, how)[0]
    window = asked.options.context_tokens * asked.options.micro_batch
    layouts = [each.layout for some in settings.values() for each in some]
    most = max([window + window // 4, *(share_tokens(layout, asked.options) for layout in layouts)])
    bounds = PolicyBounds(asked.model, asked.machine, wide.layout, wide.options, most)
    content = _Content.of(request, bounds, steps, how.cut)
    if progress is not None:
        progress.start("compare policies", len(settings))
    runs = []
    for some in settings.values():
        runs.append(_fastest(asked.model, asked.machine, some, content))
        if progress is not None:
            progress.advance()
    if progress is not None:
        progress.finish()
    return PolicyComparison(
        tuple(_row(run, runs[0].seconds, bounds, content) for run in runs),
        steps,
        content.step_tokens,
        sum(map(len, content.steps)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """The same pieces for every policy."""

    steps: tuple[Pieces, ...]
    """Pieces of each step, cut at every window's edge."""
    window: int
    step_tokens: int
    corpus: int
    """Documents of the corpus."""
    curve: LoadCurve
    travel_ns: float
    """By which policies pack, as a run on these devices would."""

    @classmethod
    def of(cls, request: StepRequest, bounds: PolicyBounds, steps: int, cut: Cut) -> "_Content":
        window = request.context_tokens
        each = window * request.step_sequences
        if request.lengths is None:
            raise SpecError("Several policies need lengths.")
        doc_tokens = read_documents(request.lengths, window, steps * each, seed=request.seed)
        stream = DocumentStream(doc_tokens, seed=request.seed, context_tokens=window)
        batch = window * request.micro_batch
        pieces = [stream.step(at * each, each) for at in range(steps)]
        if cut == "windows":
            pieces = [cut_at_windows(one, batch) for one in pieces]
        curve, travel_ns = bounds.load_curve(max(batch, int(max(doc_tokens)))), bounds.travel_ns
        return cls(tuple(pieces), batch, each, len(doc_tokens), curve, travel_ns)


@dataclass(frozen=True, slots=True, eq=False)
class _PricedRun:
    """One setting over all steps."""

    setting: PolicySetting
    packed: tuple[PackedStep, ...]
    prices: tuple[StepPrice, ...]

    @property
    def seconds(self) -> float:
        return sum(price.step_s for price in self.prices)

    @property
    def fits(self) -> bool:
        return all(price.fits for price in self.prices)


def _fastest(
    model: ModelSpec, machine: Machine, settings: Sequence[PolicySetting], content: _Content
) -> _PricedRun:
    """The fastest setting, changed if it has to be so that it fits; the first if none does."""
    known: dict[tuple[int | None, bool], tuple[PackedStep, ...]] = {}

    def run(asked: PolicySetting, *, below: float) -> tuple[_PricedRun | None, bool]:
        """The run, if it fits and takes less than ``below``; and whether it fits, as far as known.

        Of a change of memory all that packing depends on is whether ranks meet in each turn.
        """
        key = asked.max_tokens, asked.layout.meets_each_turn
        if key not in known:
            known[key] = _pack(asked, content)
        prices, seconds = list[StepPrice](), 0.0
        for price in _prices(model, machine, asked, known[key]):
            prices.append(price)
            seconds += price.step_s
            if not price.fits or seconds >= below:
                return None, price.fits
        return _PricedRun(asked, known[key], tuple(prices)), True

    best: _PricedRun | None = None
    changes: list[list[PolicySetting]] = []
    for each in settings:
        wider, *again = fitting(each)
        for one in (each, *wider):
            fast, fits = run(one, below=np.inf if best is None else best.seconds)
            if fits:
                best = fast or best
                break
        else:
            changes += again
    for row in changes:  # what computes more again is slower: of a row the first that fits counts
        for one in row:
            fast, fits = run(one, below=np.inf if best is None else best.seconds)
            if fits:
                best = fast or best
                break
    if best is None:
        packed = _pack(settings[0], content)
        prices = tuple(_prices(model, machine, settings[0], packed))
        best = _PricedRun(settings[0], packed, prices)
    return best


def _pack(setting: PolicySetting, content: _Content) -> tuple[PackedStep, ...]:
    """Every step as the policy packs it."""
    layout, traits = setting.layout, POLICIES[setting.policy]
    spec = PackSpec(
        policy=setting.policy,
        context_tokens=content.window,
        step_tokens=content.step_tokens,
        max_tokens=setting.max_tokens,
    )
    packer = make_packer(
        spec,
        layout.dp,
        content.curve,
        meets_each_turn=layout.meets_each_turn,
        travel_ns=content.travel_ns,
    )
    packed = []
    for pieces in content.steps:
        apart = tell_apart(pieces, content.corpus) if traits.divides else pieces
        packed.append(packer.step(apart))
    return (*packed, *packer.flush())


def _prices(
    model: ModelSpec, machine: Machine, setting: PolicySetting, packed: Iterable[PackedStep]
) -> Iterator[StepPrice]:
    for step in packed:
        documents: Documents | DividedStep
        if POLICIES[setting.policy].divides:
            documents = DividedStep.of(step)
        else:  # a micro-batch of nothing runs kernels of next to none
            documents = [[batch.doc_tokens.tolist() or [1] for batch in r] for r in step.ranks]
        yield price_step(model, machine, setting.layout, setting.options, documents=documents)


def _row(run: _PricedRun, plain_s: float, bounds: PolicyBounds, content: _Content) -> PolicyRow:
    setting = run.setting
    traits = POLICIES[setting.policy]
    sizes = [_doc_tokens(step, divides=traits.divides) for step in run.packed]
    # A policy that lets documents wait is bounded by the steps that it made.
    bound_s = sum(
        bounds.even_s(each) if traits.divides else bounds.whole_s(each, setting.layout.cp)
        for each in sizes
    )
    every = np.concatenate(sizes)
    tokens, pairs = int(every.sum()), layer_pairs(bounds.model, every)
    mean, most = _delays(content, run.packed) if traits.lets_wait else (0.0, 0)
    terms: dict[str, float] = defaultdict(float)
    for price in run.prices:
        for name, value in price.terms.items():
            terms[name] += value
    return PolicyRow(
        policy=setting.name,
        layout=setting.words,
        change=setting.change,
        slice_tokens=setting.max_tokens,
        seconds=run.seconds,
        bound_s=bound_s,
        gain=plain_s / run.seconds,
        most_gain=plain_s / bound_s,
        tokens=tokens,
        useful_flop=useful_flop(bounds.model, tokens, pairs),
        memory_gib=max(float(price.memory_bytes.max()) for price in run.prices) / GIB,
        fits=run.fits,
        delay_mean_steps=mean,
        delay_most_steps=most,
        extra_steps=len(run.packed) - len(content.steps),
        has_same_steps=not traits.lets_wait,
        terms=dict(terms),
    )


def _doc_tokens(step: PackedStep, *, divides: bool) -> Ints:
    """Length of each document of a packed step, its parts together, int64 [documents]."""
    if divides:
        return whole_tokens(step)
    return np.concatenate([batch.doc_tokens for batch in step])


def _delays(content: _Content, packed: Sequence[PackedStep]) -> tuple[float, int]:
    """Steps that a token waits, mean and most."""
    arrived: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    for at, pieces in enumerate(content.steps):
        for row in pieces.tolist():
            arrived[tuple(row)].append(at)
    waited, most = 0, 0
    for at, step in enumerate(packed):
        for batch in step:
            for row, size in zip(
                batch.pieces.tolist(), lengths_of(batch.pieces).tolist(), strict=True
            ):
                delay = at - arrived[tuple(row)].popleft()
                waited, most = waited + delay * size, max(most, delay)
    return waited / (content.step_tokens * len(content.steps)), most
