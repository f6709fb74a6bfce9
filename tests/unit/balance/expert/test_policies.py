"""Policies of experts: every row computed once, whatever routers choose; and how even ranks are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.expert.auto import most_held
from equipoise.balance.expert.bound import lower_bound
from equipoise.balance.expert.policies import EXPERT_POLICIES, plan_experts
from equipoise.balance.expert.request import ExpertRequest, as_wide
from equipoise.balance.expert.workload import popularity
from equipoise.base.errors import LayoutError, SpecError
from equipoise.schedule.expert.check import check_experts
from equipoise.schedule.expert.schedule import owners_of


@st.composite
def requests(draw) -> ExpertRequest:
    ranks = draw(st.integers(1, 5))
    experts = ranks * draw(st.integers(1, 3))
    row = st.lists(st.sampled_from((0, 0, 1, 5, 90)), min_size=experts, max_size=experts)
    rows = draw(st.lists(row, min_size=ranks, max_size=ranks))
    seen = draw(st.none() | row.map(np.array))
    least = draw(st.sampled_from((1, 20)))
    return ExpertRequest(
        np.array(rows, dtype=np.int64), slots=draw(st.integers(0, 3)), least_rows=least, seen=seen
    )


@settings(max_examples=20, deadline=None)
@given(requests())
def test_every_policy_writes_a_schedule_that_passes(request: ExpertRequest) -> None:
    fixed = plan_experts("fixed", request)
    for name in EXPERT_POLICIES:
        schedule = plan_experts(name, request)
        # eplb counts places, and may keep an expert away from its owner; tutel copies all or none.
        is_limited = name not in ("eplb", "tutel")
        experts = request.rows.shape[1]
        held = most_held(name, experts=experts, ranks=request.ranks, slots=request.slots)
        check_experts(schedule, slots=held)
        assert held <= request.slots or not is_limited
        assert schedule.computed.max() >= lower_bound(as_wide(request, schedule), request.loads)
        assert schedule.policy == name
        assert schedule.digest == plan_experts(name, request).digest
        assert schedule.computed_by_owners.tolist() == fixed.computed.tolist()
        if is_limited:
            assert schedule.computed.max() <= fixed.computed.max()
            assert name != "exact" or (schedule.loads[schedule.is_copy] >= request.least_rows).all()


def test_rows_stay_where_they_are_as_far_as_places_take_them() -> None:
    # Expert 0 on both ranks: each computes its own rows, and one sends what is left over.
    schedule = plan_experts("exact", ExpertRequest(np.array([[60, 0], [40, 0]]), tolerance=0.0))
    assert schedule.quotas.tolist() == [[50, 10, 0], [0, 40, 0]]
    assert schedule.sent.tolist() == [[50, 10], [0, 40]]
    assert schedule.copied.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (128, 16)])
@pytest.mark.parametrize("slots", [1, 2])
def test_stale_loads_are_corrected(experts: int, ranks: int, slots: int) -> None:
    """30% of the rows have moved on to other experts since the loads were seen."""
    owners = owners_of(experts, ranks=ranks)
    skews: dict[str, list[float]] = {name: [] for name in EXPERT_POLICIES}
    for seed in range(4):
        before, after = (popularity("W1", seed + more, 0, owners) for more in (0, 100))
        drawn = np.random.default_rng(seed)
        rows = np.stack([drawn.multinomial(4096, 0.7 * before + 0.3 * after)] * ranks)
        request = ExpertRequest(rows, slots=slots, seen=drawn.multinomial(65_536, before))
        for name, each in skews.items():
            each.append(plan_experts(name, request).skew)
    assert max(skews["hecate"]) <= 1.10
    assert max(skews["exact"]) <= 1.02
    assert np.mean(skews["eplb"]) > 1.25
    assert np.mean(skews["fixed"]) > np.mean(skews["eplb"])


def test_eplb_is_even_on_the_loads_that_it_was_planned_on() -> None:
    owners = owners_of(64, ranks=8)
    loads = np.random.default_rng(0).multinomial(65_536, popularity("W1", 3, 0, owners))
    rows = np.zeros((8, 64), dtype=np.int64)
    rows[0] = loads
    assert plan_experts("eplb", ExpertRequest(rows, seen=loads)).skew < 1.02


@pytest.mark.parametrize("policy", ["hecate", "eplb"])
def test_earlier_loads_count_by_their_shares_alone(policy: str) -> None:
    rows = np.array([[90, 2, 1, 1]] * 2)
    plans = [
        plan_experts(policy, ExpertRequest(rows, seen=np.array([90, 2, 1, 1]) * unit)).digest
        for unit in (1, 10**15)
    ]
    assert plans[0] == plans[1]


def test_what_cannot_be_is_refused() -> None:
    rows = np.ones((2, 3), dtype=np.int64)
    cases = (
        (
            SpecError,
            lambda: plan_experts("exakt", ExpertRequest(rows)),
            'No policy of experts is called "exakt". Nearest: exact. All: fixed, exact, hecate, '
            "eplb, tutel, auto.",
        ),
        (
            LayoutError,
            lambda: plan_experts("eplb", ExpertRequest(rows)),
            "eplb gives every rank equally many places, but 2 ranks do not divide 3 experts. Give "
            'a number of ranks that does, or another policy, as "exact".',
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, slots=-1),
            "-1 slots for copies cannot be. Give 0 or more.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(-rows),
            "Rows of 3 experts on 2 ranks must be counts of at least 0, of at least one rank.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, seen=np.ones(2, dtype=np.int64)),
            "Earlier loads of 2 experts do not match 3 experts. Give one for each.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, seen=np.array([3, -1, 0])),
            "Earlier loads of 3 experts must be int64 of at least 0; these are int64, the least "
            "-1.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows[0]),
            "Rows of experts must be int64 [ranks, experts]; these are int64 of shape [3].",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows * 0.5),
            "Rows of experts must be int64 [ranks, experts]; these are float64 of shape [2, 3].",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, tolerance=float("nan")),
            "tolerance is nan. Give a finite number of at least 0.",
        ),
        (
            SpecError,
            lambda: plan_experts(None, ExpertRequest(rows)),  # type: ignore[arg-type]
            "No policy of experts is called null. Nearest: eplb. All: fixed, exact, hecate, eplb, "
            "tutel, auto.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, seen=np.array(["a", "b", "c"])),  # type: ignore[arg-type]
            "Earlier loads of 3 experts must be int64 of at least 0; these are <U1.",
        ),
        (
            LayoutError,
            lambda: owners_of(4, ranks=0),
            "0 ranks cannot share experts. Give 1 or more.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, row_cost="1"),  # type: ignore[arg-type]
            'row_cost is "1". Give a finite number of at least 0.',
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, slots=1.5),  # type: ignore[arg-type]
            "slots is 1.5. Give a whole number of at least 0.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows, least_rows=-4),
            "least_rows is -4. Give a whole number of at least 0.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest(rows << 60),
            "Rows of experts sum to 6,917,529,027,641,081,856, and plans are exact for "
            "281,474,976,710,656 at most. Give the rows of one micro-batch.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest([[1, 2], [3]]),  # type: ignore[arg-type]
            "Rows of experts must be int64 [ranks, experts]; these ranks have rows for different "
            "numbers of experts. Give every rank a count for each expert, 0 where it has none.",
        ),
        (
            LayoutError,
            lambda: ExpertRequest([]),  # type: ignore[arg-type]
            "Rows of experts must be int64 [ranks, experts]; these are float64 of shape [0].",
        ),
        (
            LayoutError,
            lambda: plan_experts("exact", ExpertRequest(rows[:, :0])),
            "The model has no experts that 2 ranks could share. Set ep (layout.ep) = 1 and etp "
            "(layout.etp) = 1, or give the model experts.",
        ),
        (
            LayoutError,
            lambda: plan_experts("exact", ExpertRequest(rows[:, :1])),
            "1 expert in runs of 1 leaves 1 of 2 ranks without any. Set ep (layout.ep) to 1.",
        ),
    )
    for kind, call, message in cases:
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value) == message


def test_lists_and_loads_of_nothing_or_of_very_much_are_planned_exactly() -> None:
    most = 1 << 44
    tables = [[[0, 0, 0, 0]] * 2, [[0, 0, 0, 5], [0] * 4], [[most, 1, 1, most]] * 2, [[7]]]
    for rows in tables:
        for policy in EXPERT_POLICIES:
            request = ExpertRequest(rows, seen=[0] * len(rows[0]))  # type: ignore[arg-type]
            schedule = plan_experts(policy, request)
            check_experts(schedule)
            assert schedule.computed.sum() == np.array(rows).sum()
