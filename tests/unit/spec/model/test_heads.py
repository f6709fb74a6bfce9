"""Each tensor-parallel rank computes its query heads, with the key/value heads that they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.spec.model.heads import share_heads


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_query_head_reads_what_it_reads_on_one_rank(
    kv_heads: int, group: int, data: st.DataObject
) -> None:
    heads = kv_heads * group
    ranks = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    computed = []
    for rank in range(ranks):
        share = share_heads(heads, kv_heads, ranks=ranks, rank=rank)
        assert len(share.heads) % len(share.kv_heads) == 0
        ratio = len(share.heads) // len(share.kv_heads)
        for number, head in enumerate(share.heads):
            assert share.kv_heads[number // ratio] == head // group
            computed.append(head)
        if share.kv_run is not None:
            assert tuple(share.kv_run) == share.kv_heads
    assert computed == list(range(heads))


def test_ranks_that_divide_the_key_value_heads_hold_each_once() -> None:
    shares = [share_heads(8, 4, ranks=2, rank=rank) for rank in range(2)]
    assert [share.kv_run for share in shares] == [range(2), range(2, 4)]
    assert share_heads(6, 1, ranks=3, rank=1).kv_run == range(1)
    assert share_heads(10, 2, ranks=2, rank=1).kv_heads == (1,)
    assert share_heads(12, 2, ranks=3, rank=1).kv_run == range(2)
    assert share_heads(14, 2, ranks=2, rank=0).kv_run == range(1)
    assert share_heads(15, 3, ranks=3, rank=2).kv_run == range(2, 3)
    assert share_heads(12, 4, ranks=6, rank=1).kv_heads == (0, 1)
    assert share_heads(12, 3, ranks=2, rank=0).kv_heads == (0, 0, 0, 0, 1, 1)
    assert share_heads(12, 3, ranks=2, rank=0).kv_run is None


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        share_heads(9, 3, ranks=2, rank=0)
    assert str(refused.value) == (
        "9 heads do not divide over 2 tensor-parallel ranks. Give a divisor of 9 ranks."
    )
