"""What a drill does within a rank: real signals, real limits, real bits.

Why
    A fault that is raised as an exception, or between two steps, shows little of one that strikes
    in the middle of a collective. So a rank of a drill looks at each phase of its step whether it
    is to do itself harm there, and does it.

What it decides
    Where: at the first phase of the asked name and step, or some time later in a thread, whatever
    the rank does by then. What, ``fault.drill.acts`` says.

Kept true (tests/unit/fault/drill/test_injection.py, tests/multi/fault/test_drill.py)
    Each injection of a rank fires once over all its starts, and leaves its proof.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equipoise.fault.drill.acts import ACTS
from equipoise.fault.drill.injection import VARIABLE, Injection, asked, prove, proven


class Injector:
    """Carries out what a drill asks of one rank.

    Args:
        folder: With what is asked for.
        rank: This one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        done = {each.number for each in proven(folder)}
        self._left = [
            (number, each)
            for number, each in enumerate(asked(folder))
            if each.rank == rank and number not in done
        ]
        self._now = ("start", 0)
        self._again: list[Callable[[str, int], None]] = []
        self.kept: list[Any] = []
        self.trainer: Any = None
        """What acts on weights and gradients reach; a ``train.loop.Trainer``."""

    @classmethod
    def from_environment(cls, rank: int) -> "Injector | None":
        """This rank's, if it belongs to a drill."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder), rank) if folder else None

    def reach(self, phase: str, step: int) -> None:
        """Do whatever is asked for at this phase of this step."""
        self._now = (phase, step)
        for again in self._again:
            again(phase, step)
        for number, each in [*self._left]:
            if each.phase != phase or step < each.step:
                continue
            self._left.remove((number, each))
            if each.after_s:
                later = threading.Timer(each.after_s, self._fire, (number, each))
                later.daemon = True
                later.start()
            else:
                self._fire(number, each)

    def each_phase(self, again: Callable[[str, int], None]) -> None:
        """From now on, call this at each phase with its name and step."""
        self._again.append(again)

    def _fire(self, number: int, injection: Injection) -> None:
        def tell(detail: str = "") -> None:
            prove(self._folder, number, self._rank, *self._now, detail)

        ACTS[injection.act](self, injection, tell)
