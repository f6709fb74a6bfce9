"""Every legal layout, each once."""

import dataclasses

import pytest

from equipoise.base.errors import LayoutError
from equipoise.spec.layout import Layout
from equipoise.spec.layout_space import legal_layouts, list_layouts
from equipoise.spec.model.presets import ModelSpec

SPARSE = ModelSpec(
    layers=4,
    hidden=16,
    heads=6,
    kv_heads=2,
    ffn=24,
    vocab=61,
    head_width=4,
    experts=5,
    top_k=2,
    expert_ffn=6,
)


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 58), (3, 58), (4, 346), (8, 1346)])
def test_every_layout_is_listed_once(ranks: int, count: int) -> None:
    found = list(list_layouts(ranks))
    assert len(found) == len(set(found)) == count
    assert {layout.world for layout in found} == {ranks}
    assert {layout.zero for layout in found} == {0, 1, 2, 3}


def test_illegal_layouts_are_those_that_the_model_refuses() -> None:
    legal = set(legal_layouts(8, SPARSE))
    for layout in list_layouts(8):
        # 6 heads on 4 or 8 ranks, 4 layers on 8 stages, 5 experts on 4 or 8, 6 units on 4 or 8.
        fits = layout.tp <= 2 and layout.pp <= 4 and layout.ep <= 2 and layout.etp <= 2
        assert (layout in legal) == fits


def test_layouts_of_the_demo_are_among_them() -> None:
    wanted = [
        Layout(dp=2, pp=2, zero=1),
        Layout(cp=2, tp=2),
        Layout(dp=2, pp=2, ep=2),
        Layout(cp=2, tp=2, pp=2, ep=2),
        Layout(dp=2, tp=2, pp=2, ep=2, etp=2),
    ]
    assert set(wanted) <= {*legal_layouts(4, SPARSE), *legal_layouts(8, SPARSE)}


def test_experts_that_a_model_does_not_have_are_refused() -> None:
    dense = dataclasses.replace(SPARSE, experts=0)
    with pytest.raises(LayoutError) as caught:
        Layout(dp=2, etp=2).require_model(dense)
    assert str(caught.value) == (
        "The model has no experts that 2 ranks could share. Set ep (layout.ep) = 1 and "
        "etp (layout.etp) = 1, or give the model experts."
    )
    with pytest.raises(LayoutError) as caught:
        Layout(dp=4, ep=4).require_model(SPARSE)
    assert str(caught.value) == (
        "5 experts in runs of 2 leave 1 of 4 ranks without any. Set ep (layout.ep) to 3."
    )
    with pytest.raises(LayoutError) as caught:
        Layout(dp=4, etp=4).require_model(SPARSE)
    assert str(caught.value) == (
        "Experts of 6 hidden units in runs of 2 leave the last of etp = 4 ranks without any. Lower "
        "etp."
    )
