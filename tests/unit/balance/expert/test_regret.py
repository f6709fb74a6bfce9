"""The regret of choosing by price, from seconds of steps."""

import pytest

from equipoise.balance.expert.policies import EXPERT_POLICIES
from equipoise.balance.expert.regret import PolicyTimes

NAMES = list(EXPERT_POLICIES)


def test_regret_is_the_choice_over_the_best_policy_that_was_tried() -> None:
    times = PolicyTimes(NAMES)
    seconds = {"fixed": 2.0, "exact": 1.0, "hecate": 1.5, "eplb": 4.0}
    said = []
    for step in range(12):
        tried = NAMES[step - 2] if 2 <= step < 7 else ""
        # Nobody can obey tutel here, so its step is by price.
        chosen = [{tried: 3} if tried in seconds else {"exact": 2, "fixed": 1}] * 2
        said.append(times.add(chosen, [{"fixed": 9, "exact": 7}] * 2, seconds.get(tried, 1.1)))
    assert [each["tried"] for each in said] == ["", "", *NAMES, *[""] * 5]
    assert said[0]["chosen"] == {"exact": 4, "fixed": 2}
    assert said[0]["priced"] == {"fixed": 18, "exact": 14}
    # Known with the first step by price after the tries.
    assert [each["regret"] is None for each in said] == [True] * 7 + [False] * 5
    assert said[-1]["regret"] == pytest.approx(0.1)


def test_equal_steps_have_no_regret() -> None:
    times = PolicyTimes(NAMES)
    for step in range(9):
        tried = NAMES[step - 2] if 2 <= step < 7 else "exact"
        said = times.add([{tried: 1}], [{tried: 1}], 0.5)
    assert said["regret"] == 0.0
