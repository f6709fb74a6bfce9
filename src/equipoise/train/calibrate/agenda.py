"""What to measure next, when time is short: what forecasts need most comes first.

Why
    On a machine that others use, everything takes several times as long. A calibration that is
    stopped by its user leaves nothing; one that stops by itself leaves what matters most, says what
    is missing, and goes on from there the next time.

What it decides
    Tasks run in their order. Those that a device file cannot do without begin while there is time,
    the first of a session whatever the time, so that each session gets on. Another one runs only if
    it is expected to end in time: its weight, at the pace of the tasks that this session has run.
    Each gets its share of the time that is left, by weight, and is kept as soon as it is done.

Kept true (tests/unit/train/calibrate/test_agenda.py)
    No optional task begins that is expected to end late, and none at all after the end but a
    session's first; a session that is stopped and started again runs each task once.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure."""

    name: str
    """For people, and to know it again."""
    weight: float
    """Seconds that its least takes on an idle machine, about."""
    is_needed: bool
    """Whether there is no device file without it."""
    run: Callable[[float], Any]
    """From the seconds that it may take to what it measured."""


def run_agenda(
    tasks: Sequence[Task],
    done: Collection[str],
    keep: Callable[[Task, Any], None],
    *,
    limit_s: float,
    clock: Callable[[], float],
) -> tuple[str, ...]:
    """Run what is not done yet, as far as the time goes.

    Args:
        tasks: Most useful first.
        done: Names of tasks that were run before.
        keep: Called with each task that ends, and what it measured.
        limit_s: Seconds for all of them.
        clock: Seconds, from any moment on.

    Returns:
        Names of tasks that are left for another session.

    >>> ticks = iter(range(100))
    >>> first, second = (Task(name, 1.0, name == "a", lambda s: None) for name in "ab")
    >>> run_agenda([first, second], (), lambda task, _: None, limit_s=1, clock=lambda: next(ticks))
    ('b',)
    """
    began, weight, spent_s = clock(), 0.0, 0.0
    waiting = [task for task in tasks if task.name not in done]
    left: list[str] = []
    for at, task in enumerate(waiting):
        now = clock()
        left_s = limit_s - (now - began)
        pace = max(1.0, spent_s / weight) if weight else 1.0
        is_late = left_s <= 0 and bool(weight)
        if is_late or (not task.is_needed and pace * task.weight > left_s):
            left.append(task.name)
            continue
        share = task.weight / sum(other.weight for other in waiting[at:])
        measured = task.run(max(0.0, left_s * share))
        spent_s, weight = spent_s + clock() - now, weight + task.weight
        keep(task, measured)
    return tuple(left)
