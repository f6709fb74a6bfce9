"""A checker of expert schedules, which knows nothing of how policies plan.

What it decides
    Whether a schedule does what a layer needs: every row of every rank is computed once, by its
    own expert; every expert that is computed away from its owner is a copy that the owner sends,
    once, and whose gradient returns to the owner, once.

Kept true (tests/unit/schedule/expert/test_check.py)
    A schedule with any one number changed is refused, with a sentence that says what is wrong.
"""

import numpy as np

from equipoise.base.errors import LayoutError
from equipoise.schedule.expert.schedule import ExpertSchedule, owners_of

_FIX = "The policy that wrote it is wrong; use policy fixed."


def check_experts(schedule: ExpertSchedule, *, slots: int | None = None) -> None:
    """Refuse a schedule that would lose, repeat or misroute a row, or a gradient.

    Args:
        schedule: Any.
        slots: Most copies on a rank; any number unless given.

    Raises:
        LayoutError: the first thing that is wrong.
    """
    if fault := _form_fault(schedule):
        raise LayoutError(f"The {schedule.policy} schedule of experts {fault} {_FIX}")
    ranks, experts = schedule.rows.shape
    if fault := _shape_fault(schedule, ranks, experts) or _row_fault(schedule, ranks, experts):
        raise LayoutError(f"The {schedule.policy} schedule of experts {fault} {_FIX}")
    copies = schedule.copied.sum(axis=0)
    if slots is not None and (copies > slots).any():
        rank = int(copies.argmax())
        raise LayoutError(
            f"The {schedule.policy} schedule of experts gives rank {rank} {copies[rank]} copies, "
            f"and it has {slots} slots. {_FIX}"
        )


def _form_fault(schedule: ExpertSchedule) -> str:
    """What is not whole numbers in as many dims as they should have."""
    forms = {"rows": (2, -1), "owners": (1, -1), "places": (2, 2), "quotas": (2, -1)}
    for name, (dims, width) in forms.items():
        table = getattr(schedule, name)
        is_table = isinstance(table, np.ndarray) and table.dtype.kind == "i"
        if not is_table or table.ndim != dims or width not in (-1, table.shape[-1]):
            kind = table.dtype if isinstance(table, np.ndarray) else type(table).__name__
            shape = f" of shape {list(table.shape)}" if isinstance(table, np.ndarray) else ""
            meant = {"rows": "[ranks, experts]", "owners": "[experts]", "places": "[places, 2]"}
            wanted = meant.get(name, "[ranks, places]")
            return f"has {name} that are {kind}{shape}; they must be int64 {wanted}."
    return ""


def _shape_fault(schedule: ExpertSchedule, ranks: int, experts: int) -> str:
    places = schedule.places
    if not np.array_equal(schedule.owners, owners_of(experts, ranks=ranks)):
        return "moves owners, where optimizer states lie."
    if schedule.quotas.shape != (ranks, len(places)):
        return (
            f"has quotas of shape {schedule.quotas.shape} for {ranks} ranks, {len(places)} places."
        )
    outside = (places < 0) | (places >= np.array([experts, ranks]))
    if outside.any():
        expert, rank = places[np.flatnonzero(outside.any(axis=1))[0]]
        return (
            f"has a place of expert {expert} on rank {rank}; there are {experts} experts and "
            f"{ranks} ranks."
        )
    keys = places[:, 0] * ranks + places[:, 1]
    if (np.diff(keys) <= 0).any():
        expert, rank = places[np.flatnonzero(np.diff(keys) <= 0)[0] + 1]
        return f"has the place of expert {expert} on rank {rank} twice, or out of order."
    return ""


def _row_fault(schedule: ExpertSchedule, ranks: int, experts: int) -> str:
    quotas = schedule.quotas
    if (quotas < 0).any():
        rank, place = np.argwhere(quotas < 0)[0]
        return f"sends {quotas[rank, place]} rows from rank {rank} to place {place}."
    computed = np.zeros((experts, ranks), dtype=np.int64)
    np.add.at(computed, schedule.places[:, 0], quotas.T)
    if (schedule.rows != computed.T).any():
        rank, expert = np.argwhere(schedule.rows != computed.T)[0]
        return (
            f"computes {computed[expert, rank]} of the {schedule.rows[rank, expert]} rows that "
            f"rank {rank} has for expert {expert}."
        )
    return ""
