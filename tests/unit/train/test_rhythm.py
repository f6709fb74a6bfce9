"""How often a run saves: Young's and Daly's interval from what was measured."""

import math

from hypothesis import given
from hypothesis import strategies as st

from equipoise.train.saving.rhythm import Rhythm

HOURS = 8000.0


def rhythm(every: int | str = "auto", world: int = 8) -> Rhythm:
    return Rhythm(every, 3600 * HOURS, world)


def test_a_number_of_steps_is_kept_to() -> None:
    made = rhythm(3)
    assert [step for step in range(1, 10) if made.is_due(step, is_under_way=step == 6)] == [3, 6, 9]
    assert made.learn(1.0, 1.0, 1.0) is None


def test_the_first_save_is_due_after_the_second_step() -> None:
    made = rhythm()
    assert [step for step in range(1, 4) if made.is_due(step, is_under_way=False)] == [2, 3]
    made.begin(40)  # a run that resumes
    assert [step for step in range(41, 44) if made.is_due(step, is_under_way=False)] == [42, 43]


def test_no_save_is_due_while_one_is_under_way() -> None:
    made = rhythm()
    made.begin(2)
    assert not made.is_due(40, is_under_way=True)
    assert made.is_due(40, is_under_way=False)


def test_the_interval_is_that_of_young_and_daly() -> None:
    made = rhythm()
    made.begin(2)
    decided = made.learn(cost_s=0.5, written_s=3.0, step_s=10.0)
    mtbf_s = 3600 * HOURS / 8
    every = round(math.sqrt(2 * 0.5 * mtbf_s) / 10)
    assert decided == {
        "every_steps": every,
        "cost_s": 0.5,
        "written_s": 3.0,
        "step_s": 10.0,
        "mtbf_s": mtbf_s,
    }
    assert not made.is_due(1 + every, is_under_way=False)
    assert made.is_due(2 + every, is_under_way=False)
    assert made.news(decided) == (
        f"A save costs 500.0 ms and a failure is assumed every 1000 h 0 min "
        f"(checkpoint.rank_mtbf_hours = 8000, ranks: 8), so the run saves every {every} steps, "
        "31 min 40 s apart."
    )
    assert made.news(decided) == ""
    assert "every step," in rhythm().news({**decided, "every_steps": 1})


def test_a_save_never_begins_before_the_last_one_can_be_on_the_disk() -> None:
    decided = rhythm(world=100_000).learn(cost_s=1e-6, written_s=95.0, step_s=10.0)
    assert decided is not None and decided["every_steps"] == 10


@given(
    cost_s=st.floats(1e-4, 100),
    factor=st.floats(1, 100),
    written_s=st.floats(1e-3, 1e4),
    step_s=st.floats(1e-3, 1e3),
    world=st.integers(1, 100_000),
)
def test_a_dearer_save_is_rarer_and_more_ranks_save_more_often(
    cost_s: float, factor: float, written_s: float, step_s: float, world: int
) -> None:
    def every(cost_s: float, world: int) -> float:
        decided = rhythm(world=world).learn(cost_s, written_s, step_s)
        assert decided is not None
        return decided["every_steps"]

    assert 1 <= every(cost_s, world) <= every(factor * cost_s, world)
    assert every(cost_s, 2 * world) <= every(cost_s, world)
