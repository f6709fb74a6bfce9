"""What follows a fault, for any faults at any times."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.fault.policy import (
    Action,
    EndRun,
    Policy,
    RanksFault,
    Restart,
    Shrink,
    SpareState,
    WaitForSpare,
)
from equipoise.spec.run.spec import FaultSpec

KINDS = ("killed", "failed", "hung", "non-finite", "refused")


def fits(dp: int) -> bool:
    """Three ranks do not divide what these runs share."""
    return dp != 3


def actions(rules: FaultSpec, faults: list[RanksFault], dp: int = 1) -> list[Action]:
    """What follows each fault, up to the end."""
    policy, followed = Policy(rules, dp, fits), []
    for fault in faults:
        policy, action = policy.after(fault)
        followed.append(action)
        if isinstance(action, EndRun):
            break
    return followed


@st.composite
def drawn_faults(draw: st.DrawFn) -> list[RanksFault]:
    at_s, faults = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        at_s += draw(st.floats(0, 100))
        faults.append(
            RanksFault(
                kind=draw(st.sampled_from(KINDS)),
                at_s=at_s,
                step=draw(st.none() | st.integers(1, 4)),
                text=draw(st.sampled_from(["", "bad", "worse"])),
                rank=draw(st.none() | st.integers(0, 2)),
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
def test_the_rules_bound_every_history(rules: FaultSpec, faults: list[RanksFault], dp: int) -> None:
    followed = actions(rules, faults, dp)
    assert followed == actions(rules, faults, dp)  # the same faults, the same actions
    begun = [
        fault
        for fault, action in zip(faults, followed, strict=False)
        if not isinstance(action, EndRun)
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
    faults = [RanksFault("killed", every_s * index, step, text) for index in range(9)]
    *begun, last = actions(rules, faults)
    times = 2 if text else 3
    assert last == EndRun(
        f"The same happened {times} times in a row after step {step}, so starting again does not "
        f"help."
    )
    assert [action.number for action in begun if isinstance(action, Restart)] == [
        sum(every_s * index - every_s * earlier <= rules.within_s for earlier in range(index + 1))
        for index in range(times - 1)
    ]


def test_faults_that_get_further_are_not_the_same() -> None:
    faults = [RanksFault("killed", 10.0 * index, step=2 * index) for index in range(1, 9)]
    followed = actions(FaultSpec(), faults)
    assert followed == [Restart(number, 0.0) for number in range(1, 9)]


def test_a_step_that_others_finish_without_the_dead_rank_is_one_place() -> None:
    steps = [7, 8, 7]
    faults = [RanksFault("killed", 10.0 * index, step) for index, step in enumerate(steps)]
    assert isinstance(actions(FaultSpec(), faults)[-1], EndRun)


def test_kills_of_several_ranks_and_before_the_first_step_are_borne_longer() -> None:
    rules = FaultSpec(restarts=100)
    several = [RanksFault("killed", float(index), 7, rank=index % 2) for index in range(20)]
    assert not any(isinstance(action, EndRun) for action in actions(rules, several))
    early = actions(
        rules, [RanksFault("killed", float(index), None, rank=1) for index in range(20)]
    )
    assert len(early) == 5 and early[-1] == EndRun(
        "The same happened 5 times in a row before the first step, so starting again does not help."
    )


def test_a_fault_that_repeats_is_given_time_to_pass() -> None:
    first, second = (RanksFault("killed", at_s, None) for at_s in (1.0, 2.0))
    assert actions(FaultSpec(), [first, second]) == [Restart(1, 0.0), Restart(2, 2.0)]


def test_too_many_within_their_time() -> None:
    faults = [RanksFault("hung", 10.0 * index, step=2 * index) for index in range(4)]
    assert actions(FaultSpec(restarts=2, within_s=25.0), faults)[-1] == EndRun(
        "It is fault 3 within 25 s, and fault.restarts allows 2."
    )
    faults = [RanksFault("hung", 30.0 * index, step=2 * index) for index in range(4)]
    followed = actions(FaultSpec(restarts=1, within_s=25.0), faults)
    assert followed == [Restart(1, 0.0)] * 4


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        (FaultSpec(restarts=0), RanksFault("killed", 0.0, 3)),
        (FaultSpec(), RanksFault("non-finite", 0.0, 3)),
        (FaultSpec(), RanksFault("refused", 0.0, None)),
        (FaultSpec(on=()), RanksFault("killed", 0.0, 3)),
        (FaultSpec(), RanksFault("killed", 0.0, 3, was_asked=True)),
    ],
)
def test_what_nothing_follows(rules: FaultSpec, fault: RanksFault) -> None:
    assert actions(rules, [fault]) == [EndRun("")]


def test_fewer_ranks_where_a_rank_dies_again_and_again() -> None:
    faults = [RanksFault("killed", float(index), 7) for index in range(9)]
    followed = actions(FaultSpec(restarts=9, least_dp=2), faults, dp=4)
    shrinks = [action for action in followed if isinstance(action, Shrink)]
    assert shrinks == [Shrink(3, 2)]  # 3 do not fit
    assert isinstance(followed[-1], EndRun) and len(followed) == 6


STATES: tuple[SpareState, ...] = ("none", "starting", "ready")


@given(
    drawn_rules(),
    st.none() | st.floats(0, 500),
    drawn_faults(),
    st.integers(1, 6),
    st.data(),
)
def test_spares_change_how_soon_and_never_what_follows(
    rules: FaultSpec, wait_s: float | None, faults: list[RanksFault], dp: int, data: st.DataObject
) -> None:
    rules = dataclasses.replace(rules, wait_s=wait_s)
    policy, followed = Policy(rules, dp, fits), []
    for fault in faults:
        spares = data.draw(st.sampled_from(STATES))
        policy, action = policy.after(fault, spares)
        if isinstance(action, WaitForSpare):
            assert spares == "starting"
            assert action.most_s == (60.0 if wait_s is None else wait_s) > 0
            action = action.then
        followed.append(action)
        if isinstance(action, EndRun):
            break
    assert followed == actions(rules, faults, dp)


def test_who_does_not_want_to_wait_starts_others() -> None:
    fault = RanksFault("killed", 0.0, 3)
    _, action = Policy(FaultSpec(wait_s=0.0), 2, fits).after(fault, "starting")
    assert action == Restart(1, 0.0)
    _, action = Policy(FaultSpec(), 2, fits).after(fault, "starting")
    assert action == WaitForSpare(60.0, Restart(1, 0.0))
