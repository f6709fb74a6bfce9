"""What the scheduler remembers of one request while it is here."""

from collections.abc import Sequence as Many
from itertools import pairwise

from equipoise.schedule.batching.iteration import PageRun
from equipoise.schedule.batching.pages import CachedPage
from equipoise.schedule.batching.request import ServeRequest


class Sequence:
    """One request: how far it is computed, and where.

    ``known`` tokens are its prompt and what was sampled; ``computed`` of them have keys and values
    in its pages. While it decodes, both run with the decodes' common counter (``decodes.py``).
    """

    __slots__ = (
        "charged",
        "computed",
        "given",
        "is_decoding",
        "keys",
        "known",
        "last_cached",
        "left_s",
        "offset",
        "pages",
        "registered",
        "request",
        "runs",
        "slots",
        "turn",
    )

    def __init__(self, request: ServeRequest) -> None:
        self.request = request
        self.known = request.prompt_tokens
        self.computed = 0
        self.given = request.given_tokens
        """Tokens whose keys and values are here as soon as it has pages."""
        self.charged = 0
        """Tokens that were charged to the tenant, or came from the cache."""
        self.left_s = 0.0
        """Work that is estimated to be left [s]."""
        self.pages: list[int] = []
        self.runs: tuple[PageRun, ...] | None = None
        self.keys: Many[bytes] = request.page_keys
        self.registered = 0
        """Pages at the front that are cached."""
        self.last_cached: CachedPage | None = None
        """The last one of them."""
        self.slots: tuple[int, ...] = ()
        """Host memory that holds its pages while it is swapped out."""
        self.is_decoding = False
        self.offset = 0
        """``computed`` minus the decodes' counter."""
        self.turn = 0
        """When it decoded last, or began to, by the count of turns (``turns.py``)."""

    @property
    def generated(self) -> int:
        """Tokens that were sampled."""
        return self.known - self.request.prompt_tokens

    def page_runs(self) -> tuple[PageRun, ...]:
        """Its pages as runs of neighbours."""
        if self.runs is None:
            self.runs = page_runs(self.pages)
        return self.runs


def page_runs(pages: Many[int]) -> tuple[PageRun, ...]:
    """Pages in order, neighbours joined.

    >>> page_runs([4, 5, 6, 2])
    (PageRun(first=4, pages=3), PageRun(first=2, pages=1))
    """
    if not pages:
        return ()
    cuts = [at for at, (page, after) in enumerate(pairwise(pages), 1) if after != page + 1]
    return tuple(
        PageRun(pages[start], stop - start) for start, stop in pairwise([0, *cuts, len(pages)])
    )
