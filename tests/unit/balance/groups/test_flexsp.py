"""FlexSP: buckets, cuts and groups against brute force on small cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.groups.cost import FLEXSP_7B_A100, Exchange, GroupCosts
from equipoise.balance.groups.exact import make_buckets
from equipoise.balance.groups.flexsp import cut_evenly, plan_flexsp
from equipoise.cost.curve import LoadCurve
from equipoise.spec.workload import distribution_names, draw_lengths

EXCHANGE = Exchange("all-to-all", 4e3, ((2, 1e9), (4, 2e8)))
COSTS = GroupCosts(LoadCurve(2e4, 1000.0, (1.0,), (4.0,), 1.0, measured=False), EXCHANGE)


def overstated(lengths: np.ndarray, cuts: tuple[int, ...]) -> int:
    parts = np.split(np.sort(lengths), cuts)
    return sum(int((part.max() - part).sum()) for part in parts if len(part))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8).map(np.array),
    st.integers(1, 4),
)
def test_buckets_overstate_by_as_little_as_any(lengths: np.ndarray, most: int) -> None:
    buckets = make_buckets(lengths, most)
    stands = buckets.tokens[buckets.bucket_of]
    assert (stands >= lengths).all()
    assert len(buckets.tokens) <= most
    assert buckets.counts.sum() == len(lengths)
    assert (buckets.counts > 0).all()
    least = min(
        overstated(lengths, cuts)
        for k in range(most)
        for cuts in itertools.combinations(range(1, len(lengths)), min(k, len(lengths) - 1))
    )
    assert int((stands - lengths).sum()) == least


@pytest.mark.parametrize("name", distribution_names())
def test_sixteen_buckets_overstate_real_lengths_by_little(name: str) -> None:
    # In micro-batches, as the policy makes them; the paper says at most 2.3% of the tokens.
    lengths = np.sort(draw_lengths(name, 512, seed=0))[::-1]
    stands = 0
    for first, stop in cut_evenly(lengths, 6):
        buckets = make_buckets(lengths[first:stop], 16)
        stands += int(buckets.tokens[buckets.bucket_of].sum())
    assert stands <= 1.023 * lengths.sum()


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=30).map(lambda x: np.sort(x)[::-1]),
    st.integers(1, 30),
)
def test_runs_are_consecutive_and_none_is_empty(lengths: np.ndarray, runs: int) -> None:
    runs = min(runs, len(lengths))
    found = cut_evenly(lengths, runs)
    assert len(found) == runs
    assert [first for first, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(lengths)
    assert all(first < stop for first, stop in found)


def brute_force(lengths: np.ndarray, ranks: int, cap: int) -> int | None:
    """The fastest slowest group of one micro-batch, over all groups of powers of two."""
    sizes = [2**k for k in range(ranks.bit_length())]
    times = {s: COSTS.share_ns(lengths, np.array(s)).tolist() for s in sizes}
    held = {s: (-(-lengths // s)).tolist() for s in sizes}
    best = None
    for groups in range(1, min(ranks, len(lengths)) + 1):
        for chosen in itertools.combinations_with_replacement(sizes, groups):
            if sum(chosen) > ranks:
                continue
            for where in itertools.product(range(groups), repeat=len(lengths)):
                load, tokens = [COSTS.fixed_ns] * groups, [0] * groups
                for document, group in enumerate(where):
                    load[group] += times[chosen[group]][document]
                    tokens[group] += held[chosen[group]][document]
                if max(tokens) <= cap and (best is None or max(load) < best):
                    best = max(load)
    return best


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(20, 3000), min_size=1, max_size=5).map(np.array),
    ranks=st.sampled_from((2, 3, 4)),
)
def test_one_micro_batch_is_within_a_fiftieth_of_brute_force(lengths, ranks: int) -> None:
    # A cap that all documents fit at once, so that one micro-batch is what both look at.
    cap = int(lengths.sum())
    plan = plan_flexsp(lengths, ranks, COSTS, cap, nodes=1000)
    best = brute_force(lengths, ranks, cap)
    assert best is not None
    assert plan.critical_ns <= 1.02 * best


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=14),
    ranks=st.integers(1, 9),
)
def test_the_search_is_never_slower_than_the_heuristic_and_repeats(lengths, ranks: int) -> None:
    cap = 5000
    quick = plan_flexsp(lengths, ranks, COSTS, cap, nodes=0)
    plan, again = (plan_flexsp(lengths, ranks, COSTS, cap, nodes=4) for _ in range(2))
    assert plan.critical_ns <= quick.critical_ns
    assert plan == again
    assert {len(gang.ranks) for gang in plan.gangs} <= {1, 2, 4, 8}


def test_groups_stand_on_aligned_neighbours_and_meet_between_micro_batches() -> None:
    lengths = np.minimum(draw_lengths("pretrain-128k", 64, seed=2), 8 * 8192)
    plan = plan_flexsp(lengths, 8, FLEXSP_7B_A100, 8192, nodes=0)
    for gang in plan.gangs:
        assert gang.ranks[0] % len(gang.ranks) == 0
        assert gang.ranks == tuple(range(gang.ranks[0], gang.ranks[0] + len(gang.ranks)))
    edges = [0, *plan.barriers, len(plan.gangs)]
    batches = [plan.gangs[a:b] for a, b in itertools.pairwise(edges)]
    slowest = [max(gang.load_ns for gang in batch) for batch in batches]
    assert plan.critical_ns == sum(slowest)
    for batch in batches:
        used = [rank for gang in batch for rank in gang.ranks]
        assert len(used) == len(set(used))


def test_no_group_spans_nodes_where_travel_between_them_is_slow() -> None:
    # Beyond 8 ranks the all-to-all is 14 times slower, so two groups of 8 beat one of 16.
    plan = plan_flexsp([60_000, *([4000] * 12)], 16, FLEXSP_7B_A100, 8192, nodes=50)
    assert max(len(gang.ranks) for gang in plan.gangs) == 8


def test_no_search_needs_no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    assert plan_flexsp([5, 5, 3], 2, COSTS, 10, nodes=0).critical_ns > 0
