"""Rows of pages: found, viewed, and moved to host memory and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import FitError
from equipoise.observe.machine import resident_bytes
from equipoise.schedule.batching.iteration import Swap
from equipoise.serve.engine.pool import KvPool, token_bytes
from support.serving.paged import PLAIN, joined


def make_pool(pages: int, *, swap_pages: int = 0, dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(
        PLAIN,
        pages=pages,
        page_tokens=4,
        dtype=dtype,
        device=torch.device("cpu"),
        swap_pages=swap_pages,
    )


@given(st.permutations(range(7)), st.integers(0, 28))
def test_views_are_the_rows_of_a_sequence_in_order(pages: list[int], tokens: int) -> None:
    pool = make_pool(7)
    rows = [at for view in pool.views(joined(pages), tokens) for at in range(28)[view]]
    assert rows == pool.row_numbers(pages, 0, tokens)
    assert len(set(rows)) == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_pages_come_back_with_the_same_bits(dtype: torch.dtype) -> None:
    pool = make_pool(5, swap_pages=4, dtype=dtype)
    before = torch.randn(pool.keys(0).shape).to(dtype)
    for layer in range(PLAIN.layers):
        pool.keys(layer)[:] = before + layer
        pool.values(layer)[:] = before - layer
    pool.swap_out(Swap("a", pages=(4, 0), slots=(1, 3)))
    pool.swap_in(Swap("a", pages=(2, 1), slots=(1, 3)))
    for layer in range(PLAIN.layers):
        assert torch.equal(pool.keys(layer)[8:12], (before + layer)[16:20])
        assert torch.equal(pool.values(layer)[4:8], (before - layer)[0:4])
        assert torch.equal(pool.keys(layer)[12:], (before + layer)[12:])


def test_bytes_of_a_token() -> None:
    pool = make_pool(3)
    held = sum(pool.keys(at).nbytes + pool.values(at).nbytes for at in range(PLAIN.layers))
    assert held == 12 * token_bytes(PLAIN, torch.float32)


def test_memory_is_taken_for_rows_that_were_written() -> None:
    pool = make_pool(1 << 16)
    assert pool.keys(0).nbytes >= 16 << 20
    before = resident_bytes()
    for layer in range(PLAIN.layers):
        pool.keys(layer)[5], pool.values(layer)[5] = 1, 2
    assert resident_bytes() - before < 2 << 20
    assert not pool.keys(PLAIN.layers - 1)[-1].any()


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(FitError) as caught:
        make_pool(1 << 50)
    assert str(caught.value) == (
        "A cache of 1,125,899,906,842,624 pages of 4 tokens needs 1536.0 PiB, and cpu does not "
        "have that. Give it fewer pages."
    )
