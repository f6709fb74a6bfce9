"""What follows a fault, for any faults at any times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.fault.policy import Action, Fault, Policy, Restart, Shrink, Stop
from equipoise.spec.run.spec import FaultSpec

KINDS = ("killed", "failed", "hung", "non-finite", "refused")


def fits(dp: int) -> bool:
    """Three ranks do not divide what these runs share."""
    return dp != 3


def actions(rules: FaultSpec, faults: list[Fault], dp: int = 1) -> list[Action]:
    """What follows each fault, up to the end."""
    policy, followed = Policy(rules, dp, fits), []
    for fault in faults:
        policy, action = policy.after(fault)
        followed.append(action)
        if isinstance(action, Stop):
            break
    return followed


@st.composite
def drawn_faults(draw: st.DrawFn) -> list[Fault]:
    at_s, faults = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        at_s += draw(st.floats(0, 100))
        faults.append(
            Fault(
                kind=draw(st.sampled_from(KINDS)),
                at_s=at_s,
                step=draw(st.none() | st.integers(1, 4)),
                text=draw(st.sampled_from(["", "bad", "worse"])),
                was_asked=draw(st.integers(0, 9)) == 0,
            )
        )
    return faults


@st.composite
def drawn_rules(draw: st.DrawFn) -> FaultSpec:
    return FaultSpec(
        on=tuple(draw(st.sets(st.sampled_from(KINDS[:4])))),
        restarts=draw(st.integers(0, 6)),
        within_s=draw(st.floats(1, 400)),
        least_dp=draw(st.none() | st.integers(1, 4)),
    )


@given(drawn_rules(), drawn_faults(), st.integers(1, 6))
def test_the_rules_bound_every_history(rules: FaultSpec, faults: list[Fault], dp: int) -> None:
    followed = actions(rules, faults, dp)
    assert followed == actions(rules, faults, dp)  # the same faults, the same actions
    begun = [
        fault
        for fault, action in zip(faults, followed, strict=False)
        if not isinstance(action, Stop)
    ]
    for fault in begun:
        assert fault.kind in rules.on and not fault.was_asked
        in_window = [each for each in begun if 0 <= fault.at_s - each.at_s <= rules.within_s]
        assert len(in_window) <= rules.restarts
    sizes = [action.dp for action in followed if isinstance(action, Shrink)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all((rules.least_dp or dp) <= size < dp and fits(size) for size in sizes)


@given(st.integers(1, 40), st.floats(0, 1000), st.sampled_from(["", "bad"]))
def test_a_fault_that_repeats_at_its_step_ends_the_run(
    step: int, every_s: float, text: str
) -> None:
    rules = FaultSpec(restarts=1000)
    faults = [Fault("killed", every_s * index, step, text) for index in range(9)]
    *begun, last = actions(rules, faults)
    times = 2 if text else 3
    assert last == Stop(
        f"The same happened {times} times in a row after step {step}, so starting again does not "
        f"help."
    )
    assert [action.number for action in begun if isinstance(action, Restart)] == [
        sum(every_s * index - every_s * earlier <= rules.within_s for earlier in range(index + 1))
        for index in range(times - 1)
    ]


def test_faults_that_get_further_are_not_the_same() -> None:
    faults = [Fault("killed", 10.0 * index, step=2 * index) for index in range(1, 9)]
    followed = actions(FaultSpec(), faults)
    assert followed == [Restart(number, 0.0) for number in range(1, 9)]


def test_a_step_that_others_finish_without_the_dead_rank_is_one_place() -> None:
    steps = [7, 8, 7]
    faults = [Fault("killed", 10.0 * index, step) for index, step in enumerate(steps)]
    assert isinstance(actions(FaultSpec(), faults)[-1], Stop)


def test_a_fault_that_repeats_is_given_time_to_pass() -> None:
    first, second = (Fault("killed", at_s, None) for at_s in (1.0, 2.0))
    assert actions(FaultSpec(), [first, second]) == [Restart(1, 0.0), Restart(2, 2.0)]


def test_too_many_within_their_time() -> None:
    faults = [Fault("hung", 10.0 * index, step=2 * index) for index in range(4)]
    assert actions(FaultSpec(restarts=2, within_s=25.0), faults)[-1] == Stop(
        "It is fault 3 within 25 s, and fault.restarts allows 2."
    )
    faults = [Fault("hung", 30.0 * index, step=2 * index) for index in range(4)]
    followed = actions(FaultSpec(restarts=1, within_s=25.0), faults)
    assert followed == [Restart(1, 0.0)] * 4


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        (FaultSpec(restarts=0), Fault("killed", 0.0, 3)),
        (FaultSpec(), Fault("non-finite", 0.0, 3)),
        (FaultSpec(), Fault("refused", 0.0, None)),
        (FaultSpec(on=()), Fault("killed", 0.0, 3)),
        (FaultSpec(), Fault("killed", 0.0, 3, was_asked=True)),
    ],
)
def test_what_nothing_follows(rules: FaultSpec, fault: Fault) -> None:
    assert actions(rules, [fault]) == [Stop("")]


def test_fewer_ranks_where_a_rank_dies_again_and_again() -> None:
    faults = [Fault("killed", float(index), 7) for index in range(9)]
    followed = actions(FaultSpec(restarts=9, least_dp=2), faults, dp=4)
    shrinks = [action for action in followed if isinstance(action, Shrink)]
    assert shrinks == [Shrink(3, 2)]  # 3 do not fit
    assert isinstance(followed[-1], Stop) and len(followed) == 6
