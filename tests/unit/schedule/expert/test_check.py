"""The checker of expert schedules: what policies write passes, and any changed number does not."""

import dataclasses

import numpy as np
import pytest

from equipoise.balance.expert.policies import plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.base.errors import LayoutError
from equipoise.schedule.expert.check import check_experts
from equipoise.schedule.expert.schedule import ExpertSchedule

ROWS = np.array([[40, 1, 2, 3], [30, 0, 1, 0]])
FIX = " The policy that wrote it is wrong; use policy fixed."


def planned() -> ExpertSchedule:
    schedule = plan_experts("exact", ExpertRequest(ROWS))
    assert schedule.copies == 1
    check_experts(schedule, slots=1)
    return schedule


def message(changes: dict[str, object], slots: int | None = None) -> str:
    with pytest.raises(LayoutError) as caught:
        check_experts(dataclasses.replace(planned(), **changes), slots=slots)
    return str(caught.value)


def test_a_schedule_is_text() -> None:
    assert str(planned()) == (
        "exact: 77 rows of 4 experts over 2 ranks, 1 copies\n"
        "expert 0 of rank 0: rank 0 38, rank 1 32\n"
        "expert 1 of rank 0: rank 0 1\n"
        "expert 2 of rank 1: rank 1 3\n"
        "expert 3 of rank 1: rank 1 3"
    )


def test_every_quota_matters() -> None:
    quotas = planned().quotas
    for rank, place in np.ndindex(*quotas.shape):
        for change in (1, -1):
            other = quotas.copy()
            other[rank, place] += change
            assert "rows" in message({"quotas": other})


def test_each_fault_has_a_sentence() -> None:
    begin = "The exact schedule of experts "
    one = planned()
    lost = one.quotas.copy()
    lost[0, 0] -= 1
    assert message({"quotas": lost}) == (
        f"{begin}computes 39 of the 40 rows that rank 0 has for expert 0.{FIX}"
    )
    below = one.quotas.copy()
    below[0, :2] += (41, -41)
    assert message({"quotas": below}) == f"{begin}sends -39 rows from rank 0 to place 1.{FIX}"
    assert message({"owners": one.owners[::-1]}) == (
        f"{begin}moves owners, where optimizer states lie.{FIX}"
    )
    assert message({"quotas": one.quotas[:, 1:]}) == (
        f"{begin}has quotas of shape (2, 4) for 2 ranks, 5 places.{FIX}"
    )
    far = one.places.copy()
    far[-1] = 4, 1
    assert message({"places": far}) == (
        f"{begin}has a place of expert 4 on rank 1; there are 4 experts and 2 ranks.{FIX}"
    )
    twice = one.places.copy()
    twice[1] = 0, 0
    assert message({"places": twice}) == (
        f"{begin}has the place of expert 0 on rank 0 twice, or out of order.{FIX}"
    )
    for changed, said in (
        (
            {"rows": ROWS[0]},
            "rows that are int64 of shape [4]; they must be int64 [ranks, experts].",
        ),
        ({"rows": ROWS.tolist()}, "rows that are list; they must be int64 [ranks, experts]."),
        (
            {"owners": one.owners * 1.0},
            "owners that are float64 of shape [4]; they must be int64 [experts].",
        ),
        (
            {"places": one.places[:, :1]},
            "places that are int64 of shape [5, 1]; they must be int64 [places, 2].",
        ),
        (
            {"quotas": one.quotas * np.nan},
            "quotas that are float64 of shape [2, 5]; they must be int64 [ranks, places].",
        ),
    ):
        assert message(changed) == f"{begin}has {said}{FIX}"
    assert message({}, slots=0) == f"{begin}gives rank 1 1 copies, and it has 0 slots.{FIX}"
