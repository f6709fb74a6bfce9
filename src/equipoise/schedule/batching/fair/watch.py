"""What each tenant was served, and how far apart tenants are that wait at the same time.

What it decides
    The gap is read from virtual counters, whatever the policy that is watched: a tenant's counter
    rises by the work it was served over its weight, and a tenant that comes to wait is lifted to
    the least counter of those that wait already, or to that of the tenant that waited last. So the
    gap counts what happened while tenants waited side by side, and not what one did while the
    others were away. VTC keeps it below a bound; under ``fifo`` it grows for as long as one tenant
    sends more than another.

Kept true (tests/unit/schedule/batching/fair/test_watch.py)
    A watched policy decides as it does by itself; under VTC the gap stays below that policy's
    bound.

Sources
    Virtual token counters: Sheng et al., arXiv:2401.00588, algorithm 2.
"""

from collections import Counter
from collections.abc import Mapping

from equipoise.schedule.batching.fair.policy import FairJob, FairPolicy, Key, MakePolicy


class WatchedPolicy:
    """A policy whose calls are counted on their way."""

    def __init__(self, policy: FairPolicy, weights: Mapping[str, float]) -> None:
        self._policy, self._weights = policy, weights
        self.served_s: dict[str, float] = {}
        """Predicted seconds of work that each tenant was served."""
        self._counters: dict[str, float] = {}
        self._tenants: dict[str, str] = {}
        """The tenant of every job that is here."""
        self._waiting: set[str] = set()
        self._counts = Counter[str]()
        """Jobs of each tenant that wait."""
        self._last: list[str] = []
        """The tenant that waited last, once there is one."""

    @property
    def divides_by_tenant(self) -> bool:
        """Whether tenants have shares."""
        return self._policy.divides_by_tenant

    @property
    def gap_s(self) -> float:
        """Most less least counter of the tenants that wait; 0 where fewer than two do [s]."""
        counters = [self._counters[tenant] for tenant in self._counts]
        return max(counters) - min(counters) if counters else 0.0

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""
        self._policy.arrive(job, now_s)
        self._tenants[job.id] = job.tenant
        self._enter(job.id)

    def first(self) -> str | None:
        """The most deserving of those that wait."""
        return self._policy.first()

    def take(self, job_id: str, ahead_s: float) -> None:
        """A job waits no longer."""
        self._policy.take(job_id, ahead_s)
        self._leave(job_id)

    def wait(self, job_id: str) -> None:
        """A job waits again."""
        self._policy.wait(job_id)
        self._enter(job_id)

    def key(self, job_id: str) -> Key:
        """The present order of any job."""
        return self._policy.key(job_id)

    def charge(self, job_id: str, work_s: float) -> None:
        """A job was served."""
        self._policy.charge(job_id, work_s)
        tenant = self._tenants[job_id]
        self.served_s[tenant] = self.served_s.get(tenant, 0.0) + work_s
        self._counters[tenant] += work_s / self._weights.get(tenant, 1.0)

    def finish(self, job_id: str, now_s: float) -> None:
        """A job is gone."""
        self._policy.finish(job_id, now_s)
        self._leave(job_id)
        del self._tenants[job_id]

    def _enter(self, job_id: str) -> None:
        tenant = self._tenants[job_id]
        counter = self._counters.get(tenant, 0.0)
        if tenant not in self._counts:
            beside = [*self._counts] or self._last
            counter = max(counter, min((self._counters[each] for each in beside), default=0.0))
        self._counters[tenant] = counter
        self._counts[tenant] += 1
        self._waiting.add(job_id)

    def _leave(self, job_id: str) -> None:
        if job_id not in self._waiting:
            return
        self._waiting.remove(job_id)
        tenant = self._tenants[job_id]
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
            self._last = [tenant]


def watch(make_policy: MakePolicy) -> MakePolicy:
    """The same policy, watched."""
    return lambda weights, grace_s: WatchedPolicy(make_policy(weights, grace_s), weights)
