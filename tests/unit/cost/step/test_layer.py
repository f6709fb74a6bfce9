"""Seconds of a layer: no term below zero, and what each setting adds."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.arrays import Floats
from equipoise.cost.step.layer import LayerTraffic, price_layer, product_passes
from equipoise.cost.step.request import PASSES, TERMS, Residuals, Stack, StepOptions
from equipoise.cost.step.work import Product, layer_work
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.program.stack import Attention, Fp8

MODEL = preset("llama3-8b")
SPARSE = preset("mixtral-8x7b")


class Flat:
    """A device on which every FLOP and every byte costs the same."""

    bytes_per_s = 1e12

    def product_s(
        self,
        rows: float,
        columns: float,
        inner: float,
        *,
        fp8: bool,
        scaled: Fp8 = "per-product",
    ) -> float:
        return 2 * rows * columns * inner / (2e15 if fp8 else 1e15)

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
        return np.asarray(doc_tokens, np.float64)

    def attention_slowdown(self, kernel: Attention, *, wider_scores: bool = False) -> float:
        return 1.0


def parts(
    layout: Layout,
    *,
    sparse: bool = False,
    shared_ffn: int = 0,
    core_s: tuple[float, float] | None = None,
    **changes: object,
) -> Floats:
    stack = {key: changes.pop(key) for key in list(changes) if hasattr(Stack(), key)}
    options = dataclasses.replace(
        StepOptions(4096, 8, stack=dataclasses.replace(Stack(), **stack)), **changes
    )
    model = dataclasses.replace(SPARSE, shared_ffn=shared_ffn) if sparse else MODEL
    work = layer_work(
        model,
        layout,
        4096,
        sparse=sparse,
        stack=options.stack,
        expert_skew=options.expert_skew,
    )
    bytes_per_s = {"all_reduce": 0.5e11, "all_gather": 1e11}
    traffic = LayerTraffic(*(lambda op, size: size / bytes_per_s.get(op, 1e11) for _ in range(3)))
    sizes = {"tokens": 4096.0, "hidden": model.hidden, "core_s": core_s}
    return price_layer(work, Flat(), layout, options, traffic=traffic, **sizes)


def term(table: Floats, name: str) -> list[float]:
    return table[:, TERMS.index(name)].tolist()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=8), Layout(dp=8, zero=3), Layout(cp=4)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_no_term_is_below_zero(layout: Layout, sequence_parallel: bool) -> None:
    table = parts(layout, sequence_parallel=sequence_parallel)
    assert table.shape == (len(PASSES), len(TERMS))
    assert (table >= 0).all()
    assert (table.sum(axis=1) > 0).all()


def test_each_product_has_two_in_the_backward() -> None:
    table = parts(Layout(), residuals=Residuals())
    assert term(table, "products") == pytest.approx([term(table, "products")[0]] * 3)
    narrow = parts(Layout(), residuals=Residuals(), precision="fp8")
    assert np.array(term(narrow, "products")) * 2 == pytest.approx(term(table, "products"))


def test_the_head_and_the_router_stay_wide() -> None:
    options = StepOptions(4096, 8, precision="fp8")
    wide = product_passes(Product("head", 10, 10, 10), Flat(), options)
    narrow = product_passes(Product("projections", 10, 10, 10), Flat(), options)
    assert wide == pytest.approx([2 * each for each in narrow])


def test_overlap_hides_its_share_of_tensor_traffic() -> None:
    table, half = parts(Layout(tp=8)), parts(Layout(tp=8), tensor_overlap=0.5)
    assert term(half, "tensor traffic")[:2] == pytest.approx(
        [each / 2 for each in term(table, "tensor traffic")[:2]]
    )


def test_two_reductions_are_two_gathers_and_two_scatters() -> None:
    divided = parts(Layout(tp=8))
    whole = parts(Layout(tp=8), sequence_parallel=False)
    assert term(divided, "tensor traffic")[0] == pytest.approx(term(whole, "tensor traffic")[0])


def test_experts_pay_on_the_way_there_and_back() -> None:
    alone = parts(Layout(), sparse=True)
    shared = parts(Layout(dp=8, ep=8), sparse=True)
    both = parts(Layout(dp=4, tp=2, ep=4, etp=2), sparse=True)
    assert term(alone, "expert traffic") == [0, 0, 0]
    assert min(term(shared, "expert traffic")[:2]) > 0
    assert term(both, "expert traffic")[0] > term(shared, "expert traffic")[0] / 2
    uneven = parts(Layout(dp=8, ep=8), sparse=True, expert_skew=2.0)
    assert term(uneven, "expert traffic")[0] == pytest.approx(2 * term(shared, "expert traffic")[0])


def test_a_shortcut_hides_one_way_behind_attention_and_one_behind_the_shared_expert() -> None:
    shape = {"layout": Layout(dp=8, ep=8), "sparse": True, "shared_ffn": SPARSE.ffn}
    plain, short = parts(**shape), parts(**shape, core_s=(0.0, 0.0))
    attention = parts(**shape | {"shared_ffn": 0})
    both, beside = term(plain, "expert traffic")[0], term(attention, "products")[0]
    shared = term(plain, "products")[0] - beside
    exposed = max(0.0, both / 2 - beside) + max(0.0, both / 2 - shared)
    assert 0 < exposed < both
    assert term(short, "expert traffic")[0] == pytest.approx(exposed)
    assert np.delete(short, TERMS.index("expert traffic"), 1) == pytest.approx(
        np.delete(plain, TERMS.index("expert traffic"), 1)
    )
    longer = parts(**shape, core_s=(both, both))
    assert term(longer, "expert traffic")[0] == pytest.approx(max(0.0, both / 2 - shared))


def test_beside_another_micro_batch_both_passes_hide_rows_together() -> None:
    shape = {"layout": Layout(dp=8, ep=8), "sparse": True}
    travels = sum(term(parts(**shape), "expert traffic"))

    def waits(core_s: tuple[float, float], share: float = 0.0) -> list[float]:
        beside = parts(**shape, dispatch_beside="layer", core_s=core_s, dispatch_share=share)
        return term(beside, "expert traffic")

    # Fewer rows than a layer hides, in whichever pass it computes.
    hidden = travels + 1.0 - sum(waits((-1.0, 0.0)))
    assert sum(waits((0.0, -2.0))) == pytest.approx(travels + 2.0 - hidden)
    assert waits((1.0, 0.0)) == waits((0.0, 1.0)) == [0, 0, 0]
    # Multiprocessors that carry rows compute nothing meanwhile.
    assert waits((1.0, 0.0), share=0.25) == pytest.approx([travels / 8, travels / 8, 0])


def test_sums_of_gradients_move_their_bytes() -> None:
    weights = MODEL.count_layer(sparse=False, active=True)
    table = parts(Layout(), residuals=Residuals())
    assert term(table, "gradient sums") == pytest.approx([0, 0, 8 * weights / 1e12])
    sharded = parts(Layout(dp=8, zero=3), residuals=Residuals())
    assert term(sharded, "gradient sums") == pytest.approx([0, 0, 14 * weights / 1e12])
