"""Sequences that get one token in every iteration, advanced all at once.

Why
    Of a hundred sequences that decode, six need a page in an iteration and none ends. Counting
    each one up would cost more than deciding.

What it decides
    One counter for all. A sequence is as far as the counter plus its own offset, so it needs a
    page whenever the counter meets its remainder. A sequence that rests has its pages, and none of
    its tokens is computed meanwhile; who rests is decided in ``turns.py``.
"""

from equipoise.schedule.batching.sequence import Sequence
from equipoise.spec.serving import IterationWork, decodes_of


class Decodes:
    """The sequences that decode."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._counter = 0
        self._sequences: dict[str, Sequence] = {}
        self._crossing: list[dict[str, Sequence]] = [{} for _ in range(page_tokens)]
        """By the remainder of the counter at which they need a page."""
        self.context_tokens = 0
        """Sum over sequences of the context that their next token reads, itself included."""
        self.resting: dict[str, Sequence] = {}
        """Those that decode, but not in the next iteration."""
        self._tenants: dict[str, tuple[int, int]] = {}
        """How many of each tenant decode and do not rest, and the sum of their offsets."""

    def __len__(self) -> int:
        return len(self._sequences)

    def work(self) -> IterationWork:
        """The next iteration of those that do not rest."""
        return decodes_of(len(self._sequences), self.context_tokens)

    def sequences(self) -> list[Sequence]:
        """All of them, with ``known`` and ``computed`` up to date."""
        members = list(self._sequences.values())
        for each in members:
            self.update(each)
        return members

    def update(self, sequence: Sequence) -> None:
        """Bring a sequence's ``known`` and ``computed`` up to date."""
        sequence.computed = self._counter + sequence.offset
        sequence.known = sequence.computed + 1

    def join(self, sequence: Sequence) -> None:
        """A sequence has one known token that is not computed."""
        sequence.is_decoding = True
        sequence.offset = sequence.computed - self._counter
        name = sequence.request.id
        self._sequences[name] = sequence
        self._crossing[-sequence.offset % self._page_tokens][name] = sequence
        self.context_tokens += sequence.known
        self._count(sequence, 1)

    def leave(self, sequence: Sequence) -> None:
        """A sequence decodes no more."""
        sequence.is_decoding = False
        if self.resting.pop(sequence.request.id, None) is None:
            self._remove(sequence)

    def rest(self, sequence: Sequence) -> None:
        """A sequence leaves the next iterations to others."""
        self._remove(sequence)
        self.resting[sequence.request.id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """A sequence rests no longer."""
        del self.resting[sequence.request.id]
        self.join(sequence)

    def of_tenants(self) -> dict[str, tuple[int, int]]:
        """How many sequences of each tenant decode, and the context that their tokens read.

        Those that rest count, too.
        """
        counter = self._counter + 1
        sizes = {
            name: (count, count * counter + offsets)
            for name, (count, offsets) in self._tenants.items()
        }
        for each in self.resting.values():
            count, context_tokens = sizes.get(each.request.tenant, (0, 0))
            sizes[each.request.tenant] = count + 1, context_tokens + each.known
        return sizes

    def _remove(self, sequence: Sequence) -> None:
        self.update(sequence)
        name = sequence.request.id
        del self._sequences[name], self._crossing[-sequence.offset % self._page_tokens][name]
        self.context_tokens -= sequence.known
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        tenant = sequence.request.tenant
        count, offsets = self._tenants.get(tenant, (0, 0))
        if count + change:
            self._tenants[tenant] = count + change, offsets + change * sequence.offset
        else:
            del self._tenants[tenant]

    def advance(self, most: int) -> int:
        """Each sequence got a token in each of some iterations.

        They end where pages end, or after ``most``; returns how many there were.
        """
        crossing, size = self._crossing, self._page_tokens
        first = counter = self._counter
        while True:
            counter += 1
            if counter - first == most or crossing[counter % size]:
                break
        self._counter = counter
        self.context_tokens += (counter - first) * len(self._sequences)
        return counter - first

    def at_page_end(self) -> list[Sequence]:
        """Those whose computed tokens fill whole pages, up to date."""
        counter = self._counter
        members = list(self._crossing[counter % self._page_tokens].values())
        for each in members:
            each.computed = computed = counter + each.offset
            each.known = computed + 1
        return members

    def pages_until(self, iterations: int) -> int:
        """Most pages that the sequences may need within further iterations."""
        whole, rest = divmod(iterations, self._page_tokens)
        after = sum(
            len(self._crossing[(self._counter + step) % self._page_tokens])
            for step in range(1, rest + 1)
        )
        return whole * len(self._sequences) + after
