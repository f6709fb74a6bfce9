"""Placements, the boxes of ranks, and what steps between placements move."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError, SpecError
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing import exchange as boxing_exchange
from equipoise.schedule.boxing import path as boxing
from equipoise.schedule.boxing import placement as boxing_placement
from equipoise.schedule.boxing import step as boxing_step
from equipoise.schedule.boxing.exchange import exchange_of, flat_exchanges
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placement,
    Placements,
    SplitDim,
    read_placements,
    write_placements,
)
from equipoise.schedule.boxing.step import count_step, groups_along, price_step, steps_between


def placements(axis_ranks: int, dims: int) -> st.SearchStrategy[Placement]:
    shares = st.lists(st.integers(0, 5), min_size=axis_ranks, max_size=axis_ranks).filter(any)
    splits = st.builds(SplitDim, st.integers(0, dims - 1), st.none() | shares.map(tuple))
    return st.one_of(splits, st.just(Broadcast()), st.just(Partial()))


@st.composite
def settings(draw, count: int = 1) -> tuple[MeshTensor, list[Placements]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = st.tuples(*(placements(ranks, len(shape)) for ranks in mesh))
    return MeshTensor(shape, mesh), [draw(axes) for _ in range(count)]


@given(settings())
def test_text_and_placements_are_one_to_one(found) -> None:
    _, (each,) = found
    assert read_placements(write_placements(each)) == each
    assert read_placements(write_placements(each).replace(" ", "")) == each


@given(settings())
def test_every_element_is_on_one_rank_of_each_copy(found) -> None:
    on, (each,) = found
    times = np.zeros(on.shape, dtype=np.int64)
    for box in on.boxes(each).tolist():
        times[tuple(slice(*dim) for dim in box)] += 1
    copies = [n for n, p in zip(on.mesh, each, strict=True) if not isinstance(p, SplitDim)]
    assert (times == math.prod(copies)).all()


def test_splits_are_torchs_and_shares_are_sizes_where_they_add_up() -> None:
    torch_cuts = {(5, 3): [2, 2, 1], (4, 3): [2, 2, 0], (1, 3): [1, 0, 0], (6, 3): [2, 2, 2]}
    for (size, ranks), expected in torch_cuts.items():
        boxes = MeshTensor((size,), (ranks,)).boxes((SplitDim(0),))
        assert np.diff(boxes[:, 0]).flatten().tolist() == expected
    boxes = MeshTensor((7,), (3,)).boxes((SplitDim(0, (4, 0, 3)),))
    assert boxes[:, 0].tolist() == [[0, 4], [4, 4], [4, 7]]
    halves = MeshTensor((8,), (2, 2)).boxes((SplitDim(0, (3, 1)), SplitDim(0, (1, 1))))
    assert halves[:, 0].tolist() == [[0, 3], [3, 6], [6, 7], [7, 8]]


@given(settings(count=2))
def test_what_ranks_send_is_what_is_counted_and_what_peers_receive(found) -> None:
    on, (before, after) = found
    for step in steps_between(before, after) if before != after else ():
        count = count_step(on, step)
        if count is None or step.kind == "fill":
            continue
        ranks = range(on.ranks)
        if step.kind == "exchange":
            turns = [[exchange_of(on, step, rank)] for rank in ranks]
        else:
            turns = [list(flat_exchanges(on, step, rank)) for rank in ranks]
        sent, received = np.zeros((2, on.ranks, on.ranks), dtype=np.int64)
        for rank, exchanges in enumerate(turns):
            for each in exchanges:
                for piece in each.sends:
                    sent[rank, piece.peer] += math.prod(b - a for a, b in piece.box)
                for piece in each.receives:
                    received[piece.peer, rank] += math.prod(b - a for a, b in piece.box)
        assert np.array_equal(sent, count.sent(on.ranks))
        assert np.array_equal(sent, received)
        assert int(sent.sum()) == count.total


# n ranks, |T| bytes: what each sends, over |T| / n ** 2.
TABLE = {
    ("S(0)", "S(1)"): lambda n: n - 1,
    ("S(0)", "B"): lambda n: n * (n - 1),
    ("S(0)", "P"): lambda n: 0,
    ("B", "S(1)"): lambda n: 0,
    ("B", "P"): lambda n: 0,
    ("B", "P(max)"): lambda n: 0,
    ("P", "S(1)"): lambda n: n * (n - 1),
    ("P(max)", "S(0)"): lambda n: n * (n - 1),
    ("P", "B"): lambda n: 2 * n * (n - 1),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("pair", TABLE)
def test_even_splits_move_what_the_table_says(pair: tuple[str, str], ranks: int) -> None:
    on = MeshTensor((2 * ranks, ranks, 3), (ranks,))
    unit = math.prod(on.shape) // ranks**2
    *_, step = steps_between(*map(read_placements, pair))
    count = count_step(on, step)
    sent = count.sent(ranks).sum(axis=1)
    assert sent.tolist() == [unit * TABLE[pair](ranks)] * ranks
    assert count.most == sent.max()
    # OneFlow counts all ranks together, with |T| = 1: (n-1)/n, n-1, 0, n-1 and 2 (n-1).
    assert count.total * ranks == unit * ranks**2 * TABLE[pair](ranks)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("S(0), S(0)", "B, S(0)"),
        ("S(0), S(0)", "P, S(0)"),
        ("P, S(0)", "S(0), S(0)"),
        ("B, S(0)", "S(0), S(0)"),
    ],
)
def test_an_outer_axis_alone_cannot_change_what_an_inner_one_has_cut(
    before: str, after: str
) -> None:
    on = MeshTensor((8, 8), (2, 2))
    for step in steps_between(read_placements(before), read_placements(after)):
        assert step.axes == (0,)
        assert count_step(on, step) is None


def test_the_names_of_steps() -> None:
    names = {
        (before, after): [
            each.words for each in steps_between(read_placements(before), read_placements(after))
        ]
        for before, after in (
            ("S(0), B", "S(1), B"),
            ("S(0), B", "B, B"),
            ("B, B", "S(0), S(1)"),
            ("P, B", "S(1), B"),
            ("P, B", "B, B"),
            ("P, P", "B, B"),
            ("P, S(0)", "S(0), B"),
            ("B, S(0)", "B, P"),
            ("B, S(0)", "S(0), P"),
            ("P, P(max)", "P, P"),
        )
    }
    assert list(names.values()) == [
        ["all-to-all"],
        ["all-gather"],
        ["slice"],
        ["reduce-scatter"],
        ["gather and reduce", "all-reduce"],
        ["exchange", "all-reduce"],
        ["exchange"],
        ["fill"],
        [],
        [],
    ]


def test_a_step_takes_its_busiest_ranks_busiest_links() -> None:
    links = (LinkPrice(10e-6, 1e6), LinkPrice(1e-6, 4e6))

    def seconds(before: str, after: str) -> list[float]:
        on = MeshTensor((12,), (3,)) if "+" in before else MeshTensor((12, 12), (2, 2))
        steps = steps_between(read_placements(before), read_placements(after))
        return [
            price_step(on, step, count_step(on, step), element_bytes=2, links=links)
            for step in steps
        ]

    half, quarter = 12 * 6 * 2, 6 * 6 * 2
    assert seconds("B, S(0)", "B, B") == pytest.approx([1e-6 + half / 4e6])
    assert seconds("S(0), B", "B, B") == pytest.approx([10e-6 + half / 1e6])
    assert seconds("S(0), S(1)", "B, B") == pytest.approx([20e-6 + 2 * quarter / 1e6])
    assert seconds("P, B", "B, B") == pytest.approx(
        [10e-6 + 2 * half / 1e6, 20e-6 + 2 * half / 1e6]
    )
    # Of three ranks the second has most, and its two peers send to it one after another.
    assert seconds("S(0: 2+1+9)", "S(0: 0+12+0)") == pytest.approx([20e-6 + 22 / 1e6])


def test_groups_are_ranks_that_differ_along_some_axes() -> None:
    assert groups_along((2, 3), (1,)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert groups_along((2, 1, 2), (0, 2)).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("word", ["S", "S(-1)", "R", "P(min)", "S(0: 1+)", "", "B B"])
def test_words_that_are_no_placement_are_refused(word: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_placements(f"B, {word}")
    assert str(refused.value) == (
        f'"{word}" is not a placement. Give S(dim), S(dim: 3+1) with the share of each rank, B, P '
        f"or P(max), one for each mesh axis, as in S(0), B."
    )


@pytest.mark.parametrize(
    ("shape", "mesh", "text", "message"),
    [
        ((4,), (), "B", "A mesh of no axis is none. Give sizes of 1 or more, as in 2x4."),
        ((4,), (2, 0), "B", "A mesh of 2x0 is none. Give sizes of 1 or more, as in 2x4."),
        ((4, -1), (2,), "B", "A shape of 4x-1 is none. Give sizes of 0 or more, as in 2x4."),
        (
            (4,),
            (2, 1024),
            "B",
            "A mesh of 2x1024 has 2,048 ranks on 2 axes, and paths are searched for at most 512 "
            "on 3. Leave out an axis along which nothing changes.",
        ),
        (
            (4,),
            (1, 1, 1, 1, 2),
            "B",
            "A mesh of 1x1x1x1x2 has 2 ranks on 5 axes, and paths are searched for at most 512 "
            "on 3. Leave out an axis along which nothing changes.",
        ),
        (
            (4,),
            (600,),
            "B",
            "A mesh of 600 has 600 ranks on 1 axis, and paths are searched for at most 512 on 3. "
            "Leave out an axis along which nothing changes.",
        ),
        (
            (10**9, 0, 10**9),
            (2,),
            "B",
            "A tensor of 1000000000x0x1000000000 has 1e+18 elements, and bytes are counted for at "
            "most 1.1e+12. Give a smaller one.",
        ),
        (
            (1 << 30,),
            (2,),
            "S(0: 99999999999+1)",
            "S(0: 99999999999+1) gives shares that add up to 1e+11, and for a dim of 1,073,741,824 "
            "they may to 4.3e+09. Give smaller ones in proportion.",
        ),
        (
            (4,),
            (2, 2),
            "S(0)",
            "S(0) is 1 placement for a mesh of 2 axes (2x2). Give one for each axis.",
        ),
        (
            (4, 3),
            (2,),
            "S(2)",
            "S(2) splits dim 2 of a tensor of 2 dims (4x3). Dims are counted from 0.",
        ),
        (
            (),
            (2,),
            "S(0)",
            "S(0) splits dim 0 of a tensor of 0 dims (a scalar). Dims are counted from 0.",
        ),
        (
            (4,),
            (2,),
            "S(0: 3+1+0)",
            "S(0: 3+1+0) gives 3 shares to an axis of 2 ranks. Give one for each rank; 0 is a "
            "share too.",
        ),
        (
            (4,),
            (2,),
            "S(0: 0+0)",
            "S(0: 0+0) gives shares that add up to 0, or one below 0. Give whole numbers of 0 or "
            "more, not all 0.",
        ),
        (
            (4,),
            (2, 2),
            "P, P(max)",
            "P, P(max) is partial by sum and by max at once, and nothing says which comes first. "
            "Take one of them first.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    shape: tuple[int, ...], mesh: tuple[int, ...], text: str, message: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        MeshTensor(shape, mesh).require(read_placements(text))
    assert str(refused.value) == message


@pytest.mark.parametrize("module", [boxing, boxing_exchange, boxing_placement, boxing_step])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0
