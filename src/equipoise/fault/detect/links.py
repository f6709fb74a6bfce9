"""Name a link between two ranks that carries fewer bytes a second than it should.

Why
    A slow link and a slow rank both make everybody wait, and call for different repairs.

What it decides
    A link's *rate* is the bytes that it carried over the seconds in which it had some to carry
    (``observe.links``): a rank that sends late or reads late does not change it. A link is slow if
    its last ``_WINDOWS`` rates are all below a third of what is expected: the median of links that
    carried about as much meanwhile, or what it carried itself before, whichever is more.

    ::

                  to 0      to 1      to 2        a matrix of rates, as C4 draws it:
        from 0      .     880 MB/s  860 MB/s
        from 1   21 MB/s     .      870 MB/s      one cell: the link; a row: all that rank 1
        from 2   850 MB/s 890 MB/s     .          sends; a column: all that it receives

Kept true (tests/unit/fault/detect/test_links.py, tests/multi/fault/test_slow_link.py)
    A link that is paced by the kernel is named, and no rank; of links that carry different amounts
    none is.

Sources
    C4, arXiv:2406.04594: rows, columns and cells of the matrix of delays.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from equipoise.base.units import format_bytes
from equipoise.observe.links import Links, LinkTotals

_LEAST_BYTES = 1 << 18
"""A rate of fewer says more about single messages than about the link."""

_WINDOWS, _USUAL, _LEAST_USUAL = 3, 64, 3
"""Rates that must agree, that are remembered, and that must be known to be compared with."""

_SLOW, _EVEN = 3.0, 1.5
"""A link is slow below a third of the expected rate, and is not any more above two thirds."""

_ALIKE = 4.0
"""Links are compared where the bytes that they carried differ by at most this factor."""

_LEAST_BUSY = 0.05
"""Share of the time that a link must be busy to matter."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A verdict: a link that has become slow, or that is not slow any more."""

    source: int
    target: int
    rate: float
    """While it has bytes to carry [bytes/s]."""
    expected: float
    """What others carry, or it did before [bytes/s]."""
    resent: int
    """Packets sent again meanwhile."""
    is_over: bool = False
    whole: str = ""
    """``row`` if all that the source sends is slow, ``column`` if all that the target receives."""

    @property
    def sentence(self) -> str:
        """For the user."""
        rates = f"{format_bytes(self.rate)}/s while it has bytes to carry"
        if self.is_over:
            name = f"The link from rank {self.source} to rank {self.target}"
            return f"{name} is as fast as it should be again: {rates}."
        source, target = f"from rank {self.source}", f"to rank {self.target}"
        name = {
            "": f"The link {source} {target} is slow: it carries",
            "row": f"All links {source} are slow: the one {target} carries",
            "column": f"All links {target} are slow: the one {source} carries",
        }[self.whole]
        lost = f", and {self.resent} packets had to be sent again" if self.resent else ""
        return (
            f"{name} {rates}, where {format_bytes(self.expected)}/s are expected{lost}. No rank is "
            f"slow by that; look at the network between their hosts."
        )


@dataclass(slots=True)
class _Watched:
    """What is known of one link."""

    begun: LinkTotals
    begun_s: float
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL))
    carried: float = 0.0
    """Bytes a second of the clock, in the last window."""
    busy: float = 0.0
    """Share of the last window."""
    resent: int = 0
    windows: int = 0
    is_slow: bool = False

    def learn(self, totals: LinkTotals, now_s: float) -> bool:
        """Close a window if enough was carried in it; whether it is the link's second or later."""
        sent, busy_s = totals.sent_bytes - self.begun.sent_bytes, totals.busy_s - self.begun.busy_s
        if sent < 0:  # connections were closed
            self.begun, self.begun_s = totals, now_s
        if sent < _LEAST_BYTES or now_s <= self.begun_s:
            return False
        self.windows += 1
        self.resent = totals.resent - self.begun.resent
        self.carried, self.busy = (each / (now_s - self.begun_s) for each in (sent, busy_s))
        self.begun, self.begun_s = totals, now_s
        if self.windows == 1:  # ranks were starting
            return False
        if len(self.rates) == _WINDOWS and not self.is_slow:
            self.usual.append(self.rates[0])
        self.rates.append(sent / max(busy_s, 1e-6))
        return True


class SlowLinks:
    """Watches the links of a run; depends on nothing but what it is given."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], _Watched] = {}

    def learn(self, now_s: float, links: Links) -> list[SlowLink]:
        """Take what all links have carried into account; which are slow by it, or not any more.

        Args:
            now_s: By a clock that never goes back [s].
            links: Totals so far.

        Cost: O(links^2) where all of them carry bytes; for the tens that a rank 0 sees.
        """
        changed = []
        for pair, totals in links.items():
            link = self._links.setdefault(pair, _Watched(totals, now_s))
            if link.learn(totals, now_s):
                changed.append(pair)
        newly = [pair for pair in changed if not self._links[pair].is_slow and self._is_slow(pair)]
        over = [pair for pair in changed if self._links[pair].is_slow and self._is_even(pair)]
        for pair in (*newly, *over):
            self._links[pair].is_slow = pair in newly
        slow = {pair for pair, link in self._links.items() if link.is_slow}
        verdicts = [self._verdict(pair, self._whole(pair, slow)) for pair in newly]
        told, once = set(), []
        for each in verdicts:
            key = (each.whole, each.source if each.whole == "row" else each.target)
            if not each.whole or key not in told:
                once.append(each)
            told.add(key)
        return once + [self._verdict(pair, "", is_over=True) for pair in over]

    def _expected(self, pair: tuple[int, int]) -> float:
        """The rate that a link should have [bytes/s]; 0 if nothing is known."""
        link = self._links[pair]
        others = [
            median(each.rates)
            for other, each in self._links.items()
            if other != pair
            and len(each.rates) == _WINDOWS
            and 1 / _ALIKE <= each.carried / max(link.carried, 1e-9) <= _ALIKE
        ]
        own = median(link.usual) if len(link.usual) >= _LEAST_USUAL else 0.0
        return max(own, median(others) if others else 0.0)

    def _is_slow(self, pair: tuple[int, int]) -> bool:
        link = self._links[pair]
        is_full = len(link.rates) == _WINDOWS and link.busy >= _LEAST_BUSY
        return is_full and _SLOW * max(link.rates) < self._expected(pair)

    def _is_even(self, pair: tuple[int, int]) -> bool:
        return _EVEN * min(self._links[pair].rates) >= self._expected(pair)

    def _whole(self, pair: tuple[int, int], slow: set[tuple[int, int]]) -> str:
        """Whether the slow links are a row or a column of the matrix, and not a cell."""
        row = {each for each in self._links if each[0] == pair[0]}
        column = {each for each in self._links if each[1] == pair[1]}
        if len(row) > 1 and row <= slow:
            return "row"
        return "column" if len(column) > 1 and column <= slow else ""

    def _verdict(self, pair: tuple[int, int], whole: str, *, is_over: bool = False) -> SlowLink:
        link = self._links[pair]
        rate, expected = median(link.rates), self._expected(pair)
        return SlowLink(*pair, rate, expected, link.resent, is_over, whole)
