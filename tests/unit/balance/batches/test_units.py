"""Samples and trees of samples: pairs as in the explicit mask, each sample in one unit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise import balance
from equipoise.balance.batches.units import Shared, grouped_units, read_lengths
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import pairs_before
from equipoise.spec.mask import Mask

PAIRS = LoadCurve(0.0, 0.0, (1.0,), (1.0,), 1.0, measured=False)
"""One nanosecond a pair."""


@given(st.integers(0, 40), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_flat_tree_has_the_pairs_of_its_mask(prefix, branches) -> None:
    lengths = prefix + np.array(branches)[:, None]
    units = grouped_units(lengths, [Shared(prefix, list(range(len(branches))))], PAIRS)
    total = prefix + sum(branches)
    mask = Mask("prefix", prefix_tokens=prefix, branch_tokens=tuple(branches))
    assert units.loads.tolist() == [[int(pairs_before(np.array(total), np.array(total), mask))]]
    assert units.sizes.tolist() == [[total]]


def test_a_nested_tree_has_the_pairs_of_its_mask() -> None:
    paths = [[4, 2], [4, 1], [4, 3, 2], [4, 3, 1]]
    lengths = np.array([sum(path) for path in paths])[:, None]
    units = grouped_units(lengths, [Shared(4, [0, 1, Shared(3, [2, 3])])], PAIRS)
    every = {(start, at) for path in paths for start, at in _nodes(path)}
    pairs = sum((end * (end + 1) - begin * (begin + 1)) // 2 for _, (begin, end) in every)
    assert units.loads.tolist() == [[pairs]]
    assert units.sizes.tolist() == [[4 + 2 + 1 + 3 + 2 + 1]]


def _nodes(path):
    begin = 0
    for depth, tokens in enumerate(path):
        yield tuple(path[: depth + 1]), (begin, begin + tokens)
        begin += tokens


def test_groups_stay_together_only_where_their_prefix_is_shared() -> None:
    lengths = [512, 510, 505, 501, 700, 20]
    groups = [Shared(500, [0, 1, 2, 3])]
    together = balance.batch(lengths, 2, price="7m", groups=groups)
    assert together.micro_batches == [[[4]], [[0, 1, 2, 3, 5]]]
    assert together.tokens[1, 0, 0] == 500 + 12 + 10 + 5 + 1 + 20
    apart = balance.batch(lengths, 2, price="7m", groups=groups, shares_prefix=False)
    assert apart.micro_batches == balance.batch(lengths, 2, price="7m").micro_batches
    assert together.seconds.sum() < apart.seconds.sum()


def test_lists_keep_samples_together_without_a_prefix() -> None:
    answer = balance.batch([10] * 6, 2, price="7m", groups=[[0, 5], (1, 2), range(3, 5)])
    assert sorted(batch for (batch,) in answer.micro_batches) == [[0, 3, 4, 5], [1, 2]]


def test_lengths_may_be_whole_numbers_of_any_type() -> None:
    for given_lengths in ([3, 4], (3, 4), np.array([3.0, 4.0]), np.array([3, 4], dtype=np.int32)):
        assert read_lengths(given_lengths).tolist() == [[3], [4]]
