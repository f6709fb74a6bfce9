"""What a rehearsal of one fault showed."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One injected fault and what the run made of it."""

    injected: str
    """What was done, where; proven by what it left. Empty if it did not fire."""
    detected_by: str = ""
    """The part of equipoise that noticed; empty if none did."""
    is_named: bool = False
    """Whether what was said has the fault's kind and its place."""
    detected_s: float | None = None
    """From the injection until the user could read of it [s]; None where no time is measured."""
    resumed_s: float | None = None
    """From then until the first step after it had been computed [s]; None where none was due."""
    lost_tokens: int = 0
    """Computed, thrown away and computed again."""
    is_equal: bool | None = None
    """Whether weights and moments at the end are those without faults, byte for byte; where fewer
    ranks went on, whether every loss is, up to rounding."""
    goes_on: str = ""
    """How the run went on: ``by itself``, ``same command``, ``undisturbed``; empty: not at all."""
    said: str = ""
    """What equipoise said of it."""
    note: str = ""
    """Figures of this fault alone, as a sentence."""

    @property
    def is_survived(self) -> bool:
        """Whether the fault fired, was named, and nothing was lost by it."""
        named = bool(self.injected) and bool(self.detected_by) and self.is_named
        return named and bool(self.goes_on) and self.is_equal is True


@dataclass(frozen=True, slots=True)
class DrillRow:
    """A fault of the catalog, rehearsed once or more often."""

    name: str
    number: str
    """The fault's number in the documentation: ``F1``."""
    outcomes: tuple[Rehearsal, ...] = ()
    left_out: str = ""
    """Why it was not rehearsed here; empty if it was."""

    @property
    def is_survived(self) -> bool:
        """Whether the run survived each time."""
        return all(each.is_survived for each in self.outcomes)

    @property
    def survived(self) -> int:
        """How often it did."""
        return sum(each.is_survived for each in self.outcomes)

    def median(self, field: str) -> float | None:
        """The median of ``detected_s`` or ``resumed_s``; None if none was measured."""
        times = self._times(field)
        return statistics.median(times) if times else None

    def most(self, field: str) -> float | None:
        """The longest."""
        return max(self._times(field), default=None)

    def _times(self, field: str) -> list[float]:
        return [each for each in (getattr(one, field) for one in self.outcomes) if each is not None]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "fault": self.name,
            "number": self.number,
            "left_out": self.left_out or None,
            "survived": self.survived,
            "outcomes": [
                dataclasses.asdict(each) | {"is_survived": each.is_survived}
                for each in self.outcomes
            ],
        }


@dataclass(frozen=True, slots=True)
class Drill:
    """All rehearsals of a run."""

    rows: tuple[DrillRow, ...]
    ranks: int
    scaled: Sequence[str]
    """What was made smaller than in the user's run, a phrase each."""
    took_s: float

    @property
    def is_survived(self) -> bool:
        """Whether every fault that was rehearsed was named and recovered from."""
        return all(row.is_survived for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "ranks": self.ranks,
            "scaled": [*self.scaled],
            "took_s": self.took_s,
            "survived": self.is_survived,
            "rows": [row.as_json() for row in self.rows],
        }
