"""Decide what follows a fault: wait for a spare, start the ranks again or fewer of them, or stop.

Why
    Most faults of a long run are passing: a machine loses power, the kernel kills a process for
    its memory, a card falls off its bus. Some are not, and a run that starts again for ever hides
    them and burns its machines.

What it decides
    A state machine without clock, process or file: ``Policy`` is what has happened so far, a
    ``RanksFault`` comes in, the next ``Policy`` and an action come out. ``[fault]`` bounds it: what
    kinds of fault are recovered, and how many within which time. A fault that repeats at the same
    step stops the run sooner, because it would repeat for ever: one that left a message at its
    second time; a silent one, whose cause may be outside, at its third, or before the first step,
    which takes longest to reach, at its fifth.

    Ranks that are kept ready take the places of those that were lost. Where they are still on
    their way they are waited for, at most for ``wait_s``; what follows has been decided by then,
    and others are started if they do not come.

Kept true (tests/unit/fault/test_policy.py, by Hypothesis)
    What follows does not depend on spares, only how soon: a wait is bounded, and has one end.
    Never more restarts within ``within_s`` than allowed; never a restart of what the user stopped
    or did not list; the same faults always lead to the same actions.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from equipoise.spec.run.spec import FaultSpec

_SAYING_TIMES, _SILENT_TIMES, _EARLY_TIMES = 2, 3, 5
"""The time that a fault comes at the same step and ends the run: with a message, without one, and
without one before the first step."""

_LONGEST_PAUSE_S = 30.0

SPARE_WAIT_S = 60.0
"""Longest wait for spares of this machine unless ``fault.wait_s`` is given: many times what they
import in [s]."""

SpareState = Literal["none", "starting", "ready"]
"""How far the ranks of the next start are: absent, on their way, or with their imports done."""


@dataclass(frozen=True, slots=True)
class RanksFault:
    """One end of the ranks before their work was done."""

    kind: str
    """One of ``spec.run.spec.FaultKind``, or anything else, which is never recovered."""
    at_s: float
    """When, by a clock that never goes back [s]."""
    step: int | None
    """The last step that the ranks had finished since they were started; None before any."""
    text: str = ""
    """What the failing rank said; empty if it could not say anything."""
    rank: int | None = None
    """None where nobody knows which it was."""
    was_asked: bool = False
    """Whether the user had asked the run to stop."""

    def is_like(self, other: "RanksFault") -> bool:
        """Whether both are the same fault at the same place.

        Where one rank dies in a step that others can finish without it, its launcher may or may
        not hear that they have: steps beside each other are one place.
        """
        if (self.kind, self.text, self.rank) != (other.kind, other.text, other.rank):
            return False
        if self.step is None or other.step is None:
            return self.step is other.step
        return abs(self.step - other.step) <= 1


@dataclass(frozen=True, slots=True)
class Restart:
    """Start all ranks again from the newest whole checkpoint."""

    number: int
    """How many restarts within ``within_s`` this makes."""
    pause_s: float
    """Wait before it [s]: a fault that repeats is given time to pass."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """Start fewer ranks from the newest whole checkpoint: same batches in the same order."""

    number: int
    dp: int
    """Data-parallel ranks from now on."""


@dataclass(frozen=True, slots=True)
class WaitForSpare:
    """Wait for ranks that are on their way, then go on, with them or with others."""

    most_s: float
    """Longest wait [s]."""
    then: Restart | Shrink
    """What follows."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """Start nothing."""

    reason: str
    """A sentence; empty where the fault alone says enough."""


Action = Restart | Shrink | WaitForSpare | EndRun


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules, and every fault so far."""

    rules: FaultSpec
    dp: int
    """Data-parallel ranks of the run as it was last started."""
    fits: Callable[[int], bool]
    """Whether the run can be started with this number of data-parallel ranks; a pure function."""
    faults: tuple[RanksFault, ...] = ()
    shrunk_at: int = 0
    """How many faults there were when the run last went on with fewer ranks."""

    def after(self, fault: RanksFault, spares: SpareState = "none") -> tuple["Policy", Action]:
        """The state and the action that follow a fault; times must not go back.

        >>> policy = Policy(FaultSpec(restarts=1), dp=2, fits=lambda dp: True)
        >>> policy, action = policy.after(RanksFault("killed", 10.0, step=4))
        >>> action
        Restart(number=1, pause_s=0.0)
        >>> policy.after(RanksFault("killed", 20.0, step=9))[1].reason
        'It is fault 2 within 3600 s, and fault.restarts allows 1.'
        """
        state, action = self._follow(fault)
        if isinstance(action, EndRun) or spares != "starting":
            return state, action
        most_s = SPARE_WAIT_S if self.rules.wait_s is None else self.rules.wait_s
        return state, WaitForSpare(most_s, action) if most_s else action

    def _follow(self, fault: RanksFault) -> tuple["Policy", Restart | Shrink | EndRun]:
        state = dataclasses.replace(self, faults=(*self.faults, fault))
        rules = self.rules
        if fault.was_asked or fault.kind not in rules.on or not rules.restarts:
            return state, EndRun("")
        recent = [each for each in state.faults if fault.at_s - each.at_s <= rules.within_s]
        number = len(recent)
        if number > rules.restarts:
            return state, EndRun(
                f"It is fault {number} within {rules.within_s:g} s, and fault.restarts allows "
                f"{rules.restarts}."
            )
        times = state._times()
        silent_times = _EARLY_TIMES if fault.step is None else _SILENT_TIMES
        if times >= (_SAYING_TIMES if fault.text else silent_times):
            return state._give_up(fault, number, times)
        pause_s = min(_LONGEST_PAUSE_S, float(2**times - 2))
        return state, Restart(number, pause_s)

    def _times(self) -> int:
        """How often the last fault has come without another in between."""
        last, times = self.faults[-1], 0
        for each in reversed(self.faults[self.shrunk_at :]):
            if not each.is_like(last):
                break
            times += 1
        return times

    def _give_up(
        self, fault: RanksFault, number: int, times: int
    ) -> tuple["Policy", Shrink | EndRun]:
        """What follows a fault that repeats: fewer ranks if the rules allow that, else the end."""
        least = self.rules.least_dp
        fewer = [dp for dp in range(self.dp - 1, (least or self.dp) - 1, -1) if self.fits(dp)]
        if fewer and not fault.text:
            state = dataclasses.replace(self, dp=fewer[0], shrunk_at=len(self.faults))
            return state, Shrink(number, fewer[0])
        where = f"after step {fault.step}" if fault.step is not None else "before the first step"
        return self, EndRun(
            f"The same happened {times} times in a row {where}, so starting again does not help."
        )
