"""Virtual token counters: the tenant that was served least is next, first come, first served.

What it decides
    A tenant's counter is the work it was served over its weight. A prompt is charged when it is
    taken, what it generates as it is generated; what is left of a prompt is given back if the job
    stops. A tenant that comes with nothing waiting is lifted to the least counter of those that
    wait; if nobody waits, to that of the tenant that waited last.

Kept true (tests/unit/schedule/batching/fair/test_policies.py)
    Counters of two tenants that both wait all the time differ by at most the larger of the longest
    prompt's work and the work of all tokens that fit the pool; so does, twice, their service.

Sources
    Sheng et al., arXiv:2401.00588, algorithm 2 and theorem 4.4; in predicted seconds in place of
    weighted tokens (section 4.2, general cost functions).
"""

from collections.abc import Mapping

from equipoise.schedule.batching.fair.policy import FairJob, Key
from equipoise.schedule.batching.fair.queue import QueuedPolicy, WaitingQueue


class Vtc(QueuedPolicy):
    """The tenant with the least counter is next."""

    def __init__(self, weights: Mapping[str, float], grace_s: float) -> None:
        del grace_s
        self._weights = weights
        self._jobs: dict[str, FairJob] = {}
        self._ahead_s: dict[str, float] = {}
        """Work that is charged already, but not done."""
        self.counters: dict[str, float] = {}
        self._last: str | None = None
        """The tenant whose job left the queue last."""
        self._queue = WaitingQueue(lambda tenant, _: self.counters[tenant])

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""
        del now_s
        self._jobs[job.id] = job
        self._ahead_s[job.id] = 0.0
        self._lift(job.tenant)
        self._queue.push(job.tenant, job.arrival_s, job.id)

    def _lift(self, tenant: str) -> None:
        counter = self.counters.get(tenant, 0.0)
        if not self._queue.has_group(tenant):
            first = self._queue.first()
            reached = self._last if first is None else self._jobs[first].tenant
            if reached is not None:
                counter = max(counter, self.counters[reached])
        self.counters[tenant] = counter

    def take(self, job_id: str, ahead_s: float) -> None:
        """A job waits no longer; its prompt is charged."""
        self._queue.remove(job_id)
        self._last = self._jobs[job_id].tenant
        self._ahead_s[job_id] = ahead_s
        self._add(job_id, ahead_s)

    def wait(self, job_id: str) -> None:
        """A job waits again; it is not new, so nothing is lifted."""
        self._refund(job_id)
        job = self._jobs[job_id]
        self._queue.push(job.tenant, job.arrival_s, job_id)

    def key(self, job_id: str) -> Key:
        """By the tenant's counter, then arrival."""
        job = self._jobs[job_id]
        return self.counters[job.tenant], job.arrival_s, job_id

    def charge(self, job_id: str, work_s: float) -> None:
        """A job was served: first what was charged ahead."""
        ahead_s = min(work_s, self._ahead_s[job_id])
        self._ahead_s[job_id] -= ahead_s
        self._add(job_id, work_s - ahead_s)

    def finish(self, job_id: str, now_s: float) -> None:
        """A job is gone; what was charged ahead is given back."""
        del now_s
        self._queue.discard(job_id)
        self._refund(job_id)
        del self._jobs[job_id], self._ahead_s[job_id]

    def _refund(self, job_id: str) -> None:
        self._add(job_id, -self._ahead_s[job_id])
        self._ahead_s[job_id] = 0.0
        self._queue.recheck(self._jobs[job_id].tenant)

    def _add(self, job_id: str, work_s: float) -> None:
        tenant = self._jobs[job_id].tenant
        self.counters[tenant] += work_s / self._weights.get(tenant, 1.0)
