"""Which layout trains a model, or a run.toml, fastest, and why: one call.

What it decides
    How the time that is given is shared: most for the search, the rest for pricing the best and the
    next whole and for what would change the answer. What there was no time for is left out, and
    the answer says so.

Kept true (tests/unit/plan/test_request.py, tests/unit/cli/plan)
    The answer's lock is what ``equipoise plan --json`` prints and ``--out`` keeps.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from equipoise.base.digest import digest
from equipoise.base.errors import FitError, SpecError
from equipoise.base.fields import plain_fields
from equipoise.base.units import GIB
from equipoise.data.progress import Progress, SilentProgress
from equipoise.plan.answer.explain import find_flip, loses_by
from equipoise.plan.answer.final import Finalist, price_choice, smallest_cluster
from equipoise.plan.answer.remarks import gap_remark
from equipoise.plan.answer.run_stages import run_stages
from equipoise.plan.balanced import ANY, search_policies
from equipoise.plan.described import ClusterInputs, PlanRequest, read_inputs
from equipoise.plan.export.settings import EXPORTS
from equipoise.plan.kept import keep_priced
from equipoise.plan.run import RunInputs, RunPlanRequest, read_run_inputs
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.space.choice import Choice
from equipoise.sim.answer import interval_row, step_row
from equipoise.sim.mixed.words import say_layers
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.plan import Candidate, Flip, Plan, Wall

__all__ = ["PlanAnswer", "PlanRequest", "RunPlanRequest", "decide", "plan"]

Inputs: TypeAlias = ClusterInputs | RunInputs

_SEARCH_SHARE = 0.8
"""The search's share of the time; the rest is for pricing the best and the next whole."""

_SITES_SHARE = 0.5
"""The same over several sites, whose own steps are searched for with the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanAnswer:
    """The layout that trains fastest, and why."""

    lock: Plan
    """What ``equipoise plan --json`` prints; ``lock.write(file)`` keeps it."""
    finalists: tuple[Finalist, ...]
    """The best and the next, as priced."""
    model: ModelSpec
    is_whole: bool
    """Whether every choice was searched; of a vast space whose sites or layers differ, only what
    recipes differ in is."""
    is_late: bool
    """Whether time ended before everything was priced."""

    @property
    def best(self) -> Candidate:
        """The fastest choice that fits: its words, its price, its keys of run.toml."""
        return self.lock.best

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The next three at most, and by which terms they lose."""
        return self.lock.runners_up

    @property
    def bound_s(self) -> float:
        """Seconds of a step that no choice undercuts."""
        return self.lock.bound_s

    @property
    def gap(self) -> float | None:
        """The best's ``step_s`` over ``bound_s``, minus 1; None without a bound."""
        return self.lock.gap

    @property
    def listed(self) -> int:
        """Choices in the space."""
        return self.lock.listed

    @property
    def priced(self) -> int:
        """Choices that were replayed."""
        return self.lock.priced

    @property
    def wall(self) -> tuple[Wall, ...]:
        """What no longer fits when it grows and the layout stays, nearest first."""
        return self.lock.wall

    @property
    def flip(self) -> Flip | None:
        """The term that, so much slower, makes the first runner-up the best."""
        return self.lock.flip

    def export(self, program: str) -> str:
        """The best as flags of another program.

        Args:
            program: That of the request's ``export``: torchtitan or megatron.
        """
        best = self.finalists[0]
        _, write = EXPORTS[program]
        return write(self.model, best.choice, best.run.layers)

    def as_row(self) -> Mapping[str, Any]:
        """Plain data: what ``equipoise plan --json`` prints."""
        return self.lock.as_row()


def plan(
    request: PlanRequest | RunPlanRequest,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> PlanAnswer:
    """Search the layout that trains fastest.

    Args:
        request: A model on a described cluster, or a run on this machine.
        progress: Shown while a corpus is made and while choices are searched.
        say: Given a sentence before the search where prices were not measured.

    Raises:
        SpecError: a word is wrong, nothing is left to choose, or there was no time to find a
            layout that fits.
        LayoutError: more ranks than this machine has cores.
        FitError: no layout fits; says which cluster would do.
        DataError: lengths or a corpus cannot be read.

    Cost: at most ``request.seconds``, of one core or more.

    >>> answer = plan(PlanRequest("llama3-8b", "h100-sxm:8", 8192, 64, layout="cp=1,pp=1"))
    >>> answer.best.words["layout"], answer.bound_s <= answer.best.price["step_s"]
    ('dp=8,zero=3', True)
    """
    request = plain_fields(request)
    seconds = request.seconds
    if not seconds > 0:
        raise SpecError(f"seconds is {seconds:g}. Give a time above 0.")
    progress = progress or SilentProgress()
    if isinstance(request, PlanRequest) and request.expert_policy == ANY:
        one = partial(plan, progress=progress, say=say)
        answer, lock = search_policies(request, one, lambda each: each.lock)
        return dataclasses.replace(answer, lock=lock)
    due = Deadline.after(seconds)
    inputs: Inputs
    if isinstance(request, PlanRequest):
        inputs = read_inputs(request)
    else:
        inputs = run_inputs = read_run_inputs(request, progress=progress)
        due = Deadline.after(seconds)  # its corpus may have been made first
        if run_inputs.doubt and say is not None:
            say(run_inputs.doubt)
    search = inputs.search
    if request.out is not None:
        keep_priced(request.out, search, digest({"asked": inputs.asked, "read": inputs.read}))
    outcome = _search(inputs, due, seconds, progress)
    _require_some(seconds, inputs, outcome, due)
    finalists = inputs.finalists(outcome, due)
    if not finalists[0].run.price.fits:
        least = min(each.run.price.needs_bytes for each in finalists)
        raise _too_large(inputs, outcome.listed, least, due)
    lock = decide(inputs, outcome, finalists, due)
    return PlanAnswer(
        lock, tuple(finalists), search.model, math.isinf(inputs.unlisted_s), due.is_over()
    )


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
        row = step_row(each.run, search.machine, each.choice.options)
        sure = inputs.interval(each.run.price)
        row |= {"doubts": list(inputs.doubts)} | ({} if sure is None else interval_row(sure))
        stages = run_stages(each.choice, each.run) if keys else None
        return Candidate(words, row, apart, keys, stages)

    flip = None
    if len(finalists) > 1:
        second = finalists[1]
        flip = find_flip(best.terms, second.run.price.terms, second.choice.words()["layout"])
    # Bounds are of passes in which every weight is trained.
    is_whole = finalists[0].choice.options.trained is None
    bound = outcome.progress.bound_s if is_whole else 0.0
    if isinstance(inputs, RunInputs) and bound:  # 0 where nothing is bounded
        bound += inputs.beside_s(finalists[0])
    bound = min(bound, best.step_s, inputs.unlisted_s)
    gap = best.step_s / bound - 1.0 if bound > 0.0 else None
    doubt = gap_remark(outcome, gap) if math.isinf(inputs.unlisted_s) else None
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
        gap=gap,
        listed=outcome.listed,
        priced=outcome.progress.priced,
        wall=inputs.walls(finalists[0], due),
        flip=flip,
        nodes=finalists[0].nodes,
        read=inputs.read,
        sources=inputs.sources,
        without_offload=without,
        remarks=(*inputs.remarks(finalists, due), *([] if doubt is None else [doubt])),
    )


def _search(inputs: Inputs, due: Deadline, seconds: float, progress: Progress) -> Outcome:
    of_sites = isinstance(inputs, ClusterInputs) and inputs.has_sites
    shown, searched = 0, due.part(_SITES_SHARE if of_sites else _SEARCH_SHARE)

    def watch(_: object) -> None:
        nonlocal shown
        spent = 0.0 if math.isinf(seconds) else 1.0 - searched.left_s / seconds
        share = min(99, int(100 * spent))
        progress.advance(max(0, share - shown))
        shown = max(share, shown)

    progress.start("search", 100)
    outcome = inputs.search.run(seconds=searched.left_s, watch=watch)
    outcome = inputs.go_on(outcome, seconds=searched.left_s, watch=watch)
    progress.advance(100 - shown)
    progress.finish()
    return outcome


def _require_some(seconds: float, inputs: Inputs, outcome: Outcome, due: Deadline) -> None:
    """Refuse to plan what fits nowhere."""
    if outcome.fitting:
        return
    if outcome.progress.bound_s < float("inf"):
        raise SpecError(
            f"Within {seconds:g} s no layout that fits was found among {outcome.listed:,}. "
            f"Give more seconds, or fix more of the layout."
        )
    raise _too_large(inputs, outcome.listed, outcome.least_bytes, due)


def _too_large(inputs: Inputs, listed: int, least_bytes: float, due: Deadline) -> FitError:
    """How much is missing, and how large a cluster would do."""
    search = inputs.search
    cluster, capacity = search.machine.cluster, search.machine.capacity_bytes
    name = cluster.classes[0].name
    devices, resort = None, inputs.last_resort
    if cluster.name == f"{name}:{cluster.devices}" and len(cluster.classes) == 1:
        base = search.space.base
        of_all = search.model, name, cluster.devices, base
        devices = due.attempt(lambda: smallest_cluster(*of_all, offload=resort))
    fix = (
        f"The smallest that would do, by doubling: {name}:{devices}."
        if devices
        else "Give more devices, shorter windows or a smaller model."
    )
    beside = "" if resort == "none" else f", with offload = {resort},"
    needs = f"needs {least_bytes / GIB:.1f} GiB on its fullest rank, which has {capacity / GIB:.1f}"
    if least_bytes == float("inf"):
        share = search.machine.host_capacity_bytes
        needs = f"needs more host memory than a device's share of it, {share / GIB:.1f} GiB"
    return FitError(
        f"{inputs.name} does not fit {cluster.name}: of {listed:,} layouts the smallest{beside} "
        f"{needs}. {fix}"
    )
