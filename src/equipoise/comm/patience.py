"""How long one rank waits for another: until it is named, and until the run ends.

Why
    A fixed deadline is ten minutes for a run whose steps take a second, and too short for one that
    saves a terabyte. A run knows how long its own steps take.

What it decides
    A wait is *named* once it is longer than twice the steps (the 99th percentile of the last 256)
    and a second: that is news, and costs nothing where it ends by itself. It *ends* the run after
    ``layout.deadline_s``; unless that is given, after ten such steps and 30 s. Before a few steps
    are known, and while a rank does what takes long for a known reason (it starts, measures,
    proves, loads, saves or evaluates), nobody is named and the run waits ten minutes.

Kept true (tests/unit/comm/test_patience.py)
    A pause of 5 s never ends a run whose deadline was not given; a given deadline is kept.
"""

from collections import deque

_LONGEST_S = 600.0
_LEAST_END_S, _END_STEPS = 30.0, 10.0
_LEAST_NAME_S, _NAME_STEPS = 1.0, 2.0

_KNOWN_STEPS = 3
"""Steps after which their length is known: the first ones warm up."""

_RECENT = 256

_LONG_PHASES = ("start", "measure", "load", "save", "evaluate", "prove")
"""First words of phases that take long for a known reason."""


def takes_long(phase: str) -> bool:
    """Whether what a rank does takes long for a known reason.

    >>> takes_long("save of step 7"), takes_long("after save of step 7"), takes_long("wait")
    (True, True, False)
    """
    return phase.removeprefix("after ").startswith(_LONG_PHASES)


class Patience:
    """One rank's measure of how long its waits may last."""

    def __init__(self, given_s: float | None) -> None:
        """``given_s`` is ``layout.deadline_s``, if that was given."""
        self.given_s = given_s
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._long_s = 0.0

    def learn(self, step_s: float) -> None:
        """Take a finished step into account."""
        self._steps_s.append(step_s)
        # The 99th percentile: of fewer than a hundred steps, the longest.
        ordered = sorted(self._steps_s)
        self._long_s = ordered[(99 * len(ordered)) // 100]

    def name_s(self, phase: str) -> float | None:
        """Length of a wait in this phase that is named [s]; None where none is."""
        if len(self._steps_s) < _KNOWN_STEPS or takes_long(phase):
            return None
        return max(_LEAST_NAME_S, _NAME_STEPS * self._long_s)

    def end_s(self, phase: str) -> float:
        """Length of a wait in this phase that ends the run [s]."""
        if self.given_s is not None:
            return self.given_s
        is_unknown = len(self._steps_s) < _KNOWN_STEPS or takes_long(phase)
        return max(_LONGEST_S if is_unknown else _LEAST_END_S, _END_STEPS * self._long_s)
