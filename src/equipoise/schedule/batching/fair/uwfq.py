"""User weighted fair queuing: deadlines from a fluid device that is shared equally by users.

Why
    Equal shares make everybody's jobs end late. The same shares spent on one job after the other
    let most end early: short jobs of a tenant that asks for little go first, and a tenant that asks
    for much loses nothing.

What it decides
    The *fluid* device serves all users with unfinished jobs at once, each in proportion to its
    weight. Its clock V (work per unit of weight) runs on: each second of work that is charged
    moves it by one over the sum of active weights, piecewise, up to each user's last deadline.
    Jobs are ordered by their deadlines in V (``UserChain``).

    V follows work that was done, not the time of day: the fluid device is as fast as the real one,
    whatever predictions are off by.

    A job that takes more work than estimated is chained once more, with as much again. When a job
    ends or is aborted, its size becomes the work it was really served. A user that comes back
    begins at V; at its last deadline instead, if within a grace period after the last stage of the
    same job.

Kept true (tests/unit/schedule/batching/fair/test_uwfq.py)
    Where estimates are right, no user ends its work later than in the fluid device by more than the
    longest chunk, nor does any job where those of a user come together; a user's last deadline does
    not depend on how its work is cut into jobs; what is charged moves the fluid device by as much.

Sources
    UWFQ, arXiv:2510.15485.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from equipoise.schedule.batching.fair.chain import ChainLink, UserChain
from equipoise.schedule.batching.fair.policy import FairJob, Key
from equipoise.schedule.batching.fair.queue import QueuedPolicy, WaitingQueue

_ROUNDING = 1e-9
"""Share of a job's work by which sums of its parts may differ from it."""
_LOST = 1e-3
"""A sum of weights that has fallen to this share has lost digits, and is added up anew."""


@dataclass(slots=True)
class _Chained:
    """A job in its user's chain."""

    job: FairJob
    chain: UserChain
    link: ChainLink
    planned_s: float
    done_s: float = 0.0


class Uwfq(QueuedPolicy):
    """The job with the earliest virtual deadline is next."""

    def __init__(self, weights: Mapping[str, float], grace_s: float) -> None:
        self._weights = weights
        self._grace_s = grace_s
        self._jobs: dict[str, _Chained] = {}
        self._users: dict[str, UserChain] = {}
        self._now = 0.0
        """V."""
        self._active: dict[str, UserChain] = {}
        self._weight = 0.0
        """Sum over active users."""
        self._most_weight = 0.0
        """The largest it was since it was added up."""
        self._ends: list[tuple[float, str]] = []
        """(last deadline, user), also outdated ones."""
        self._queue = WaitingQueue(self._standing)

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""
        chain = self._users.get(job.tenant)
        if chain is None:
            weight = self._weights.get(job.tenant, 1.0)
            chain = self._users[job.tenant] = UserChain(job.tenant, weight, self._now)
        last_s = chain.stages.get(job.stage_of)
        is_stage = last_s is not None and now_s - last_s <= self._grace_s
        chain.advance(self._now)
        work = job.work_s / chain.weight
        link = chain.append(job.id, job.arrival_s, work, self._now, is_stage=is_stage)
        self._jobs[job.id] = _Chained(job, chain, link, job.work_s)
        self._activate(chain)
        self._queue.push(job.tenant, link.place[0], job.id)

    def wait(self, job_id: str) -> None:
        """A job that was taken waits again; its deadline stays."""
        chained = self._jobs[job_id]
        self._queue.push(chained.job.tenant, chained.link.place[0], job_id)

    def key(self, job_id: str) -> Key:
        """By deadline, then arrival."""
        chained = self._jobs[job_id]
        return chained.chain.deadline(chained.link), chained.job.arrival_s, job_id

    def charge(self, job_id: str, work_s: float) -> None:
        """A job was served: the fluid device serves as much."""
        chained = self._jobs[job_id]
        chain = chained.chain
        chained.done_s = done_s = chained.done_s + work_s
        chain.serve(chained.link, work_s / chain.weight)
        self._serve(work_s)
        planned_s = chained.planned_s
        if done_s > planned_s * (1.0 + _ROUNDING):
            more_s = max(planned_s, done_s - planned_s)
            chain.advance(self._now)
            chain.leave(chained.link, self._now)
            work = more_s / chain.weight
            chained.link = chain.append(job_id, chained.job.arrival_s, work, self._now)
            chained.planned_s += more_s
            self._activate(chain)

    def finish(self, job_id: str, now_s: float) -> None:
        """A job is gone; its size is corrected to what it was served."""
        self._queue.discard(job_id)
        chained = self._jobs.pop(job_id)
        chain = chained.chain
        chain.advance(self._now)
        chain.change(chained.link, (chained.done_s - chained.planned_s) / chain.weight)
        chain.leave(chained.link, self._now)
        stages = {name: at for name, at in chain.stages.items() if now_s - at <= self._grace_s}
        if chained.job.stage_of:
            stages[chained.job.stage_of] = now_s
        chain.stages = stages
        self._activate(chain)
        self._queue.recheck(chain.name)

    def _standing(self, _: str, head: str) -> float:
        chained = self._jobs[head]
        return chained.chain.deadline(chained.link)

    def _activate(self, chain: UserChain) -> None:
        """A user's last deadline has changed."""
        if chain.end > self._now:
            heappush(self._ends, (chain.end, chain.name))
            if chain.name not in self._active:
                self._active[chain.name] = chain
                self._weight += chain.weight
                self._most_weight = max(self._most_weight, self._weight)
        elif chain.name in self._active:
            self._rest(chain)

    def _rest(self, chain: UserChain) -> None:
        del self._active[chain.name]
        self._weight -= chain.weight
        if self._weight < _LOST * self._most_weight:
            self._weight = math.fsum(each.weight for each in self._active.values())
            self._most_weight = self._weight
        chain.advance(self._now)
        chain.rest()

    def _serve(self, work_s: float) -> None:
        """Let V run on by this much work."""
        ends, active = self._ends, self._active
        while work_s > 0 and ends:
            end, name = ends[0]
            chain = active.get(name)
            if chain is None or chain.end != end:
                heappop(ends)
                continue
            needed_s = (end - self._now) * self._weight
            if needed_s > work_s:
                self._now += work_s / self._weight
                return
            work_s -= needed_s
            self._now = end
            heappop(ends)
            self._rest(chain)
