"""Wraps over neighbours: few cuts, each token once, no rank over its share."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.divided_price import cell_rows
from equipoise.balance.packing.divided_wrap import Wrap
from equipoise.balance.packing.pack import batch_ns
from equipoise.cost.curve import break_even_curve

CURVE = break_even_curve(50)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    ranks=st.integers(1, 6),
    turns=st.integers(1, 3),
    even=st.sampled_from((1.0, 1.002, 1.05)),
    slack=st.integers(0, 400),
)
def test_a_wrap_keeps_what_it_promises(lengths, ranks, turns, even, slack) -> None:
    pieces = np.array([[7 * index, 5, 5 + tokens] for index, tokens in enumerate(lengths)])
    cap = -(-sum(lengths) // (ranks * turns)) + slack
    packed = Wrap(pieces, ranks, turns, cap, CURVE).cut("divided", even)
    again = Wrap(pieces.copy(), ranks, turns, cap, CURVE).cut("divided", even)
    if packed is None:
        assert again is None
        return
    assert packed.digest == again.digest
    assert packed.micro_batches == turns
    assert max(batch.tokens for batch in packed) <= cap
    cell_of, rows = cell_rows(packed)
    assert len(rows) - len(pieces) <= turns * (ranks - 1)
    for document, start, stop in pieces.tolist():
        mine = rows[rows[:, 0] == document]
        runs = sorted(mine[:, 1:3].tolist())
        assert [runs[0][0], *(end for _, end in runs)] == [*(begin for begin, _ in runs), stop]
        assert (mine[:, 3] == start).all()
        assert len(set((cell_of[rows[:, 0] == document] // ranks).tolist())) == 1  # one turn
    for turn in zip(*packed.ranks, strict=True):
        loads = [batch_ns(batch, CURVE) for batch in turn]
        mean = sum(loads) / ranks
        token = int(np.diff(CURVE.document_ns(np.array([299, 300])))[0])
        assert max(loads) <= even * mean + 2 * token + len(rows)


def test_documents_that_come_out_even_are_not_cut() -> None:
    pieces = np.array([[index, 0, 100] for index in range(12)])
    packed = Wrap(pieces, 4, 1, 400, CURVE).cut("divided", 1.0)
    assert packed is not None
    assert [len(batch.pieces) for batch in packed] == [3, 3, 3, 3]


def test_cuts_go_through_the_shortest_documents() -> None:
    lengths = [200, 190, 20, 5, 5]
    pieces = np.array([[index, 0, tokens] for index, tokens in enumerate(lengths)])
    packed = Wrap(pieces, 2, 1, 400, break_even_curve(float("inf"))).cut("divided", 1.0)
    assert packed is not None
    assert {int(row[0]) for batch in packed for row in batch.pieces if row[2] - row[1] > 100} == {
        0,
        1,
    }
