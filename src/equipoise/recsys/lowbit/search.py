"""Formats of least bytes whose model loses no more than a budget.

What it decides
    Losses of single parts are taken to add up, and ``balance.tables.forms`` chooses exactly under
    that. What the chosen model really loses is then measured, with two deviations on top; a gain
    counts as nothing, since coarse formats also gain by chance. The sum may be too large or too
    small, so models are chosen for sums up to four times the budget, four to each doubling, and
    measured from the smallest model on: the first that fits is taken; fp32 alone always fits. The
    sums are the same for every budget, so a larger one has all models of a smaller one and more.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    The measured loss is within the budget; a larger budget never takes more bytes.

Sources
    Search under a budget of normalised entropy: arXiv:2105.12676, section 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.balance.tables.forms import FormAnswer, FormOption, choose_forms
from equipoise.recsys.lowbit.parts import Forms, make_scorer, parts_of
from equipoise.recsys.lowbit.scan import Loss, PartLoss, ReferenceScores, scan_parts
from equipoise.recsys.rank.scorer import Scorer

_WIDEST = 4.0
"""The largest sum that is tried, of the budget."""
_PER_DOUBLING = 4
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
    tried = 0
    for answer in _answers(options, budget):
        forms = {part.name: each.form for part, each in zip(parts, answer.chosen, strict=True)}
        scorer = make_scorer(reference.scorer, forms, reference.ends)
        loss = reference.measure(scorer)
        tried += 1
        if _with_doubt(loss, _DEVIATIONS) <= budget:
            return Searched(
                forms,
                scorer,
                loss,
                scanned,
                answer.cost_bytes,
                fp32_bytes,
                answer.bound_bytes,
                tried,
            )
    plain = make_scorer(reference.scorer, {}, reference.ends)
    loss = reference.measure(plain)
    return Searched({}, plain, loss, scanned, fp32_bytes, fp32_bytes, fp32_bytes, tried)


def _answers(options: Sequence[Sequence[FormOption]], budget: float) -> list[FormAnswer]:
    """Different choices for sums of losses up to some times the budget, of least bytes first."""
    least = min((each.loss for part in options for each in part if each.loss), default=0.0)
    rooms = [0.0]
    if budget and least:
        last = math.floor(_PER_DOUBLING * math.log2(_WIDEST * budget))
        first = math.floor(_PER_DOUBLING * math.log2(least))
        rooms += [2 ** (at / _PER_DOUBLING) for at in range(first, last + 1)]
    answers = {each.chosen: each for each in (choose_forms(options, room) for room in rooms)}
    return sorted(answers.values(), key=lambda each: each.cost_bytes)


def _with_doubt(loss: Loss, deviations: float) -> float:
    """A loss with some of its deviations on top; a gain counts as nothing."""
    return max(0.0, loss.entropy) + deviations * loss.deviation
