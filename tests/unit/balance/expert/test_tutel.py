"""Sharings of experts and their prices, and the choice between policies."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.expert.auto import trial_of
from equipoise.balance.expert.policies import EXPERT_POLICIES, choose_experts, plan_experts
from equipoise.balance.expert.price import RowPrices, price_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.tutel import choose_sharing, price_sharings, sharings
from equipoise.schedule.expert.check import check_experts


def test_weights_stay_at_few_rows_and_rows_stay_at_many() -> None:
    for least_rows, count in ((100, 5), (100, 5000)):
        rows = np.full((2, 8), count)
        request = ExpertRequest(rows, least_rows=least_rows, row_cost=0.5)
        schedule = plan_experts("tutel", request)
        check_experts(schedule)
        is_many = count > 100
        assert (schedule.copies > 0) == is_many
        assert schedule.sent[0, 1] == (0 if is_many else 4 * count)
        assert schedule.computed.tolist() == [8 * count] * 2


def test_more_rows_go_where_fewer_weights_travel() -> None:
    """As rows grow, the cheapest sharing goes from s ranks for each row to none."""
    prices = RowPrices.of_width(100, 64)
    chosen = [choose_sharing(np.full((4, 2, 4), count), prices) for count in (1, 40, 80, 9000)]
    assert chosen[0] == 4 and chosen[-1] == 0
    assert chosen == sorted(chosen, reverse=True) and len(set(chosen)) >= 3


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from((1, 2, 4)),
    st.integers(1, 3),
    st.lists(st.integers(0, 90), min_size=24, max_size=24),
    st.sampled_from((0.0, 3.0, 200.0)),
)
def test_prices_of_sharings_are_those_of_counted_rows(
    etp: int, ep: int, counts: list[int], least: float
) -> None:
    """Against a count of every row and weight, one by one."""
    experts = 2 * ep
    rows = np.resize(np.array(counts), (etp, ep, experts))
    prices = RowPrices(least, 0.25)
    costs = price_sharings(rows, prices)
    assert list(costs) == sharings(etp)
    for r in sharings(etp)[1:]:
        worst = 0.0
        for j, e in itertools.product(range(etp), range(ep)):
            mine = range(2 * e, 2 * e + 2)
            arrived = [int(rows[other, :, mine].sum()) for other in range(etp)]
            group = range(j // r * r, j // r * r + r)
            total = sum(arrived[other] for other in group)
            out = int(rows[j, e].sum() - rows[j, e, mine].sum())
            into = arrived[j] - int(rows[j, e, mine].sum())
            moved = max(out, into) + total - arrived[j]
            weights = 2 * (1 / r - 1 / etp)
            worst = max(worst, total / r + 0.25 * moved + least * weights)
        assert costs[r] == pytest.approx(worst)
    assert costs[choose_sharing(rows, prices)] == min(costs.values())


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from((0, 1, 40, 900)), min_size=8, max_size=8), min_size=4, max_size=4
    ),
    st.sampled_from((1, 50, 2000)),
    st.integers(0, 6),
)
def test_no_policy_is_cheaper_than_the_choice(
    rows: list[list[int]], least: int, slots: int
) -> None:
    request = ExpertRequest(
        np.array(rows), slots=slots, least_rows=least, row_cost=0.3, seen=np.array(rows[0])
    )
    choice = choose_experts(request)
    assert choice.schedule.digest == plan_experts("auto", request).digest
    price = price_experts(choice.schedule, request.prices)
    assert price == min(choice.prices.values()) == choice.prices[choice.schedule.policy]
    assert ("tutel" in choice.prices) == (slots >= 6)
    tried = choose_experts(request, trial="eplb")
    assert tried.schedule.policy == "eplb" and tried.prices == choice.prices


def test_free_links_leave_the_rows_of_the_fullest_rank() -> None:
    request = ExpertRequest(np.array([[50, 3], [9, 1]]))
    fixed = plan_experts("fixed", request)
    assert price_experts(fixed, RowPrices(0.0, 0.0)) == 59
    assert price_experts(fixed, RowPrices(0.0, 2.0)) == 59 + 2 * 9


def test_each_policy_is_tried_once_in_a_hundred_steps() -> None:
    names = list(EXPERT_POLICIES)
    tried = [trial_of(step, names) for step in range(200)]
    assert [each for each in tried[:100] if each] == names and tried[100:] == tried[:100]
