"""Requests that wait while another one computes what they have in common.

Why
    Many answers to one prompt, or a hundred prompts with one long preamble, come at the same time.
    The first of them computes the common pages; the others find them in the cache.

What it decides
    A request waits only for pages that a sequence is to cache next, and only until all pages that
    the two have in common are cached, or that sequence is gone.
"""

from equipoise.schedule.batching.pages import CachedPage
from equipoise.schedule.batching.sequence import Sequence

_Place = tuple[CachedPage | tuple[str, str], bytes]
"""The page before, or the root, and the content of a page that is being computed."""


class Siblings:
    """Who computes which page, and who waits for it."""

    def __init__(self) -> None:
        self._leaders: dict[_Place, Sequence] = {}
        self._places: dict[str, _Place] = {}
        self._waiting: dict[str, list[tuple[int, Sequence]]] = {}

    def lead(self, sequence: Sequence) -> None:
        """A sequence is about to compute the page behind those that it has cached."""
        self._stop(sequence)
        if sequence.registered < len(sequence.keys):
            request = sequence.request
            place = (
                sequence.last_cached or (request.tenant, request.salt),
                sequence.keys[sequence.registered],
            )
            if place not in self._leaders:
                self._leaders[place] = sequence
                self._places[request.id] = place

    def leader_of(self, sequence: Sequence, hits: list[CachedPage], most: int) -> Sequence | None:
        """Who is computing the page behind a waiting sequence's hits, if it could use it."""
        if len(hits) >= most:
            return None
        request = sequence.request
        before = hits[-1] if hits else (request.tenant, request.salt)
        return self._leaders.get((before, sequence.keys[len(hits)]))

    def wait(self, sequence: Sequence, leader: Sequence, most: int) -> None:
        """A sequence waits for all pages that it has in common with its leader."""
        pairs = zip(sequence.keys[:most], leader.keys, strict=False)
        common = next((at for at, (mine, its) in enumerate(pairs) if mine != its), None)
        until = min(most, len(leader.keys)) if common is None else common
        self._waiting.setdefault(leader.request.id, []).append((until, sequence))

    def waiting_for(self, leader: Sequence) -> list[Sequence]:
        """Those that wait for a sequence."""
        return [each for _, each in self._waiting.get(leader.request.id, ())]

    def progress(self, leader: Sequence) -> list[Sequence]:
        """A sequence has cached further pages: those that wait no longer."""
        self.lead(leader)
        waiting = self._waiting.get(leader.request.id)
        if waiting is None:
            return []
        return self._split(leader, [pair for pair in waiting if pair[0] > leader.registered])

    def gone(self, leader: Sequence) -> list[Sequence]:
        """A sequence computes no prompt any more: those that wait no longer."""
        self._stop(leader)
        return self._split(leader, [])

    def forget(self, sequence: Sequence) -> None:
        """A sequence that waited is gone."""
        for name, waiting in list(self._waiting.items()):
            left = [pair for pair in waiting if pair[1] is not sequence]
            if left:
                self._waiting[name] = left
            else:
                del self._waiting[name]

    def _split(self, leader: Sequence, left: list[tuple[int, Sequence]]) -> list[Sequence]:
        waiting = self._waiting.pop(leader.request.id, [])
        if left:
            self._waiting[leader.request.id] = left
        staying = {id(each) for _, each in left}
        return [each for _, each in waiting if id(each) not in staying]

    def _stop(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence.request.id, None)
        if place is not None:
            del self._leaders[place]
