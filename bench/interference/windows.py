"""The recorded seconds as windows that predictors read, and their labels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.interference.stress import KINDS
from equipoise.fault.interference.features import WINDOW, relative
from equipoise.fault.interference.metrics import RESOURCES

RECORDED = Path(__file__).with_name("recorded.npz")

RESOURCE_OF = {kind: resource for kind, (resource, _) in KINDS.items()}
SLOWED = 0.9
"""Performance below which there is a slowdown to name the cause of."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows [n, seconds, metrics] of relative rows, and the labels of their last second."""

    rows: np.ndarray
    performance: np.ndarray
    kind: np.ndarray
    """What ran beside it; empty where calm."""
    kinds: np.ndarray
    """All kinds within a window, as bits."""
    workload: np.ndarray

    def __len__(self) -> int:
        return len(self.performance)

    def take(self, which: np.ndarray) -> "Windows":
        return Windows(*(getattr(self, name)[which] for name in self.__slots__))

    def has(self, kind: str) -> np.ndarray:
        """Whether a kind ran in any second of the window."""
        return (self.kinds >> list(RESOURCE_OF).index(kind)) & 1 == 1

    @property
    def resource(self) -> np.ndarray:
        """Number of the stressed resource; -1 where calm."""
        numbers = {kind: RESOURCES.index(each) for kind, each in RESOURCE_OF.items()} | {"": -1}
        return np.array([numbers[each] for each in self.kind.tolist()])


def load(file: Path = RECORDED) -> Windows:
    """Every second of the recording that follows ``WINDOW - 1`` others of its workload."""
    recorded = np.load(file)
    parts: list[tuple[np.ndarray, ...]] = []
    names = list(RESOURCE_OF)
    for workload in dict.fromkeys(recorded["workload"].tolist()):
        own = recorded["workload"] == workload
        first = int(np.flatnonzero(own & (recorded["level"] >= 0))[0])
        own &= np.arange(len(own)) >= first  # before that it starts
        rows = recorded["rows"][own].astype(np.float64)
        rows = relative(np.where(rows == -1, np.nan, rows))
        bits = np.array([1 << names.index(each) if each else 0 for each in recorded["kind"][own]])
        ends = np.arange(WINDOW - 1, len(rows))
        around = ends[:, None] + np.arange(1 - WINDOW, 1)
        # A second in which a neighbour came or went is neither calm nor disturbed.
        is_clear = (recorded["level"][own][ends] >= 0) & (recorded["since_s"][own][ends] >= 1.0)
        ends, around = ends[is_clear], around[is_clear]
        parts.append(
            (
                rows[around],
                recorded["performance"][own][ends],
                recorded["kind"][own][ends],
                np.bitwise_or.reduce(bits[around], axis=1),
                recorded["workload"][own][ends],
            )
        )
    return Windows(*(np.concatenate(each) for each in zip(*parts, strict=True)))
