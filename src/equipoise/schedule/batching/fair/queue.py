"""Waiting jobs in groups: the first job of the most deserving group.

Why
    Thousands may wait, and a tenant's standing changes with every iteration. Only the standing of
    groups is looked up again, and only when they come to the top.

Kept true (tests/unit/schedule/batching/fair/test_policies.py, by Hypothesis)
    ``first`` is the job with the least (group's key, job's key), as by a full search.
"""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

JobKey = tuple[float, str]
"""Order within a group, the job's id last."""

GroupKey = Callable[[str, str], float]
"""Present standing of a group, from its name and its first job."""


class WaitingQueue:
    """Jobs that wait. A group's key may rise at any time; where it may fall, ``recheck`` it."""

    def __init__(self, group_key: GroupKey) -> None:
        self._group_key = group_key
        self._jobs: dict[str, tuple[str, JobKey]] = {}
        self._heaps: dict[str, list[JobKey]] = {}
        self._groups: list[tuple[float, str]] = []
        self._listed: dict[str, float] = {}
        """The one valid key of each group in ``_groups``."""
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def has_group(self, group: str) -> bool:
        """Whether a job of the group waits."""
        return group in self._counts

    def push(self, group: str, order: float, job_id: str) -> None:
        """A job waits."""
        self._jobs[job_id] = group, (order, job_id)
        self._counts[group] = self._counts.get(group, 0) + 1
        heappush(self._heaps.setdefault(group, []), (order, job_id))
        self.recheck(group)

    def remove(self, job_id: str) -> None:
        """A job waits no longer."""
        group, _ = self._jobs.pop(job_id)
        self._counts[group] -= 1
        if not self._counts[group]:
            del self._counts[group], self._heaps[group]
            self._listed.pop(group, None)

    def discard(self, job_id: str) -> None:
        """A job waits no longer, if it did."""
        if job_id in self._jobs:
            self.remove(job_id)

    def recheck(self, group: str) -> None:
        """A group's key may have fallen."""
        head = self._head(group)
        if head is None:
            return
        key = self._group_key(group, head)
        listed = self._listed.get(group)
        if listed is None or key < listed:
            self._listed[group] = key
            heappush(self._groups, (key, group))

    def first(self) -> str | None:
        """The first job of the most deserving group."""
        groups = self._groups
        while groups:
            key, group = groups[0]
            if self._listed.get(group) != key:
                heappop(groups)
                continue
            head = self._head(group)
            if head is None:
                raise RuntimeError(f"group {group!r} is listed without a job")
            current = self._group_key(group, head)
            if current == key:
                return head
            self._listed[group] = current
            heapreplace(groups, (current, group))
        return None

    def first_of(self, group: str) -> str | None:
        """The first job of one group."""
        return self._head(group)

    def _head(self, group: str) -> str | None:
        heap = self._heaps.get(group)
        while heap:
            order = heap[0]
            if self._jobs.get(order[1]) == (group, order):
                return order[1]
            heappop(heap)
        return None


class QueuedPolicy:
    """A policy whose jobs wait in a ``WaitingQueue``."""

    _queue: WaitingQueue

    @property
    def divides_by_tenant(self) -> bool:
        """Whether tenants have shares."""
        return True

    def first(self) -> str | None:
        """The most deserving of those that wait."""
        return self._queue.first()

    def take(self, job_id: str, ahead_s: float) -> None:
        """A job waits no longer."""
        del ahead_s
        self._queue.remove(job_id)
