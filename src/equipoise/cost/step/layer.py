"""Seconds of one layer on one rank, by pass and by term.

What it decides
    Forward, input gradient and weight gradient are priced apart, since a schedule may run them
    apart. Each product of the forward has two in the backward, priced at their own sizes: in the
    weight gradient the tokens are the inner dim. Attention's backward belongs entirely to the
    input gradient, and recomputation precedes it.

    Tensor-parallel traffic is a gather before and a reduce-scatter after each half of a layer, or
    two all-reduces without sequence parallelism; the stack's overlap hides its share behind
    products.

Kept true (tests/unit/cost/step/test_layer.py)
    No term is negative; recomputation adds exactly a forward; more overlap never costs.

Sources
    Collectives of a layer: Korthikanti et al., arXiv:2205.05198, section 4. Element-wise
    backwards move 1.6 times their forwards: a norm 3 rows for 2, a gated activation 5 for 3, a
    residual 1 for 3, rounded up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.cost.link import Op
from equipoise.cost.step.request import TERMS, StepOptions
from equipoise.cost.step.work import LayerWork, Product
from equipoise.spec.layout import Layout

_MOVES_BACKWARD = 1.6

_LAUNCH_S = 2e-6
"""Gap between two kernels on a device that waits for nothing, as profiles show [s]."""

Collective = Callable[[Op, float], float]
"""Seconds of an operation, by the bytes of the whole tensor."""


class Rates(Protocol):
    """Kernel times of one device."""

    def product_s(self, rows: float, columns: float, inner: float, *, fp8: bool) -> float:
        """One matrix product [s]."""

    def attention_s(
        self,
        doc_tokens: Floats,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        backward: bool,
        pack_tokens: Floats | None = None,
    ) -> Floats:
        """Causal attention over each document [s], in one pack or in packs of a given size."""

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
    width: int = 2,
) -> Floats:
    """Price one layer without its attention core and its recomputation.

    ``tokens`` are those of the micro-batch on this rank's context share; ``width`` is the bytes of
    an activation that travels.

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
    for row, share in ((0, 1.0), (1, 1.2), (2, 0.5)):
        add(parts, row, "launches", share * work.kernels * _LAUNCH_S)
    if traffic.tensor is not None and layout.tp > 1:
        whole = tokens * hidden * width
        seconds = _tensor_s(traffic.tensor, whole, stack.sequence_parallel)
        exposed = seconds * (1.0 - stack.tensor_overlap) * residuals.traffic
        add(parts, 0, "tensor traffic", exposed)
        add(parts, 1, "tensor traffic", exposed)
        if stack.sequence_parallel:
            # Inputs are gathered once more for the weight gradient, during the input gradient.
            again = 2 * traffic.tensor("all_gather", whole) * residuals.traffic
            beside = parts[1, TERMS.index("products")]
            add(parts, 2, "tensor traffic", max(0.0, again - beside))
    if traffic.expert is not None and work.routed_rows and layout.ep > 1:
        sent = work.routed_rows * hidden * width * options.expert_skew
        seconds = 2 * traffic.expert("all_to_all", sent) * residuals.traffic
        add(parts, 0, "expert traffic", seconds)
        add(parts, 1, "expert traffic", seconds)
    if traffic.within is not None and work.routed_rows and layout.etp > 1:
        whole = work.routed_rows * hidden * width * layout.etp * options.expert_skew
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


def _halves_s(collective: Collective, whole_bytes: float) -> float:
    """Seconds of a gather and a reduce-scatter."""
    gather = collective("all_gather", whole_bytes)
    return gather + collective("reduce_scatter", whole_bytes)


def _tensor_s(collective: Collective, whole_bytes: float, sequence_parallel: bool) -> float:
    """Seconds of a layer's two halves in one pass."""
    if sequence_parallel:
        return 2 * _halves_s(collective, whole_bytes)
    return 2 * collective("all_reduce", whole_bytes)


def product_passes(
    product: Product, rates: Rates, options: StepOptions
) -> tuple[float, float, float]:
    """Seconds of a product's forward and its two gradients."""
    rows, columns, inner = product.rows, product.columns, product.inner
    fp8 = options.precision == "fp8" and product.name not in ("head", "router")
    if product.grouped:
        # One kernel fills the device with tiles of all experts, like one product of all their
        # rows, but reads each expert's weights once.
        rows = product.rows * product.count
        passes = [
            rates.product_s(rows, columns, inner, fp8=fp8),
            rates.product_s(rows, inner, columns, fp8=fp8),
            rates.product_s(inner, columns, rows, fp8=fp8),
        ]
        return passes[0], passes[1], passes[2]
    return (
        product.count * rates.product_s(rows, columns, inner, fp8=fp8),
        product.count * rates.product_s(rows, inner, columns, fp8=fp8),
        product.count * rates.product_s(inner, columns, rows, fp8=fp8),
    )
