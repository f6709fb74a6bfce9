"""ByteScale: fewest ranks that hold a document, the offload ratio of equation 3, both balances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.groups.bytescale import Offload, plan_bytescale
from equipoise.balance.groups.cost import GroupCosts
from equipoise.base.errors import SpecError
from equipoise.cost.curve import LoadCurve, break_even_curve
from equipoise.spec.workload import draw_lengths

COSTS = GroupCosts(break_even_curve(36_000))
OFFLOAD = Offload(layers=32, bytes_per_token=2e5, bytes_per_s=2e10)
SCHEDULES = ("naive", "dp", "pp")


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=30))
def test_a_document_has_the_fewest_ranks_that_hold_it(schedule, lengths: list[int]) -> None:
    plan = plan_bytescale(lengths, 8, COSTS, 500, schedule=schedule)
    for gang in plan.gangs:
        for document in gang.documents:
            assert len(gang.ranks) == -(-lengths[document] // 500)


def test_ranks_run_different_numbers_of_micro_batches() -> None:
    plan = plan_bytescale([4000, *([500] * 12)], 9, COSTS, 500)
    assert len(set(plan.micro_batches)) > 1


def test_a_ring_of_ranks_goes_round_the_end() -> None:
    plan = plan_bytescale([900, 900], 3, COSTS, 450, schedule="naive")
    assert [gang.ranks for gang in plan.gangs] == [(0, 1), (0, 2)]


def test_naive_packs_short_documents_best_fit_in_order_of_arrival() -> None:
    plan = plan_bytescale([6, 5, 3, 4], 4, COSTS, 10, schedule="naive")
    assert [gang.documents for gang in plan.gangs] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_balance_ends_sooner_than_naive(seed: int) -> None:
    lengths = np.minimum(draw_lengths("pretrain-128k", 256, seed=seed), 16 * 8192)
    naive, dp, pp = (
        plan_bytescale(lengths, 16, COSTS, 8192, schedule=schedule).critical_ns
        for schedule in SCHEDULES
    )
    assert dp < naive
    assert pp < naive


def test_pipeline_balance_keeps_like_with_like() -> None:
    lengths = np.minimum(draw_lengths("pretrain-128k", 1024, seed=1), 16 * 8192)

    def unlike(schedule) -> float:
        plan = plan_bytescale(lengths, 16, COSTS, 8192, schedule=schedule)
        loads = [[plan.gangs[i].load_ns for i in mine] for mine in plan.rank_gangs]
        return float(np.mean([np.std(mine) / np.mean(mine) for mine in loads]))

    assert unlike("pp") < unlike("dp")


@given(st.lists(st.integers(1, 2_000_000), min_size=1, max_size=9).map(np.array))
def test_the_copy_is_hidden_and_held_tokens_follow_equation_3(lengths: np.ndarray) -> None:
    costs = GroupCosts(LoadCurve(0.0, 2e5, (1.0,), (8.0,), 1.0, measured=False))
    ratio = OFFLOAD.ratio(lengths, costs)
    layer_s = costs.document_ns(lengths) * 1e-9 / 3 / 32
    assert ((ratio > 0) & (ratio <= 1)).all()
    assert (ratio * lengths * 2e5 / 2e10 <= layer_s * (1 + 1e-9)).all()
    held = OFFLOAD.held_tokens(lengths, ratio)
    exact = (2 * lengths + (1 - ratio) * 30 * lengths) / 32
    assert (held >= exact - 1e-6).all()
    assert (held < exact + 1).all()
    moved = OFFLOAD.offloaded_bytes(lengths, ratio)
    kept = exact * 32 * 2e5
    assert moved + kept == pytest.approx(lengths * 32 * 2e5)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=20),
    schedule=st.sampled_from(SCHEDULES),
)
def test_offloading_gives_documents_fewer_ranks_under_the_same_cap(lengths, schedule) -> None:
    curve = LoadCurve(0.0, 3 * 10 * 500.0, (1.0,), (4.0,), 1.0, measured=False)
    costs, offload = GroupCosts(curve), Offload(10, 1000.0, 1e9)
    plain = plan_bytescale(lengths, 12, costs, 500, schedule=schedule)
    plan = plan_bytescale(lengths, 12, costs, 500, schedule=schedule, offload=offload)
    assert int(plan.peak_tokens.max()) <= 500
    assert plan.critical_ns >= plan.bound_ns
    width = [
        {d: len(gang.ranks) for gang in each.gangs for d in gang.documents}
        for each in (plain, plan)
    ]
    for document, tokens in enumerate(lengths):
        assert width[1][document] <= width[0][document]
        if tokens > 2500:
            assert width[1][document] < width[0][document]
    offloaded = {d for gang in plan.gangs if gang.offload for d in gang.documents}
    assert offloaded == {d for d, tokens in enumerate(lengths) if tokens > 500}


def test_two_layers_leave_nothing_to_offload() -> None:
    with pytest.raises(SpecError) as error:
        Offload(2, 1.0, 1.0)
    assert str(error.value) == (
        "A model of 2 layers has none to offload: two stay on the device. Give 3 or more, or no "
        "offload."
    )
