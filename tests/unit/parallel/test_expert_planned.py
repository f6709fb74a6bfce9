"""Bytes of experts' copies as passes move them: recomputed forwards, frozen experts, evaluation."""

import numpy as np
import pytest
import torch

from equipoise.balance.expert.auto import PolicyChoice
from equipoise.balance.expert.policies import choose_experts, plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.parallel.expert.planned import PlannedLoads, counted


@pytest.mark.parametrize(
    ("forwards", "is_trained", "trips"), [(1, True, 3), (2, True, 4), (1, False, 2)]
)
def test_copies_are_counted_as_often_as_they_travel(
    forwards: int, is_trained: bool, trips: int
) -> None:
    schedule = plan_experts("exact", ExpertRequest(np.array([[90, 2, 1, 1]] * 2)))
    choice, loads = PolicyChoice(schedule, {}), PlannedLoads()
    rows = torch.zeros(3, 2, requires_grad=True)
    with torch.no_grad():
        counted(rows, loads, choice, 10 * schedule.copies, is_trained=is_trained)
    for _ in range(forwards):
        out = counted(rows, loads, choice, 10 * schedule.copies, is_trained=is_trained)
    out.sum().backward()
    assert schedule.copies == loads.copies == 1
    assert loads.copied_bytes == 10 * trips
    moved = schedule.copy_bytes(10, element_bytes=1, forwards=forwards, is_trained=is_trained)
    assert loads.copied_bytes == moved.sum()


def test_a_pass_without_rows_counts_for_nothing() -> None:
    loads = PlannedLoads()
    for rows in (np.zeros((2, 4), dtype=np.int64), np.array([[90, 2, 1, 1]] * 2)):
        loads.add(choose_experts(ExpertRequest(rows)), 10)
    assert loads.chosen["exact"] == 1 and sum(loads.chosen.values()) == 1
