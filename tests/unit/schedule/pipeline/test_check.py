"""Schedules that are wrong, and what is said of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from equipoise.base.errors import CheckError, FitError
from equipoise.schedule.pipeline.check import check_pipeline, find_faults
from equipoise.schedule.pipeline.instruction import MICRO_BATCH, OP, STAGE, Op
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from support.pipelines import WHOLE, steps, write_if_legal


def write(strategy: str = "1f1b", ranks: int = 2, stages: int = 2, **more) -> PipelineSchedule:
    prices = make_prices(1, 1, 1, stages=stages, micro_batches=3)
    return write_pipeline(strategy, prices, ranks=ranks, **more)


def change(schedule: PipelineSchedule, rank: int, rows: list[list[int]]) -> PipelineSchedule:
    orders = list(schedule.orders)
    orders[rank] = np.array(rows).reshape(-1, 3)
    return dataclasses.replace(schedule, orders=tuple(orders))


def rows_of(schedule: PipelineSchedule, rank: int) -> list[list[int]]:
    return schedule.orders[rank].tolist()


def fault_of(schedule: PipelineSchedule, **more) -> str:
    with pytest.raises(CheckError) as caught:
        check_pipeline(schedule, **more)
    return str(caught.value)


@given(steps(), st.sampled_from(WHOLE), st.data())
def test_a_dropped_or_doubled_instruction_is_told(step, strategy: str, data) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    assume(schedule is not None)
    rank = data.draw(st.integers(0, ranks - 1))
    rows = rows_of(schedule, rank)
    at = data.draw(st.integers(0, len(rows) - 1))
    dropped = change(schedule, rank, rows[:at] + rows[at + 1 :])
    doubled = change(schedule, rank, [*rows[:at], rows[at], *rows[at:]])
    for wrong, times in ((dropped, 0), (doubled, 2)):
        assert f"{times} times instead of once" in next(find_faults(wrong))


@given(steps(), st.sampled_from(WHOLE), st.data())
def test_a_moved_instruction_is_told_or_harmless(step, strategy: str, data) -> None:
    """Where the checker finds nothing, every rank comes to its end, told by brute force."""
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    assume(schedule is not None)
    rank = data.draw(st.integers(0, ranks - 1))
    rows = rows_of(schedule, rank)
    row = rows.pop(data.draw(st.integers(0, len(rows) - 1)))
    rows.insert(data.draw(st.integers(0, len(rows))), row)
    moved = change(schedule, rank, rows)
    assert (next(find_faults(moved), None) is None) == comes_to_its_end(moved)


def comes_to_its_end(schedule: PipelineSchedule) -> bool:
    left = [each.tolist() for each in schedule.orders]
    done: set[tuple[str, int, int]] = set()
    moving = True
    while moving:
        moving = False
        for order in left:
            while order:
                op, stage, m = order[0]
                before = ("F", stage - 1, m) if stage else None
                if op == Op.BACKWARD_WEIGHT:
                    before = ("B", stage, m)
                elif op != Op.FORWARD:
                    before = ("B", stage + 1, m) if stage + 1 < schedule.stages else None
                    if ("F", stage, m) not in done:
                        break
                if before and before not in done:
                    break
                done.add(("FBBW"[op], stage, m))
                order.pop(0)
                moving = True
    return not any(left)


def test_a_dropped_backward() -> None:
    schedule = write()
    assert fault_of(change(schedule, 1, rows_of(schedule, 1)[:-1])) == (
        "1f1b: Stage 1 computes the input gradient of micro-batch 2 0 times instead of once."
    )


def test_a_dropped_weight_gradient() -> None:
    schedule = write("zb-h1")
    assert fault_of(change(schedule, 1, rows_of(schedule, 1)[:-1])) == (
        "zb-h1: Stage 1 computes the weight gradient of micro-batch 2 0 times instead of once."
    )


def test_a_doubled_forward() -> None:
    schedule = write()
    rows = rows_of(schedule, 0)
    assert fault_of(change(schedule, 0, [rows[0], *rows])) == (
        "1f1b: Stage 0 computes the forward of micro-batch 0 2 times instead of once."
    )


def test_a_stage_of_another_rank() -> None:
    schedule = write()
    rows = rows_of(schedule, 0)
    rows[1][STAGE] = 1
    assert fault_of(change(schedule, 0, rows)) == (
        "1f1b: Rank 0 has the forward of micro-batch 1 on stage 1 at place 1, but that stage is on "
        "rank 1."
    )


@pytest.mark.parametrize("column", [OP, STAGE, MICRO_BATCH])
def test_an_instruction_that_does_not_exist(column: int) -> None:
    schedule = write()
    rows = rows_of(schedule, 0)
    rows[1][column] = 9
    op, stage, micro_batch = rows[1]
    assert fault_of(change(schedule, 0, rows)) == (
        f"1f1b: Rank 0 has operation {op} of micro-batch {micro_batch} on stage {stage} at place "
        f"1; there are 4 operations, 3 micro-batches and 2 stages."
    )


def test_a_backward_before_its_forward() -> None:
    schedule = write("gpipe")
    assert fault_of(change(schedule, 0, rows_of(schedule, 0)[::-1])) == (
        "gpipe: Rank 0 has the input gradient of micro-batch 0 on stage 0 at place 0, before its "
        "forward at place 5."
    )


def test_a_weight_gradient_before_its_input_gradient() -> None:
    schedule = write("zb-h1")
    rows = rows_of(schedule, 1)
    at = [row[OP] for row in rows].index(Op.BACKWARD_WEIGHT)
    rows.insert(0, rows.pop(at))
    assert fault_of(change(schedule, 1, rows)) == (
        "zb-h1: Rank 1 has the weight gradient of micro-batch 0 on stage 1 at place 0, before its "
        "input gradient at place 2."
    )


def test_slices_of_a_document_in_the_wrong_order() -> None:
    words = "They are slices of one document: forwards must run in order and backwards in reverse."
    schedule = dataclasses.replace(write("1f1b"), units=np.array([[0, 2], [2, 3]]))
    assert fault_of(schedule) == (
        "1f1b: Rank 0 has the input gradient of micro-batch 0 on stage 0 before that of "
        f"micro-batch 1. {words}"
    )
    schedule = dataclasses.replace(write("gpipe"), units=np.array([[0, 3]]))
    check_pipeline(schedule)
    rows = rows_of(schedule, 1)
    rows[0], rows[1] = rows[1], rows[0]
    assert fault_of(change(schedule, 1, rows)) == (
        "gpipe: Rank 1 has the forward of micro-batch 1 on stage 1 before that of micro-batch 0. "
        f"{words}"
    )


def test_ranks_that_wait_for_each_other() -> None:
    schedule = write()
    first = [[Op.FORWARD, 0, 0], [Op.BACKWARD, 0, 0], [Op.FORWARD, 0, 1], [Op.BACKWARD, 0, 1]]
    other = [[Op.FORWARD, 1, 0], [Op.FORWARD, 1, 1], [Op.BACKWARD, 1, 0], [Op.BACKWARD, 1, 1]]
    tail = [[[Op.FORWARD, s, 2], [Op.BACKWARD, s, 2]] for s in (0, 1)]
    schedule = change(change(schedule, 0, first + tail[0]), 1, other + tail[1])
    assert fault_of(schedule) == (
        "1f1b: Rank 0 waits at place 1, the backward of micro-batch 0 on stage 0, for the backward "
        "of micro-batch 0 on stage 1, which rank 1 has at place 2, and rank 1 waits at "
        "place 1."
    )


def test_too_much_in_flight() -> None:
    schedule = write()
    check_pipeline(schedule, most_held=[2, 1])
    with pytest.raises(FitError) as caught:
        check_pipeline(schedule, most_held=[2, 0])
    assert str(caught.value) == (
        "1f1b: Rank 1 holds 1 at a time; the limit is 0. Take a strategy that holds less, such as "
        "v-half or auto, or raise the bound."
    )
    sizes = np.array([[5, 7, 9], [1, 1, 1]])
    with pytest.raises(FitError, match="Rank 0 holds 16 at a time; the limit is 15"):
        check_pipeline(schedule, activation=sizes, most_held=[15, 15])


def test_a_skipped_stage() -> None:
    schedule = write("skip-partial", ranks=4, stages=4, skip=0.5)
    check_pipeline(schedule, allow_lossy=True)
    assert fault_of(schedule) == (
        "skip-partial: Micro-batch 0 takes the path 0 2 3 through 4 stages, which trains another "
        "model. Pass allow_lossy=True if that is meant."
    )
    rows = [[Op.FORWARD, 1, 0], *rows_of(schedule, 1)]
    assert fault_of(change(schedule, 1, rows), allow_lossy=True) == (
        "skip-partial: Rank 1 has the forward of micro-batch 0 on stage 1 at place 0, but that "
        "stage is not on the micro-batch's path."
    )


def test_stages_out_of_order() -> None:
    schedule = write("gpipe")
    paths = schedule.paths.copy()
    paths[1] = paths[1, ::-1]
    turned = dataclasses.replace(schedule, paths=paths)
    rows = [rows_of(turned, rank) for rank in (0, 1)]
    order = [0, 2, 1]  # micro-batch 1 comes back through stage 0 once stage 1 has had it
    rows[0][:3] = [rows[0][at] for at in order]
    rows[0][3:] = [[Op.BACKWARD, 0, m] for m in (1, 2, 0)]
    rows[1][:3] = [[Op.FORWARD, 1, m] for m in (1, 0, 2)]
    rows[1][3:] = [[Op.BACKWARD, 1, m] for m in (2, 0, 1)]
    turned = change(change(turned, 0, rows[0]), 1, rows[1])
    check_pipeline(turned, allow_lossy=True)
    assert fault_of(turned) == (
        "gpipe: Micro-batch 1 takes the path 1 0 through 2 stages, which trains another model. "
        "Pass allow_lossy=True if that is meant."
    )
