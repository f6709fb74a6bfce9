"""Workloads of routers: the same for the same arguments, and as uneven as their names say."""

import itertools

import numpy as np
import pytest

from equipoise.balance.expert.workload import WORKLOADS, workload
from equipoise.base.errors import SpecError
from equipoise.schedule.expert.schedule import schedule_experts
from equipoise.schedule.expert.skew import load_skew

SIZES = {"ranks": 8, "experts": 64, "rows_per_rank": 4096}


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_workload_is_a_function_of_its_arguments(kind: str) -> None:
    rows = workload(kind, 5, 2, **SIZES)
    assert rows.shape == (8, 64)
    assert np.array_equal(rows, workload(kind, 5, 2, **SIZES))
    if kind != "W0":
        assert not np.array_equal(rows, workload(kind, 6, 2, **SIZES))
    if kind not in ("W4", "W5"):
        assert set(rows.sum(axis=1).tolist()) == {4096}


def test_each_kind_is_as_uneven_as_its_name() -> None:
    rows = {kind: workload(kind, 1, 3, **SIZES) for kind in WORKLOADS}
    skews = {kind: schedule_experts(each).skew for kind, each in rows.items()}
    assert skews["W0"] == 1.0
    assert skews["W1"] > 1.5
    assert skews["W2"] == pytest.approx(4.0, rel=0.05)
    assert skews["W3"] == pytest.approx(1.0, abs=0.05)
    assert load_skew(rows["W3"].sum(axis=0)) > 3.5
    assert rows["W4"].sum(axis=1).tolist() == [4096 // n for n in range(1, 9)]
    assert (rows["W5"].sum(axis=0) == 0).sum() == 32
    assert (rows["W5"].sum(axis=1) == 0).sum() == 2
    assert skews["W7"] > 4.0 > schedule_experts(workload("W7", 1, 2, **SIZES)).skew
    hottest = [int(workload("W6", 1, step, **SIZES).sum(axis=0).argmax()) for step in range(3)]
    assert [(after - before) % 64 for before, after in itertools.pairwise(hottest)] == [8, 8]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        workload("W8", 0, 0, **SIZES)
    assert str(caught.value) == '"W8" is not one of W0, W1, W2, W3, W4, W5, W6, W7. Nearest: "W0".'


def test_numbers_that_cannot_be_are_refused() -> None:
    assert workload("W1", 0, 0).shape == (8, 64)
    with pytest.raises(SpecError) as caught:
        workload("W0", -1, 0, ranks=0)
    assert str(caught.value) == (
        "A workload needs seed, step and rows_per_rank of 0 or more and ranks of 1 or more. Raise "
        "seed and ranks."
    )
    for given, said in (
        ({"seed": 0.5}, "seed is 0.5. Give a whole number."),
        ({"ranks": True}, "ranks is true. Give a whole number."),
        (
            {"rows_per_rank": 1 << 60},
            "8 ranks with 1,152,921,504,606,846,976 rows each are more than the "
            "281,474,976,710,656 rows for which plans are exact. Lower rows_per_rank.",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            workload(**{"kind": "W1", "seed": 0, "step": 0} | given)
        assert str(caught.value) == said
