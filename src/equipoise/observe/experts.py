"""What a run's journal says of its experts: skews, copies, choices between policies, and loads.

Kept true (tests/unit/observe/test_experts.py)
    Values that are missing or not numbers count for nothing.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.observe.journal_lines import Event


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """What a run chose between policies of experts."""

    chosen: Mapping[str, int]
    """Micro-batches of each policy, over all steps and layers."""
    regret: float
    """The last known: seconds of steps by price over those of the best policy tried, minus 1; NaN
    where none was tried."""


def mean_skews(events: Mapping[int, Event]) -> tuple[float, float] | None:
    """Means over steps and layers of what a policy of experts met, and made of it.

    Args:
        events: The journal's, by step.
    """

    def mean(key: str) -> float:
        lists = [each.get(key) for each in events.values()]
        known = [_finite(value) for each in lists if isinstance(each, list) for value in each]
        return float(np.mean(known)) if known else math.nan

    before, after = mean("owner_skew"), mean("planned_skew")
    return None if math.isnan(before) or math.isnan(after) else (before, after)


def step_skews(events: Mapping[int, Event]) -> tuple[Ints, Floats, Floats] | None:
    """Steps, and means over layers of what a policy of experts met there, and made of it.

    Args:
        events: The journal's, by step.

    Returns:
        int64, float64 and float64 [steps]; None where no step has both.
    """
    rows = []
    for step, event in sorted(events.items()):
        skews = mean_skews({step: event})
        if skews is not None:
            rows.append((step, *skews))
    if not rows:
        return None
    steps, before, after = zip(*rows, strict=True)
    return np.array(steps, dtype=np.int64), np.array(before), np.array(after)


def expert_choice(events: Mapping[int, Event]) -> ExpertChoice | None:
    """What was chosen, over all steps; None where a run named its policy.

    Args:
        events: The journal's, by step.
    """
    chosen, regret = Counter[str](), math.nan
    for _, event in sorted(events.items()):
        counts = event.get("chosen")
        if isinstance(counts, dict):
            for name, count in counts.items():
                chosen[str(name)] += int(_finite(count)) if _finite(count) > 0 else 0
            known = _finite(event.get("regret"))
            regret = regret if math.isnan(known) else known
    return ExpertChoice(dict(chosen), regret) if chosen else None


def parted_passes(events: Mapping[int, Event]) -> dict[int, int] | None:
    """Forward passes of all steps by the number of parts in which rows travelled, or None.

    Args:
        events: The journal's steps.
    """
    ran = Counter[int]()
    tables = [each["parted"] for each in events.values() if isinstance(each.get("parted"), dict)]
    for table in tables:
        for parts, passes in table.items():
            if str(parts).isdecimal() and _finite(passes) > 0:
                ran[int(parts)] += int(passes)
    return dict(sorted(ran.items())) if tables else None


def rows_travel_s(events: Mapping[int, Event]) -> tuple[float, float] | None:
    """How long rows of experts travelled beside other work of rank 0, and were then waited for.

    Medians over steps [s]; None in a run whose model has no shortcut.

    Args:
        events: The journal's, by step.
    """
    pairs = [
        (_finite(each.get("rows_beside_s")), _finite(each.get("rows_waited_s")))
        for each in events.values()
    ]
    known = [pair for pair in pairs if not math.isnan(sum(pair))]
    if not known:
        return None
    beside, waited = np.median(known, axis=0).tolist()
    return beside, waited


def expert_file(events: Mapping[int, Event]) -> tuple[float, float, float] | None:
    """Share of a step that rank 0 waited for experts in a file, bytes read and bytes sent.

    Medians over steps; None in a run whose experts are in memory.

    Args:
        events: The journal's, by step.
    """
    rows = []
    for each in events.values():
        if isinstance(file := each.get("file"), dict):
            sent = _finite(file.get("gathered_bytes")) + _finite(file.get("reduced_bytes"))
            rows.append((_finite(file.get("waited")), _finite(file.get("read_bytes")), sent))
    known = [row for row in rows if not math.isnan(sum(row))]
    if not known:
        return None
    waited, read_bytes, sent_bytes = np.median(known, axis=0).tolist()
    return waited, read_bytes, sent_bytes


def expert_loads(events: Mapping[int, Event], experts: object = None) -> dict[int, Ints]:
    """By step, tokens that chose each expert of each layer, int64 [layers, X].

    Args:
        events: The journal's, by step.
        experts: Those with weights, as the run's start says; the ones after them compute nothing,
            and are left out. All of them where it is not a number.
    """
    known = experts if isinstance(experts, int) and experts > 0 else None
    loads = {}
    for step, event in sorted(events.items()):
        layers = event.get("loads")
        try:
            table = np.array(layers, dtype=np.int64)[..., :known]
        except (TypeError, ValueError, OverflowError, IndexError):
            continue
        if table.ndim == 2 and table.size and (table >= 0).all():
            loads[step] = table
    return loads


def _finite(value: object) -> float:
    """A number that is finite, else NaN."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan
