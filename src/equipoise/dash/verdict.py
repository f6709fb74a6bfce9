"""A comparison of two runs in words: what it took, what was predicted, and how sure it is."""

import math
from collections.abc import Sequence

from equipoise.dash.compare import RunComparison


def tell(comparison: RunComparison) -> str:
    """What one run took beside another, and the prediction, in one sentence."""
    if comparison.is_same_documents:
        return _same_documents(comparison)
    return _other_documents(comparison)


def tell_spread(comparison: RunComparison) -> str:
    """How sure a paired comparison is; "" where the runs are not sides of one run.

    >>> sides = RunComparison("in-order", "divided", 1.32, 1.28, 19, True, (), 1.25, 1.39, 1.34)
    >>> tell_spread(sides).split(", over ")[0]
    '1.32 times as fast (90% interval 1.25 to 1.39, by processor time 1.34)'
    """
    if math.isnan(comparison.low):
        return ""
    busy = comparison.busy
    by_cpu = "" if math.isnan(busy) else f", by processor time {busy:.2f}"
    clock = f"{comparison.low:.2f} to {comparison.high:.2f}"
    over = f", over {comparison.steps} steps that both computed."
    if comparison.is_disturbed:
        interval = f"{comparison.busy_low:.2f} to {comparison.busy_high:.2f}"
        return (
            f"{busy:.2f} times as fast by processor time (90% interval {interval}; by the clock "
            f"{comparison.measured:.2f}, {clock}){over}"
        )
    return f"{comparison.measured:.2f} times as fast (90% interval {clock}{by_cpu}){over}"


def _same_documents(comparison: RunComparison) -> str:
    label, baseline = comparison.label, comparison.baseline
    measured, predicted = comparison.measured, comparison.predicted
    low, high, of, lead, end = comparison.low, comparison.high, "time", "", ""
    if comparison.is_disturbed:
        by_clock = _change(1 / measured, "more", "less") or "no less"
        measured, predicted = comparison.busy, comparison.busy_predicted
        low, high = comparison.busy_low, comparison.busy_high
        of, end = "processor time", f"; by the clock, {by_clock}"
        lead = (
            f"Other programs had the cores for {comparison.run_delay:.0%} of the ranks' time, "
            "which processor time leaves out. "
        )
    expected = _change(1 / predicted, "longer", "shorter") or "as long"
    if math.isnan(predicted):
        expected = ""
    if low <= 1 <= high:
        beside = f"; predicted: {expected}" if expected else ""
        return (
            f"{lead}{label} and {baseline}: no difference in {of} per step "
            f"(±{(high - low) / 2:.1%}{beside}){end}."
        )
    took = _change(1 / measured, f"more {of}" if lead else "longer", f"less {of}")
    beside = f" (predicted: {expected})" if expected else ""
    if took and expected.endswith(("longer", "shorter")) and (measured > 1) == (predicted > 1):
        beside = f" (predicted {expected.split()[0]})"
    took = f"{took} per step than" if took else "as long per step as"
    return f"{lead}{label} took {took} {baseline}{beside}{end}."


def _other_documents(comparison: RunComparison) -> str:
    keys = comparison.differs_in[:3] + (("more",) if len(comparison.differs_in) > 3 else ())
    differ = f" The runs differ in {_listed(keys)}." if keys else " Their documents differ."
    more = _change(comparison.measured, "more", "fewer")
    trained = f"{more} tokens a second than" if more else "as many tokens a second as"
    predicted = _change(comparison.predicted, "more", "fewer") or "as many"
    beside = "" if math.isnan(comparison.predicted) else f" (predicted: {predicted})"
    return f"{comparison.label} trained {trained} {comparison.baseline}{beside}.{differ}"


def _change(ratio: float, above: str, below: str) -> str:
    """How one number differs from another, by their ratio; empty where they are the same.

    >>> _change(1.012, "longer", "shorter"), _change(0.95, "longer", "shorter")
    ('1% longer', '5% shorter')
    >>> _change(1.004, "longer", "shorter"), _change(0.9999, "longer", "shorter")
    ('0.4% longer', '')
    """
    change = abs(ratio - 1)
    if change < 0.0005:
        return ""
    return f"{change:.{0 if change >= 0.00995 else 1}%} {above if ratio > 1 else below}"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
