"""What a journal says of experts, whole or damaged."""

import math

import pytest

from equipoise.observe.experts import (
    expert_choice,
    expert_file,
    expert_loads,
    mean_skews,
    rows_travel_s,
    step_skews,
)


def test_choices_are_summed_and_the_last_regret_is_kept() -> None:
    events = {
        2: {"chosen": {"exact": 3, "fixed": 1}, "regret": 0.5},
        1: {"chosen": {"exact": 2}, "regret": None},
        3: {"chosen": {"exact": 1, "fixed": "many"}, "regret": 0.25},
        4: {"chosen": "none"},
    }
    choice = expert_choice(events)
    assert choice is not None
    assert choice.chosen == {"exact": 6, "fixed": 1} and choice.regret == 0.25
    assert expert_choice({1: {"owner_skew": [1.0]}}) is None
    untried = expert_choice({1: {"chosen": {"exact": 1}, "regret": None}})
    assert untried is not None and math.isnan(untried.regret)


def test_loads_that_are_no_table_are_left_out() -> None:
    events = {1: {"loads": [[1, 2], [3, 0]]}, 2: {"loads": [[1], [2, 3]]}, 3: {}, 4: {"loads": "x"}}
    loads = expert_loads(events)
    assert list(loads) == [1] and loads[1].tolist() == [[1, 2], [3, 0]]
    assert expert_loads(events, 1)[1].tolist() == [[1], [3]]  # the second has no weights
    assert expert_loads(events | {5: {"loads": 7}}, "one")[1].tolist() == [[1, 2], [3, 0]]
    assert mean_skews(events) is None
    assert mean_skews({1: {"owner_skew": [3.0, 1.0], "planned_skew": [1.0]}}) == (2.0, 1.0)


def test_skews_by_step_are_means_over_layers() -> None:
    both = {"owner_skew": [3.0, 1.0], "planned_skew": [1.0]}
    found = step_skews({5: both, 2: {"owner_skew": [1.5], "planned_skew": [1.25]}, 3: {}})
    assert found is not None
    assert [each.tolist() for each in found] == [[2, 5], [1.5, 2.0], [1.25, 1.0]]
    assert step_skews({1: {"owner_skew": [1.0]}}) is None


def test_travel_is_that_of_a_median_step() -> None:
    events = {
        step: {"rows_beside_s": beside, "rows_waited_s": 1.0}
        for step, beside in enumerate((0.5, 3.0, 0.25))
    }
    assert rows_travel_s(events | {9: {"rows_beside_s": "x", "rows_waited_s": 0.1}}) == (0.5, 1.0)
    assert rows_travel_s({1: {"loads": [[1]]}}) is None


def test_waits_for_a_file_are_those_of_a_median_step() -> None:
    file = {"waited": 0.1, "read_bytes": 7, "gathered_bytes": 2, "reduced_bytes": 3}
    events = {1: {"file": file}, 2: {"file": file | {"waited": 0.3}}, 3: {"file": {}}, 4: {}}
    assert expert_file(events) == (pytest.approx(0.2), 7, 5)
    assert expert_file({1: {"loads": [[1]]}}) is None
