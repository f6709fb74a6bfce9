"""What a run's journal says of its encoders: what each rank had to encode, and what it would have.

Kept true (tests/unit/observe/test_modality.py)
    Values that are missing or not numbers count for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.observe.journal_lines import Event


@dataclass(frozen=True, slots=True, eq=False)
class EncoderRecord:
    """Images and sound of a run's steps."""

    items: int
    """All of them, over all steps."""
    work: Floats
    """Share of each rank in the work of an average step, float64 [ranks]."""
    work_in_turn: Floats
    """The same if items were dealt in turn."""
    skew: float
    """Work of the fullest rank over the mean; mean of steps."""
    skew_in_turn: float
    """The same if items were dealt in turn."""
    gap: float
    """How far the fullest rank is above the least possible; mean of steps."""
    encode_s: Floats
    """Seconds of each rank's encoders, mean of steps, float64 [ranks]."""
    bridge_bytes: float
    """Bytes over the bridge, all ranks, mean of steps."""
    step: Ints
    """Numbers of the steps with items, int64 [steps]."""
    fullest_s: Floats
    """Seconds that the longest encoder had its core for in each of them, float64 [steps]."""


def read_encoders(events: Mapping[int, Event]) -> EncoderRecord | None:
    """The encoders of a run on the ranks that it had last; None without any.

    Args:
        events: The journal's, by step.
    """
    read = [(step, each, _table(each)) for step, each in sorted(events.items())]
    known = [(step, each, table) for step, each, table in read if table is not None]
    if not known:
        return None
    last = known[-1][2].shape  # a run may have gone on with other ranks
    rows = [each for _, each, table in known if table.shape == last]
    tables = [table for *_, table in known if table.shape == last]
    steps = np.array([step for step, _, table in known if table.shape == last], dtype=np.int64)
    work, in_turn, encode_s = np.stack(tables).swapaxes(0, 1)
    has_work = work.sum(axis=1) > 0
    if not has_work.any():
        return None
    work, in_turn = work[has_work], in_turn[has_work]
    return EncoderRecord(
        items=sum(int(_number(each.get("items"))) for each in rows),
        work=(work / work.sum(axis=1, keepdims=True)).mean(axis=0),
        work_in_turn=(in_turn / in_turn.sum(axis=1, keepdims=True)).mean(axis=0),
        skew=float((work.max(axis=1) / work.mean(axis=1)).mean()),
        skew_in_turn=float((in_turn.max(axis=1) / in_turn.mean(axis=1)).mean()),
        gap=float(np.mean([_number(each.get("gap")) for each in rows])),
        encode_s=encode_s[has_work].mean(axis=0),
        bridge_bytes=float(np.mean([_number(each.get("bridge_bytes")) for each in rows])),
        step=steps[has_work],
        fullest_s=np.array([_fullest_s(each) for each in rows])[has_work],
    )


def _table(event: Event) -> Floats | None:
    """Work, work in turn and seconds by rank, float64 [3, ranks], if they are whole."""
    lists = [event.get(key) for key in ("work", "work_in_turn", "encode_s")]
    try:
        table = np.array(lists, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    is_whole = table.ndim == 2 and table.size > 0 and np.isfinite(table).all()
    return table if is_whole and (table >= 0).all() else None


def _fullest_s(event: Event) -> float:
    """Seconds of the rank that encoded longest, without those in which others had its core."""
    known = event.get("encode_core_s", event.get("encode_s"))
    seconds = [_number(each) for each in known] if isinstance(known, list) else []
    return max(seconds, default=0.0)


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and np.isfinite(value) else 0.0  # type: ignore[arg-type,call-overload]
