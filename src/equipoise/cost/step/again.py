"""What recomputation does not compute again: a layer's last product, which no gradient reads.

What it decides
    A program that stops recomputing early (``Stack.recompute_stops``) needs the inputs of the last
    product, for its weight's gradient, and never its output. So a dense layer is computed again
    without that product and without what sums it over tensor ranks. A layer of experts ends with
    rows that are scaled and added, which reads the output of its products: all of it is computed
    again.

Kept true (tests/unit/cost/step/test_again.py)
    What is left out is a part of the forward; without the fact it is nothing.

Sources
    torch.utils.checkpoint, ``early_stop``: on since torch 2.1 for non-reentrant checkpoints
    (pytorch #96866). Inputs are saved before a product runs, so it does not run.
"""

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.cost.link import Op
from equipoise.cost.step.layer import LayerTraffic, Rates, product_passes
from equipoise.cost.step.request import TERMS, StepOptions, element_bytes
from equipoise.cost.step.work import Product
from equipoise.spec.layout import Layout


def left_out(
    products: tuple[Product, ...],
    rates: Rates,
    layout: Layout,
    options: StepOptions,
    traffic: LayerTraffic,
) -> Floats:
    """Seconds of a dense layer's forward that are not spent again, by term, float64 [TERMS].

    Args:
        products: Of the layer, in their order.
        rates: Of kernels.
        layout: Degrees.
        options: Everything else.
        traffic: Collectives of the layer.
    """
    parts = np.zeros(len(TERMS))
    stack, residuals, last = options.stack, options.residuals, products[-1]
    if not stack.recompute_stops:
        return parts
    seconds = product_passes(last, rates, options)[0] * residuals.products
    parts[TERMS.index("products")] = seconds
    if traffic.tensor is not None and layout.tp > 1:
        whole = last.rows * last.columns * element_bytes(options.precision)
        summing: Op = "reduce_scatter" if stack.sequence_parallel else "all_reduce"
        exposed = (1.0 - stack.tensor_overlap) * residuals.traffic
        parts[TERMS.index("tensor traffic")] = exposed * traffic.tensor(summing, whole)
    return parts
