"""Price every choice by a bound, then simulate those that may be among the best.

What it decides
    Choices are ordered by what people ask for: first as few requests refused as can be, then most
    requests that meet their objectives, then the least mean latency. A choice is left out only if
    its bound is no better than what was simulated already: than the fourth best, and than the best
    of its kind, together or apart. So the best and the next three are those of the whole space.

Kept true (tests/unit/plan/serving/test_search.py)
    The best is that of simulating every choice; a bound is never worse than its simulation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.data.progress import Progress
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.serving.bounds import Floor, Sizes, floor_of, least_mean_s
from equipoise.plan.serving.space import (
    ServingChoice,
    list_layouts,
    list_parts,
    require_some,
)
from equipoise.schedule.batching.fair.policy import MakePolicy
from equipoise.sim.serve.answer import Objective
from equipoise.sim.serve.curve import ServingDevice
from equipoise.sim.serve.lane import Ended
from equipoise.sim.serve.record import RequestRecord
from equipoise.sim.serve.request import ServingSite
from equipoise.sim.serve.run import Pool, ServedTrace, run_apart, run_trace
from equipoise.spec.layout import Layout
from equipoise.spec.request_trace import TracedRequest

Standing = tuple[int, float, float]
"""Requests refused, minus the share in time, mean latency [s]: less is better."""

_LOOK = 32
"""Requests that end between two looks at whether a choice is beaten."""

_ROUNDING = 1.0 - 1e-9
"""Sums in another order differ by less."""


class _BeatenError(Exception):
    """A choice cannot be among the best."""


KEPT = 4
"""The best, and the next three."""


@dataclass(frozen=True, slots=True, eq=False)
class PricedPool:
    """Replicas of a layout somewhere on the cluster, and what no schedule of theirs undercuts."""

    layout: Layout
    replica: ServingDevice
    pool: Pool
    floor: Floor

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that can run."""
        return self.pool.settings.pages * self.pool.settings.page_tokens


@dataclass(frozen=True, slots=True, eq=False)
class ServingCandidate:
    """A choice that fits, with its bound."""

    choice: ServingChoice
    prompts: PricedPool
    outputs: PricedPool | None
    bound: Standing


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """A choice whose trace was served."""

    candidate: ServingCandidate
    run: ServedTrace
    standing: Standing


@dataclass(slots=True)
class ServingOutcome:
    """What a search has seen."""

    best: list[Simulated] = field(default_factory=list)
    """Simulated choices, best first."""
    listed: int = 0
    """Choices in the space."""
    unfit: int = 0
    """Those that do not fit, or were not measured."""
    left_out: int = 0
    """Those whose bound says that they are not among the best."""
    is_whole: bool = True
    """Whether time sufficed for all."""
    bound: Standing = (0, -1.0, 0.0)
    """No choice is better than this."""
    refusal: str = ""
    """Why a choice does not fit."""


class ServingSearch:
    """A trace, a site, and the choices for them."""

    def __init__(
        self,
        site: ServingSite,
        trace: Sequence[TracedRequest],
        objectives: Mapping[str, Objective],
        make_policy: MakePolicy,
        fixed: Mapping[str, int],
    ) -> None:
        self.site, self.trace = site, tuple(sorted(trace))
        self._make_policy = make_policy
        self._fixed = fixed
        self._sizes = Sizes.of(self.trace)
        plain = objectives.get("", Objective())
        mine = [objectives.get(each.tenant, plain) for each in self.trace]
        self._objectives = mine if objectives else None
        self._ttft_s = np.array([each.ttft_s for each in mine])
        self._tpot_s = np.array([each.tpot_s for each in mine])
        self._floors: dict[tuple[int, ...], tuple[ServingDevice, Floor] | str] = {}

    def run(self, due: Deadline, progress: Progress) -> ServingOutcome:
        """Search until everything is decided, or the time is over."""
        outcome = ServingOutcome()
        candidates = self._candidates(outcome, due, progress)
        outcome.is_whole = not due.is_over()
        candidates.sort(key=lambda each: each.bound)
        progress.start("simulate", len(candidates))
        for at, candidate in enumerate(candidates):
            progress.advance()
            if self._is_beaten(candidate, candidate.bound, outcome) or self._is_beaten(
                candidate, self._crowded(candidate), outcome
            ):
                outcome.left_out += 1
                continue
            try:
                run = due.attempt(lambda each=candidate: self._serve(each, outcome))  # type: ignore[misc]
            except _BeatenError:
                outcome.left_out += 1
                continue
            if run is None:
                if outcome.is_whole:
                    outcome.bound = min(each.bound for each in candidates[at:])
                outcome.is_whole = False
                break
            outcome.best.append(Simulated(candidate, run, self._standing(run)))
            outcome.best.sort(key=lambda each: each.standing)
        progress.finish()
        if outcome.best:
            first = outcome.best[0].standing
            outcome.bound = first if outcome.is_whole else min(first, outcome.bound)
        return outcome

    def alone(self, candidate: ServingCandidate) -> tuple[Floats, Floats]:
        """Seconds to the first token, and from there to the last, that requests take at least."""
        return candidate.prompts.floor.prompt_s, (
            candidate.outputs or candidate.prompts
        ).floor.later_s

    def sent_s(self, candidate: ServingCandidate) -> Callable[[int], float] | None:
        """What it takes to send a number of tokens to the replicas that generate [s]."""
        outputs = candidate.outputs
        if outputs is None:
            return None
        first = candidate.prompts.layout.world
        return self.site.send_s(candidate.prompts.replica, outputs.replica, first)

    # The space.

    def _candidates(
        self, outcome: ServingOutcome, due: Deadline, progress: Progress
    ) -> list[ServingCandidate]:
        devices, model = self.site.machine.cluster.devices, self.site.model
        machine = self.site.machine
        together = list_layouts(model, machine, devices, self._fixed)
        # This machine's engine computes prompts where it generates.
        parts = [] if self.site.is_here else list_parts(devices)
        split = [
            (
                list_layouts(model, machine, part, self._fixed),
                list_layouts(model, machine, devices - part, self._fixed),
            )
            for part in parts
        ]
        outcome.listed = len(together) + sum(len(one) * len(two) for one, two in split)
        require_some(outcome.listed, self._fixed, devices)
        progress.start("price", len(together) + sum(len(one) + len(two) for one, two in split))
        candidates = []
        for pool in self._priced(together, 0, due, progress):
            bound = self._bound(pool, None)
            candidates.append(ServingCandidate(ServingChoice(pool.layout), pool, None, bound))
        for part, (one, two) in zip(parts, split, strict=True):
            prompts = self._priced(one, 0, due, progress)
            outputs = self._priced(two, part, due, progress)
            for first in prompts:
                for second in outputs:
                    choice = ServingChoice(first.layout, second.layout)
                    bound = self._bound(first, second)
                    candidates.append(ServingCandidate(choice, first, second, bound))
        progress.finish()
        outcome.unfit = 0 if due.is_over() else outcome.listed - len(candidates)
        refusals = [each for each in self._floors.values() if isinstance(each, str)]
        outcome.refusal = refusals[0] if refusals else ""
        return candidates

    def _priced(
        self, layouts: Sequence[Layout], first: int, due: Deadline, progress: Progress
    ) -> list[PricedPool]:
        pools = []
        for layout in layouts:
            progress.advance()
            if due.is_over():
                break
            known = self._floor(layout, first)
            if not isinstance(known, str):
                replica, floor = known
                pools.append(PricedPool(layout, replica, self.site.pool(replica, layout), floor))
        return pools

    def _floor(self, layout: Layout, first: int) -> tuple[ServingDevice, Floor] | str:
        """One replica and its floor, or why it does not fit; alike for equal neighbours."""
        size = layout.tp * layout.cp * layout.pp
        cluster = self.site.machine.cluster
        node = cluster.classes[0].devices_per_node if cluster.is_uniform else cluster.devices
        places = {(first + at * size) % node for at in range(layout.dp)}
        key = (layout.tp, layout.cp, layout.pp, layout.ep, *sorted(places))
        if key not in self._floors:
            try:
                replica = self.site.replica(layout, first)
            except (FitError, LayoutError, SpecError) as error:
                self._floors[key] = str(error)
            else:
                pool = self.site.pool(replica, layout)
                self._floors[key] = replica, floor_of(replica.price, pool.settings, self._sizes)
        return self._floors[key]

    # Bounds and simulations.

    def _bound(self, prompts: PricedPool, outputs: PricedPool | None) -> Standing:
        """What a choice is at best, if every request had a replica of its own."""
        generating = outputs or prompts
        sizes = self._sizes
        prompt_s, later_s = prompts.floor.prompt_s, generating.floor.later_s
        is_refused = sizes.prompt + sizes.most > generating.most_tokens
        if outputs is not None:
            is_refused &= sizes.output > 0
            is_refused |= sizes.prompt + np.minimum(1.0, sizes.most) > prompts.most_tokens
        served = ~is_refused
        refused = int(is_refused.sum())
        if not served.any():
            return refused, 0.0, 0.0
        share = 1.0
        if self._objectives is not None:
            per_token_s = later_s / np.maximum(1.0, sizes.later)
            is_good = (prompt_s <= self._ttft_s) & (per_token_s <= self._tpot_s)
            share = float(is_good[served].mean())
        return refused, -share, float((prompt_s + later_s)[served].mean())

    def _crowded(self, candidate: ServingCandidate) -> Standing:
        """The same, if all replicas together were one machine."""
        refused, share, latency_s = candidate.bound
        if refused:
            return candidate.bound
        prompts, outputs, sizes = candidate.prompts, candidate.outputs, self._sizes
        floor = prompts.floor
        if outputs is None:
            works = floor.prompt_work_s + floor.later_work_s
            crowded_s = least_mean_s(sizes.arrival_s, works, prompts.layout.dp)
            return refused, share, max(latency_s, crowded_s)
        first_s = least_mean_s(sizes.arrival_s, floor.prompt_work_s, prompts.layout.dp)
        later = outputs.floor
        sent_s = sizes.arrival_s + floor.prompt_s
        last_s = least_mean_s(sent_s, later.later_work_s, outputs.layout.dp)
        latency_s = max(
            latency_s,
            first_s + float(later.later_s.mean()),
            last_s + float(floor.prompt_s.mean()),
        )
        return refused, share, latency_s

    def _is_beaten(
        self, candidate: ServingCandidate, bound: Standing, outcome: ServingOutcome
    ) -> bool:
        best = outcome.best
        if len(best) < KEPT or bound < best[KEPT - 1].standing:
            return False
        kind = candidate.choice.is_apart
        alike = [each.standing for each in best if each.candidate.choice.is_apart == kind]
        return bool(alike) and bound >= alike[0]

    def _serve(self, candidate: ServingCandidate, outcome: ServingOutcome) -> ServedTrace:
        prompts, outputs = candidate.prompts, candidate.outputs
        send_s = self.sent_s(candidate)
        watch = self._watch(candidate, outcome)
        make = self._make_policy
        if outputs is None or send_s is None:
            pool = prompts.pool
            return run_trace(
                self.trace, pool.settings, pool.price, make, replicas=pool.replicas, ended=watch
            )
        return run_apart(self.trace, prompts.pool, outputs.pool, send_s, make, ended=watch)

    def _watch(self, candidate: ServingCandidate, outcome: ServingOutcome) -> Ended:
        """End a simulation as soon as what has ended, and bounds of the rest, say enough."""
        prompt_s, later_s = self.alone(candidate)
        alone_s = (prompt_s + later_s).tolist()
        refused, _, latency_s = self._crowded(candidate)
        count, goals = len(self.trace), self._objectives
        least_s, missed, at = sum(alone_s), 0, 0

        def watch(record: RequestRecord) -> None:
            nonlocal least_s, missed, at
            number = int(record.id)
            least_s += record.latency_s - alone_s[number]
            missed += goals is not None and not goals[number].is_met(record)
            at += 1
            if at % _LOOK == 0:
                mean_s = max(latency_s, _ROUNDING * least_s / count)
                share = 1.0 if goals is None else 1.0 - missed / count
                if not refused and self._is_beaten(candidate, (0, -share, mean_s), outcome):
                    raise _BeatenError

        return watch

    def _standing(self, run: ServedTrace) -> Standing:
        served = run.requests
        if not served:
            return len(run.refused), 0.0, 0.0
        share = 1.0
        if self._objectives is not None:
            mine = dict(zip(self.trace, self._objectives, strict=True))
            share = sum(mine[each.traced].is_met(each) for each in served) / len(served)
        mean_s = sum(each.latency_s for each in served) / len(served)
        return len(run.refused), -share, mean_s
