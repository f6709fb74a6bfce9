"""Goodput of a long run: steps, checkpoints, failures and restarts, one after another.

Why
    A step's price leaves out the hours that a run of ten thousand devices loses. How often to
    save follows from how long saving takes and how often something dies.

What it decides
    Failures of devices are independent and memoryless, so the first of all of them is, too. A
    failure throws away what was done since the last checkpoint, and a restart, which may fail
    as well. Time goes on until all steps are done and saved.

Kept true (tests/unit/sim/test_faults.py)
    The mean of many runs is the closed form of memoryless failures; nothing is lost without
    them; the same seed fails at the same moments.

Sources
    Interval of checkpoints: Young, CACM 17(9), 1974.
"""

import math
from dataclasses import dataclass

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.units import format_seconds


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """What fails, and what it costs."""

    device_mtbf_s: float
    """Mean time between failures of one device."""
    checkpoint_s: float
    """Time for which a checkpoint stops training [s]."""
    restart_s: float
    """Time from a failure to the first step after it [s]."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints; Young's interval unless given."""

    def require(self) -> None:
        """Refuse times that cannot be.

        Raises:
            SpecError: names the number.
        """
        times = self.device_mtbf_s, self.checkpoint_s, self.restart_s
        if not (all(0 <= each < math.inf for each in times) and times[0] > 0):
            raise SpecError(
                f"The mean time between failures is {times[0]:g} s, a checkpoint takes "
                f"{times[1]:g} s and a restart {times[2]:g} s. Give the first above 0, the others "
                f"0 or more, all of them finite."
            )
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise SpecError(f"{self.checkpoint_steps} steps between checkpoints. Give 1 or more.")


@dataclass(frozen=True, slots=True)
class FaultRun:
    """A run with its failures."""

    goodput: float
    """Share of the time that went into steps that were kept."""
    wall_s: float
    failures: int
    lost_s: float
    """Computed, and thrown away."""
    saving_s: float
    restarting_s: float
    checkpoint_steps: int
    """Steps between checkpoints."""


def best_interval(step_s: float, devices: int, options: FaultOptions) -> int:
    """Steps between checkpoints by Young's rule: sqrt(2 x saving x time between failures).

    >>> best_interval(10.0, 1000, FaultOptions(1e8, 50.0, 300.0))
    316
    """
    seconds = math.sqrt(2.0 * options.checkpoint_s * options.device_mtbf_s / devices)
    return max(1, round(seconds / step_s))


def run_with_faults(
    step_s: float, devices: int, options: FaultOptions, *, steps: int, seed: int = 0
) -> FaultRun:
    """Run ``steps`` steps through their failures.

    Args:
        step_s: One step.
        devices: Whose first failure stops all.
        options: How often, and what it costs.
        steps: To be done and saved.
        seed: Of the moments of failure.

    Raises:
        SpecError: an option is not a time, or no run with this interval would end.

    Cost: O(checkpoints + failures).
    """
    options.require()
    mean_s = options.device_mtbf_s / devices
    every = options.checkpoint_steps or best_interval(step_s, devices, options)
    whole = every * step_s + options.checkpoint_s
    if whole > 20 * mean_s or options.restart_s > 20 * mean_s:
        raise SpecError(
            f"{devices:,} devices fail every {format_seconds(mean_s)}, and {every} steps with "
            f"their checkpoint take {format_seconds(whole)}, a restart "
            f"{format_seconds(options.restart_s)}: the run would not end. Save more often, or "
            f"faster."
        )
    draws = np.random.Generator(np.random.PCG64(seed))
    wall = lost = saving = restarting = 0.0
    failures, done = 0, 0
    until = float(draws.exponential(mean_s))
    while done < steps:
        count = min(every, steps - done)
        needed = count * step_s + options.checkpoint_s
        if until >= needed:
            wall, until, done = wall + needed, until - needed, done + count
            saving += options.checkpoint_s
            continue
        wall, lost, failures = wall + until, lost + until, failures + 1
        until = float(draws.exponential(mean_s))
        while until < options.restart_s:
            wall, restarting, failures = wall + until, restarting + until, failures + 1
            until = float(draws.exponential(mean_s))
        wall, restarting = wall + options.restart_s, restarting + options.restart_s
        until -= options.restart_s
    return FaultRun(steps * step_s / wall, wall, failures, lost, saving, restarting, every)
