"""Roofline bounds of every choice, in seconds and in bytes: a million choices at a time.

Why
    Replaying a step takes tens of milliseconds, and there are a million choices. What surely does
    not fit, and what is surely slower than the incumbent, need not be replayed.

What it relaxes (proofs: docs/predict/search.md)
    *Time*: all useful and recomputed FLOP at the devices' peak; for 1F1B times its least bubble,
    which no split of layers can shorten. *Memory*: weights, gradients and moments of the mean
    stage, or of one of ``ceil(layers / pp)`` layers; activations of one micro-batch there, or of as
    many as the first stage has in flight, of full windows; of what is offloaded, what stays.

Kept true (tests/unit/plan/bounds/test_bounds.py, by Hypothesis)
    Neither bound exceeds what ``sim.step.price_step`` finds, on any choice.

Sources
    Bounds before prices: Calculon (SC 2023) prices every choice whole, at 102 a second.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.cost.memory.device import (
    hosted_bytes,
    kept_bytes,
    logit_bytes,
    weight_bytes,
)
from equipoise.cost.step.modules import module_counts
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.cost.work import layer_pairs, pair_flop
from equipoise.plan.space.columns import (
    RECOMPUTES,
    SCHEDULES,
    WHOLE_LAYERS,
    Space,
    schedules_with,
)
from equipoise.sim.machine import Machine
from equipoise.spec import catalog
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import (
    KEPT_LAYERS,
    OFFLOADS,
    Offload,
    offloads_activations,
    offloads_optimizer,
)
from equipoise.spec.recompute import attention_repeats, linear_repeats, modules_of

_IN_V = schedules_with(lambda each: each.in_v)

_ROUNDING = 0.999
"""A measured kernel may beat its device's peak by rounding."""


_AT_ONCE = 32_768
"""Rows whose columns stay in a core's cache while they are bounded."""


def memory_bound_bytes(model: ModelSpec, space: Space, *, has_documents: bool = False) -> Floats:
    """Lower bound of the fullest rank's memory, float64 [rows] [bytes].

    Args:
        model: Sizes.
        space: The choices.
        has_documents: Whether windows are packed documents, so that the rank that is priced may
            have fewer tokens than others: then activations are left out.

    Cost: about 0.15 us a row.
    """
    full = 0.0 if has_documents else 1.0
    parts = (_memory_bound_bytes(model, some, full) for some in space.runs(_AT_ONCE))
    return np.concatenate([np.zeros(0), *parts])


def memory_guess_bytes(model: ModelSpec, space: Space) -> Floats:
    """What the fullest rank needs if all layers are as large as any and cut evenly, float64 [rows].

    Schedules in the form of a V hold what 1F1B's first rank does; the last stage has the logits.
    """
    return _memory_bound_bytes(model, space, 1.0, is_guess=True)


def _memory_bound_bytes(
    model: ModelSpec, space: Space, full: float, *, is_guess: bool = False
) -> Floats:
    stack, base = space.base.stack, space.base
    tp, pp, zero = space["tp"], space["pp"], space["zero"]
    of_param, of_grad, of_optimizer = weight_bytes(base)
    width = element_bytes(base.precision)
    layers, one = model.layers, pp == 1
    is_alike = is_guess or len({model.is_sparse(each) for each in range(layers)}) == 1
    most = np.ceil(layers / pp) if is_alike else layers / pp
    weights = _Weights(model, space)
    tables = weights.tables
    hosted = np.where(_is_offloaded(space, offloads_optimizer), _hosted(base), 0.0)
    # Layers that hold activations of one micro-batch: no more are on the device at once.
    room = np.where(_is_offloaded(space, offloads_activations), float(KEPT_LAYERS), np.inf)

    def states(count: npt.NDArray[Any]) -> Floats:
        mine, theirs, moments = weights.of_layers(count)
        scattered = weights.scatter(mine, theirs)
        params = np.where(zero < 3, mine + theirs, tables)
        grads = np.where(zero < 2, mine + theirs, scattered)
        grads = np.where((zero >= 2) & (space["replicas"] > 1), theirs / weights.alike, grads)
        return np.asarray((of_optimizer - hosted) * moments + of_param * params + of_grad * grads)

    kept, widest = _token_bytes(model, space, is_guess=is_guess)
    tokens = full * space["micro_batch"] * base.context_tokens / space["cp"]
    slack = 1.0 + stack.slack_share
    words = np.where(one | is_guess, model.vocab / tp, 0.0)
    logits = tokens * (logit_bytes(base) * words + 2.0 * width * model.hidden * one)
    held = kept * np.minimum(most, room)
    fullest = states(most) + slack * tokens * (held + widest) + slack * logits
    # The first stage, which has most in flight.
    ahead = np.minimum(stages_ahead(space), space.micro_batches)
    runs = np.floor(layers / (pp * space["virtual"])) - 1 if is_alike else np.ones(len(tp))
    stage = np.where(one, layers, np.maximum(runs, 1.0))
    if is_guess:
        ahead = np.where(np.isin(space["schedule"], _IN_V), 2.0 * pp, stages_ahead(space))
        ahead = np.minimum(ahead, space["virtual"] * space.micro_batches)
        stage = layers / (pp * space["virtual"])
    least = stage * space["virtual"]
    first = states(least) + slack * tokens * (kept * np.minimum(stage * ahead, room) + widest)
    return np.asarray(np.maximum(fullest, first))


def needed_bytes(
    model: ModelSpec, machine: Machine, space: Space, *, has_documents: bool = False
) -> Floats:
    """``memory_bound_bytes``; infinite where the host has no room for the optimizer."""
    needs = memory_bound_bytes(model, space, has_documents=has_documents)
    if not space["offload"].any():
        return needs
    is_full = host_bound_bytes(model, space) > machine.host_capacity_bytes
    return np.where(is_full, np.inf, needs)


def host_bound_bytes(model: ModelSpec, space: Space) -> Floats:
    """Lower bound of a rank's host memory: the optimizer's, float64 [rows] [bytes]."""
    _, _, moments = _Weights(model, space).of_layers(model.layers / space["pp"])
    of_param, of_grad, _ = weight_bytes(space.base)
    hosted = (_hosted(space.base) + of_grad + of_param) * moments
    return np.where(_is_offloaded(space, offloads_optimizer), hosted, 0.0)


def _hosted(base: StepOptions) -> float:
    return hosted_bytes(dataclasses.replace(base, offload="optimizer"))


def _is_offloaded(space: Space, what: Callable[[Offload], bool]) -> Flags:
    """Whether each row offloads it; one answer where no row offloads anything."""
    column = space["offload"]
    return np.array([what(setting) for setting in OFFLOADS])[column if column.any() else [0]]


def stages_ahead(space: Space) -> Floats:
    """Stages' activations that the first rank holds at the fullest moment, at least."""
    pp, virtual = space["pp"], space["virtual"]
    ahead = np.ones(len(pp))
    rounds = (virtual - 1) * np.minimum(pp, space.micro_batches)
    for place, name in enumerate(SCHEDULES):
        traits = catalog.SCHEDULES[name]
        most = 2.0 if traits.in_v else rounds + traits.ahead * (pp - 1) + 1
        if traits.is_interleaved:
            most = np.minimum(most, virtual * space.micro_batches)
        ahead = np.where(space["schedule"] == place, most, ahead)
    # With several stages a rank, whole rounds may be more than micro-batches; see the caller.
    return np.asarray(ahead, dtype=np.float64)


class _Weights:
    """Weights of a layer on a rank of each row, and who shares them."""

    def __init__(self, model: ModelSpec, space: Space) -> None:
        dense, experts = _weights(model)
        tp, ranks = space["tp"], space["cp"] * space["dp"]
        spread = space["ep"] * space["etp"]
        tables = 1.0 if model.tied else 2.0
        self.tables = np.where(space["pp"] == 1, tables, 0.0) * model.hidden * model.vocab / tp
        self.alike = tp * ranks // spread
        self._own = dense / model.layers / tp
        self._away = experts / model.layers / spread
        self._sharers = ranks // space["replicas"]
        self._zero = space["zero"]

    def of_layers(self, count: npt.NDArray[Any]) -> tuple[Floats, Floats, Floats]:
        """Weights of some layers and the tables, of their experts, and those updated here."""
        mine, theirs = self._own * count + self.tables, self._away * count
        whole = mine + theirs
        return mine, theirs, np.where(self._zero > 0, self.scatter(mine, theirs), whole)

    def scatter(self, mine: Floats, theirs: Floats) -> Floats:
        """A rank's shard."""
        return np.asarray(mine / self._sharers + theirs / self.alike)


def _weights(model: ModelSpec) -> tuple[float, float]:
    """Weights of all layers, without experts and of experts."""
    dense = experts = 0.0
    for layer in range(model.layers):
        sparse = model.is_sparse(layer)
        routed = model.experts * model.expert_params if sparse else 0
        experts += routed
        dense += model.count_layer(sparse=sparse, active=False) - routed
    return dense, experts


def _token_bytes(
    model: ModelSpec, space: Space, *, is_guess: bool = False
) -> tuple[Floats, Floats]:
    """Bytes of a token that the mean layer keeps and that a backward works with.

    At least; or, as a guess, those of the largest layer.
    """
    codes = (space["tp"] * 64 + space["etp"]) * len(RECOMPUTES) + space["recompute"]
    unique, inverse = np.unique(codes, return_inverse=True)
    width = element_bytes(space.base.precision)
    kept, widest = np.zeros(len(unique)), np.zeros(len(unique))
    kinds = sorted({model.is_sparse(layer) for layer in range(model.layers)})
    for at, code in enumerate(unique.tolist()):
        rest, recompute = divmod(code, len(RECOMPUTES))
        tp, etp = divmod(rest, 64)
        layout = Layout(dp=etp, tp=tp, etp=etp)
        setting = RECOMPUTES[recompute]
        is_mixed = setting.startswith("every")
        how = "full" if is_mixed else setting
        each = [_kept(model, layout, space.base, sparse, how) for sparse in kinds]
        whole = [_kept(model, layout, space.base, sparse, "none") for sparse in kinds]
        kept[at] = min(each)
        if is_guess:
            again = 1.0 / int(setting.removeprefix("every-")) if is_mixed else 1.0
            kept[at] = again * max(each) + (1.0 - again) * max(whole)
        working = [full - some for full, some in zip(whole, each, strict=True)]
        widest[at] = (0.0 if is_mixed else min(working)) + 3.0 * width * model.hidden
    return kept[inverse], widest[inverse]


def _kept(model: ModelSpec, layout: Layout, options: StepOptions, sparse: bool, how: str) -> float:
    return kept_bytes(
        model,
        layout,
        options,
        sparse=sparse,
        recompute=how,
        doc_tokens=options.context_tokens,
        received_rows=options.skew_of(layout),
    )


def peak_bound_s(
    model: ModelSpec, machine: Machine, space: Space, *, has_documents: bool = False
) -> Floats:
    """Lower bound of the step's time, float64 [rows] [s].

    Args:
        model: Sizes.
        machine: Device and its peak.
        space: The choices.
        has_documents: Whether windows are packed documents, whose pairs are fewer than a
            window's and are not counted here.

    Cost: about 0.2 us a row.
    """
    flops = _flops(model, space.base, has_documents=has_documents)
    base = space.base
    devices = space["tp"] * space["cp"] * space["pp"] * space["dp"]
    rate = devices * machine.peak_flop_per_s(base.precision)
    whole: Floats = _ROUNDING * flops[space["recompute"]] / rate
    whole = whole / (1.0 - base.residuals.step_share)
    if has_documents:
        return np.asarray(whole)
    is_plain = np.isin(space["schedule"], schedules_with(lambda each: each.is_plain))
    longer = bubble(space["pp"], space.micro_batches)
    return np.where(is_plain, whole * longer, whole)


def _flops(model: ModelSpec, base: StepOptions, *, has_documents: bool) -> Floats:
    """FLOP of a step under each setting of recomputation, float64 [RECOMPUTES]."""
    tokens = base.context_tokens * base.step_sequences
    pairs = 0 if has_documents else layer_pairs(model, np.array([base.context_tokens]))
    pairs *= base.step_sequences
    layers, head = model.layers, model.hidden * model.vocab
    linear = 2.0 * (model.matmul_params - head) * tokens
    core = 1.0 * pair_flop(model) * pairs
    plain = 3.0 * (linear + core + 2.0 * head * tokens)
    linear_share, core_share = _repeated_shares(layers)
    again = linear_share * linear + core_share * core
    return np.asarray(plain + again + tokens * _module_counts(model, base)[0])


def layers_flop(model: ModelSpec, base: StepOptions) -> float:
    """Useful FLOP of a step's layers at full windows, without the head; lowered as bounds are."""
    tokens = base.context_tokens * base.step_sequences
    pairs = layer_pairs(model, np.array([base.context_tokens])) * base.step_sequences
    linear = 2.0 * (model.matmul_params - model.hidden * model.vocab) * tokens
    return _ROUNDING * 3.0 * (linear + 1.0 * pair_flop(model) * pairs)


@functools.cache
def _repeated_shares(layers: int) -> tuple[Floats, Floats]:
    """Shares of layers that repeat their products, and their core, float64 [RECOMPUTES] each."""
    repeats = (linear_repeats, attention_repeats)
    linear, core = ([count(each, layers) / layers for each in RECOMPUTES] for count in repeats)
    return np.array(linear), np.array(core)


def _module_counts(model: ModelSpec, base: StepOptions) -> Floats:
    """FLOP and bytes of what modules compute again of a token, float64 [2, RECOMPUTES]."""
    return _known_counts(model, StepOptions(1, 1, precision=base.precision, stack=base.stack))


@functools.cache
def _known_counts(model: ModelSpec, options: StepOptions) -> Floats:
    return np.array([module_counts(modules_of(each), model, options) for each in RECOMPUTES]).T


def module_bound_s(model: ModelSpec, machine: Machine, space: Space, rows: Ints) -> Floats:
    """Seconds of the mean device for what modules compute again, at least, float64 [rows] [s].

    Products at the device's peak, and then what is moved at the bandwidth that kernels reach.
    """
    recompute, base = space["recompute"][rows], space.base
    if (recompute < len(WHOLE_LAYERS)).all():
        return np.zeros(len(rows))
    devices = math.prod(space[axis][rows] for axis in ("tp", "cp", "pp", "dp"))
    flop, moved = _module_counts(model, base)[:, recompute]
    seconds = flop / machine.peak_flop_per_s(base.precision)
    seconds = seconds + moved * base.residuals.moves / machine.bytes_per_s
    return np.asarray(_ROUNDING * seconds * base.context_tokens * base.step_sequences / devices)


def bubble(stages: npt.ArrayLike, micro_batches: npt.ArrayLike) -> Floats:
    """Least ratio of step to mean busy time of 1F1B, whatever the split of layers.

    Args:
        stages: Pipeline ranks.
        micro_batches: Micro-batches of each, all alike.

    >>> bubble([1, 4, 4], [8, 8, 2]).tolist()
    [1.0, 1.375, 2.0]
    """
    p, m = np.asarray(stages, np.float64), np.asarray(micro_batches, np.float64)
    # With few micro-batches the two waits for later stages are one; a micro-batch still has to
    # pass all of them.
    return np.where(p == 1, 1.0, np.where(m > p, (m + p - 1) / m, np.maximum(1.0, p / m)))
