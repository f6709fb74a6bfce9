"""Tensors redistributed between gloo ranks equal dense ones, and bytes are those predicted."""

import itertools

import numpy as np
import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.schedule.boxing.path import BoxingSchedule, plan_boxing, transposed
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placements,
    SplitDim,
    read_placements,
)
from equipoise.schedule.boxing.ways import other_ways
from support.ranks.boxing_ranks import (
    ONE_AXIS,
    gradients,
    halves_of_a_loss,
    joined,
    placements_of,
    redistribute_all,
    redistribute_wrongly,
    request,
    sum_floats,
    whole_of,
)

EVEN = placements_of(*([SplitDim(0), SplitDim(1), Broadcast(), Partial()],) * 2)
PAIRS = list(itertools.product(EVEN, EVEN))
UNEVEN = placements_of(
    [SplitDim(0), SplitDim(1), SplitDim(0, (2, 1)), Broadcast(), Partial("max")],
    [SplitDim(0), SplitDim(1), SplitDim(1, (0, 3)), Broadcast(), Partial("max")],
)
RAGGED = [pair for pair in itertools.product(UNEVEN, UNEVEN) if not {*pair} <= {*EVEN}]


def prove(on: MeshTensor, schedules: list[BoxingSchedule]) -> None:
    """Run schedules on ranks; compare tensors with dense ones, and bytes link by link."""
    results = run_ranks(on.ranks, redistribute_all, schedules)
    for number, schedule in enumerate(schedules):
        parts, sent, received = zip(*(each[number] for each in results), strict=True)
        whole = joined([torch.from_numpy(part) for part in parts], on, schedule.after)
        assert torch.equal(whole, whole_of(on)), schedule
        assert np.array_equal(np.stack(sent), schedule.link_bytes()), schedule
        assert np.array_equal(np.stack(received).T, schedule.link_bytes()), schedule
        assert int(np.sum(sent)) == schedule.sent_bytes


def every_way(on: MeshTensor, pairs: list[tuple[Placements, Placements]]) -> list[BoxingSchedule]:
    """Of all pairs the cheapest path, and every other that is a different one."""
    found = {}
    for before, after in pairs:
        asked = request(on, before, after)
        for schedule in (plan_boxing(asked), *other_ways(asked)):
            steps = tuple(each.step for each in schedule.steps)
            found.setdefault((before, after, steps), schedule)
    return list(found.values())


@pytest.mark.parametrize("shape", [(5, 4), (2, 1)])
def test_every_pair_on_one_axis_of_three_ranks(shape: tuple[int, int]) -> None:
    on = MeshTensor(shape, (3,))  # of 2 rows and 1 column some ranks have none
    states = placements_of(ONE_AXIS)
    prove(on, every_way(on, list(itertools.product(states, states))))


def test_pairs_on_two_axes() -> None:
    """A third of the even ones, so that each placement still meets a third of the others."""
    on = MeshTensor((5, 3), (2, 2))
    pairs = PAIRS[::3] + RAGGED[::17]
    prove(on, [plan_boxing(request(on, *pair)) for pair in pairs])


def test_every_way_on_two_axes_of_six_ranks() -> None:
    on = MeshTensor((7, 5), (2, 3))
    states = placements_of(*([SplitDim(0), SplitDim(1), Broadcast(), Partial("max")],) * 2)
    prove(on, every_way(on, list(itertools.product(states, states))[::5]))


def test_tensors_of_no_three_and_no_elements() -> None:
    for on in (MeshTensor((), (2,)), MeshTensor((0, 3), (2,)), MeshTensor((3, 2, 4), (2,))):
        choices = [Broadcast(), Partial(), Partial("max"), *map(SplitDim, range(len(on.shape)))]
        states = placements_of(choices)
        prove(on, every_way(on, list(itertools.product(states, states))))


def test_gradients_go_back_between_all_placements() -> None:
    on = MeshTensor((5, 3), (2, 2))
    pairs = []
    linear = [pair for pair in RAGGED if Partial("max") not in {*pair[0], *pair[1]}]
    for before, after in PAIRS[::7] + linear[::13]:
        asked = request(on, before, after)
        pairs.append((plan_boxing(asked), plan_boxing(transposed(asked))))
    results = run_ranks(4, gradients, pairs)
    for number, (_, backward) in enumerate(pairs):
        parts = [torch.from_numpy(each[number]) for each in results]
        assert torch.equal(joined(parts, on, backward.after), whole_of(on)), backward


def test_a_loss_of_all_ranks_has_the_dense_gradient() -> None:
    on = MeshTensor((4, 6), (4,))
    asked = request(on, (SplitDim(1, (1, 0, 3, 2)),), (Broadcast(),), element_bytes=4)
    schedules = (plan_boxing(asked), plan_boxing(transposed(asked)))
    for found, expected in run_ranks(4, halves_of_a_loss, schedules):
        assert found.shape == expected.shape
        assert np.abs(found - expected).max(initial=0.0) <= 1e-6


def test_sums_have_the_same_bits_on_all_ranks_and_on_every_run() -> None:
    on = MeshTensor((64, 9), (2, 2))
    asked = request(on, (Partial(),) * 2, (Broadcast(),) * 2, element_bytes=4)
    for schedule in (plan_boxing(asked), *other_ways(asked)):
        first, *others = run_ranks(4, sum_floats, schedule)
        for other in (*others, *run_ranks(4, sum_floats, schedule)):
            assert np.array_equal(first, other)


def refusal(ranks: int, *args: object) -> str:
    with pytest.raises(LayoutError) as refused:
        run_ranks(ranks, redistribute_wrongly, *args)
    return str(refused.value)


def test_other_parts_and_ranks_than_the_schedules_are_refused() -> None:
    states = tuple(map(read_placements, ("S(0)", "B")))
    on = MeshTensor((3, 2), (1,))
    schedule = plan_boxing(request(on, *states, element_bytes=4))
    assert refusal(1, schedule, [6, 2], torch.float32) == (
        "Rank 0 has a part of [6, 2], 4 bytes an element, and the schedule is for [3, 2] of 4. "
        "Plan it for the tensor that there is."
    )
    assert refusal(1, schedule, [3, 2], torch.float64) == (
        "Rank 0 has a part of [3, 2], 8 bytes an element, and the schedule is for [3, 2] of 4. "
        "Plan it for the tensor that there is."
    )
    schedule = plan_boxing(request(MeshTensor((6, 2), (2,)), *states, element_bytes=4))
    assert refusal(1, schedule, [3, 2], torch.float32) == (
        "A schedule of 2 ranks cannot run on 1. Let the ranks of its mesh run it."
    )
    other = plan_boxing(request(on, *reversed(states), element_bytes=4))
    schedule = plan_boxing(request(on, *states, element_bytes=4))
    assert refusal(1, schedule, [3, 2], torch.float32, other) == (
        "The gradient goes from P to S(0), and the schedule for it from B to S(0). Plan it of "
        "transposed(request)."
    )
