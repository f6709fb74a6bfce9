"""What a policy of experts is asked, and what all policies answer with.

What it decides
    From rows for each place to a schedule: each source rank's own rows stay with it as far as its
    places take them, the rest go to the other places in the order of ranks.

Kept true (tests/unit/balance/expert/test_policies.py, by Hypothesis)
    Whatever a policy answers passes ``check_experts``.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.balance.expert.loops import share
from equipoise.balance.expert.price import RowPrices
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.base.fields import is_whole
from equipoise.base.shown import shown
from equipoise.schedule.compiled import run_loop
from equipoise.schedule.expert.schedule import ExpertSchedule, add_by, owners_of, require_rows

_TOLERANCES = (0.015, 0.0095)
"""By how much the fullest rank may exceed the mean before a copy is made to lower it, with one
slot and with more: less than the 2% and 1% to which plans are held, and every copy that it saves is
bytes saved."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRequest:
    """Rows that routers chose, and what a rank may hold beside its own experts."""

    rows: Ints
    """Rows that each rank has for each expert, int64 [ranks, X]."""
    slots: int = 1
    """Most copies of experts on a rank."""
    least_rows: int = 1
    """Fewest rows that a copy is made for: below them its bytes cost more than it saves."""
    seen: Ints | None = None
    """Earlier loads of each expert, in any unit, int64 [X]; None before the first step, or if all
    are 0."""
    tolerance: float | None = None
    """Share of the mean by which the fullest rank may exceed it; by the slots unless given."""
    row_cost: float = 0.0
    """Rows that a rank could compute while one row travels there and back, twice."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", require_rows(self.rows))
        experts = self.rows.shape[1]
        if is_whole(self.slots) and self.slots < 0:
            raise LayoutError(f"{self.slots} slots for copies cannot be. Give 0 or more.")
        for name, whole in (("slots", self.slots), ("least_rows", self.least_rows)):
            if not is_whole(whole) or whole < 0:
                raise LayoutError(f"{name} is {shown(whole)}. Give a whole number of at least 0.")
        for name, value in (("tolerance", self.allowed), ("row_cost", self.row_cost)):
            if not isinstance(value, int | float | np.number):
                raise LayoutError(f"{name} is {shown(value)}. Give a finite number of at least 0.")
            if not 0 <= value < math.inf:
                raise LayoutError(f"{name} is {value:g}. Give a finite number of at least 0.")
        if self.seen is None:
            return
        object.__setattr__(self, "seen", np.asarray(self.seen))
        if self.seen.shape != (experts,):
            raise LayoutError(
                f"Earlier loads of {self.seen.size} experts do not match {experts} experts. Give "
                f"one for each."
            )
        if self.seen.dtype.kind != "i" or (self.seen < 0).any():
            least = f", the least {self.seen.min()}" if self.seen.dtype.kind in "if" else ""
            raise LayoutError(
                f"Earlier loads of {experts} experts must be int64 of at least 0; these are "
                f"{self.seen.dtype}{least}."
            )

    @property
    def ranks(self) -> int:
        """How many ranks share the experts."""
        return len(self.rows)

    @property
    def loads(self) -> Ints:
        """Rows of each expert, int64 [X]."""
        total: Ints = self.rows.sum(axis=0)
        return total

    @property
    def allowed(self) -> float:
        """Share of the mean by which the fullest rank may exceed it."""
        return _TOLERANCES[self.slots > 1] if self.tolerance is None else self.tolerance

    @property
    def prices(self) -> RowPrices:
        """What travel costs."""
        return RowPrices(self.least_rows, self.row_cost)

    @property
    def owners(self) -> Ints:
        """The rank that keeps each expert, int64 [X]."""
        return owners_of(self.rows.shape[1], ranks=self.ranks)


ExpertPolicy = Callable[[ExpertRequest], ExpertSchedule]
"""Writes a schedule that ``check_experts`` accepts, the same on every rank."""


def write_schedule(
    policy: str, request: ExpertRequest, places: Ints, place_rows: Ints
) -> ExpertSchedule:
    """The schedule of places that compute given numbers of rows.

    Args:
        policy: Its name.
        request: What it was asked.
        places: Expert and rank of each, int64 [places, 2], ascending.
        place_rows: Rows that each computes, int64 [places]; by expert they sum to its load.
    """
    ranks, experts = request.rows.shape
    quotas = np.zeros(len(places) * ranks, dtype=np.int64)
    tables = (first_places(places, experts), places[:, 1], place_rows, request.rows.T)
    run_loop(
        share,
        4 * len(places) * ranks,
        *(np.array(table, dtype=np.int64, order="C").reshape(-1) for table in tables),
        quotas,
    )
    by_rank = np.ascontiguousarray(quotas.reshape(len(places), ranks).T)
    return ExpertSchedule(policy, request.rows, request.owners, places, by_rank)


def first_places(places: Ints, experts: int) -> Ints:
    """The first place of each expert, and the number of places, int64 [X + 1]."""
    return np.searchsorted(places[:, 0], np.arange(experts + 1)).astype(np.int64)


def with_copies(request: ExpertRequest, kept: Ints, copies: Ints) -> tuple[Ints, Ints]:
    """Places of owners and copies in order, and their rows.

    Args:
        request: For its owners.
        kept: Rows that each owner computes, int64 [X].
        copies: Expert, rank and rows of each copy, int64 [n, 3].

    Returns:
        Places int64 [X + n, 2], and their rows int64 [X + n].
    """
    own = np.stack((np.arange(len(kept)), request.owners, kept), axis=1)
    every = np.concatenate((own, copies.reshape(-1, 3)))
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    return np.ascontiguousarray(every[:, :2]), np.ascontiguousarray(every[:, 2])


def as_wide(request: ExpertRequest, schedule: ExpertSchedule) -> ExpertRequest:
    """The request with slots for all copies of a schedule, whose bounds hold for it.

    ``eplb`` and ``tutel`` may copy more than slots: they move what a rank owns, too.
    """
    held = int(schedule.copied.sum(axis=0).max())
    return request if held <= request.slots else dataclasses.replace(request, slots=held)


def heights_of(request: ExpertRequest, places: Ints, place_rows: Ints) -> Ints:
    """Rows that each rank computes, int64 [ranks]."""
    return add_by(places[:, 1], place_rows, request.ranks)
