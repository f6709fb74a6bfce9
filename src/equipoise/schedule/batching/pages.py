"""The pool of pages: who uses which, and which old ones may be used again by the same tenant.

Why
    Memory for keys and values bounds how many requests run together. A prompt that begins like an
    earlier one need not be computed again, unless it is another tenant's: timing would then tell
    tenants what others asked (CVE-2025-46570).

What it decides
    Cached pages form a tree below each (tenant, salt): a page is reached through all pages before
    it, by its whole content. So tenants are apart by construction, and no two contents can be
    taken for each other, as hashes could.

    A page is *used* (by one or more requests), *idle* (used by nobody, but cached) or free. Idle
    pages are evicted, least recently used first, when free ones run out. The last page of a
    request is released first, so pages never outlive the path to them.

    Only whole pages are cached; a partial page is never shared, so nothing is ever copied on
    writing.

Kept true (tests/unit/schedule/batching/test_pages.py, by Hypothesis)
    Every page is used, idle or free, and counts of users are right; tenants never share; a page is
    reached only by the contents it holds; all pages are free or idle when all requests have gone.
"""

from collections.abc import Iterable, Sequence

from equipoise.schedule.batching.free_runs import FreeRuns


class CachedPage:
    """A page in the tree, below the page before it; ``page`` is -1 in a root."""

    __slots__ = ("children", "is_end", "key", "page", "parent", "root")

    def __init__(
        self, page: int, key: bytes, parent: "CachedPage | None", root: tuple[str, str]
    ) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[bytes, CachedPage] = {}
        self.root = root
        self.is_end = False
        """Whether a chunk of the sequence that computed it ended with this page."""


class PagePool:
    """Pages 0 to ``pages`` - 1 and the tree of those that are cached."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = FreeRuns(pages)
        self._users = [0] * pages
        self._cached: dict[int, CachedPage] = {}
        self._idle: dict[int, None] = {}
        """Idle pages, least recently used first."""
        self._roots: dict[tuple[str, str], CachedPage] = {}
        self._growing: set[int] = set()
        """Last pages of requests."""

    @property
    def available(self) -> int:
        """Pages that a request can get: free and idle ones."""
        return self._free.count + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.pages - self.available

    @property
    def idle(self) -> int:
        """Pages that nobody uses, but that are cached."""
        return len(self._idle)

    def match(self, tenant: str, salt: str, keys: Sequence[bytes], most: int) -> list[CachedPage]:
        """The cached pages that a prompt begins with, at most ``most``."""
        pages: list[CachedPage] = []
        at = self._roots.get((tenant, salt))
        while at is not None and len(pages) < min(most, len(keys)):
            at = at.children.get(keys[len(pages)])
            if at is not None:
                pages.append(at)
        return pages

    def is_known(self, tenant: str, salt: str, parent: CachedPage | None, key: bytes) -> bool:
        """Whether a page with this content behind ``parent`` is cached; as in ``register``."""
        parent = parent or self._roots.get((tenant, salt))
        return parent is not None and key in parent.children

    def count_idle(self, pages: Iterable[CachedPage]) -> int:
        """How many of these are idle."""
        return sum(each.page in self._idle for each in pages)

    def hold(self, pages: Iterable[CachedPage]) -> None:
        """Use cached pages."""
        for each in pages:
            self._users[each.page] += 1
            self._idle.pop(each.page, None)

    def take(self, pages: int, *, behind: int = -1) -> list[int]:
        """Take pages for one request, at most ``available``.

        Args:
            pages: How many.
            behind: The request's last page so far; -1 for none.
        """
        while self._free.count < pages:
            self._evict()
        taken: list[int] = []
        last = behind
        while len(taken) < pages and last >= 0 and self._free.take_next(last):
            last += 1
            taken.append(last)
        self._growing.discard(behind)
        if len(taken) < pages:
            taken += self._free.take(pages - len(taken), self._growing)
        for page in taken:
            self._users[page] = 1
        if taken:
            self._growing.add(taken[-1])
        return taken

    def register(
        self, tenant: str, salt: str, parent: CachedPage | None, key: bytes, page: int
    ) -> CachedPage:
        """Cache a used page that is whole now.

        Args:
            tenant: Its owner.
            salt: As in ``match``.
            parent: The page before it; None for a request's first.
            key: Its content.
            page: The page. If another one with this content is cached already, the request uses
                that one from now on, and this one is released.

        Returns:
            The cached page that the request uses.
        """
        root = tenant, salt
        if parent is None:
            parent = self._roots.setdefault(root, CachedPage(-1, b"", None, root))
        known = parent.children.get(key)
        if known is not None:
            self.hold([known])
            self.release([page])
            return known
        cached = CachedPage(page, key, parent, root)
        parent.children[key] = self._cached[page] = cached
        return cached

    def grow(self, pages: list[int]) -> bool:
        """Add a page to those of one request; False if none is available."""
        last, free, growing = pages[-1], self._free, self._growing
        if free.take_next(last):
            growing.discard(last)
            page = last + 1
        elif free.count:
            growing.discard(last)
            page = free.take_one(growing)
        elif self._idle:
            pages += self.take(1, behind=last)
            return True
        else:
            return False
        self._users[page] = 1
        growing.add(page)
        pages.append(page)
        return True

    def release(self, pages: Sequence[int]) -> None:
        """A request gives up pages; the last ones become idle first."""
        if not pages:
            return
        users, cached, give_back = self._users, self._cached, self._free.give_back
        self._growing.discard(pages[-1])
        start = stop = 0  # a run of free pages, which mostly come in falling order
        for page in reversed(pages):
            users[page] -= 1
            if users[page]:
                continue
            if page in cached:
                self._idle[page] = None
            elif page == start - 1:
                start = page
            else:
                if stop:
                    give_back(start, stop)
                start, stop = page, page + 1
        if stop:
            give_back(start, stop)

    def evict_all(self) -> None:
        """Forget every page that nobody uses."""
        while self._idle:
            self._evict()

    def _evict(self) -> None:
        page = next(iter(self._idle))
        del self._idle[page]
        cached = self._cached.pop(page)
        if cached.parent is not None:
            del cached.parent.children[cached.key]
            if cached.parent.page < 0 and not cached.parent.children:
                del self._roots[cached.root]
        self._free.give_back(page, page + 1)
