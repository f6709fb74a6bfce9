"""Which pages each sequence has: placed, grown, cached, swapped out and back, released."""

import sys

from equipoise.schedule.batching.iteration import Swap
from equipoise.schedule.batching.pages import CachedPage, PagePool
from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import BatchSettings

_NEVER = sys.maxsize
"""More pages than a sequence can have: it caches no further ones."""


class Residency:
    """The pool of pages and the slots of host memory, as sequences use them."""

    def __init__(self, settings: BatchSettings) -> None:
        self.pool = PagePool(settings.pages)
        self.page_tokens = settings.page_tokens
        self._shares_chunks = settings.shares_chunks
        self._free_slots = list(range(settings.swap_pages - 1, -1, -1))
        self._emptied: list[int] = []
        """Slots that the iteration which is running still reads."""

    @property
    def free_slots(self) -> int:
        """Slots of host memory that a sequence can be swapped out to."""
        return len(self._free_slots)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_tokens)

    def most_hits(self, sequence: Sequence) -> int:
        """Pages that may come from the cache: the last prompt token is computed in any case."""
        if sequence.request.scores_prompt:
            return 0
        return min(len(sequence.keys), (sequence.known - 1) // self.page_tokens)

    def hits(self, sequence: Sequence) -> list[CachedPage]:
        """The cached pages that a sequence begins with."""
        request = sequence.request
        most = self.most_hits(sequence)
        hits = self.pool.match(request.tenant, request.salt, sequence.keys, most)
        while self._shares_chunks and hits and not hits[-1].is_end:
            hits.pop()
        return hits

    def pages_to_place(self, sequence: Sequence, hits: list[CachedPage]) -> int:
        """Available pages that placing a sequence takes; idle ones that it hits count, too."""
        new = self.pages_of(sequence.known) - len(hits)
        return new + self.pool.count_idle(hits)

    def place(self, sequence: Sequence, hits: list[CachedPage]) -> None:
        """Give a sequence pages for all known tokens; what it hits, or brings, is computed."""
        self.pool.hold(hits)
        pages = [each.page for each in hits]
        new = self.pages_of(sequence.known) - len(hits)
        sequence.pages = pages + self.pool.take(new, behind=pages[-1] if pages else -1)
        sequence.runs = None
        sequence.computed = max(len(hits) * self.page_tokens, sequence.given)
        sequence.registered = len(hits)
        sequence.last_cached = hits[-1] if hits else None

    def register(self, sequence: Sequence) -> None:
        """Cache the pages of a sequence that are whole by now."""
        whole = min(len(sequence.keys), sequence.computed // self.page_tokens)
        request = sequence.request
        for at in range(sequence.registered, whole):
            page = sequence.pages[at]
            if self._shares_chunks and self.pool.is_known(
                request.tenant, request.salt, sequence.last_cached, sequence.keys[at]
            ):  # with the same tokens as the page that is cached, but not in the same rows
                sequence.registered = _NEVER
                return
            cached = self.pool.register(
                request.tenant, request.salt, sequence.last_cached, sequence.keys[at], page
            )
            if cached.page != page:
                sequence.pages[at] = cached.page
                sequence.runs = None
            sequence.last_cached = cached
            sequence.registered = at + 1
        if sequence.last_cached is not None:
            sequence.last_cached.is_end |= sequence.computed == whole * self.page_tokens

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's pages and slots; nothing of it counts as computed any more."""
        self.pool.release(sequence.pages)
        self._free_slots += sequence.slots
        sequence.slots = ()
        self._forget(sequence)
        sequence.computed = sequence.given = 0

    def swap_out(self, sequence: Sequence) -> Swap:
        """Move a sequence's computed tokens to host memory and take its pages."""
        held = self.pages_of(sequence.computed)
        pages = tuple(sequence.pages[:held])
        sequence.slots = tuple(self._free_slots.pop() for _ in pages)
        self.pool.release(sequence.pages)
        self._forget(sequence)
        return Swap(sequence.request.id, pages, sequence.slots)

    def swap_in(self, sequence: Sequence) -> Swap:
        """Give a sequence pages for all known tokens, and its computed tokens back."""
        sequence.pages = self.pool.take(self.pages_of(sequence.known))
        slots, sequence.slots = sequence.slots, ()
        self._emptied += slots
        return Swap(sequence.request.id, tuple(sequence.pages[: len(slots)]), slots)

    def end_iteration(self) -> None:
        """Slots that were read can be written again."""
        self._free_slots += self._emptied
        self._emptied.clear()

    @staticmethod
    def _forget(sequence: Sequence) -> None:
        sequence.pages = []
        sequence.runs = None
        sequence.registered = 0
        sequence.last_cached = None
