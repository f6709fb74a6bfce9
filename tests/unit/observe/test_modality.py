"""A run's encoders, read back from its journal."""

import pytest

from equipoise.observe.modality import read_encoders


def test_shares_and_skews_are_means_of_steps() -> None:
    events = {
        1: {"items": 3, "work": [2, 2], "work_in_turn": [3, 1], "encode_s": [0.1, 0.2], "gap": 0.0},
        2: {"items": 1, "work": [4, 0], "work_in_turn": [4, 0], "encode_s": [0.3, 0.0], "gap": 0.5}
        | {"encode_core_s": [0.25, 0.0]},
        3: {"items": 0, "work": [0, 0], "work_in_turn": [0, 0], "encode_s": [0.0, 0.0]},
    }
    record = read_encoders(events)
    assert record is not None
    assert record.items == 4
    assert record.work.tolist() == [0.75, 0.25]
    assert record.work_in_turn.tolist() == [0.875, 0.125]
    assert (record.skew, record.skew_in_turn) == (1.5, 1.75)
    assert record.gap == pytest.approx(1 / 6)
    assert record.encode_s.tolist() == pytest.approx([0.2, 0.1])
    assert (record.step.tolist(), record.fullest_s.tolist()) == ([1, 2], [0.2, 0.25])


def test_steps_on_other_ranks_than_the_last_are_left_out() -> None:
    one = {"items": 1, "work": [5], "work_in_turn": [5], "encode_s": [0.5]}
    two = {"items": 2, "work": [1, 3], "work_in_turn": [4, 0], "encode_s": [0.1, 0.3]}
    record = read_encoders({1: one, 2: two, 3: two})
    assert record is not None
    assert (record.items, record.work.tolist(), record.skew) == (4, [0.25, 0.75], 1.5)


@pytest.mark.parametrize(
    "events",
    [
        {},
        {1: {"work": [0, 0], "work_in_turn": [0, 0], "encode_s": [0, 0]}},
        {1: {"work": ["a", 1], "work_in_turn": [1, 1], "encode_s": [0, 0]}},
        {1: {"work": [1], "work_in_turn": [1, 1], "encode_s": [0]}},
        {1: {"work": [-1, 1], "work_in_turn": [1, 1], "encode_s": [0, 0]}},
        {1: {}},
    ],
)
def test_what_is_missing_or_no_number_counts_for_nothing(
    events: dict[int, dict[str, object]],
) -> None:
    assert read_encoders(events) is None
