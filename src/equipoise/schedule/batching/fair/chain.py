"""Jobs of one user, chained by their virtual deadlines.

What it decides
    A user's jobs are ordered by when they would end if each had an equal share of what the user
    gets (``order``). In that order, the user's whole share is spent on one after the other: job j's
    *deadline* is that of the job before it plus its own work. So no job ends later than with equal
    shares, most end earlier, and the last one ends when the user's share is spent.

    Times are global virtual times, in which every active user gets its weight of work per unit.

Kept true (tests/unit/schedule/batching/fair/test_uwfq.py)
    Deadlines rise along the chain; the last one depends on the sum of work alone.

Sources
    UWFQ, arXiv:2510.15485.
"""

import math
from bisect import bisect_left, bisect_right, insort

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
        """Work of each link, with the pause before it."""
        self._gone: set[Link] = set()
        self._cut = 0.0
        """Work of links that were trimmed."""
        self._sums: list[float] = []
        """Work from the base to the end of each of the first links, as many as were asked for."""
        self._total = 0.0
        """Work from the base to the end of the last link."""
        self._time = 0.0
        """Virtual time among the user's jobs."""
        self._seen = start
        """Global virtual time up to which ``_time`` has run."""

    @property
    def end(self) -> float:
        """Deadline of the last job."""
        return self._base + self._total

    def advance(self, now: float) -> None:
        """Let the virtual time among the user's jobs run up to a global virtual time."""
        left, self._seen = now - self._seen, max(now, self._seen)
        links = self._links
        at = bisect_right(links, (self._time, math.inf, ""))
        while left > 0 and at < len(links):
            step = (links[at][0] - self._time) * (len(links) - at)
            if step > left:
                self._time += left / (len(links) - at)
                return
            left -= step
            self._time = links[at][0]
            at += 1

    def rest(self) -> None:
        """The user's share is spent: no job is left in virtual time."""
        if self._links:
            self._time = max(self._time, self._links[-1][0])

    def append(self, job_id: str, arrival_s: float, work: float, pause: float) -> Link:
        """Chain a job that comes now, ``pause`` after the last one's deadline."""
        link = self._time + work, arrival_s, job_id
        while link in self._sizes:
            link = math.nextafter(link[0], math.inf), arrival_s, job_id
        insort(self._links, link)
        self._sizes[link] = 0.0
        self._resize(link, pause + work)
        return link

    def change(self, link: Link, work: float) -> None:
        """The link's job takes this much more work than its size says, or less."""
        self._resize(link, max(0.0, self._sizes[link] + work))

    def leave(self, link: Link, now: float) -> None:
        """A link's job is gone; links at the front that have ended virtually are trimmed."""
        self._gone.add(link)
        while self._links and self._links[0] in self._gone and self.deadline(self._links[0]) <= now:
            first = self._links.pop(0)
            self._gone.remove(first)
            self._cut += self._sizes.pop(first)
            self._sums.pop(0)

    def deadline(self, link: Link) -> float:
        """Global virtual time at which a job ends, one job after the other."""
        at = bisect_left(self._links, link)
        sums = self._sums
        while len(sums) <= at:
            size = self._sizes[self._links[len(sums)]]
            sums.append((sums[-1] if sums else self._cut) + size)
        return self._base + sums[at]

    def _resize(self, link: Link, size: float) -> None:
        self._total += size - self._sizes[link]
        self._sizes[link] = size
        del self._sums[bisect_left(self._links, link) :]
