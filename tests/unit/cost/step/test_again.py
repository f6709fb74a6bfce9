"""What is not computed again: a layer's last product, and only where a program says so."""

import numpy as np
import pytest

from equipoise.cost.step.again import left_out
from equipoise.cost.step.layer import LayerTraffic, product_passes
from equipoise.cost.step.request import TERMS
from equipoise.cost.step.work import Product
from equipoise.sim.parts import StepParts
from equipoise.spec.layout import Layout
from support.machines import MODEL, SPARSE, h100, options, stack

PRODUCTS = (Product("projections", 4096.0, 64, 64), Product("feed-forward", 4096.0, 64, 256))
EARLY = stack(recompute_stops=True)


def seconds(operation: str, size: float) -> float:
    return size * (2e-9 if operation == "all_reduce" else 1e-9)


def test_without_the_fact_everything_is_computed_again() -> None:
    alone = LayerTraffic(None, None, None)
    assert not left_out(PRODUCTS, h100(8), Layout(), options(), alone).any()


@pytest.mark.parametrize(("parallel", "again"), [(True, 1e-9), (False, 2e-9)])
def test_the_last_product_and_its_sum_are_left_out(parallel: bool, again: float) -> None:
    asked = options(stack=stack(recompute_stops=True, sequence_parallel=parallel))
    traffic = LayerTraffic(seconds, None, None)
    machine = h100(8)
    parts = left_out(PRODUCTS, machine, Layout(tp=2), asked, traffic)
    last = product_passes(PRODUCTS[-1], machine, asked)[0] * asked.residuals.products
    assert parts[TERMS.index("products")] == last
    sent = 4096 * 64 * 2 * again * asked.residuals.traffic
    assert parts[TERMS.index("tensor traffic")] == pytest.approx(sent)
    assert np.count_nonzero(parts) == 2


def test_a_dense_layer_is_computed_again_for_less_and_one_of_experts_is_not() -> None:
    documents = np.array([4096.0])
    for model, is_spared in ((MODEL, True), (SPARSE, False)):
        whole, early = (
            StepParts(model, h100(8), Layout(dp=8), options(recompute="full", stack=each))
            for each in (stack(), EARLY)
        )
        forward, backward = (
            whole.price(documents).layers[0][at].sum() - early.price(documents).layers[0][at].sum()
            for at in (0, 1)
        )
        assert forward == 0
        assert (backward > 0) == is_spared
        spared = product_passes(
            Product("feed-forward", 4096.0, model.hidden, model.ffn), h100(8), options()
        )[0]
        assert backward == pytest.approx(is_spared * spared * options().residuals.products)
