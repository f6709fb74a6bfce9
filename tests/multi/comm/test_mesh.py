"""Groups of a mesh are those of its layout, and reach nobody else."""

import pytest

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from support.ranks import tensor_ranks

LAYOUTS = [
    Layout(dp=4),
    Layout(dp=2, tp=2, zero=0),
    Layout(cp=2, tp=2),
    Layout(pp=2, dp=2, replicas=2),
    Layout(pp=2, tp=2),
    Layout(dp=2, cp=2, order=("cp", "tp", "pp", "dp")),
    Layout(dp=4, ep=2),
    Layout(dp=2, tp=2, ep=2, etp=2),
    Layout(dp=2, pp=2, ep=2, order=("dp", "cp", "tp", "pp"), expert_order=("ep", "edp", "etp")),
]
AXES = [
    *((axis,) for axis in ("dp", "cp", "tp", "pp", "edp", "ep", "etp")),
    ("dp", "cp"),
]


def test_peers_are_the_groups_of_the_layout() -> None:
    found = run_ranks(4, tensor_ranks.mesh_of, LAYOUTS, AXES)
    for rank, rows in enumerate(found):
        for layout, each in zip(LAYOUTS, rows, strict=True):
            for axes in AXES:
                group = layout.group_of(rank, *axes)
                assert each[axes] == (group, group.index(rank), sum(group)), (layout, axes)


def test_the_mesh_of_weights_is_of_one_stage_with_tensor_ranks_outside() -> None:
    found = run_ranks(4, tensor_ranks.weights_mesh_of, LAYOUTS[:6])
    assert [rows[3][:3] for rows in zip(*found, strict=True)] == [
        (("dp_shard",), [4], [3]),
        (("tp", "dp_replicate", "dp_shard"), [2, 2, 1], [1, 1, 0]),
        (("tp", "dp_shard"), [2, 2], [1, 1]),
        (("dp_replicate", "dp_shard"), [2, 1], [1, 0]),
        (("tp", "dp_shard"), [2, 1], [1, 0]),
        (("dp_shard",), [4], [3]),
    ]
    for rank in range(4):
        # tp = 2 innermost: neighbours 0 1 and 2 3; dp x cp are the others.
        tensor, replicate, shard = found[rank][1][3]
        assert (tensor, replicate, shard) == ([1, 1, 5, 5][rank], [2, 4, 2, 4][rank], rank)


def test_other_ranks_than_the_layout_has_are_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        run_ranks(2, tensor_ranks.join_mesh, Layout(tp=3), "tp")
    assert str(refused.value) == (
        "dp x cp x tp x pp = 1 x 1 x 3 x 1 = 3 ranks, but there are 2. Give degrees whose "
        "product is 2."
    )


def test_an_axis_that_is_none_is_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        run_ranks(1, tensor_ranks.join_mesh, Layout(), "sp")
    assert str(refused.value) == (
        "No group runs along sp. Groups run along dp, pp, cp, tp, edp, ep, etp, dp x cp."
    )
