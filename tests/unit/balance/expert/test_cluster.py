"""Tokens are dealt to ranks, experts are clustered with them, and small cases are tried whole."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.balance.expert.cluster import cluster_experts, local_values, renumbering
from equipoise.balance.expert.deal import deal, order_tokens
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.spec.layout import rows_of
from equipoise.spec.model.experts import split_experts


def _rooms(tokens: int, ranks: int) -> Ints:
    return np.array([len(rows_of(tokens, ranks=ranks, rank=rank)) for rank in range(ranks)])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.integers(1, 3), st.integers(0, 1 << 30))
@example(tokens=3, ranks=3, seed=32)
def test_every_token_is_dealt_once_and_two_ranks_cannot_do_better(
    tokens: int, ranks: int, seed: int
) -> None:
    values = np.random.default_rng(seed).integers(0, 6, (tokens, ranks))
    order = order_tokens(values, ranks=ranks)
    assert sorted(order.tolist()) == list(range(tokens))
    runs = [rows_of(tokens, ranks=ranks, rank=rank) for rank in range(ranks)]
    for run in runs:
        assert (np.diff(order[run.start : run.stop]) > 0).all()

    def worth(order: Ints) -> int:
        return sum(int(values[order[r.start : r.stop], at].sum()) for at, r in enumerate(runs))

    assert worth(order) >= worth(np.arange(tokens))
    if ranks == 2:
        first = len(runs[0])
        best = max(
            (
                values[list(some), 0].sum() + np.delete(values[:, 1], list(some)).sum()
                for some in itertools.combinations(range(tokens), first)
            ),
            default=0,
        )
        assert worth(order) == best


@settings(max_examples=7, deadline=None)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(0, 1 << 30))
def test_kinds_are_dealt_whole_and_near_the_best(kinds: int, ranks: int, seed: int) -> None:
    from scipy.optimize import linprog

    drawn = np.random.default_rng(seed)
    values, mass = drawn.integers(0, 1000, (kinds, ranks)), drawn.integers(0, 9, kinds)
    rooms = _rooms(int(mass.sum()), ranks)
    dealt = deal(values, mass, rooms)
    assert dealt.min() >= 0
    assert dealt.sum(axis=1).tolist() == mass.tolist()
    assert dealt.sum(axis=0).tolist() == rooms.tolist()
    rows, columns = np.eye(kinds).repeat(ranks, axis=1), np.tile(np.eye(ranks), kinds)
    best = linprog(
        -values.reshape(-1), A_eq=np.vstack((rows, columns)), b_eq=np.append(mass, rooms)
    )
    assert (dealt * values).sum() >= -0.8 * best.fun - 1e-6
    if ranks == 2:
        assert (dealt * values).sum() >= -best.fun - 1e-6


def _best_of_all(counts: Ints, ranks: int) -> int:
    """Local rows under the best of all placements of experts, every layer, tokens dealt best."""
    kinds, layers, experts = counts.shape
    own = np.repeat(np.arange(ranks), split_experts(experts, ranks=ranks))
    placements = sorted(set(itertools.permutations(own.tolist())))
    by_kind = counts.reshape(kinds, -1)
    mass = by_kind.sum(axis=1)
    best = 0.0
    for choice in itertools.product(placements, repeat=layers):
        values = local_values(by_kind, np.array(choice), ranks)
        per_row = (values << 16) // np.maximum(mass, 1)[:, np.newaxis]
        dealt = deal(per_row, mass, _rooms(int(mass.sum()), ranks))
        best = max(best, (values * dealt / np.maximum(mass, 1)[:, np.newaxis]).sum())
    return int(best)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 2), st.integers(1, 6), st.integers(0, 1 << 30))
def test_small_cases_are_near_the_best_of_all_placements(
    layers: int, kinds: int, seed: int
) -> None:
    counts = np.random.default_rng(seed).integers(0, 20, (kinds, layers, 4))
    clusters = cluster_experts(counts, 2, tolerance=9.0)
    assert np.bincount(clusters.ranks_LX.reshape(-1), minlength=2).tolist() == [2 * layers] * 2
    assert clusters.local_rows >= 0.9 * _best_of_all(counts, 2) - layers
    again = cluster_experts(counts, 2, tolerance=9.0)
    assert again.ranks_LX.tolist() == clusters.ranks_LX.tolist()


@pytest.mark.parametrize(("ranks", "experts"), [(2, 8), (4, 16), (3, 8)])
def test_groups_that_never_mix_are_found_in_every_layer(ranks: int, experts: int) -> None:
    drawn = np.random.default_rng(ranks)
    shares = split_experts(experts, ranks=ranks)
    own = np.repeat(np.arange(ranks), shares)
    hidden = np.stack([drawn.permutation(own) for _ in range(3)])
    group = np.repeat(np.arange(ranks), [10 * share for share in shares])
    mates = group[:, np.newaxis, np.newaxis] == hidden
    clusters = cluster_experts(mates.astype(np.int64), ranks, tolerance=9.0)
    # Ranks with fewer experts have as many tokens as the others, some of which must travel.
    assert clusters.local_rate >= (1.0 if experts % ranks == 0 else 0.83)
    if experts % ranks == 0:
        for layer in range(3):
            pairs = set(zip(hidden[layer].tolist(), clusters.ranks_LX[layer].tolist(), strict=True))
            assert len(pairs) == ranks
    order = renumbering(clusters.ranks_LX)
    runs = np.take_along_axis(clusters.ranks_LX, order, axis=1)
    assert runs.tolist() == [own.tolist()] * 3


def test_hot_experts_are_parted_for_the_fewest_rows() -> None:
    """Tokens of two experts that all choose together: balance costs local rows, tolerance none."""
    counts = np.zeros((8, 1, 4), dtype=np.int64)
    counts[:6, 0, :2], counts[6:, 0, 2:] = 30, 1
    loose = cluster_experts(counts, 2, tolerance=9.0)
    even = cluster_experts(counts, 2)
    heights = np.bincount(even.ranks_LX[0], weights=counts.sum(axis=(0, 1)))
    assert heights.max() <= 1.1 * heights.mean()
    assert loose.ranks_LX.tolist() == [[0, 0, 1, 1]]
    assert even.local_rows <= loose.local_rows
    with pytest.raises(LayoutError, match="3 experts in runs of 1 leave 1 of 4 ranks without any"):
        cluster_experts(counts[:, :, :3], 4)
