"""Free pages as runs of neighbours, so that a sequence gets few runs and can grow its last one.

What it decides
    New sequences take from the longest free run. If that run begins right behind a sequence that
    may grow, they begin in the middle of what is left over.

Kept true (tests/unit/schedule/batching/test_pages.py, by Hypothesis)
    No page is handed out twice, and every page that comes back can be handed out again; runs are
    maximal.
"""

from heapq import heapify, heappop, heappush, heapreplace


class FreeRuns:
    """The free ones of pages 0 to ``pages`` - 1; all, to begin with."""

    def __init__(self, pages: int) -> None:
        self.count = pages
        self._stop_of = {0: pages}
        self._start_of = {pages: 0}
        self._longest = [(-pages, pages)]
        """(-pages, stop) of every run, or of what it was before its first pages were taken."""

    def runs(self) -> dict[int, int]:
        """Start and stop of every run."""
        return dict(self._stop_of)

    def give_back(self, start: int, stop: int) -> None:
        """Make pages free again."""
        self.count += stop - start
        stop_of, start_of = self._stop_of, self._start_of
        self._list(start_of.pop(start, start), stop_of.pop(stop, stop))

    def take_next(self, page: int) -> bool:
        """Take the page behind this one, if it is free."""
        stop = self._stop_of.pop(page + 1, 0)
        if not stop:
            return False
        self.count -= 1
        if stop == page + 2:
            del self._start_of[stop]
        else:
            self._stop_of[page + 2], self._start_of[stop] = stop, page + 2
        return True

    def take(self, pages: int, growing: set[int]) -> list[int]:
        """Take pages, in as few runs as there can be.

        Args:
            pages: At most ``count``.
            growing: Pages whose next one should stay free where it can.
        """
        taken: list[int] = []
        self.count -= pages
        while pages > 0:
            start, stop = self._longest_run()
            count = stop - start
            del self._stop_of[start], self._start_of[stop]
            if count <= pages:
                taken += range(start, stop)
            else:
                first = start + (count - pages) // 2 if start - 1 in growing else start
                if first + pages < stop:
                    self._shorten(first + pages, stop)
                if start < first:
                    self._list(start, first)
                taken += range(first, first + pages)
            pages -= count
        return taken

    def take_one(self, growing: set[int]) -> int:
        """As ``take`` of one page, which is what a sequence that decodes needs."""
        start, stop = self._longest_run()
        stop_of, start_of = self._stop_of, self._start_of
        del stop_of[start], start_of[stop]
        page = start
        if start - 1 in growing:
            page = start + (stop - start - 1) // 2
        if page + 1 < stop:
            self._shorten(page + 1, stop)
        if start < page:
            self._list(start, page)
        self.count -= 1
        return page

    def _longest_run(self) -> tuple[int, int]:
        longest, start_of = self._longest, self._start_of
        while True:
            size, stop = longest[0]
            start = start_of.get(stop)
            if start is None:
                heappop(longest)
            elif start - stop == size:
                return start, stop
            elif start - stop < size:  # a longer entry is behind it
                heappop(longest)
            else:
                heapreplace(longest, (start - stop, stop))

    def _shorten(self, start: int, stop: int) -> None:
        """A run has lost its first pages: its entry is made right when it comes to the top."""
        self._stop_of[start], self._start_of[stop] = stop, start

    def _list(self, start: int, stop: int) -> None:
        longest, stop_of = self._longest, self._stop_of
        stop_of[start], self._start_of[stop] = stop, start
        heappush(longest, (start - stop, stop))
        if len(longest) > 64 + 4 * len(stop_of):
            self._longest = [(start - stop, stop) for start, stop in self._stop_of.items()]
            heapify(self._longest)
