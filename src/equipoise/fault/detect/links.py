"""Name a link between two ranks that carries fewer bytes a second than it should.

Why
    A slow link and a slow rank both make everybody wait, and call for different repairs.

What it decides
    A link's *rate* is the bytes that it carried over the seconds in which it had some to carry
    (``observe.links``): a rank that sends late or reads late does not change it. A link is slow if
    its last ``_WINDOWS`` rates are all below a third of what is expected (the median of links that
    carried about as much meanwhile, or what it carried itself before, whichever is more), and if
    that costs a tenth of the time beyond what load explains.

    A loaded host makes healthy links busy as well: messages wait there until the other end has a
    core. So the seconds for which threads of either rank waited for one are taken off the cost; or,
    over ``_LOADED_WINDOWS``, what the busiest other link of these ranks was busy for, which meets
    the same load. And the kernel must have sampled a slow delivery, which it does only while more
    is to be sent: small messages are acknowledged up to 40 ms late on any link.

    ::

                  to 0      to 1      to 2        a matrix of rates, as C4 draws it:
        from 0      .     880 MB/s  860 MB/s
        from 1   21 MB/s     .      870 MB/s      one cell: the link; a row: all that rank 1
        from 2   850 MB/s 890 MB/s     .          sends; a column: all that it receives

Kept true (tests/unit/fault/detect/test_links.py, tests/multi/fault/test_slow_link.py)
    A link that is paced by the kernel is named, and no rank; of links that carry different amounts
    none is, nor of those that a loaded host delays.

Sources
    C4, arXiv:2406.04594: rows, columns and cells of the matrix of delays.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from equipoise.base.units import format_bytes
from equipoise.observe.links import Links, LinkTotals

_LEAST_BYTES = 1 << 18
"""A rate of fewer says more about single messages than about the link."""

_WINDOWS, _LOADED_WINDOWS = 3, 8
"""Windows that must all agree; where other programs have the cores, most of the second number."""

_USUAL, _LEAST_USUAL = 64, 3
"""Rates that are remembered, and that must be known to be compared with."""

_SLOW, _EVEN = 3.0, 1.5
"""A link is slow below a third of the expected rate, and is not any more above two thirds."""

_RECOVERED = 2.0
"""A link that was called slow carries at least this much more before it is called even: where
all others became slow as well, it has not recovered."""

_ALIKE = 4.0
"""Links are compared where the bytes that they carried differ by at most this factor."""

_LEAST_COST = 0.1
"""Share of the time that a link must cost, beyond what load explains, to matter."""

_TICK_S = 0.01
"""Kernels count busy seconds in ticks of at most this [s]: fewer say nothing about a rate."""


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
        packets = "a packet" if self.resent == 1 else f"{self.resent:,} packets"
        lost = f", and {packets} had to be sent again" if self.resent else ""
        return (
            f"{name} {rates}, where {format_bytes(self.expected)}/s are expected{lost}. No rank is "
            f"slow by that; look at the network between their hosts."
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """What a link did between two looks."""

    sent_bytes: int
    busy_s: float
    clock_s: float
    delivery_rate: float
    """By the kernel's last sample [bytes/s]."""
    delayed: float
    """Share of the clock for which threads of one of its ranks had no core."""

    @property
    def rate(self) -> float:
        return self.sent_bytes / max(self.busy_s, _TICK_S)

    @property
    def carried(self) -> float:
        """Bytes a second of the clock."""
        return self.sent_bytes / self.clock_s

    def cost(self, expected: float) -> float:
        """Share of the clock that a link of the expected rate would not have been busy."""
        return (self.busy_s - self.sent_bytes / expected) / self.clock_s


@dataclass(slots=True)
class _Watched:
    """What is known of one link."""

    begun: LinkTotals
    begun_s: float
    windows: deque[_Window] = field(default_factory=lambda: deque(maxlen=_LOADED_WINDOWS))
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL))
    resent: int = 0
    is_known: bool = False
    """Whether a first window, in which ranks were starting, is over."""
    slow_rate: float = 0.0
    """What it carried when it was called slow, until it is not any more [bytes/s]."""

    def learn(self, totals: LinkTotals, now_s: float) -> bool:
        """Close a window if enough was carried in it; whether it is the link's second or later."""
        begun, clock_s = self.begun, now_s - self.begun_s
        sent_bytes = totals.sent_bytes - begun.sent_bytes
        if sent_bytes < 0:  # connections were closed
            self.begun, self.begun_s = totals, now_s
        if sent_bytes < _LEAST_BYTES or clock_s <= 0:
            return False
        self.begun, self.begun_s = totals, now_s
        if not self.is_known:
            self.is_known = True
            return False
        self.resent = totals.resent - begun.resent
        if len(self.windows) == _LOADED_WINDOWS and not self.slow_rate:
            self.usual.append(self.windows[0].rate)
        waited_s = max(new - old for new, old in zip(totals.delays_s, begun.delays_s, strict=True))
        busy_s = totals.busy_s - begun.busy_s
        delayed = max(0.0, waited_s) / clock_s
        self.windows.append(_Window(sent_bytes, busy_s, clock_s, totals.delivery_rate, delayed))
        return True

    def last(self, windows: int = _WINDOWS) -> list[_Window]:
        """The newest ones; none if there are not as many."""
        return list(self.windows)[-windows:] if len(self.windows) >= windows else []


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
        judged = {pair: self._judge(pair) for pair in changed if not self._links[pair].slow_rate}
        newly = {pair: rates for pair, rates in judged.items() if rates is not None}
        over = [pair for pair in changed if pair not in judged and self._is_even(pair)]
        for pair, (rate, _) in newly.items():
            self._links[pair].slow_rate = rate
        for pair in over:
            self._links[pair].slow_rate = 0.0
        slow = {pair for pair, link in self._links.items() if link.slow_rate}
        verdicts = [
            SlowLink(*pair, *rates, self._links[pair].resent, whole=self._whole(pair, slow))
            for pair, rates in newly.items()
        ]
        told, once = set(), []
        for each in verdicts:
            key = (each.whole, each.source if each.whole == "row" else each.target)
            if not each.whole or key not in told:
                once.append(each)
            told.add(key)
        return once + [self._recovered(pair) for pair in over]

    def _alike(self, pair: tuple[int, int]) -> dict[tuple[int, int], _Watched]:
        """The other links that carried about as much."""
        carried = self._links[pair].windows[-1].carried
        return {
            other: each
            for other, each in self._links.items()
            if other != pair
            and each.last()
            and 1 / _ALIKE <= each.windows[-1].carried / carried <= _ALIKE
        }

    def _expected(self, pair: tuple[int, int], windows: int = _WINDOWS) -> float:
        """The rate that a link should have [bytes/s]; 0 if nothing is known."""
        link = self._links[pair]
        others = [_rate(each.last(windows) or each.last()) for each in self._alike(pair).values()]
        own = median(link.usual) if len(link.usual) >= _LEAST_USUAL else 0.0
        return max(own, median(others) if others else 0.0)

    def _judge(self, pair: tuple[int, int]) -> tuple[float, float] | None:
        """Rates of a slow link, its own and the expected one [bytes/s]; None if it is not slow."""
        last, expected = self._links[pair].last(), self._expected(pair)
        if not last or not expected:
            return None
        is_slow = all(
            _SLOW * each.rate < expected and each.cost(expected) - each.delayed >= _LEAST_COST
            for each in last
        )
        if is_slow and _has_more_to_send(last, expected):
            return _rate(last), expected
        return self._judge_loaded(pair)

    def _judge_loaded(self, pair: tuple[int, int]) -> tuple[float, float] | None:
        """The same for ranks that wait for cores: held against other links, and for longer."""
        last, load = self._links[pair].last(_LOADED_WINDOWS), self._load(pair)
        if not last or load is None:
            return None
        rate, expected = _rate(last), self._expected(pair, _LOADED_WINDOWS)
        cost = median(each.cost(expected) for each in last)
        is_slow = _SLOW * rate < expected and cost - load >= _LEAST_COST
        return (rate, expected) if is_slow and _has_more_to_send(last, expected) else None

    def _load(self, pair: tuple[int, int]) -> float | None:
        """Share of the time that the busiest other link of the same ranks was busy, if any."""
        of_others = [
            median(window.busy_s / window.clock_s for window in each.windows)
            for other, each in self._alike(pair).items()
            if {*other} & {*pair}
        ]
        return max(of_others, default=None)

    def _is_even(self, pair: tuple[int, int]) -> bool:
        link = self._links[pair]
        least = min(each.rate for each in link.last())
        is_faster = least >= _RECOVERED * link.slow_rate
        return is_faster and _EVEN * least >= self._expected(pair)

    def _whole(self, pair: tuple[int, int], slow: set[tuple[int, int]]) -> str:
        """Whether the slow links are a row or a column of the matrix, and not a cell."""
        row = {each for each in self._links if each[0] == pair[0]}
        column = {each for each in self._links if each[1] == pair[1]}
        if len(row) > 1 and row <= slow:
            return "row"
        return "column" if len(column) > 1 and column <= slow else ""

    def _recovered(self, pair: tuple[int, int]) -> SlowLink:
        link = self._links[pair]
        return SlowLink(*pair, _rate(link.last()), self._expected(pair), link.resent, is_over=True)


def _has_more_to_send(windows: Sequence[_Window], expected: float) -> bool:
    """Whether the kernel saw the link slow while more was to be sent, and not just acknowledged."""
    return any(0 < _SLOW * each.delivery_rate < expected for each in windows)


def _rate(windows: Sequence[_Window]) -> float:
    """What a link carried while it was busy, as a rule [bytes/s]."""
    return median(each.rate for each in windows)
