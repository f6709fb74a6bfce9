"""What a reader of a plan should know beside its table: sentences with numbers and sources.

Why
    An engineer who has read the model's report looks for its layout first. And a schedule that
    only a few programs run does not help those who use another.

What it decides
    *Published recipes* of the model are priced as the plan's own choices are, on the plan's cluster
    and step. *Schedules*: which of the shipped programs run the best's.

Kept true (tests/unit/plan/answer/test_remarks.py)
    A recipe's price is that of ``equipoise simulate``; programs are those that do not refuse the
    schedule; a search that ended by itself has no sentence about its gap.
"""

from collections.abc import Sequence
from functools import partial

from equipoise.base.units import GIB, format_seconds
from equipoise.plan.answer.final import Finalist, price_choice
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.search.search import FAMILY, GROUP, OWN, ROW, SPLIT, Search
from equipoise.plan.search.vast import BLOCK, LOOK, SURVEY
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.published import PublishedRecipe, recipes_of
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.program.file import program_names, read_program

_FEW = 6
"""Schedules that fewer programs run are marked."""
_TRIES = 8
_SMALL_GAP = 0.05
"""A gap that needs no words."""


def programs_with(schedule: str) -> list[str]:
    """Shipped programs that run a schedule.

    >>> programs_with("zb-v")
    ['equipoise', 'torchtitan', 'torchtitan-async', 'torchtitan-eager']
    """
    known = ((name, read_program(name).schedules) for name in program_names())
    return [name for name, schedules in known if schedules is None or schedule in schedules]


def schedule_remark(best: Finalist) -> str | None:
    """Who runs the best's schedule, where few do."""
    if best.choice.layout.pp == 1:
        return None
    schedule = best.choice.options.schedule
    who = programs_with(schedule)
    if len(who) >= _FEW or SCHEDULES[schedule].megatron is not None:
        return None
    return (
        f"Few programs run {schedule}: of those shipped {', '.join(who)}. --program NAME searches "
        f"what NAME runs; --schedule interleaved leaves others out."
    )


_KNOWN_BY = {
    LOOK: "their useful FLOP at the devices' peak",
    GROUP: "their useful FLOP at the devices' peak",
    SURVEY: "their products, attention and expert traffic, shared out evenly over all ranks",
    BLOCK: "their passes and the least bubble",
    FAMILY: "their fullest rank",
    ROW: "their pipeline's ranks, with kernels as short as any of those that share them,",
    SPLIT: "their pipeline's ranks, without their own messages,",
    OWN: "their pipeline's ranks, with messages but not in the order of a replay,",
}
"""What a node's bound counts, by how tightly it is bounded; waiting and traffic come later."""


def gap_remark(outcome: Outcome, gap: float | None) -> str | None:
    """What a stopped search's bound leaves out; None for a search that ended, or a small gap."""
    if outcome.loosest is None or gap is None or gap < _SMALL_GAP:
        return None
    level, count = outcome.loosest
    kind = "choices" if level >= ROW else "groups of choices"
    return (
        f"How much of the gap is real is not known: time ended with {count:,} {kind} bounded by "
        f"{_KNOWN_BY[level]} alone. More --seconds raise the bound."
    )


Published = list[tuple[PublishedRecipe, Finalist]]
"""Recipes, each with the fastest choice that means it and fits."""


def price_published(search: Search, lattice: Lattice, model: str, due: Deadline) -> Published:
    """Each published recipe of a model at this plan's step.

    Args:
        search: What was searched.
        lattice: All choices.
        model: Its name, which recipes are known by.
        due: When pricing ends.
    """
    known = []
    for recipe in recipes_of(model):
        priced: list[Finalist] = []
        for row in recipe.rows(lattice).tolist()[:_TRIES]:
            each = due.attempt(partial(price_choice, search, lattice.choice(row)))
            if each is not None:
                priced.append(each)
        if priced:
            priced.sort(key=lambda each: (not each.run.price.fits, each.run.price.step_s))
            known.append((recipe, priced[0]))
    return known


def with_published(finalists: list[Finalist], published: Published) -> list[Finalist]:
    """Finalists, and before them a published recipe that is faster than all and fits."""
    fitting = [each for _, each in published if each.run.price.fits]
    best = min(fitting, key=lambda each: each.run.price.step_s, default=None)
    if best is None or (
        finalists[0].run.price.fits and finalists[0].run.price.step_s <= best.run.price.step_s
    ):
        return finalists
    return [best, *finalists[:3]]


def _say(
    search: Search, lattice: Lattice, recipe: PublishedRecipe, theirs: Finalist, best: Finalist
) -> str:
    price, words = theirs.run.price, theirs.choice.words()
    slower = price.step_s / best.run.price.step_s - 1.0
    layout = " ".join([words["layout"], *([words["schedule"]] if "schedule" in words else [])])
    fits = "fits" if price.fits else "does not fit"
    cluster, base = search.machine.cluster, lattice.base
    at_home = (recipe.devices, recipe.context_tokens, recipe.step_sequences, recipe.precision) == (
        *(cluster.devices, base.context_tokens, base.step_sequences, base.precision),
    )
    at_home &= cluster.classes[0].device.name == recipe.device
    rate = price.tokens / price.step_s / cluster.devices
    measured = ""
    if recipe.tokens_per_s is not None and at_home:
        off = rate / recipe.tokens_per_s - 1.0
        measured = (
            f"; {rate:,.0f} tokens/s a device, published {recipe.tokens_per_s:,.0f} ({off:+.0%})"
        )
    elif not at_home:
        measured = (
            f"; it was for {recipe.devices:,} {recipe.device}, {recipe.step_sequences:,} x "
            f"{recipe.context_tokens:,} tokens, {recipe.precision}"
        )
    return (
        f"As published: {layout} recompute {words['recompute']}: {format_seconds(price.step_s)} a "
        f"step, {slower:+.1%}, {price.needs_bytes / GIB:.1f} GiB, {fits}{measured} "
        f"({recipe.source})."
    )


def remarks_of(
    search: Search,
    lattice: Lattice,
    published: Published,
    finalists: Sequence[Finalist],
    *,
    named: bool,
) -> tuple[str, ...]:
    """All sentences about a plan.

    Args:
        search: What was searched.
        lattice: All choices.
        published: Recipes of the model.
        finalists: The best first.
        named: Whether a program was given, which then runs the schedule.
    """
    remark = None if named else schedule_remark(finalists[0])
    said = [] if remark is None else [remark]
    said += [_say(search, lattice, *each, finalists[0]) for each in published]
    return tuple(said)
