"""Seconds of one layer on one rank, by pass and by term.

What it decides
    Forward, input gradient and weight gradient are priced apart, since a schedule may run them
    apart. Each product of the forward has two in the backward, priced at their own sizes: in the
    weight gradient the tokens are the inner dim. Attention's backward belongs entirely to the
    input gradient, and recomputation precedes it.

    Grouped products of experts are priced as one, or by expert: in tiles of its own rows, its
    weights read once whatever the rows, so that few rows take what reading takes.

    Tensor-parallel traffic is a gather before and a reduce-scatter after each half of a layer, or
    two all-reduces without sequence parallelism; the stack's overlap hides its share behind
    products.

    A host that launches more slowly than the device computes is a floor under each pass: so much a
    kernel, or for a layer of experts, which has hundreds, so much a layer. The attention core
    counts as what the device computes meanwhile.

Kept true (tests/unit/cost/step/test_layer.py, tests/unit/sim/test_parts.py)
    No term is negative; recomputation adds exactly a forward; more overlap never costs; a layer
    takes what its host does, or what its device does.

Sources
    Collectives of a layer: Korthikanti et al., arXiv:2205.05198, section 4. Element-wise
    backwards move 1.6 times their forwards: a norm 3 rows for 2, a gated activation 5 for 3, a
    residual 1 for 3, rounded up.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.cost.link import Op
from equipoise.cost.step.dispatch import ExpertRoutes
from equipoise.cost.step.fp8 import cast_bytes, is_narrow
from equipoise.cost.step.request import TERMS, StepOptions
from equipoise.cost.step.work import LayerWork, Product
from equipoise.spec.layout import Layout
from equipoise.spec.program.stack import Attention, Fp8, Stack

_MOVES_BACKWARD = 1.6

LAUNCH_S = 2e-6
"""Gap between two kernels on a device that waits for nothing, as profiles show [s]."""

_LAUNCHES = (1.0, 1.2, 0.5)
"""Kernels of each pass over those of the forward."""

_TILE_ROWS = 128
"""Rows that a tile of a grouped product has, of one expert."""

_SUM_BYTES = 8.0
"""Bytes a weight of a gradient that a product adds to a sum in fp32: read and written."""

Collective = Callable[[Op, float], float]
"""Seconds of an operation, by the bytes of the whole tensor."""


class Rates(Protocol):
    """Kernel times of one device."""

    def product_s(
        self,
        rows: float,
        columns: float,
        inner: float,
        *,
        fp8: bool,
        scaled: Fp8 = "per-product",
    ) -> float:
        """One matrix product, in FP8 scaled as ``scaled`` says [s]."""

    def attention_s(
        self,
        doc_tokens: Floats,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        backward: bool,
        pack_tokens: Floats | None = None,
        score_width: int | None = None,
    ) -> Floats:
        """Causal attention over each document [s], in one pack or in packs of a given size."""

    def attention_slowdown(self, kernel: Attention, *, wider_scores: bool = False) -> float:
        """Time of an attention kernel over that of the fastest."""

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that kernels reach [bytes/s]."""


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """Collectives that a layer waits for, by group."""

    tensor: Collective | None
    expert: Collective | None
    """Among the ranks that share the experts of a layer."""
    within: Collective | None
    """Among the ranks that share each expert."""
    routes: ExpertRoutes | None = None
    """What connects the ranks that share the experts of a layer."""


def add(parts: Floats, row: int, term: str, seconds: float) -> None:
    """Add to one cell of a table of parts."""
    parts[row, TERMS.index(term)] += seconds


def price_layer(
    work: LayerWork,
    rates: Rates,
    layout: Layout,
    options: StepOptions,
    *,
    tokens: float,
    hidden: int,
    traffic: LayerTraffic,
    top_k: float = 1,
    width: int = 2,
    core_s: tuple[float, float] | None = None,
) -> Floats:
    """Price one layer without its attention core and its recomputation.

    ``tokens`` are those of the micro-batch on this rank's context share; ``width`` is the bytes of
    an activation that travels, and ``top_k`` the experts of a row that is routed.
    ``core_s`` is what the attention core takes in forward and backward, where rows of experts
    travel beside it: behind a shortcut, or beside the layer of another micro-batch.

    Returns:
        float64 [PASSES, TERMS] [s].
    """
    parts = np.zeros((3, len(TERMS)))
    residuals, stack = options.residuals, options.stack
    for each in work.products:
        term = "experts" if each.grouped else "products"
        for row, seconds in enumerate(product_passes(each, rates, options)):
            add(parts, row, term, seconds * residuals.products)
    moves = work.moved_bytes / rates.bytes_per_s * residuals.moves
    add(parts, 0, "element-wise", moves)
    add(parts, 1, "element-wise", _MOVES_BACKWARD * moves)
    if options.precision == "fp8":
        casts = cast_bytes(work.products, stack.fp8, hidden)
        for row, size in enumerate(casts):
            add(parts, row, "element-wise", size / rates.bytes_per_s * residuals.moves)
    for row, share in enumerate(_LAUNCHES):
        add(parts, row, "launches", share * work.kernels * LAUNCH_S)
    if traffic.tensor is not None and layout.tp > 1:
        whole = tokens * hidden * width
        gathered = whole / 2 if options.precision == "fp8" and stack.gather_fp8 else whole
        seconds = _tensor_s(traffic.tensor, gathered, whole, stack.sequence_parallel)
        exposed = seconds * (1.0 - stack.tensor_overlap) * residuals.traffic
        add(parts, 0, "tensor traffic", exposed)
        if stack.weight_overlap:
            summed = exposed * _summed_share(traffic.tensor, whole, stack.sequence_parallel)
            exposed -= min(summed, float(parts[2, TERMS.index("products")]))
        add(parts, 1, "tensor traffic", exposed)
        if stack.sequence_parallel:
            # Inputs are gathered once more for the weight gradient, during the input gradient.
            again = 2 * traffic.tensor("all_gather", gathered) * residuals.traffic
            beside = parts[1, TERMS.index("products")]
            add(parts, 2, "tensor traffic", max(0.0, again - beside))
    if traffic.expert is not None and work.routed_rows and layout.ep > 1:
        skew = options.skew_of(layout)
        for row, size in enumerate(_copy_bytes(work, options, layout, width)):
            seconds = traffic.expert("all_to_all", size) * residuals.traffic if size else 0.0
            add(parts, row, "expert traffic", seconds)
        each_way = _experts_s(
            work, options, traffic.expert, traffic.routes, hidden, top_k, width, skew
        )
        waits = _exposed(each_way * residuals.traffic, stack, parts, work, core_s)
        for row, seconds in enumerate(waits):
            add(parts, row, "expert traffic", seconds)
    if traffic.within is not None and work.routed_rows and layout.etp > 1:
        whole = work.routed_rows * hidden * width * layout.etp * options.skew_of(layout)
        seconds = _halves_s(traffic.within, whole) * residuals.traffic
        add(parts, 0, "expert traffic", seconds)
        add(parts, 1, "expert traffic", seconds)
    if layout.zero < 3:
        summed = work.weights * stack.sum_bytes / rates.bytes_per_s
    else:
        # Gathered flat and copied out, in two passes; copied in and cast for the reduction.
        summed = work.weights * (2 * 4.0 + 2.0 + stack.grad_bytes) / rates.bytes_per_s
    add(parts, 2, "gradient sums", summed * residuals.moves)
    return parts


def _experts_s(
    work: LayerWork,
    options: StepOptions,
    all_to_all: Collective,
    routes: ExpertRoutes | None,
    hidden: int,
    top_k: float,
    width: int,
    skew: float,
) -> float:
    """Rows on their way to experts and back, in one pass [s]."""
    stack = options.stack
    if stack.dispatch == "per-node" and routes is not None:
        rows = work.routed_rows / top_k
        narrow = options.precision == "fp8" and stack.dispatch_fp8
        return sum(
            routes.travel_s(rows, top_k, hidden, is_return=back, fp8=narrow and not back, skew=skew)
            for back in (False, True)
        )
    return 2 * all_to_all("all_to_all", work.routed_rows * hidden * width * skew)


def _copy_bytes(
    work: LayerWork, options: StepOptions, layout: Layout, width: int
) -> tuple[float, float]:
    """What copies of experts move in the forward and the backward, on the busiest rank [bytes].

    Weights to copies in both, and their gradients back; nothing hides them.
    """
    weights = sum(each.weights / each.count for each in work.products if each.grouped)
    copied = options.copied_of(layout) * weights
    return copied * width, copied * (width + options.stack.grad_bytes)


def _exposed(
    seconds: float,
    stack: Stack,
    parts: Floats,
    work: LayerWork,
    core_s: tuple[float, float] | None,
) -> tuple[float, float]:
    """What forward and backward wait for rows [s].

    Beside another micro-batch, a forward's rows travel while the other's backward computes, and a
    backward's beside a forward, so it is the two together that hide or wait. While rows travel,
    the multiprocessors that carry them compute nothing.

    Args:
        seconds: That rows travel in one pass.
        stack: What rows travel beside.
        parts: Without travelling rows, float64 [PASSES, TERMS].
        work: Of the layer.
        core_s: The attention core in forward and backward, where rows travel beside it.
    """
    if stack.dispatch_beside == "layer" and core_s is not None:
        computed = (float(parts.sum()) + sum(core_s)) / 2
        waits = max(seconds - computed, stack.dispatch_share * seconds)
        return waits, waits
    if core_s is not None:
        forward, backward = (
            _exposed_by_shortcut(seconds, parts[row], work, core_s[row]) for row in (0, 1)
        )
        return forward, backward
    if stack.dispatch_beside == "nothing":
        return seconds, seconds
    share = _shared_share(work)
    products = parts[:2, TERMS.index("products")] * share
    return max(0.0, seconds - float(products[0])), max(0.0, seconds - float(products[1]))


def _shared_share(work: LayerWork) -> float:
    """Products of the shared expert over all but the experts' [ratio]."""
    dense = sum(each.flop for each in work.products if not each.grouped)
    return sum(each.flop for each in work.products if each.name == "shared expert") / dense


def _exposed_by_shortcut(seconds: float, parts: Floats, work: LayerWork, core_s: float) -> float:
    """What one pass waits for rows behind a shortcut [s].

    One way runs beside attention, the other beside the shared expert.

    Args:
        seconds: Both ways.
        parts: Of the pass, float64 [TERMS].
        work: Of the layer.
        core_s: The attention core.
    """
    products, shared = float(parts[TERMS.index("products")]), _shared_share(work)
    attention_s, shared_s = products * (1.0 - shared) + core_s, products * shared
    return max(0.0, seconds / 2 - attention_s) + max(0.0, seconds / 2 - shared_s)


def wait_for_host(
    parts: Floats,
    work: LayerWork,
    options: StepOptions,
    core_s: tuple[float, float],
    *,
    repeats_core: bool,
) -> Floats:
    """Where the host launches more slowly than the device computes, the device waits.

    Args:
        parts: Of the layer without its core, float64 [PASSES, TERMS] [s]; is added to.
        work: Of the layer.
        options: The stack.
        core_s: The attention core in forward and backward, with what it waits for [s].
        repeats_core: Whether the layer, if it is computed again, attends again.

    Returns:
        What the forward takes by term if it is computed again, without its core, float64 [TERMS].
    """
    stack, passes, term = options.stack, np.array(_LAUNCHES), TERMS.index("launches")
    host = passes * work.kernels * stack.host_launch_s
    if work.routed_rows:
        host = np.maximum(host, passes / passes.sum() * stack.host_experts_s)
    device = parts.sum(axis=1)
    again: Floats = parts[0].copy()
    again[term] += max(0.0, host[0] - device[0] - repeats_core * core_s[0])
    parts[:, term] += np.maximum(host - device - (*core_s, 0.0), 0.0)
    return again


def _halves_s(collective: Collective, whole_bytes: float) -> float:
    """Seconds of a gather and a reduce-scatter."""
    gather = collective("all_gather", whole_bytes)
    return gather + collective("reduce_scatter", whole_bytes)


def _tensor_s(
    collective: Collective, gathered_bytes: float, whole_bytes: float, sequence_parallel: bool
) -> float:
    """Seconds of a layer's two halves in one pass."""
    if sequence_parallel:
        gather = collective("all_gather", gathered_bytes)
        return 2 * (gather + collective("reduce_scatter", whole_bytes))
    return 2 * collective("all_reduce", whole_bytes)


def _summed_share(collective: Collective, whole_bytes: float, sequence_parallel: bool) -> float:
    """The share of a pass's tensor traffic that sums gradients of inputs."""
    if not sequence_parallel:
        return 1.0
    scatter = collective("reduce_scatter", whole_bytes)
    return scatter / (collective("all_gather", whole_bytes) + scatter)


def product_passes(
    product: Product, rates: Rates, options: StepOptions
) -> tuple[float, float, float]:
    """Seconds of a product's forward and its two gradients."""
    rows, columns, inner = product.rows, product.columns, product.inner
    stack = options.stack
    fp8 = options.precision == "fp8" and is_narrow(product)
    price = functools.partial(rates.product_s, fp8=fp8, scaled=stack.fp8)
    # A product that adds to a sum streams it beside its own work, on the same memory.
    summed = 0.0 if stack.sum_bytes else _SUM_BYTES * product.weights / rates.bytes_per_s
    if not product.grouped:
        return (
            product.count * price(rows, columns, inner),
            product.count * price(rows, inner, columns),
            math.hypot(product.count * price(inner, columns, rows), summed),
        )
    if stack.experts == "as-one":
        # One kernel fills the device with tiles of all experts, like one product of all their
        # rows, but reads each expert's weights once.
        rows = product.rows * product.count
        return price(rows, columns, inner), price(rows, inner, columns), price(inner, columns, rows)
    rows = math.ceil(product.rows / _TILE_ROWS) * _TILE_ROWS
    every = rows * product.count
    read = product.weights * (1.0 if fp8 else 2.0) / rates.bytes_per_s
    written = summed or product.weights * 2.0 / rates.bytes_per_s
    return (
        max(price(every, columns, inner), read),
        max(price(every, inner, columns), read),
        # Each expert's tokens alone are the inner dim.
        math.hypot(price(inner, columns * product.count, rows), written),
    )
