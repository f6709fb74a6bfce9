"""Goodput of a long run: steps, checkpoints, failures and restarts, one after another.

Why
    A step's price leaves out the hours that a run of ten thousand devices loses. How often to
    save follows from how long saving takes and how often something dies.

What it decides
    Failures of devices are independent and memoryless, so the first of all of them is, too. A
    failure throws away what was done since the last checkpoint. It is detected, and the run starts
    again; either may fail as well. Where spares are counted, each failed device is replaced by one
    and repaired, after which it is a spare; while none is left the run waits, and nothing fails.
    Time goes on until all steps are done and saved.

Kept true (tests/unit/sim/test_faults.py)
    The mean of many runs is the closed form of memoryless failures; nothing is lost without
    them; the same seed fails at the same moments; the parts of a run's time add up to it.

Sources
    Interval of checkpoints: Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006, equation 37.
"""

import dataclasses
import heapq
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.units import format_seconds

_LONGEST_S = 1e100
"""The longest time that an option may be [s]; the product of two is a number still."""


_MOST_MEANS = 10
"""Mean times between failures that a segment or a restart may take: one of 22,000 gets through."""


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
    detect_s: float = 0.0
    """Time from a failure until it is known, before the restart begins [s]."""
    spares: int | None = None
    """Devices that wait to replace others; as many as fail unless given."""
    repair_s: float = 86_400.0
    """Time until a failed device is a spare [s]."""

    @property
    def away_s(self) -> float:
        """From a failure to the first step after it [s]."""
        return self.detect_s + self.restart_s

    def require(self) -> None:
        """Refuse times that cannot be.

        Raises:
            SpecError: names the number.
        """
        times = self.device_mtbf_s, self.checkpoint_s, self.restart_s
        if not (all(0 <= each <= _LONGEST_S for each in times) and times[0] > 0):
            raise SpecError(
                f"The mean time between failures is {times[0]:g} s, a checkpoint takes "
                f"{times[1]:g} s and a restart {times[2]:g} s. Give the first above 0, the others "
                f"0 or more, and all of them at most {_LONGEST_S:g} s."
            )
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise SpecError(f"{self.checkpoint_steps} steps between checkpoints. Give 1 or more.")
        if not (0 <= self.detect_s <= _LONGEST_S and 0 <= self.repair_s <= _LONGEST_S):
            raise SpecError(
                f"A failure is detected after {self.detect_s:g} s and a device repaired after "
                f"{self.repair_s:g} s. Give 0 or more of each, and at most {_LONGEST_S:g} s."
            )
        if self.spares is not None and self.spares < 0:
            raise SpecError(f"There are {self.spares} spares. Give 0 or more.")


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
    detecting_s: float = 0.0
    """Until failures were known."""
    waiting_s: float = 0.0
    """While no spare was left."""
    steps: int = 0
    """Steps that were done and saved."""


def best_interval(step_s: float, devices: int, options: FaultOptions) -> int:
    """Steps between checkpoints by Young's rule: sqrt(2 x saving x time between failures).

    >>> best_interval(10.0, 1000, FaultOptions(1e8, 50.0, 300.0))
    316
    """
    seconds = math.sqrt(2.0 * options.checkpoint_s * options.device_mtbf_s / devices)
    return max(1, round(seconds / step_s))


def daly_interval(step_s: float, devices: int, options: FaultOptions) -> int:
    """Steps between checkpoints by Daly's estimate, which also counts failures while saving.

    >>> daly_interval(10.0, 1000, FaultOptions(1e8, 50.0, 300.0))
    313
    """
    saving_s, mean_s = options.checkpoint_s, options.device_mtbf_s / devices
    if saving_s >= 2 * mean_s:
        return max(1, round(mean_s / step_s))
    ratio = saving_s / (2 * mean_s)
    seconds = math.sqrt(2 * saving_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - saving_s
    return max(1, round(seconds / step_s))


def expected_goodput(step_s: float, devices: int, options: FaultOptions) -> float:
    """The share of the time that goes into kept steps, in the mean of a long run with spares.

    Args:
        step_s: One step.
        devices: Whose first failure stops all.
        options: How often, and what it costs.

    >>> round(expected_goodput(10.0, 1000, FaultOptions(1e8, 50.0, 300.0)), 4)
    0.9658
    """
    mean_s = options.device_mtbf_s / devices
    every = options.checkpoint_steps or best_interval(step_s, devices, options)
    away_s = mean_s * math.expm1(options.away_s / mean_s)
    segment_s = (mean_s + away_s) * math.expm1((every * step_s + options.checkpoint_s) / mean_s)
    return every * step_s / segment_s


def run_with_faults(
    step_s: float,
    devices: int,
    options: FaultOptions,
    *,
    steps: int,
    seed: int = 0,
    most_s: float = math.inf,
) -> FaultRun:
    """Run ``steps`` steps through their failures.

    Args:
        step_s: One step.
        devices: Whose first failure stops all.
        options: How often, and what it costs.
        steps: To be done and saved.
        seed: Of the moments of failure.
        most_s: The run ends with the first checkpoint after this time, done or not; nor does it
            wait for a spare any longer.

    Raises:
        SpecError: an option is not a time, or no run with this interval would end.

    Cost: O(failures).
    """
    options.require()
    mean_s = options.device_mtbf_s / devices
    every = options.checkpoint_steps or best_interval(step_s, devices, options)
    whole = every * step_s + options.checkpoint_s
    if max(whole, options.away_s) > _MOST_MEANS * mean_s:
        fix = (
            "Save more often, or faster." if whole > _MOST_MEANS * mean_s else "Start again sooner."
        )
        raise SpecError(
            f"{devices:,} devices fail every {format_seconds(mean_s)}, and {every} steps with "
            f"their checkpoint take {format_seconds(whole)}, a restart "
            f"{format_seconds(options.away_s)}: the run would not end. {fix}"
        )
    draws = np.random.Generator(np.random.PCG64(seed))
    wall = lost = saving = away = waiting = 0.0
    failures, done = 0, 0
    in_repair: list[float] = []
    until = float(draws.exponential(mean_s))

    def replace() -> None:
        """Take a spare for the device that has just failed; wait for one if none is left."""
        nonlocal wall, waiting
        if options.spares is None:
            return
        while in_repair and in_repair[0] <= wall:
            heapq.heappop(in_repair)
        heapq.heappush(in_repair, wall + options.repair_s)
        if len(in_repair) > options.spares:
            back = max(wall, min(heapq.heappop(in_repair), most_s))
            waiting += back - wall
            wall = back

    while done < steps and wall < most_s:
        count = min(every, steps - done)
        needed = count * step_s + options.checkpoint_s
        if until >= needed:
            # All at once that are as long, until the next failure or the end.
            saves = int(min(until // needed, max(1, (steps - done) // every)))
            if most_s < math.inf:
                saves = min(saves, max(1, math.ceil((most_s - wall) / needed)))
            wall, done = wall + saves * needed, done + saves * count
            until = max(0.0, until - saves * needed)
            saving += saves * options.checkpoint_s
            continue
        wall, lost, failures = wall + until, lost + until, failures + 1
        replace()
        until = float(draws.exponential(mean_s))
        while until < options.away_s:
            wall, away, failures = wall + until, away + until, failures + 1
            replace()
            until = float(draws.exponential(mean_s))
        wall, away = wall + options.away_s, away + options.away_s
        until -= options.away_s
    share = options.detect_s / options.away_s if options.away_s else 0.0
    return FaultRun(
        goodput=done * step_s / wall if wall else 1.0,
        wall_s=wall,
        failures=failures,
        lost_s=lost,
        saving_s=saving,
        restarting_s=away * (1 - share),
        checkpoint_steps=every,
        detecting_s=away * share,
        waiting_s=waiting,
        steps=done,
    )


@dataclass(frozen=True, slots=True)
class Month:
    """What failures make of some days of a run: means over runs that fail at other moments."""

    days: float
    mean: FaultRun
    """The mean run; its counts are rounded."""
    goodput_low: float
    """In one run of twenty it is lower."""
    goodput_high: float
    """In one run of twenty it is higher."""
    expected: float
    """``expected_goodput``: with a spare for each failure."""
    young_steps: int
    daly_steps: int
    devices: int
    spares: int | None


_DRAWS, _MOST_FAILURES = 40, 4e5
"""Runs that are drawn, and most failures of all of them: where there are more, runs are alike, and
so are a run's days."""


def price_days(
    step_s: float, devices: int, options: FaultOptions, *, days: float = 30.0, seed: int = 0
) -> Month:
    """Price some days of a run that fails and goes on.

    Args:
        step_s: One step.
        devices: Whose first failure stops all.
        options: How often, and what it costs.
        days: From its first step on.
        seed: Of the moments of failure.

    Raises:
        SpecError: as ``run_with_faults``; or no time to price.
    """
    if not 0 < days < 36_500:
        raise SpecError(f"{days:g} days cannot be priced. Give more than 0 and less than 36,500.")
    whole_s = days * 86_400
    mean_s = options.device_mtbf_s / devices
    most_s, longest_s = whole_s, _MOST_FAILURES * mean_s
    repaired = min(whole_s, options.repair_s) / mean_s  # devices, on average
    if options.spares is None or options.spares > repaired + 10 * math.sqrt(repaired) + 10:
        most_s = min(whole_s, longest_s)  # else the last days may wait where the first do not
    draws = min(_DRAWS, int(longest_s / most_s))
    runs = [
        run_with_faults(
            step_s,
            devices,
            options,
            steps=math.ceil(most_s / step_s) + 1,
            seed=_DRAWS * seed + draw,
            most_s=most_s,
        )
        for draw in range(max(1, draws))
    ]
    names = [each.name for each in dataclasses.fields(FaultRun)]
    means = {name: float(np.mean([getattr(run, name) for run in runs])) for name in names}
    for name in means.keys() - {"goodput", "checkpoint_steps"}:
        means[name] *= whole_s / most_s
    for name in ("failures", "checkpoint_steps", "steps"):
        means[name] = round(means[name])
    low, high = np.quantile([run.goodput for run in runs], [0.05, 0.95])
    return Month(
        days=days,
        mean=FaultRun(**means),  # type: ignore[arg-type]
        goodput_low=float(low),
        goodput_high=float(high),
        expected=expected_goodput(step_s, devices, options),
        young_steps=best_interval(step_s, devices, options),
        daly_steps=daly_interval(step_s, devices, options),
        devices=devices,
        spares=options.spares,
    )


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

_FORM = (
    "Write mtbf=50000h, and after commas any of checkpoint=30s, detect=10s, restart=600s, "
    "steps=200 (between checkpoints), spares=4, repair=24h, days=30."
)


def read_faults(words: str) -> tuple[FaultOptions, float]:
    """What fails and what it costs, from words; and how many days to price.

    Times have a unit: s, m, h or d. ``mtbf`` is one device's.

    Raises:
        SpecError: a word is unknown, twice or not a number; or ``mtbf`` is missing.

    >>> options, days = read_faults("mtbf=50000h,checkpoint=20s,spares=4")
    >>> options.device_mtbf_s, options.restart_s, options.spares, days
    (180000000.0, 600.0, 4, 30.0)
    """
    readers: dict[str, Callable[[str], float]] = {
        **dict.fromkeys(("mtbf", "checkpoint", "detect", "restart", "repair"), _read_time),
        **dict.fromkeys(("steps", "spares"), int),
        "days": float,
    }
    values: dict[str, float] = {}
    for word in words.split(","):
        name, _, text = word.strip().partition("=")
        try:
            value = readers[name](text)
        except (KeyError, ValueError):
            raise SpecError(f'--faults: "{word}" cannot be read. {_FORM}') from None
        if name in values:
            raise SpecError(f"--faults: {name} is given twice. {_FORM}")
        values[name] = value
    if "mtbf" not in values:
        raise SpecError(f"--faults: mtbf is missing, and without it nothing fails. {_FORM}")
    options = FaultOptions(
        device_mtbf_s=values["mtbf"],
        checkpoint_s=values.get("checkpoint", 30.0),
        restart_s=values.get("restart", 600.0),
        checkpoint_steps=int(values["steps"]) if "steps" in values else None,
        detect_s=values.get("detect", 0.0),
        spares=int(values["spares"]) if "spares" in values else None,
        repair_s=values.get("repair", 86_400.0),
    )
    options.require()
    return options, values.get("days", 30.0)


def _read_time(text: str) -> float:
    time = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([smhd])", text)
    if time is None:
        raise ValueError(text)
    return float(time[1]) * _UNITS_S[time[2]]
