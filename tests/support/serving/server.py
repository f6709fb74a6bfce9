"""One server that runs jobs chunk by chunk in a policy's order, and the fluid one beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.schedule.batching.fair.policy import FairJob, FairPolicy


@dataclass(frozen=True)
class Work:
    """A job of a test."""

    id: str
    tenant: str
    arrival_s: float
    work_s: float
    estimate_s: float | None = None


def run_server(
    policy: FairPolicy, jobs: Sequence[Work], chunk_s: float, *, until_s: float = float("inf")
) -> tuple[dict[str, float], dict[str, float]]:
    """When each job ended, and the work that each tenant was served until then.

    The server computes one second of work a second, and asks who is next after every chunk.
    """
    waiting = sorted(jobs, key=lambda each: (each.arrival_s, each.id))
    left = {each.id: each.work_s for each in jobs}
    tenant_of = {each.id: each.tenant for each in jobs}
    served = {each.tenant: 0.0 for each in jobs}
    ends: dict[str, float] = {}
    now_s = 0.0
    while now_s < until_s:
        while waiting and waiting[0].arrival_s <= now_s:
            job = waiting.pop(0)
            estimate_s = job.work_s if job.estimate_s is None else job.estimate_s
            policy.arrive(FairJob(job.id, job.tenant, job.arrival_s, estimate_s), now_s)
        first = policy.first()
        if first is None:
            if not waiting:
                break
            now_s = waiting[0].arrival_s
            continue
        policy.take(first, left[first])
        work_s = min(chunk_s, left[first])
        now_s += work_s
        left[first] -= work_s
        served[tenant_of[first]] += work_s
        policy.charge(first, work_s)
        if left[first] > 1e-12:
            policy.wait(first)
        else:
            policy.finish(first, now_s)
            ends[first] = now_s
    return ends, served


def fluid_ends(jobs: Sequence[Work]) -> dict[str, float]:
    """When each job ends if users share the server equally, and each user's jobs its share."""
    left = {each.id: each.work_s for each in jobs}
    waiting = sorted(jobs, key=lambda each: each.arrival_s)
    active: list[Work] = []
    ends: dict[str, float] = {}
    now_s = 0.0
    while active or waiting:
        if not active:
            now_s = max(now_s, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now_s:
            active.append(waiting.pop(0))
        users = [each.tenant for each in active]
        rates = {e.id: 1 / len(set(users)) / users.count(e.tenant) for e in active}
        step_s = min(left[each.id] / rates[each.id] for each in active)
        if waiting:
            step_s = min(step_s, waiting[0].arrival_s - now_s)
        now_s += step_s
        for each in active:
            left[each.id] -= step_s * rates[each.id]
        for each in [each for each in active if left[each.id] <= 1e-12]:
            ends[each.id] = now_s
            active.remove(each)
    return ends
