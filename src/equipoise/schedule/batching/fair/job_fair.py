"""Equal shares for all jobs: who sends more of them gets more."""

from collections.abc import Mapping

from equipoise.schedule.batching.fair.clock import ShareClock
from equipoise.schedule.batching.fair.policy import FairJob, Key
from equipoise.schedule.batching.fair.queue import QueuedPolicy, WaitingQueue


class JobFair(QueuedPolicy):
    """The job that was served least since it came is next."""

    def __init__(self, weights: Mapping[str, float], grace_s: float) -> None:
        del grace_s
        self._weights = weights
        self._jobs: dict[str, FairJob] = {}
        self._clock = ShareClock()
        self._queue = WaitingQueue(lambda *_: 0.0)

    @property
    def divides_by_tenant(self) -> bool:
        """Whether tenants have shares: whoever sends more gets more."""
        return False

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""
        del now_s
        self._jobs[job.id] = job
        self._clock.join(job.id)
        self.wait(job.id)

    def wait(self, job_id: str) -> None:
        """A job waits, or waits again."""
        self._queue.push("", self._clock.tag(job_id), job_id)

    def key(self, job_id: str) -> Key:
        """By work served, then arrival."""
        return self._clock.tag(job_id), self._jobs[job_id].arrival_s, job_id

    def charge(self, job_id: str, work_s: float) -> None:
        """A job was served."""
        weight = self._weights.get(self._jobs[job_id].tenant, 1.0)
        self._clock.charge(job_id, work_s / weight, self._queue.first())

    def finish(self, job_id: str, now_s: float) -> None:
        """A job is gone."""
        del now_s
        self._queue.discard(job_id)
        self._clock.leave(job_id, is_forgotten=True)
        del self._jobs[job_id]
