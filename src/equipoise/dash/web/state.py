"""What a followed run is doing now: running, finished, ended by a fault, or silent.

What it decides
    A run without an end that was not seen to grow is judged by the age of its files, one that was
    by this machine's own monotonic clock: clocks of other machines differ. It is silent when
    nothing was written for twenty of its steps, and for two minutes at least; before its first
    step, while it measures and compiles, for ten.

Kept true (tests/unit/dash/web/test_state.py)
    Every journal has exactly one state; a run that was never read to its end has
    no numbers yet.
"""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.dash.web.follow import Follower
from equipoise.observe.run_record import RunRecord

Kind = Literal["reading", "running", "finished", "interrupted", "fault", "silent", "unreadable"]

_LEAST_SILENT_S = 120.0
_BEFORE_STEPS_S = 600.0
_SILENT_STEPS = 20
_RECENT = 64


@dataclass(frozen=True, slots=True)
class State:
    """A word for a label, and what it means here."""

    kind: Kind
    sentence: str


def state_of(follower: Follower, record: RunRecord | None) -> State:
    """The state of a run.

    Args:
        follower: The run, read as far as it was written.
        record: The same as arrays; None if it has not started, or was never read to its end.
    """
    if follower.refusal:
        return State("unreadable", follower.refusal)
    if follower.is_behind and record is None:
        return State("reading", f"{follower.read_share:.0%} of its journals are read.")
    if follower.stop == "done":
        return State("finished", f"Finished after step {follower.newest_step:,}.")
    if follower.stop:
        return State("interrupted", f"Interrupted after step {follower.newest_step:,}.")
    if follower.end is not None:
        lines = str(follower.end.get("message") or follower.end.get("type")).strip().splitlines()
        rank = follower.end.get("rank")
        said = lines[0] if lines else "It left no message."
        return State("fault", f"Rank {rank} ended after step {follower.newest_step:,}: {said}")
    quiet_s = quiet_for(follower)
    allowed_s = _allowed_s(record.step_s if record else np.zeros(0))
    if quiet_s > allowed_s:
        return State("silent", silence(quiet_s))
    if record is None or not record.step.size:
        return State("running", "Before its first step.")
    return State("running", "")


def silence(quiet_s: float) -> str:
    """What it means that nothing was written for some seconds.

    >>> silence(600.0)
    'Nothing was written for 10 min, and it has no end: it was killed, or hangs.'
    """
    return (
        f"Nothing was written for {_roughly(quiet_s)}, and it has no end: it was killed, or hangs."
    )


def quiet_for(follower: Follower) -> float:
    """Seconds since the run wrote anything; never negative."""
    if follower.grew_s is not None:
        return time.monotonic() - follower.grew_s
    return max(0.0, time.time() - follower.changed_s)


def _allowed_s(step_s: Floats) -> float:
    known = step_s[~np.isnan(step_s)][-_RECENT:]
    if not known.size:
        return _BEFORE_STEPS_S
    return max(_LEAST_SILENT_S, _SILENT_STEPS * float(np.median(known)))


def _roughly(seconds: float) -> str:
    """Whole minutes, hours or days: a page that says 61 s, 62 s, 63 s changes for nothing.

    >>> _roughly(150.0), _roughly(8000.0), _roughly(300_000.0)
    ('2 min', '2 h', '3 days')
    """
    if seconds < 7200:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h" if seconds < 172_800 else f"{seconds // 86_400:.0f} days"
