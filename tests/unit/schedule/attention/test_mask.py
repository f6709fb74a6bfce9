"""Masks as runs of queries that read alike, against masks written out; masks that are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.work import pairs_before
from equipoise.schedule.attention.mask import masks_of, reads_of
from equipoise.spec.mask import Mask
from support.placements import masks_for, written_out


@given(st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(n), masks_for(n))))
def test_runs_read_the_masks_pairs(case) -> None:
    tokens, mask = case
    reads = reads_of([mask], np.array([tokens]))
    found = np.zeros((tokens, tokens), dtype=np.int64)
    for _, start, stop, window in reads.own.tolist():
        for query in range(start, stop):
            found[query, max(start, query - window + 1) : query + 1] += 1
    for _, start, stop, shared in reads.shared.tolist():
        found[start:stop, :shared] += 1
    assert np.array_equal(found, written_out(mask, tokens))
    lengths = np.array([tokens])
    assert found.sum() == pairs_before(lengths, lengths, mask).sum()


def refusal(call) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


def test_masks_that_are_refused() -> None:
    lengths = np.array([4, 5])
    assert refusal(lambda: masks_of([Mask()], lengths)) == (
        "1 masks for 2 documents. Give one mask per document, or one for all."
    )
    prefix = Mask("prefix", prefix_tokens=1, branch_tokens=(1, 2))
    assert refusal(lambda: masks_of(prefix, lengths)) == (
        "Document 1 has 5 tokens, but its mask has a prefix of 1 and branches of 3. Give it a mask "
        "of 5 tokens."
    )
    assert refusal(lambda: Mask("windw")) == (
        'No mask is called "windw". Nearest: window. All: causal, full, window, prefix.'
    )
    assert refusal(lambda: Mask("prefix", prefix_tokens=-1, branch_tokens=(3,))) == (
        "The prefix is -1 tokens and the branches [3]. Give 0 or more tokens each."
    )
