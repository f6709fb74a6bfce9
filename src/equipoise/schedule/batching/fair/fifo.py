"""First come, first served."""

from collections.abc import Mapping

from equipoise.schedule.batching.fair.policy import FairJob, Key
from equipoise.schedule.batching.fair.queue import QueuedPolicy, WaitingQueue


class Fifo(QueuedPolicy):
    """Jobs in the order of their arrival, whoever sent them."""

    def __init__(self, weights: Mapping[str, float], grace_s: float) -> None:
        del weights, grace_s
        self._arrivals: dict[str, float] = {}
        self._queue = WaitingQueue(lambda *_: 0.0)

    @property
    def divides_by_tenant(self) -> bool:
        """Whether tenants have shares: whoever sends more gets more."""
        return False

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""
        del now_s
        self._arrivals[job.id] = job.arrival_s
        self.wait(job.id)

    def wait(self, job_id: str) -> None:
        """A job waits, or waits again."""
        self._queue.push("", self._arrivals[job_id], job_id)

    def key(self, job_id: str) -> Key:
        """By arrival."""
        return self._arrivals[job_id], 0.0, job_id

    def charge(self, job_id: str, work_s: float) -> None:
        """Work does not matter here."""

    def finish(self, job_id: str, now_s: float) -> None:
        """A job is gone."""
        del now_s
        del self._arrivals[job_id]
        self._queue.discard(job_id)
