"""Degrees of experts in run.toml: they fold over the ranks of everything else."""

import pytest

from equipoise.base.errors import LayoutError
from equipoise.spec.run.spec import LayoutSpec


def test_experts_fold_over_the_ranks_that_share_other_things() -> None:
    layout = LayoutSpec(cp=2, tp=2, ep=4, etp=2).of_ranks(8)
    assert (layout.dp, layout.cp, layout.tp, layout.ep, layout.etp) == (2, 2, 2, 4, 2)
    assert layout.edp == 1
    assert LayoutSpec(ep=2).count_ranks(cores=4) == 4


def test_degrees_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        LayoutSpec(ep=2, etp=2).of_ranks(6)
    assert str(caught.value) == (
        "layout.ep x layout.etp = 2 x 2 does not divide the 6 ranks of dp x cp "
        "x tp. Give degrees whose product is one of 1, 2, 3, 6."
    )
