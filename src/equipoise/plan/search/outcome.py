"""What a search tells on its way and at its end."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Priced:
    """What is remembered of a choice that was priced."""

    row: int
    step_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is."""

    priced: int
    best_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """What may be left to gain, as a share of the best."""
        return max(0.0, 1.0 - self.bound_s / self.best_s) if self.best_s < np.inf else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a search found."""

    fitting: tuple[Priced, ...]
    """Choices that fit, fastest first."""
    progress: Progress
    listed: int
    """Choices in the space."""
    ruled_out: int
    """Of these, by memory before anything was priced."""
    bounded: int
    """Families whose kernels were priced."""
    least_bytes: float
    """What the smallest choice needs, by bound or by price."""


@dataclass(slots=True)
class Reached:
    """How far a run of a search has come, whenever it is stopped."""

    bound_s: float = 0.0
    """What takes less was looked at."""
    rows: int | None = None
    """Choices that are not ruled out by memory; None before that is known."""
    least_bytes: float = np.inf
    bounded: int = 0
    is_done: bool = False
