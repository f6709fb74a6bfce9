"""Equal shares for all tenants that have work, and within a tenant for all of its jobs."""

from collections.abc import Mapping

from equipoise.schedule.batching.fair.clock import ShareClock
from equipoise.schedule.batching.fair.policy import FairJob, Key
from equipoise.schedule.batching.fair.queue import QueuedPolicy, WaitingQueue


class UserFair(QueuedPolicy):
    """The tenant that was served least is next, with the job that was served least."""

    def __init__(self, weights: Mapping[str, float], grace_s: float) -> None:
        del grace_s
        self._weights = weights
        self._jobs: dict[str, FairJob] = {}
        self._counts: dict[str, int] = {}
        """Jobs of each tenant that has any."""
        self._tenants = ShareClock()
        self._within: dict[str, ShareClock] = {}
        self._queue = WaitingQueue(lambda tenant, _: self._tenants.tag(tenant))

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""
        del now_s
        tenant = job.tenant
        self._jobs[job.id] = job
        if tenant not in self._counts:
            self._counts[tenant] = 0
            self._tenants.join(tenant)
            self._within[tenant] = ShareClock()
        self._counts[tenant] += 1
        self._within[tenant].join(job.id)
        self.wait(job.id)

    def wait(self, job_id: str) -> None:
        """A job waits, or waits again."""
        tenant = self._jobs[job_id].tenant
        self._queue.push(tenant, self._within[tenant].tag(job_id), job_id)

    def key(self, job_id: str) -> Key:
        """By work served to the tenant, then to the job."""
        tenant = self._jobs[job_id].tenant
        return self._tenants.tag(tenant), self._within[tenant].tag(job_id), job_id

    def charge(self, job_id: str, work_s: float) -> None:
        """A job was served."""
        tenant = self._jobs[job_id].tenant
        first = self._queue.first()
        other = None if first is None else self._jobs[first].tenant
        self._tenants.charge(tenant, work_s / self._weights.get(tenant, 1.0), other)
        self._within[tenant].charge(job_id, work_s, self._queue.first_of(tenant))

    def finish(self, job_id: str, now_s: float) -> None:
        """A job is gone."""
        del now_s
        self._queue.discard(job_id)
        tenant = self._jobs.pop(job_id).tenant
        self._within[tenant].leave(job_id, is_forgotten=True)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._within[tenant]
            self._tenants.leave(tenant, is_forgotten=False)
