"""Recorded loads as requests, and every policy on all of them."""

import numpy as np
import pytest

from equipoise.balance.expert.trace import TraceSetting, deal_loads, score_trace, trace_requests
from equipoise.base.errors import SpecError

SETTING = TraceSetting(ranks=2, slots=1, least_rows=1, row_cost=0.0)


def test_rows_are_those_of_the_journal_dealt_evenly() -> None:
    loads = np.random.default_rng(0).integers(0, 50, 12)
    rows = deal_loads(loads, 5)
    assert rows.sum(axis=0).tolist() == loads.tolist()
    assert (rows.max(axis=0) - rows.min(axis=0) <= 1).all()
    assert np.ptp(rows.sum(axis=1)) <= 1


def test_policies_see_the_step_before() -> None:
    loads = {1: np.array([[9, 1, 1, 1]]), 2: np.array([[1, 9, 1, 1]]), 4: np.array([[3, 3, 3, 3]])}
    requests = list(trace_requests(loads, SETTING))
    assert [None if each.seen is None else each.seen.tolist() for each in requests] == [
        None,
        [9, 1, 1, 1],
        None,  # the step before was not recorded
    ]
    (one,) = trace_requests(loads, SETTING, [2])
    assert one.loads.tolist() == [1, 9, 1, 1]
    scores = {each.policy: each for each in score_trace(requests)}
    assert list(scores) == ["fixed", "exact", "hecate", "eplb", "auto"]
    assert scores["exact"].mean_skew < scores["fixed"].mean_skew
    assert scores["auto"].price == min(each.price for each in scores.values())
    with pytest.raises(SpecError) as caught:
        list(trace_requests(loads, SETTING, [7]))
    assert str(caught.value) == (
        "Step 7 is not in this run's journal, which has experts' loads of steps 1 to 4."
    )
