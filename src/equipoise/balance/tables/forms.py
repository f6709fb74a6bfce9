"""Choose a format for each part of a model: least bytes within a budget of lost quality.

What it decides
    Each part has formats with bytes and a loss; losses add up. Parts are merged one by one, and of
    the partial choices those stay that no other beats in both bytes and loss, so the answer is the
    best there is. Beyond ``most_states`` of them, losses are rounded up to a grid: the answer then
    stays within the budget and may cost more than the best; ``bound`` says how much at most.

Kept true (tests/unit/balance/tables/test_forms.py, by Hypothesis)
    The answer is that of brute force on small cases; never beyond the budget; never below the
    bound, on a grid or not.

Sources
    The multiple-choice knapsack problem: H. Kellerer et al., "Knapsack Problems", chapter 11; its
    linear relaxation takes each part's convex hull.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.base.errors import FitError


@dataclass(frozen=True, slots=True)
class FormOption:
    """One format of one part."""

    form: str
    cost_bytes: int
    loss: float
    """What quality it costs; one of the part's formats costs none."""


@dataclass(frozen=True, slots=True)
class FormAnswer:
    """A format for each part."""

    chosen: tuple[FormOption, ...]
    bound_bytes: int
    """No choice within the budget takes fewer."""

    @property
    def cost_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(each.cost_bytes for each in self.chosen)

    @property
    def loss(self) -> float:
        """What all parts together cost, if losses add up."""
        return math.fsum(each.loss for each in self.chosen)

    @property
    def gap(self) -> float:
        """How far the bytes may be above the best: answer / bound - 1."""
        return self.cost_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


_State = tuple[int, float, tuple[int, ...]]
"""Bytes, loss, and the place of each part's format."""


def choose_forms(
    parts: Sequence[Sequence[FormOption]], budget: float, *, most_states: int = 4096
) -> FormAnswer:
    """The formats of least bytes whose losses add up to the budget at most.

    Args:
        parts: The formats of each part; losses are 0 or more.
        budget: 0 or more.
        most_states: Partial choices that are kept exactly; 2 at least.

    Raises:
        FitError: every choice exceeds the budget.

    >>> part = [FormOption("fp32", 8, 0.0), FormOption("int8", 2, 0.3)]
    >>> answer = choose_forms([part, part], 0.5)
    >>> [each.form for each in answer.chosen], answer.cost_bytes, answer.bound_bytes
    (['fp32', 'int8'], 10, 6)
    """
    least = math.fsum(min(each.loss for each in part) for part in parts)
    if least > budget:
        raise FitError(
            f"The formats of least loss lose {least:g} together, and the budget is {budget:g}. "
            "Raise the budget, or offer fp32."
        )
    # What the parts that are still to come lose at least: states beyond it lead nowhere.
    rest = [0.0]
    for part in reversed(parts):
        rest.append(rest[-1] + min(each.loss for each in part))
    states: list[_State] = [(0, 0.0, ())]
    for place, part in enumerate(parts):
        room = budget - rest[len(parts) - place - 1]
        grown = [
            (cost + option.cost_bytes, loss + option.loss, (*chosen, at))
            for cost, loss, chosen in states
            for at, option in enumerate(part)
            if loss + option.loss <= room
        ]
        states = _best(grown)
        if len(states) > most_states:
            states = _thin(states, budget, most_states)
    kept = [state for state in states if state[1] <= budget]
    if not kept:  # sums that rounded the other way
        losses = [[each.loss for each in part] for part in parts]
        kept = [(0, least, tuple(own.index(min(own)) for own in losses))]
    _, _, chosen = min(kept)
    answer = tuple(part[at] for part, at in zip(parts, chosen, strict=True))
    return FormAnswer(answer, min(_relaxed_bytes(parts, budget), sum(e.cost_bytes for e in answer)))


def _best(states: list[_State]) -> list[_State]:
    """States that no other beats in both bytes and loss, by bytes."""
    kept: list[_State] = []
    for state in sorted(states):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def _thin(states: list[_State], budget: float, most: int) -> list[_State]:
    """The cheapest state of each of some bands of loss."""
    by_band: dict[int, _State] = {}
    for state in states:
        band = math.floor(state[1] / budget * (most - 1)) if budget > 0 else 0
        if band not in by_band:  # states come by bytes: the first is the cheapest
            by_band[band] = state
    # The state of least loss keeps every budget reachable that was.
    return _best([*by_band.values(), states[-1]])


def _relaxed_bytes(parts: Sequence[Sequence[FormOption]], budget: float) -> int:
    """Least bytes if formats could be mixed: the linear relaxation, rounded up."""
    total, left = 0.0, float(budget)
    steps: list[tuple[float, float, float]] = []
    for part in parts:
        hull = _hull(part)
        total += hull[0].cost_bytes
        left -= hull[0].loss
        for before, after in itertools.pairwise(hull):
            lost = after.loss - before.loss
            saved = float(before.cost_bytes - after.cost_bytes)
            steps.append((saved / lost, saved, lost))
    for _, saved, lost in sorted(steps, reverse=True):
        if left <= 0:
            break
        share = min(1.0, left / lost)
        total -= share * saved
        left -= lost
    return max(0, math.ceil(total - 1e-6 * max(1.0, total)))


def _hull(part: Sequence[FormOption]) -> list[FormOption]:
    """The formats on the lower convex hull, from the least loss on, each with fewer bytes."""
    ordered = sorted(part, key=lambda each: (each.loss, each.cost_bytes))
    hull: list[FormOption] = []
    for each in ordered:
        if hull and (each.cost_bytes >= hull[-1].cost_bytes or each.loss == hull[-1].loss):
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], each):
            hull.pop()
        hull.append(each)
    return hull


def _slope(before: FormOption, after: FormOption) -> float:
    """Bytes saved for each loss."""
    return (before.cost_bytes - after.cost_bytes) / (after.loss - before.loss)
