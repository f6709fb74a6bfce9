"""The files that a run left behind, and whether two runs ended alike."""

import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.fault.drill.facts import processes
from support.ranks.on_ranks import Ended

EXACT = 1e-5


def assert_close(ended: Ended, expected: Ended, bound: float = EXACT) -> None:
    """The same losses, and the same weights within a share of each one's largest number."""
    assert ended.losses == pytest.approx(expected.losses, rel=bound)
    assert set(ended.weights) == set(expected.weights)
    for name, weights in expected.weights.items():
        error = np.abs(ended.weights[name] - weights).max()
        assert error <= bound * np.abs(weights).max(), name


def events(folder: Path, name: str = "", rank: int = 0) -> list[dict]:
    """Whole lines of a rank's journal, or those of one name; empty before it exists."""
    path = folder / "journal" / f"rank-{rank:05}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # Journals grow to thousands of lines while tests wait for one: others are not parsed.
    likely = [line for line in lines if not name or f':"{name}"' in line.replace(" ", "")]
    parsed = [json.loads(line) for line in likely if line.endswith("}\n")]
    return [event for event in parsed if name in ("", event["name"])]


def ranks_of(folder: Path) -> dict[int, int]:
    """Process of each rank of a run's folder that is alive."""
    return processes(folder)
