"""Divided documents: each token once, the document's own pairs, parts where they may be."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.packing.divided import macro_units, pack_divided, pack_divided_in_time
from equipoise.balance.packing.pack import batch_ns, rank_seconds, skew
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import break_even_curve
from equipoise.cost.work import causal_pairs
from equipoise.data.stream import DocumentStream
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec
from equipoise.spec.workload import distribution_names, draw_lengths

CURVE = break_even_curve(50)
PACKERS = {"divided": pack_divided, "divided-in-time": pack_divided_in_time}


@st.composite
def steps(draw) -> tuple[Pieces, PackSpec, int]:
    lengths = draw(st.lists(st.integers(1, 600), min_size=1, max_size=20))
    context = draw(st.integers(8, 256))
    pieces = np.array([[index, 0, tokens] for index, tokens in enumerate(lengths)])
    cut = DocumentStream(lengths, seed=0, context_tokens=context).step(0, int(sum(lengths)))
    return (
        cut if draw(st.booleans()) or max(lengths) > context else pieces,
        PackSpec(context_tokens=context),
        draw(st.integers(1, 6)),
    )


def table(packed: PackedStep) -> np.ndarray:
    """Rows (rank, turn, document, start, stop, attends_from)."""
    found = []
    for rank, batches in enumerate(packed.ranks):
        for turn, batch in enumerate(batches):
            froms = batch.begins
            found += [
                (rank, turn, *row, begin)
                for row, begin in zip(batch.pieces.tolist(), froms.tolist(), strict=True)
            ]
    return np.array(found).reshape(-1, 6)


@pytest.mark.parametrize("policy", PACKERS)
@given(step=steps())
def test_each_token_once_and_each_documents_pairs(policy: str, step) -> None:
    pieces, pack, ranks = step
    rows = table(PACKERS[policy](pieces, pack, ranks, CURVE))
    for document, start, stop in pieces.tolist():
        mine = rows[(rows[:, 2] == document) & (rows[:, 5] == start)]
        covered = np.zeros(stop - start, dtype=int)
        pairs = 0
        for _, _, _, first, last, begin in mine.tolist():
            covered[first - start : last - start] += 1
            pairs += int(
                causal_pairs(np.array(last - begin)) - causal_pairs(np.array(first - begin))
            )
        assert (covered == 1).all()
        assert pairs == causal_pairs(np.array(stop - start))


@pytest.mark.parametrize("policy", PACKERS)
@given(step=steps())
def test_the_cap_holds_and_the_answer_depends_on_the_arguments_alone(policy: str, step) -> None:
    pieces, pack, ranks = step
    packed = PACKERS[policy](pieces, pack, ranks, CURVE)
    assert max(batch.tokens for batch in packed) <= pack.most_tokens
    assert packed.digest == PACKERS[policy](pieces.copy(), pack, ranks, CURVE).digest


@given(step=steps())
def test_parts_over_ranks_have_one_turn_and_ranks_of_their_own(step) -> None:
    pieces, pack, ranks = step
    rows = table(pack_divided(pieces, pack, ranks, CURVE))
    for document, start, _ in pieces.tolist():
        mine = rows[(rows[:, 2] == document) & (rows[:, 5] == start)]
        if len(set(map(tuple, mine[:, :2].tolist()))) > 1:
            assert len(set(mine[:, 1].tolist())) == 1


@given(step=steps())
def test_slices_in_time_are_consecutive_on_one_rank_and_in_order(step) -> None:
    pieces, pack, ranks = step
    rows = table(pack_divided_in_time(pieces, pack, ranks, CURVE))
    for document, start, _ in pieces.tolist():
        mine = rows[(rows[:, 2] == document) & (rows[:, 5] == start)]
        mine = mine[np.argsort(mine[:, 3])]
        assert len(set(mine[:, 0].tolist())) == 1
        assert (np.diff(mine[:, 1]) == 1).all()


@given(step=steps())
def test_macro_units_cover_all_and_hold_every_documents_slices(step) -> None:
    pieces, pack, ranks = step
    for batches in pack_divided_in_time(pieces, pack, ranks, CURVE).ranks:
        units = macro_units(batches)
        assert [begin for begin, _ in units] == [0, *(stop for _, stop in units[:-1])]
        assert units[-1][1] == len(batches)
        unit_of = {turn: unit for unit in units for turn in range(*unit)}
        home: dict[tuple[int, int], tuple[int, int]] = {}
        for turn, batch in enumerate(batches):
            froms = batch.begins
            for key in zip(batch.pieces[:, 0].tolist(), froms.tolist(), strict=True):
                assert home.setdefault(key, unit_of[turn]) == unit_of[turn]


def test_units_that_overlap_are_one() -> None:
    def batch(*rows: tuple[int, int, int]) -> MicroBatch:
        pieces = np.array(rows)
        return MicroBatch(pieces, np.zeros(len(pieces), dtype=np.int64))

    batches = (batch((1, 0, 5)), batch((1, 5, 9), (2, 0, 5)), batch((2, 5, 9)), batch((3, 0, 2)))
    assert macro_units(batches) == [(0, 3), (3, 4)]


@pytest.mark.parametrize("policy", PACKERS)
@pytest.mark.parametrize("name", distribution_names())
@pytest.mark.parametrize("bins", [4, 16])
def test_outliers_of_every_distribution_come_out_even(policy: str, name: str, bins: int) -> None:
    context, curve = 131_072, break_even_curve(28_000)
    stream = DocumentStream(draw_lengths(name, 20_000), seed=0, context_tokens=context)
    pack = dataclasses.replace(PackSpec(), context_tokens=context)
    for step in range(3):
        pieces = stream.step(step * bins * context, bins * context)
        packed = PACKERS[policy](pieces, pack, 1 if policy == "divided-in-time" else bins, curve)
        loads = [batch_ns(batch, curve) for batch in packed]
        assert len(loads) == bins
        assert max(loads) <= 1.02 * sum(loads) / bins
        if policy == "divided":
            assert skew(rank_seconds(packed, curve)) <= 1.02


@pytest.mark.parametrize(("tokens", "ranks"), [(241, 3), (81, 1)])
def test_a_document_that_no_turn_holds_is_refused_at_once(tokens: int, ranks: int) -> None:
    """Not after a try with every number of turns up to that of tokens."""
    lengths = np.array([tokens, *[50] * 500])
    index = np.arange(len(lengths))
    pieces = np.stack((index, np.zeros_like(index), lengths), axis=1)
    pack = PackSpec(policy="divided", context_tokens=64, max_tokens=80)
    with pytest.raises(LayoutError) as caught:
        pack_divided(pieces, pack, ranks, CURVE)
    assert str(caught.value) == (
        f"A step of {25_000 + tokens:,} tokens does not fit micro-batches of 80. Set a larger "
        "pack.max_tokens."
    )
    pieces[0, 2] -= 1
    assert pack_divided(pieces, pack, ranks, CURVE).micro_batches < 525
