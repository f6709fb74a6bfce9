"""How long waits may last, from how long steps take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.comm.patience import Patience

WAIT = "wait of step 9"
SAVE = "save of step 9"
PAUSE_S = 5.0

steps = st.lists(st.floats(1e-3, 1e4), max_size=300)


def learned(steps_s: list[float], given_s: float | None = None) -> Patience:
    patience = Patience(given_s)
    for step_s in steps_s:
        patience.learn(step_s)
    return patience


@given(steps, st.sampled_from([WAIT, SAVE, "", "start"]))
def test_no_run_ends_for_a_pause_unless_it_was_asked_to(steps_s: list[float], phase: str) -> None:
    patience = learned(steps_s)
    assert patience.end_s(phase) > PAUSE_S
    name_s = patience.name_s(phase)
    assert name_s is None or 1.0 <= name_s < patience.end_s(phase)


@given(steps, st.floats(0.1, 1e4), st.sampled_from([WAIT, SAVE, "start"]))
def test_a_given_deadline_is_kept(steps_s: list[float], given_s: float, phase: str) -> None:
    assert learned(steps_s, given_s).end_s(phase) == given_s


def test_the_deadline_follows_the_steps() -> None:
    assert (learned([]).end_s(WAIT), learned([]).name_s(WAIT)) == (600.0, None)
    assert (learned([2.0] * 2).end_s(WAIT), learned([2.0] * 2).name_s(WAIT)) == (600.0, None)
    assert (learned([0.1] * 3).end_s(WAIT), learned([0.1] * 3).name_s(WAIT)) == (30.0, 1.0)
    assert (learned([20.0] * 3).end_s(WAIT), learned([20.0] * 3).name_s(WAIT)) == (200.0, 40.0)
    # One slow step in a hundred is no measure, two are.
    assert learned([1.0] * 198 + [50.0]).name_s(WAIT) == 2.0
    assert learned([1.0] * 196 + [50.0] * 4).name_s(WAIT) == 100.0


@pytest.mark.parametrize("phase", [SAVE, f"after {SAVE}", "measure", "load of step 3", "start"])
def test_what_takes_long_for_a_known_reason_is_not_named(phase: str) -> None:
    patience = learned([0.1] * 9)
    assert (patience.name_s(phase), patience.end_s(phase)) == (None, 600.0)
    assert learned([100.0] * 9).end_s(phase) == 1000.0  # never less than in a step
