"""Formats of least bytes whose model loses no more than a budget.

What it decides
    Losses of single parts are taken to add up, and ``balance.tables.forms`` chooses exactly under
    that. What the chosen model really loses is then measured, with two deviations on top; a gain
    counts as nothing, since coarse formats also gain by chance. The sum may be too large or too
    small, so its limit is moved by bisection until the measured loss is just within the budget.
    The smallest of all models that were measured to fit is taken; fp32 alone always fits.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    The measured loss is within the budget; a larger budget never takes more bytes.

Sources
    Search under a budget of normalised entropy: arXiv:2105.12676, section 3.
"""

from dataclasses import dataclass

from equipoise.balance.tables.forms import FormOption, choose_forms
from equipoise.recsys.lowbit.parts import Forms, make_scorer, parts_of
from equipoise.recsys.lowbit.scan import Loss, PartLoss, ReferenceScores, scan_parts
from equipoise.recsys.rank.scorer import Scorer

_TRIES = 8
_WIDEST = 4.0
"""The largest sum that is tried, of the budget."""
_DEVIATIONS = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """A model within its budget."""

    forms: Forms
    scorer: Scorer
    loss: Loss
    """Measured on the samples of the search."""
    scanned: list[PartLoss]
    cost_bytes: int
    fp32_bytes: int
    bound_bytes: int
    """No formats whose losses add up to the chosen sum take fewer."""
    tried: int
    """Models that were measured."""


def search_forms(reference: ReferenceScores, budget: float) -> Searched:
    """The smallest model found whose relative loss of normalised entropy is within a budget.

    Args:
        reference: The fp32 model and the samples.
        budget: 0 or more, 0.001 for 0.1%.
    """
    parts = parts_of(reference.scorer)
    scanned = scan_parts(reference)
    options = [
        [
            FormOption("fp32", part.bytes_of("fp32"), 0.0),
            *(
                FormOption(each.form, part.bytes_of(each.form), _with_doubt(each.loss, 1.0))
                for each in scanned
                if each.part == part
            ),
        ]
        for part in parts
    ]
    fp32_bytes = sum(part.bytes_of("fp32") for part in parts)
    plain = make_scorer(reference.scorer, {}, reference.ends)
    best = Searched(
        {}, plain, reference.measure(plain), scanned, fp32_bytes, fp32_bytes, fp32_bytes, 0
    )
    low, high, tried = 0.0, _WIDEST * budget, 0
    seen: dict[tuple[str, ...], bool] = {}
    for at in range(_TRIES):
        room = high if at == 0 else budget if at == 1 else (low + high) / 2
        answer = choose_forms(options, room)
        key = tuple(each.form for each in answer.chosen)
        if key not in seen:
            forms = {part.name: form for part, form in zip(parts, key, strict=True)}
            scorer = make_scorer(reference.scorer, forms, reference.ends)
            loss = reference.measure(scorer)
            tried += 1
            seen[key] = _with_doubt(loss, _DEVIATIONS) <= budget
            if seen[key] and answer.cost_bytes < best.cost_bytes:
                best = Searched(
                    forms,
                    scorer,
                    loss,
                    scanned,
                    answer.cost_bytes,
                    fp32_bytes,
                    answer.bound_bytes,
                    tried,
                )
        if seen[key]:
            low = max(low, room)
            if at == 0:
                break
        else:
            high = min(high, room)
    return best


def _with_doubt(loss: Loss, deviations: float) -> float:
    """A loss with some of its deviations on top; a gain counts as nothing."""
    return max(0.0, loss.entropy) + deviations * loss.deviation
