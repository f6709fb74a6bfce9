"""Which replicas serve a trace of requests best on a cluster: one call.

What it decides
    What is said of each choice: its words, what ``equipoise simulate --requests`` prints of it, and
    where the mean latency goes.

Kept true (tests/unit/plan/serving/test_search.py, tests/unit/cli/plan/test_requests.py)
    The answer is what ``equipoise plan --requests --json`` prints; its prices are those of
    ``simulate`` for the same words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.base.errors import FitError, SpecError
from equipoise.cost.step.request import Precision
from equipoise.data.progress import Progress, SilentProgress
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.serving.search import KEPT, ServingOutcome, ServingSearch, Simulated
from equipoise.plan.serving.space import ServingChoice, read_fixed
from equipoise.schedule.batching.fair.table import DEFAULT_POLICY, find_policy
from equipoise.sim.serve.answer import Objective, ServingAnswer
from equipoise.sim.serve.request import open_site, read_trace
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.request_trace import TracedRequest

SECONDS = 60.0
"""A search's budget unless one is given."""

_FULL = 0.98
"""Share of the pages beyond which waiting is put down to memory."""


@dataclass(frozen=True, slots=True)
class ServingPlanRequest:
    """A trace to be served on a described cluster, or on this machine.

    Names and words are those of ``equipoise plan --requests``; what is not given is searched.
    """

    requests: str | Path | Sequence[TracedRequest]
    """A trace file, or the requests."""
    model: str | ModelSpec
    cluster: str | ClusterSpec
    layout: str | None = None
    """Degrees that every replica has, as ``tp=4,cp=1``."""
    precision: Precision = "bf16"
    fair: str = DEFAULT_POLICY
    """Policy of fairness between tenants."""
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By tenant; "" for those not named."""
    expert_skew: float = 1.0
    """Rows of the expert rank that the router prefers most, over the mean [ratio]."""
    seconds: float = SECONDS
    """The most to price and simulate."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedServing:
    """A choice, served."""

    choice: ServingChoice
    answer: ServingAnswer
    """What ``simulate_serving`` answers."""
    spent_s: Mapping[str, float]
    """Where the mean latency goes [s]: ``waiting`` for a turn or for pages, computing ``prompts``,
    ``sending`` keys and values, ``decoding`` as if alone, and what that loses by ``batching`` with
    what runs beside. They add up to it."""
    latency_s: float
    """Mean time from arrival to the last token [s]."""

    @property
    def bounded_by(self) -> str:
        """What most of the mean latency is spent on: a name in ``spent_s``, or ``memory``.

        Waiting is put down to memory where keys and values fill it.
        """
        name = max(self.spent_s, key=lambda each: self.spent_s[each])
        is_full = name == "waiting" and max(self.answer.as_row()["kv_peak"]) >= _FULL
        return "memory" if is_full else name

    def as_row(self) -> dict[str, Any]:
        """Plain data."""
        words = self.choice.words()
        return {
            "words": words,
            "flags": " ".join(f"--{name} {value}" for name, value in words.items()),
            "latency_s": self.latency_s,
            "parts": dict(self.spent_s),
            "bounded_by": self.bounded_by,
            "price": self.answer.as_row(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class ServingPlanAnswer:
    """The replicas that serve a trace best, and what was left behind."""

    best: PlannedServing
    runners_up: tuple[PlannedServing, ...]
    """The next three at most, and the best of the other kind, together or apart."""
    listed: int
    """Choices in the space."""
    unfit: int
    """Those that do not fit, or whose engine was not measured on this machine."""
    left_out: int
    """Those that a bound left out."""
    simulated: int
    is_whole: bool
    """Whether there was time for all of them."""
    bound_s: float
    """No choice that refuses as few requests, with as many in time, has less mean latency; 0 if
    there was no time to know."""

    @property
    def gap(self) -> float | None:
        """The best's mean latency over ``bound_s``, minus 1; None without a bound."""
        return self.best.latency_s / self.bound_s - 1.0 if self.bound_s > 0.0 else None

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise plan --requests --json`` prints."""
        return {
            "best": self.best.as_row(),
            "runners_up": [each.as_row() for each in self.runners_up],
            "listed": self.listed,
            "unfit": self.unfit,
            "left_out": self.left_out,
            "simulated": self.simulated,
            "is_whole": self.is_whole,
            "bound_s": self.bound_s,
            "gap": self.gap,
        }


def plan_serving(
    request: ServingPlanRequest, *, progress: Progress | None = None
) -> ServingPlanAnswer:
    """Search the replicas that serve a trace best.

    Best is what refuses fewest requests, then what meets most objectives, then what has the least
    mean latency from arrival to last token.

    Args:
        request: What is asked.
        progress: Shown while choices are priced, and while they are simulated.

    Raises:
        DataError: the trace cannot be read.
        FitError: nothing fits the cluster.
        SpecError: a word is wrong, nothing is left to choose, or there was no time to simulate one.

    Cost: at most ``request.seconds`` of one core.
    """
    if not request.seconds > 0:
        raise SpecError(f"seconds is {request.seconds:g}. Give a time above 0.")
    due = Deadline.after(request.seconds)
    make_policy = find_policy(request.fair)
    trace = read_trace(request.requests, request.objectives, request.model)
    site = open_site(
        request.model,
        request.cluster,
        request.precision,
        requests=len(trace),
        expert_skew=request.expert_skew,
    )
    fixed = read_fixed(request.layout)
    search = ServingSearch(site, trace, request.objectives, make_policy, fixed)
    outcome = search.run(due, progress or SilentProgress())
    _require_some(request, outcome)
    kept = _kept(outcome.best)
    planned = [_planned(request, search, each) for each in kept]
    return ServingPlanAnswer(
        planned[0],
        tuple(planned[1:]),
        outcome.listed,
        outcome.unfit,
        outcome.left_out,
        len(outcome.best),
        outcome.is_whole,
        _bound_s(outcome),
    )


def _require_some(request: ServingPlanRequest, outcome: ServingOutcome) -> None:
    if outcome.best:
        return
    if outcome.unfit == outcome.listed:
        raise FitError(
            f"None of {outcome.listed:,} layouts can be served. The first of them: "
            f"{outcome.refusal}"
        )
    raise SpecError(
        f"Within {request.seconds:g} s none of {outcome.listed:,} choices was simulated. Give more "
        "seconds, fix more of the layout, or give fewer requests."
    )


def _kept(best: Sequence[Simulated]) -> list[Simulated]:
    """The best and the next three, and the best of the other kind."""
    kept = list(best[:KEPT])
    kinds = {each.candidate.choice.is_apart for each in kept}
    other = [each for each in best[KEPT:] if each.candidate.choice.is_apart not in kinds]
    return kept + other[:1]


def _planned(
    request: ServingPlanRequest, search: ServingSearch, simulated: Simulated
) -> PlannedServing:
    candidate, run = simulated.candidate, simulated.run
    site, outputs = search.site, candidate.outputs
    answer = ServingAnswer(
        run,
        candidate.prompts.replica,
        site.machine.device,
        request.fair,
        request.objectives,
        site.model,
        site.machine.peak_flop_per_s(request.precision),
        None if outputs is None else outputs.replica,
    )
    prompt_s, later_s = search.alone(candidate)
    at = {id(each): place for place, each in enumerate(search.trace)}
    served = [at[id(each.traced)] for each in run.requests]
    count = max(1, len(run.requests))
    ttft_s = sum(each.ttft_s for each in run.requests) / count
    rest_s = sum(each.end_s - each.first_s for each in run.requests) / count
    prompts_s = float(prompt_s[served].mean()) if served else 0.0
    alone_s = float(later_s[served].mean()) if served else 0.0
    sent_s = sum(seconds for _, seconds in run.sent) / count
    parts = {
        "waiting": ttft_s - prompts_s,
        "prompts": prompts_s,
        "sending": sent_s,
        "decoding": alone_s,
        "batching": rest_s - alone_s - sent_s,
    }
    return PlannedServing(candidate.choice, answer, parts, simulated.standing[2])


def _bound_s(outcome: ServingOutcome) -> float:
    """The mean latency that nothing undercuts, where it compares with the best's."""
    first = outcome.best[0].standing
    return outcome.bound[2] if outcome.bound[:2] == first[:2] else 0.0
