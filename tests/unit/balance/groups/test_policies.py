"""Group plans, by Hypothesis: what every policy keeps, and how near ours is to brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.groups.cost import Exchange, GroupCosts
from equipoise.balance.groups.gangs import plan_gangs
from equipoise.balance.groups.plan import (
    Gang,
    GroupPlan,
    critical_bound,
    finish_plan,
    make_gang,
    replay,
)
from equipoise.balance.groups.policies import GROUP_POLICIES
from equipoise.cost.curve import LoadCurve, break_even_curve
from equipoise.spec.workload import distribution_names, draw_lengths

FREE = GroupCosts(break_even_curve(500))
SLOW = Exchange("ring", 4e3, ((2, 1e9), (4, 2e8)), latency_s=1e-6)
PAID = GroupCosts(LoadCurve(2e4, 1000.0, (1.0,), (4.0,), 1.0, measured=False), SLOW)
WAITING = 1_000_000


@st.composite
def jobs(draw) -> tuple[np.ndarray, int, GroupCosts, int]:
    """Lengths, ranks, costs, and a cap under which a power of two of the ranks holds each."""
    lengths = np.array(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=20)))
    ranks = draw(st.integers(1, 12))
    widest = 1 << (ranks.bit_length() - 1)
    cap = -(-int(lengths.max()) // widest) + draw(st.integers(0, 400))
    return lengths, ranks, draw(st.sampled_from((FREE, PAID))), cap


def each_policy(test):
    return pytest.mark.parametrize("policy", GROUP_POLICIES)(
        settings(max_examples=12, deadline=None)(given(job=jobs())(test))
    )


@each_policy
def test_each_document_has_one_gang_of_ranks_that_exist(policy: str, job) -> None:
    lengths, ranks, _, _ = job
    plan = GROUP_POLICIES[policy](*job)
    placed = [document for gang in plan.gangs for document in gang.documents]
    assert sorted(placed) == list(range(len(lengths)))
    for gang in plan.gangs:
        assert gang.documents
        assert len(set(gang.ranks)) == len(gang.ranks) > 0
        assert set(gang.ranks) <= set(range(ranks))


@each_policy
def test_no_rank_holds_more_than_its_cap(policy: str, job) -> None:
    lengths, _, _, cap = job
    plan = GROUP_POLICIES[policy](*job)
    for gang in plan.gangs:
        assert gang.tokens_per_rank == sum(
            -(-lengths[d] // len(gang.ranks)) for d in gang.documents
        )
    assert int(plan.peak_tokens.max()) <= cap


@each_policy
def test_gangs_never_overlap_and_cost_what_they_should(policy: str, job) -> None:
    lengths, ranks, costs, _ = job
    plan = GROUP_POLICIES[policy](*job)
    for mine in plan.rank_gangs:
        times = [(plan.gangs[index].start_ns, plan.gangs[index].stop_ns) for index in mine]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    for gang in plan.gangs:
        assert gang.load_ns == make_gang(gang.ranks, gang.documents, lengths, costs).load_ns
    assert len(plan.rank_gangs) == len(plan.micro_batches) == ranks


@pytest.mark.parametrize("policy", [name for name in GROUP_POLICIES if name != "flexsp"])
@settings(deadline=None, max_examples=12)
@given(job=jobs(), data=st.data())
def test_ranks_that_only_follow_their_lists_all_finish_on_time(policy: str, job, data) -> None:
    plan = GROUP_POLICIES[policy](*job)
    lists, free = [list(mine) for mine in plan.rank_gangs], [0] * plan.ranks
    while any(lists):
        heads = {mine[0] for mine in lists if mine}
        ready = [g for g in sorted(heads) if all(lists[r][:1] == [g] for r in plan.gangs[g].ranks)]
        assert ready, "ranks wait for each other in a ring"
        gang = plan.gangs[data.draw(st.sampled_from(ready))]
        assert gang.start_ns == max(free[rank] for rank in gang.ranks)
        for rank in gang.ranks:
            free[rank] = gang.stop_ns
            lists[rank].pop(0)
    assert max(free) == plan.critical_ns


@each_policy
def test_no_plan_ends_before_the_bound_and_all_ranks_plan_alike(policy: str, job) -> None:
    lengths, *rest = job
    plan, again = (GROUP_POLICIES[policy](lengths.copy(), *rest) for _ in range(2))
    assert plan.critical_ns >= plan.bound_ns
    assert plan.gap >= 0
    assert int(plan.busy_ns.max()) <= plan.critical_ns
    assert plan == again
    assert plan.digest == again.digest


def quickest(lengths: np.ndarray, ranks: int, costs: GroupCosts, cap: int) -> int:
    """The least end of the last rank over all orders, sets of ranks and packings of pairs."""
    best = None
    sets = [s for k in range(1, ranks + 1) for s in itertools.combinations(range(ranks), k)]
    for order in itertools.permutations(range(len(lengths))):
        for chosen in itertools.product(sets, repeat=len(lengths)):
            gangs = [make_gang(s, (d,), lengths, costs) for s, d in zip(chosen, order, strict=True)]
            if max(gang.tokens_per_rank for gang in gangs) <= cap:
                end = max(gang.stop_ns for gang in replay(gangs, ranks))
                best = end if best is None else min(best, end)
    assert best is not None
    return best


@settings(max_examples=7, deadline=None)
@given(lengths=st.lists(st.integers(50, 3000), min_size=1, max_size=3), slack=st.integers(0, 900))
def test_ours_is_within_a_twentieth_of_brute_force(lengths: list[int], slack: int) -> None:
    # Three documents on three ranks are the hardest case: nothing is short enough to fill in.
    curve = LoadCurve(0.0, 1000.0, (1.0,), (4.0,), 1.0, measured=False)
    costs, cap = GroupCosts(curve, SLOW), -(-max(lengths) // 3) + slack
    plan = plan_gangs(lengths, 3, costs, cap)
    assert plan.critical_ns <= 1.05 * quickest(np.array(lengths), 3, costs, cap)


@pytest.mark.parametrize("ranks", [8, 12, 13, 64])
@pytest.mark.parametrize("name", distribution_names())
def test_the_last_rank_ends_within_a_twentieth_of_the_ideal(name: str, ranks: int) -> None:
    lengths = np.minimum(draw_lengths(name, 8 * ranks, seed=1), ranks * 8192)
    plan = plan_gangs(lengths, ranks, GroupCosts(break_even_curve(36_000)), 8192)
    assert plan.critical_over_ideal <= 1.05


def test_a_document_gets_a_number_of_ranks_that_is_no_power_of_two() -> None:
    plan = plan_gangs([900, 300, 300], 5, GroupCosts(break_even_curve(float("inf"))), 400)
    assert [(gang.ranks, gang.documents) for gang in plan.gangs] == [
        ((0, 1, 2), (0,)),
        ((3,), (1,)),
        ((4,), (2,)),
    ]


@settings(deadline=None, max_examples=12)
@given(job=jobs())
def test_aligned_gangs_are_blocks_that_divide_the_ranks(job) -> None:
    lengths, ranks, costs, cap = job
    for gang in plan_gangs(lengths, ranks, costs, cap, aligned=True).gangs:
        width = len(gang.ranks)
        assert ranks % width == 0
        assert gang.ranks[0] % width == 0
        assert gang.ranks == tuple(range(gang.ranks[0], gang.ranks[0] + width))


def test_short_documents_fill_the_hole_before_a_gang() -> None:
    # 600 on ranks 0 and 1, then 400 on two of three: rank 2 would wait, were it not for 100s.
    costs = GroupCosts(break_even_curve(float("inf")))
    plan = plan_gangs([600, 400, 100, 100, 100, 200], 3, costs, 300)
    assert plan.critical_over_ideal <= 1.01
    gang = next(gang for gang in plan.gangs if 1 in gang.documents)
    assert len(gang.ranks) == 2
    assert gang.start_ns > 0


def test_a_barrier_makes_all_ranks_meet() -> None:
    gangs = [Gang((0,), (0,), 5, 1), Gang((1,), (1,), 2, 1)]
    assert [gang.start_ns for gang in replay(gangs, 2, barriers=[1])] == [0, 5]


def test_a_plan_says_what_each_rank_does() -> None:
    costs = GroupCosts(break_even_curve(float("inf")))
    lengths = np.array([6, 3, 3])
    gangs = [make_gang((0, 1), (0,), lengths, costs), make_gang((1,), (1, 2), lengths, costs)]
    plan = finish_plan("by hand", gangs, lengths, 2, costs, 6)
    assert plan.rank_gangs == [[0], [0, 1]]
    assert plan.micro_batches == [1, 2]
    assert plan.peak_tokens.tolist() == [3, 6]
    assert (plan.busy_ns // WAITING).tolist() == [3, 9]
    assert plan.critical_over_ideal == pytest.approx(1.5)
    assert plan.gap == pytest.approx(0.5)
    assert plan.gangs[0].seconds == pytest.approx(3e-3)


def test_a_plan_of_nothing_is_even() -> None:
    for planner in GROUP_POLICIES.values():
        plan: GroupPlan = planner([], 4, FREE, 10)
        assert plan.gangs == ()
        assert (plan.critical_over_ideal, plan.gap, plan.critical_ns) == (1.0, 0.0, 0)


def test_the_bound_counts_the_price_of_each_micro_batch() -> None:
    costs = GroupCosts(LoadCurve(10.0, 1.0, (1.0,), (1e-9,), 1.0, measured=False))
    # 40 tokens at 10 a rank are 4 micro-batches, two on each of two ranks.
    assert critical_bound(np.array([10, 10, 10, 10]), 2, costs, 10) == 40


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [5000],
        [7] * 40,
        [5000] + [1] * 30,
        [1, 2, 3, 4, 5],
        [2**k + e for k in range(1, 10) for e in (-1, 0, 1)],
        [97, 89, 83, 79, 73],
    ],
)
@pytest.mark.parametrize("policy", GROUP_POLICIES)
def test_odd_inputs_are_planned_whole(policy: str, lengths: list[int]) -> None:
    plan = GROUP_POLICIES[policy](lengths, 8, PAID, 1000)
    placed = sorted(document for gang in plan.gangs for document in gang.documents)
    assert placed == list(range(len(lengths)))
    assert int(plan.peak_tokens.max()) <= 1000
