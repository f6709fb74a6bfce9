"""What a policy of fairness is asked, whichever it is.

Why
    The scheduler asks who is next, and says what it served to whom. It knows nothing about
    virtual clocks; a policy knows nothing about pages.

What it decides
    Work is in predicted seconds. A job is one request; it *waits* until ``take``, and again from
    ``wait`` on. Work that is charged was really computed; what is computed a second time, after a
    preemption, is not charged again.

Kept true (tests/unit/schedule/batching/fair)
    Under every policy: who is next does not depend on the order of calls at the same time; charges
    survive preemption; no job is forgotten.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Key = tuple[float, float, str]
"""What jobs are ordered by: smaller is more deserving, and the job's id breaks ties."""


@dataclass(frozen=True, slots=True)
class FairJob:
    """A request, as fairness sees it."""

    id: str
    tenant: str
    arrival_s: float
    work_s: float
    """Estimated predicted seconds of all its tokens."""
    stage_of: str = ""
    """The job of several requests that it is a stage of."""


class FairPolicy(Protocol):
    """Who is next."""

    @property
    def divides_by_tenant(self) -> bool:
        """Whether tenants have shares; else a tenant gets as much as its jobs get."""

    def arrive(self, job: FairJob, now_s: float) -> None:
        """A job comes, and waits."""

    def first(self) -> str | None:
        """The most deserving of those that wait."""

    def take(self, job_id: str, ahead_s: float) -> None:
        """A job waits no longer; ``ahead_s`` is the work of its prompt that is still to do [s]."""

    def wait(self, job_id: str) -> None:
        """A job that was taken waits again."""

    def key(self, job_id: str) -> Key:
        """The present order of any job, waiting or not."""

    def charge(self, job_id: str, work_s: float) -> None:
        """A job was served this much work [s]."""

    def finish(self, job_id: str, now_s: float) -> None:
        """A job that was taken, or waits, is gone; work that was charged ahead is given back."""


MakePolicy = Callable[[Mapping[str, float], float], FairPolicy]
"""A policy, from the tenants' weights and the grace period [s]."""
