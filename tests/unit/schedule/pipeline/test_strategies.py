"""What each strategy holds and wastes, by published numbers; and steps that it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule, place_in_loop, place_in_v
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import SCHEDULES
from support.pipelines import WHOLE, steps, units_of, write_if_legal


def even(strategy: str, ranks: int, micro_batches: int, chunks: int, **more):
    """A schedule for F = B = W, its bubble rates, and the most activations that a rank holds."""
    prices = make_prices(1, 1, 1, stages=ranks * chunks, micro_batches=micro_batches)
    schedule = write_pipeline(strategy, prices, ranks=ranks, **more)
    timeline = replay_pipeline(schedule, prices)
    held = count_in_flight(schedule)
    return timeline, held.peak.max() / chunks, held.peak_without_stash.max() / chunks


@pytest.mark.parametrize(
    ("strategy", "chunks", "bubble_rate", "held"),
    [
        ("gpipe", 1, 0.3043, 16),
        ("gpipe", 2, 0.1795, 16),
        ("1f1b", 1, 0.3043, 8),
        ("interleaved", 2, 0.1795, 11.5),
        ("zb-h1", 1, 0.1273, 8),  # 7 / 55: (p - 1)(F + B - W), in one stage a rank
        ("zb-h2", 1, 0.1273, 15),
        ("interleaved-zb", 2, 0.0680, 8),
        ("zb-v", 2, 0.0680, 8),
        ("dualpipe-v", 2, 0.0680, 8.5),
        ("auto", 2, 0.0680, 8),
    ],
)
def test_8_ranks_and_16_equal_micro_batches(strategy, chunks, bubble_rate, held) -> None:
    timeline, with_stash, _ = even(strategy, 8, 16, chunks)
    assert round(timeline.bubble_rate, 4) == bubble_rate
    assert with_stash == held


def test_zb_h2_has_no_gap_between_the_first_and_the_last_instruction_of_a_rank() -> None:
    assert even("zb-h2", 8, 16, 1)[0].span_bubble_rate == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize(
    ("strategy", "held", "bubble"), [("v-half", 1 / 2, 1 / 2), ("v-min", 1 / 3, 0.75)]
)
def test_less_memory_for_a_longer_bubble(strategy, held, bubble, ranks: int) -> None:
    timeline, with_stash, _ = even(strategy, ranks, 4 * ranks, 2)
    assert with_stash <= held * ranks + 4 / 3
    waits = timeline.makespan_ns - 6 * 4 * ranks
    assert waits <= bubble * 2 * 3 * (ranks - 1) + 1  # of 1F1B's, in slots of half a stage


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_the_v_waits_only_to_fill_the_pipeline(ranks: int, more: int) -> None:
    for strategy in ("zb-v", "dualpipe-v"):
        timeline, held, _ = even(strategy, ranks, 2 * ranks + more, 2)
        assert timeline.makespan_ns == 6 * (2 * ranks + more) + ranks - 1
        assert held <= ranks + (0.5 if strategy == "dualpipe-v" else 0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 9, 16])
def test_in_flight_and_bubble_by_formula(ranks: int, micro_batches: int) -> None:
    for strategy in ("1f1b", "zb-h1"):
        _, held, _ = even(strategy, ranks, micro_batches, 1)
        assert held == min(ranks, micro_batches)
    timeline, _, _ = even("1f1b", ranks, micro_batches, 1)
    assert timeline.makespan_ns == 3 * (micro_batches + ranks - 1)
    assert even("gpipe", ranks, micro_batches, 1)[1] == micro_batches
    if micro_batches % ranks == 0:
        timeline, held, _ = even("interleaved", ranks, micro_batches, 3)
        assert timeline.makespan_ns == 3 * (3 * micro_batches + ranks - 1)
        if micro_batches > ranks > 1:
            assert held == pytest.approx(ranks + (ranks - 1) / 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_rounds_that_ranks_do_not_divide(ranks: int, chunks: int) -> None:
    for micro_batches in range(1, 14):
        prices = make_prices(1, 1, 1, stages=ranks * chunks, micro_batches=micro_batches)
        for strategy in ("interleaved", "interleaved-zb"):
            check_pipeline(write_pipeline(strategy, prices, ranks=ranks))


@given(steps(), st.sampled_from(WHOLE), st.booleans())
def test_every_strategy_writes_what_is_right(step, strategy: str, arranged: bool) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks, arranged=arranged)
    if schedule is None:
        assert SCHEDULES[strategy].most_stages is not None
        return
    check_pipeline(schedule)
    timeline = replay_pipeline(schedule, prices)
    assert timeline.makespan_ns >= bound_pipeline(prices, schedule.rank_of)
    assert (timeline.busy_ns + timeline.idle_ns == timeline.makespan_ns).all()
    assert timeline.busy_ns.sum() == sum(
        int(each.sum()) for each in (prices.forward_ns, prices.input_ns, prices.weight_ns)
    )
    assert (
        schedule.digest == write_pipeline(strategy, prices, ranks=ranks, arranged=arranged).digest
    )


@given(st.data(), steps(most_chunks=2), st.sampled_from(["gpipe", "1f1b", "auto"]))
def test_documents_divided_over_time(data, step, strategy: str) -> None:
    ranks, prices = step
    units = data.draw(units_of(prices.micro_batches))
    schedule = write_if_legal(strategy, prices, ranks=ranks, units=units)
    if schedule is None:
        assert strategy == "1f1b" and prices.stages > ranks
        return
    check_pipeline(schedule)
    for rank in range(ranks):
        for each in schedule.instructions(rank):
            first = next(first for first, stop in units if first <= each.micro_batch < stop)
            assert each.slice == each.micro_batch - first


@given(st.data(), steps(), st.sampled_from(WHOLE))
def test_a_bound_is_kept_or_refused(data, step, strategy: str) -> None:
    ranks, prices = step
    bound = data.draw(st.lists(st.integers(1, 300), min_size=ranks, max_size=ranks))
    schedule = write_if_legal(strategy, prices, ranks=ranks, most_held=bound)
    if schedule is not None:
        check_pipeline(schedule, activation=prices.activation, most_held=bound)


@given(steps())
def test_auto_fits_whatever_holds_one_micro_batch(step) -> None:
    ranks, prices = step
    in_v = prices.stages == 2 * ranks
    placed = place_in_v(ranks) if in_v else place_in_loop(ranks, prices.stages)
    per_rank = np.zeros((ranks, prices.micro_batches), dtype=np.int64)
    np.add.at(per_rank, placed, prices.activation)
    least = per_rank.max(axis=1)
    tight = write_pipeline("auto", prices, ranks=ranks, most_held=least.tolist())
    check_pipeline(tight, activation=prices.activation, most_held=least)
    with pytest.raises(FitError):
        write_pipeline("auto", prices, ranks=ranks, most_held=(least - 1).tolist())


@given(steps())
def test_auto_is_never_slower_than_those_that_one_would_name_within_their_memory(step) -> None:
    ranks, prices = step
    for name in ("1f1b", "zb-h1", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v"):
        schedule = write_if_legal(name, prices, ranks=ranks)
        if schedule is None:
            continue
        held = count_in_flight(schedule, prices.activation).peak
        best = write_pipeline("auto", prices, ranks=ranks, most_held=int(held.max()))
        times = [replay_pipeline(each, prices).makespan_ns for each in (best, schedule)]
        assert times[0] <= times[1], name


def test_auto_takes_a_loop_where_no_v_fits() -> None:
    # First and last stage leave most, and every V puts both on rank 0.
    leaves = np.array([2, 1, 1, 2])[:, None]
    prices = make_prices(1, 1, 1, activation=leaves, stages=4, micro_batches=1)
    schedule = write_pipeline("auto", prices, ranks=2, most_held=3)
    assert schedule.rank_of.tolist() == [0, 1, 0, 1]
    assert fault_of("auto", 4, 1, 2, most_held=1) == (
        "Rank 0 may hold 1 at a time, but the largest micro-batch alone needs 2. Allow that much, "
        "or make micro-batches smaller."
    )


def test_auto_takes_a_loop_where_it_is_faster_than_a_v() -> None:
    # The last stage, which every V puts on rank 0, is as long as three others.
    forward = np.array([[3], [1], [1], [3]])
    prices = make_prices(forward, forward, forward, micro_batches=8)
    times = {}
    for name in ("auto", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v", "v-half"):
        schedule = write_pipeline(name, prices, ranks=2, most_held=[16, 16])
        times[name] = replay_pipeline(schedule, prices).makespan_ns
        if name == "auto":
            assert schedule.rank_of.tolist() == [0, 1, 0, 1]
    assert times["auto"] == min(times.values()) < times["zb-v"]


def fault_of(strategy: str, stages: int, micro_batches: int, ranks: int, **more) -> str:
    prices = make_prices(1, 1, 1, stages=stages, micro_batches=micro_batches)
    with pytest.raises((FitError, LayoutError, SpecError)) as caught:
        write_pipeline(strategy, prices, ranks=ranks, **more)
    return str(caught.value)


def test_an_unknown_name() -> None:
    assert fault_of("zbv", 4, 4, 4) == (
        'No pipeline strategy is called "zbv". Nearest: zb-v. All: ' + ", ".join(SCHEDULES) + "."
    )


def test_stages_that_ranks_cannot_share() -> None:
    assert fault_of("gpipe", 6, 4, 4) == (
        "6 stages cannot be shared by 4 ranks. Give as many stages as ranks, or a multiple."
    )
    assert fault_of("gpipe", 4, 4, 0) == (
        "4 stages cannot be shared by 0 ranks. Give as many stages as ranks, or a multiple."
    )


def test_a_number_of_stages_that_a_strategy_does_not_know() -> None:
    assert fault_of("zb-v", 4, 8, 4) == (
        "zb-v needs 8 stages on 4 ranks; there are 4. Split the layers that way, or take "
        "interleaved, which runs any whole number of stages per rank."
    )
    assert fault_of("1f1b", 8, 8, 4) == (
        "1f1b needs 4 stages on 4 ranks; there are 8. Split the layers that way, or take "
        "interleaved, which runs any whole number of stages per rank."
    )


def test_too_few_micro_batches_for_dualpipe() -> None:
    assert fault_of("dualpipe-v", 8, 7, 4) == (
        "dualpipe-v needs 8 micro-batches on 4 ranks; there are 7. Take zb-v, which runs any "
        "number."
    )


def test_documents_that_a_strategy_cannot_divide() -> None:
    assert fault_of("zb-v", 4, 4, 2, units=[(0, 3), (3, 4)]) == (
        "zb-v runs backwards in the order of forwards, but 3 micro-batches share a document over "
        "time, which needs the reverse. Take gpipe, 1f1b or auto, or pack with a policy that "
        "divides nothing over time."
    )


def test_units_that_are_no_runs() -> None:
    assert fault_of("auto", 2, 4, 2, units=[(0, 3)]) == (
        "Units 0:3 are not 4 micro-batches in order, each in one. Take those that macro_units "
        "finds."
    )
    assert "0:2, 1:4 are not" in fault_of("auto", 2, 4, 2, units=[(0, 2), (1, 4)])


def test_a_bound_that_is_exceeded() -> None:
    assert fault_of("zb-h2", 8, 16, 8, most_held=12) == (
        "zb-h2 holds 15 on rank 0; the limit is 12: 3 too many. These fit: 1f1b (8), interleaved "
        "(8), zb-h1 (8), interleaved-zb (8), auto (12)."
    )
    assert fault_of("gpipe", 2, 4, 2, most_held=0) == (
        "gpipe holds 4 on rank 0; the limit is 0: 4 too many. These fit: none."
    )


def test_a_bound_that_nothing_fits() -> None:
    assert fault_of("auto", 2, 4, 2, most_held=0) == (
        "Rank 0 may hold 0 at a time, but the largest micro-batch alone needs 1. Allow that much, "
        "or make micro-batches smaller."
    )
    assert fault_of("auto", 2, 4, 2, most_held=2, units=[(0, 1), (1, 4)]) == (
        "Rank 0 may hold 2 at a time, but 3 micro-batches that share a document need 3. Allow "
        "that much, or make micro-batches smaller."
    )


def test_bounds_for_other_ranks() -> None:
    assert fault_of("auto", 2, 4, 2, most_held=[1, 2, 3]) == (
        "Bounds are given for 3 ranks, but there are 2. Give one for all, or one for each."
    )


def test_skip_where_nothing_skips() -> None:
    assert fault_of("1f1b", 4, 4, 4, skip=0.5) == (
        "1f1b skips nothing, but skip is 0.5. Take skip-partial or skip-reordered, which train "
        "another model, or omit skip."
    )


def test_1f1b_runs_a_divided_document_forward_and_then_backward() -> None:
    prices = make_prices(1, 1, 1, stages=1, micro_batches=5)
    schedule: PipelineSchedule = write_pipeline(
        "1f1b", prices, ranks=1, units=[(0, 1), (1, 4), (4, 5)]
    )
    assert str(schedule).splitlines()[1] == ("rank 0: 0F0 0B0 0F1 0F2 0F3 0B3 0B2 0B1 0F4 0B4")
