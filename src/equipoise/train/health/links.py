"""Slow links of a run: from what they carried to a line in the journal and on the console.

What it decides
    Nothing: ``fault.detect.links`` does. It hears from the watchdog's thread on rank 0, so the
    training thread waits for nothing.

Kept true (tests/multi/fault/test_slow_link.py)
    A link that is paced is named while the run goes on.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from equipoise.fault.detect.links import SlowLinks
from equipoise.launch.last_words import say_late
from equipoise.observe.journal import note
from equipoise.observe.links import Links


class LinkWatch:
    """Watches all links; rank 0 speaks for all.

    Args:
        folders: Of the run and of what it is compared with; each has a journal.
        show: Takes sentences for the user.
    """

    def __init__(self, folders: Sequence[Path], show: Callable[[str], object] = say_late) -> None:
        self._folders, self._show, self._slow = tuple(folders), show, SlowLinks()
        self._now: set[tuple[int, int]] = set()
        """Ends of the links that are slow now."""

    def touches(self, rank: int) -> bool:
        """Whether a link of this rank is slow now, so that its exchanges take long."""
        return any(rank in ends for ends in self._now)

    def hear(self, links: Links) -> None:
        """Take into account what links have carried so far."""
        for verdict in self._slow.learn(time.monotonic(), links):
            ends = verdict.source, verdict.target
            self._now = self._now - {ends} if verdict.is_over else self._now | {ends}
            self._show(verdict.sentence)
            for folder in self._folders:
                note(
                    folder,
                    0,
                    "instant",
                    "even-link" if verdict.is_over else "slow-link",
                    source=verdict.source,
                    target=verdict.target,
                    rate=verdict.rate,
                    expected=verdict.expected,
                    resent=verdict.resent,
                    message=verdict.sentence,
                )
