"""What a search has found, as a plan: the best, the next, the bound, the wall and the flip.

Kept true (tests/unit/cli/plan, tests/unit/plan/test_request.py)
    A lock has what ``equipoise simulate --json`` prints of the same words.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol

from equipoise.base.units import GIB
from equipoise.cost.curves.sources import sources_of
from equipoise.plan.answer.explain import find_flip, loses_by
from equipoise.plan.answer.final import Finalist, price_choice
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.incumbent import Outcome, Progress
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.sim.answer import step_row
from equipoise.sim.mixed.words import say_layers
from equipoise.spec.offload import Offload
from equipoise.spec.plan import Candidate, Plan, Wall


class Inputs(Protocol):
    """Everything that a plan depends on: a described cluster's, or a run's."""

    @property
    def name(self) -> str:
        """The name of what is planned."""

    @property
    def asked(self) -> dict[str, str]:
        """Words of the command line."""

    @property
    def read(self) -> dict[str, str]:
        """Digests of what was read, by name."""

    @property
    def search(self) -> Search:
        """What is searched."""

    @property
    def is_whole(self) -> bool:
        """Whether every choice is searched; there may be no time to list them."""

    @property
    def last_resort(self) -> Offload:
        """What may be offloaded where nothing fits without."""

    def go_on(
        self, outcome: Outcome, *, seconds: float, watch: Callable[[Progress], None]
    ) -> Outcome:
        """Search with offloading, too, where that is asked for or nothing fits without."""

    def finalists(self, outcome: Outcome, due: Deadline) -> list[Finalist]:
        """The best and the next, fastest first, as far as there is time."""

    def words(self, choice: Choice) -> tuple[dict[str, str], dict[str, int | str]]:
        """Flags of ``equipoise simulate``, and keys of run.toml."""

    def walls(self, best: Finalist, due: Deadline) -> tuple[Wall, ...]:
        """What no longer fits when it grows; none if there is no time to price it."""


def decide(inputs: Inputs, outcome: Outcome, finalists: list[Finalist], due: Deadline) -> Plan:
    """The plan of a search, with the reasons for it.

    Args:
        inputs: What was read.
        outcome: What the search found.
        finalists: The best and the next, fastest first.
        due: When the reasons are to be priced.
    """
    search = inputs.search
    best = finalists[0].run.price

    def candidate(each: Finalist) -> Candidate:
        words, keys = inputs.words(each.choice)
        words |= {"layers": say_layers(each.layers)} if each.layers else {}
        apart = {} if each is finalists[0] else loses_by(best.terms, each.run.price.terms)
        return Candidate(
            words, step_row(each.run, search.machine, each.choice.options), apart, keys
        )

    flip = None
    if len(finalists) > 1:
        second = finalists[1]
        flip = find_flip(best.terms, second.run.price.terms, second.choice.words()["layout"])
    bound = min(outcome.progress.bound_s, best.step_s) if inputs.is_whole else 0.0
    without = None
    if finalists[0].choice.options.offload != "none":
        choice = finalists[0].choice
        here = Choice(choice.layout, dataclasses.replace(choice.options, offload="none"))
        kept = due.attempt(partial(price_choice, search, here))
        if kept is not None:
            gib = float(kept.run.price.memory_bytes.max()) / GIB
            without = {"step_s": kept.run.price.step_s, "memory_gib_max": gib}
    return Plan(
        asked=inputs.asked,
        best=candidate(finalists[0]),
        runners_up=tuple(candidate(each) for each in finalists[1:]),
        bound_s=bound,
        gap=best.step_s / bound - 1.0 if bound > 0.0 else None,
        listed=outcome.listed,
        priced=outcome.progress.priced,
        wall=inputs.walls(finalists[0], due),
        flip=flip,
        nodes=finalists[0].nodes,
        read=inputs.read,
        sources=sources_of(search.machine.cluster, search.space.base.precision),
        without_offload=without,
    )
