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

    What deadlines need is kept by position, since they are asked for far more often than links are
    chained; a link itself carries what it was served.

Kept true (tests/unit/schedule/batching/fair/test_uwfq.py)
    Deadlines rise along the chain; the last one depends on the sum of work alone.

Sources
    UWFQ, arXiv:2510.15485. Keeping what was spent on an overtaken job is ours: without it deadlines
    can be earlier than the user's share allows.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

Place = tuple[float, float, str]
"""A link's place in the chain: virtual end among the user's jobs, arrival, the job's id."""


@dataclass(slots=True, eq=False)
class ChainLink:
    """A job's part of the chain; also a pause, or work that was spent on another job."""

    place: Place
    is_gone: bool = False
    """Whether it has no job, or that job is gone."""
    done: float = 0.0
    """Work that its job was really served, less what was taken from its size."""
    touched: int = 0
    """Its number among those that were served or taken from, by when they first were; 0 before."""


class UserChain:
    """The chain of one user."""

    def __init__(self, name: str, weight: float, start: float) -> None:
        self.name = name
        self.weight = weight
        self.stages: dict[str, float] = {}
        """Jobs of several requests, and when each one's last request ended [s]."""
        self.end = start
        """Deadline of the last job."""
        self._base = start
        self._links: list[ChainLink] = []
        self._places: list[Place] = []
        """Where each link stands; they rise."""
        self._sizes: list[float] = []
        """Work of each link."""
        self._touched = 0
        """Links that were served or taken from."""
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
    ) -> ChainLink:
        """Chain a job that comes now; a further stage begins where the last job's share ended."""
        end = self._time + work
        heappush(self._ends, end)
        places = self._places
        passed = self._first_after(now)
        at = max(passed, bisect_left(places, (end, arrival_s, job_id)))
        before = places[at - 1][0] if at else -math.inf
        spent = 0.0
        if at < len(places):
            spent = self._overtake(at, now if at == passed else -math.inf)
        elif not is_stage:
            spent = max(0.0, now - self.end)
        if spent > 0:
            self._spend((before, math.inf, ""), spent)
        order = end if end > before else math.nextafter(before, math.inf)
        place = order, arrival_s, job_id
        at = bisect_left(places, place)
        while at < len(places) and places[at] == place:
            order = math.nextafter(order, math.inf)
            place = order, arrival_s, job_id
            at = bisect_left(places, place)
        return self._insert(at, place, work)

    def _overtake(self, at: int, now: float) -> float:
        """Take from the links from ``at`` on what was spent on them, by this time; returns it."""
        before = self._deadline(at - 1) if at else self._base + self._cut
        links, sizes, left = self._links, self._sizes, self._total
        # The same numbers added in another order would differ in their last bits.
        taken = [
            (each.touched, where, each)
            for where, each in enumerate(links[at:], at)
            if each.done > 0
        ]
        taken.sort()
        first = links[at]
        if not first.done > 0:
            taken.append((0, at, first))
        total = 0.0
        for _, where, link in taken:
            work, size = link.done, sizes[where]
            if link is first:
                work = max(work, 0.0, now - before)
            spent = work if work < size else size
            if spent > 0:
                if not link.touched:
                    self._touch(link)
                link.done -= spent
                sizes[where] = size - spent
                left -= spent
                total += spent
        self._total, self.end = left, self._base + left
        del self._sums[at:]
        return total

    def serve(self, link: ChainLink, work: float) -> None:
        """The link's job was really served."""
        if not link.touched:
            self._touch(link)
        link.done += work

    def change(self, link: ChainLink, work: float) -> None:
        """The link's job takes this much more work than its size says, or less."""
        at = bisect_left(self._places, link.place)
        self._resize(at, max(-self._sizes[at], work))

    def leave(self, link: ChainLink, now: float) -> None:
        """A link's job is gone; links at the front that have ended virtually are trimmed."""
        link.is_gone = True
        while self._links and self._links[0].is_gone and self._deadline(0) <= now:
            del self._links[0], self._places[0]
            self._cut += self._sizes.pop(0)
            self._sums.pop(0)

    def deadline(self, link: ChainLink) -> float:
        """Global virtual time at which a job ends, one job after the other."""
        return self._deadline(bisect_left(self._places, link.place))

    def _deadline(self, at: int) -> float:
        sums = self._sums
        if at >= len(sums):
            self._add_sums(at + 1)
        return self._base + sums[at]

    def _add_sums(self, stop: int) -> None:
        sums = self._sums
        more = accumulate(self._sizes[len(sums) : stop], initial=sums[-1] if sums else self._cut)
        next(more)
        sums += more

    def _first_after(self, now: float) -> int:
        """The first link whose deadline has not passed."""
        limit = math.nextafter(now - self._base, math.inf)
        while True:
            at = bisect_left(self._sums, limit)
            if at < len(self._sums) or at == len(self._sizes):
                return at
            self._add_sums(at + 16)

    def _spend(self, place: Place, work: float) -> None:
        """Add work that is nobody's any more to the link at this place, a new one if need be."""
        at = bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            self._resize(at, work)
        else:
            self._insert(at, place, work).is_gone = True

    def _insert(self, at: int, place: Place, work: float) -> ChainLink:
        link = ChainLink(place)
        self._links.insert(at, link)
        self._places.insert(at, place)
        self._sizes.insert(at, 0.0)
        self._resize(at, work)
        return link

    def _touch(self, link: ChainLink) -> None:
        self._touched += 1
        link.touched = self._touched

    def _resize(self, at: int, work: float) -> None:
        self._sizes[at] += work
        self._total += work
        self.end = self._base + self._total
        del self._sums[at:]
