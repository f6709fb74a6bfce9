"""Jobs of one user, chained by their virtual deadlines.

What it decides
    A user's jobs are ordered by when they would end if each had an equal share of what the user
    gets. In that order, the user's whole share is spent on one after the other: a job's *deadline*
    is that of the job before it plus its own work. So of jobs that come together none ends later
    than with equal shares, most end earlier, and the last one ends when the user's share is spent.

    A job that comes later may go before one that has had a part of the share already, virtually or
    really. That part stays spent: it becomes a link of its own, as does a pause in which the user
    had no job.

    Times are global virtual times, in which every active user gets its weight of work per unit.

Kept true (tests/unit/schedule/batching/fair/test_uwfq.py)
    Deadlines rise along the chain; the last one depends on the sum of work alone.

Sources
    UWFQ, arXiv:2510.15485. Keeping what was spent on an overtaken job is ours: without it deadlines
    can be earlier than the user's share allows.
"""

import math
from bisect import bisect_left, insort
from heapq import heappop, heappush
from itertools import accumulate

Link = tuple[float, float, str]
"""A job's place in the chain: virtual end among the user's jobs, arrival, id."""


class UserChain:
    """The chain of one user."""

    def __init__(self, name: str, weight: float, start: float) -> None:
        self.name = name
        self.weight = weight
        self.stages: dict[str, float] = {}
        """Jobs of several requests, and when each one's last request ended [s]."""
        self._base = start
        self._links: list[Link] = []
        self._sizes: dict[Link, float] = {}
        """Work of each link."""
        self._gone: set[Link] = set()
        """Links of jobs that are gone, of pauses, and of work that was spent on another job."""
        self._done: dict[Link, float] = {}
        """Work that each link's job was really served, less what was taken from its size."""
        self._cut = 0.0
        """Work of links that were trimmed."""
        self._sums: list[float] = []
        """Work from the base to the end of each of the first links, as many as were asked for."""
        self._total = 0.0
        """Work from the base to the end of the last link."""
        self._time = 0.0
        """Virtual time among the user's jobs, in which each active one gets one unit per unit."""
        self._seen = start
        """Global virtual time up to which ``_time`` has run."""
        self._ends: list[float] = []
        """Virtual ends of the jobs that are active in ``_time``, a heap."""

    @property
    def end(self) -> float:
        """Deadline of the last job."""
        return self._base + self._total

    def advance(self, now: float) -> None:
        """Let the virtual time among the user's jobs run up to a global virtual time."""
        left, self._seen = now - self._seen, max(now, self._seen)
        ends = self._ends
        while left > 0 and ends:
            step = (ends[0] - self._time) * len(ends)
            if step > left:
                self._time += left / len(ends)
                return
            left -= step
            self._time = heappop(ends)

    def rest(self) -> None:
        """The user's share is spent: no job is left in virtual time."""
        self._time = max([self._time, *self._ends])
        self._ends.clear()

    def append(
        self, job_id: str, arrival_s: float, work: float, now: float, *, is_stage: bool = False
    ) -> Link:
        """Chain a job that comes now; a further stage begins where the last job's share ended."""
        end = self._time + work
        heappush(self._ends, end)
        passed = self._first_after(now)
        at = max(passed, bisect_left(self._links, (end, arrival_s, job_id)))
        before = self._links[at - 1][0] if at else -math.inf
        gap = before, math.inf, ""
        spent = 0.0
        if at < len(self._links):
            spent = self._overtake(at, now if at == passed else -math.inf)
        elif not is_stage:
            spent = max(0.0, now - self.end)
        if spent > 0:
            self._gone.add(gap)
            self._resize(gap, spent)
        order = end if end > before else math.nextafter(before, math.inf)
        while (order, arrival_s, job_id) in self._sizes:
            order = math.nextafter(order, math.inf)
        link = order, arrival_s, job_id
        self._resize(link, work)
        return link

    def _overtake(self, at: int, now: float) -> float:
        """Take from the links from ``at`` on what was spent on them, by this time; returns it."""
        first = self._links[at]
        before = self.deadline(self._links[at - 1]) if at else self._base + self._cut
        taken = {link: done for link, done in self._done.items() if done > 0 and link >= first}
        taken[first] = max(taken.get(first, 0.0), now - before)
        total = 0.0
        for link, work in taken.items():
            spent = min(work, self._sizes[link])
            if spent > 0:
                self._done[link] = self._done.get(link, 0.0) - spent
                self._sizes[link] -= spent
                self._total -= spent
                total += spent
        del self._sums[at:]
        return total

    def serve(self, link: Link, work: float) -> None:
        """The link's job was really served."""
        self._done[link] = self._done.get(link, 0.0) + work

    def change(self, link: Link, work: float) -> None:
        """The link's job takes this much more work than its size says, or less."""
        self._resize(link, max(-self._sizes[link], work))

    def leave(self, link: Link, now: float) -> None:
        """A link's job is gone; links at the front that have ended virtually are trimmed."""
        self._gone.add(link)
        while self._links:
            first = self._links[0]
            if first not in self._gone or self.deadline(first) > now:
                return
            del self._links[0]
            self._gone.remove(first)
            self._done.pop(first, None)
            self._cut += self._sizes.pop(first)
            self._sums.pop(0)

    def deadline(self, link: Link) -> float:
        """Global virtual time at which a job ends, one job after the other."""
        at = bisect_left(self._links, link)
        if at >= len(self._sums):
            self._add_sums(at + 1)
        return self._base + self._sums[at]

    def _add_sums(self, stop: int) -> None:
        sums = self._sums
        links = self._links[len(sums) : stop]
        more = accumulate(
            map(self._sizes.__getitem__, links), initial=sums[-1] if sums else self._cut
        )
        next(more)
        sums += more

    def _first_after(self, now: float) -> int:
        """The first link whose deadline has not passed."""
        limit = math.nextafter(now - self._base, math.inf)
        while True:
            at = bisect_left(self._sums, limit)
            if at < len(self._sums) or at == len(self._links):
                return at
            self._add_sums(at + 16)

    def _resize(self, link: Link, work: float) -> None:
        if link not in self._sizes:
            insort(self._links, link)
            self._sizes[link] = 0.0
        self._sizes[link] += work
        self._total += work
        del self._sums[bisect_left(self._links, link) :]
