"""Where each expert is computed in one micro-batch, and which rows travel there.

Why
    How many rows an expert gets is known only once tokens have chosen, and the rank of a popular
    expert keeps all others waiting. An expert is therefore a logical id: its weights, gradients
    and optimizer state stay with one *owner*, while any rank may compute a share of its rows with
    a copy that lasts for this micro-batch.

What it decides
    Nothing: it is the answer of a policy (``balance.expert``) in arrays that one executor obeys
    (``parallel.expert.balanced``). A *place* is an expert on a rank. Each source rank has a
    *quota* of rows for each place; its rows of an expert, in order, fill the expert's places in
    the order of ranks::

        expert 3, owner rank 1      places   (3, 0) copy   (3, 1) owner   (3, 2) copy
        rank 0 has 5 rows           quotas        5             0              0
        rank 1 has 9 rows                         0             6              3

    Before rows travel, owners send the weights of copies; in the backward pass they send them
    again unless copies were kept, and every copy's gradient returns to its owner, who adds it to
    its own in the order of ranks.

    The owner of expert ``x`` of X is rank ``x // ceil(X / ranks)``: runs of equal length, the last
    perhaps shorter, as torch splits a tensor's first dim.

Kept true (tests/unit/schedule/expert/test_schedule.py, tests/multi/parallel/test_expert.py)
    Each row is computed once; ranks send exactly the bytes counted here, link by link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Flags, Ints
from equipoise.base.digest import digest
from equipoise.base.errors import LayoutError
from equipoise.schedule.expert.skew import load_skew
from equipoise.spec.model.experts import split_experts

COUNT_BYTES = 8
"""Bytes of one entry of the counts that ranks exchange, and of a plan's digest, int64."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSchedule:
    """The places and rows of one sparse layer and micro-batch."""

    policy: str
    """Who wrote it."""
    rows: Ints
    """Rows that each rank has for each expert, int64 [ranks, X]."""
    owners: Ints
    """The rank that keeps each expert, int64 [X]."""
    places: Ints
    """Expert and rank of each place, int64 [places, 2], ascending."""
    quotas: Ints
    """Rows that each rank sends to each place, int64 [ranks, places]."""
    remakes: bool = True
    """Whether copies are dropped after the forward pass and sent again for the backward."""

    @property
    def ranks(self) -> int:
        """How many ranks share the experts."""
        return len(self.rows)

    @property
    def is_copy(self) -> Flags:
        """Which places are not their expert's owner, bool [places]."""
        copies: Flags = self.owners[self.places[:, 0]] != self.places[:, 1]
        return copies

    @property
    def loads(self) -> Ints:
        """Rows that each place computes, int64 [places]."""
        total: Ints = self.quotas.sum(axis=0)
        return total

    @property
    def computed(self) -> Ints:
        """Rows that each rank computes, int64 [ranks]."""
        total: Ints = self.sent.sum(axis=0)
        return total

    @property
    def computed_by_owners(self) -> Ints:
        """Rows that each rank would compute without copies, int64 [ranks]."""
        return add_by(self.owners, self.rows.sum(axis=0), self.ranks)

    @property
    def sent(self) -> Ints:
        """Rows that each rank sends to each rank, int64 [ranks, ranks]; its own on the diagonal."""
        sent = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        np.add.at(sent.T, self.places[:, 1], self.quotas.T)
        return sent

    @property
    def copied(self) -> Ints:
        """Experts whose weights each rank sends to each rank, int64 [ranks, ranks]."""
        copies = self.places[self.is_copy]
        copied = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        np.add.at(copied, (self.owners[copies[:, 0]], copies[:, 1]), 1)
        return copied

    @property
    def copies(self) -> int:
        """Copies of experts, over all ranks."""
        return int(self.is_copy.sum())

    @property
    def skew(self) -> float:
        """Rows of the rank that computes the most, over the mean; 1 if there are none."""
        return load_skew(self.computed)

    @property
    def digest(self) -> str:
        """Equal for equal schedules, on every rank."""
        return digest([self.policy, self.rows, self.owners, self.places, self.quotas, self.remakes])

    def bytes(
        self, width: int, *, element_bytes: int, forwards: int = 1, is_planned: bool | None = None
    ) -> Ints:
        """Bytes of rows and counts that each rank sends to each in forward and backward.

        Rows go to their place and come back, in each forward and, as gradients, in the backward.
        Where every expert stays, a rank tells each rank the counts of the experts there. Where
        ranks plan from counts, each tells all its counts, and the digest of its plan.

        Args:
            width: Elements of a row, D.
            element_bytes: Bytes of an activation's element.
            forwards: Forward passes, 2 with full recomputation.
            is_planned: Whether ranks planned it from their counts; by default all policies but
                ``fixed``, which ``auto`` also plans.

        Returns:
            int64 [ranks, ranks].
        """
        is_planned = self.policy != "fixed" if is_planned is None else is_planned
        own = np.bincount(self.owners, minlength=self.ranks)
        counts = np.full(self.ranks, len(self.owners) + 1) if is_planned else own
        sent = self.sent
        rows = (forwards + 1) * (sent + sent.T) * width * element_bytes
        return _between(rows + forwards * COUNT_BYTES * counts[np.newaxis, :])

    def copy_bytes(
        self,
        expert_elements: int,
        *,
        element_bytes: int,
        forwards: int = 1,
        is_trained: bool = True,
    ) -> Ints:
        """Bytes of weights to copies, and of their gradients back, int64 [ranks, ranks].

        Args:
            expert_elements: Weights of an expert: 3 x D x F for SwiGLU.
            element_bytes: Bytes of a weight's element, and of its gradient's.
            forwards: Forward passes, 2 with full recomputation.
            is_trained: Whether experts have gradients; frozen ones send none back.
        """
        copied = self.copied
        trips = (forwards + self.remakes) * copied + is_trained * copied.T
        return _between(trips * expert_elements * element_bytes)

    def __str__(self) -> str:
        """The schedule as text, a line for each expert."""
        ranks, experts = self.rows.shape
        lines = [
            f"{self.policy}: {int(self.rows.sum())} rows of {experts} experts over {ranks} ranks, "
            f"{self.copies} copies"
        ]
        loads = self.loads
        for expert in range(experts):
            mine = np.flatnonzero(self.places[:, 0] == expert)
            where = ", ".join(f"rank {self.places[at, 1]} {loads[at]}" for at in mine)
            lines.append(f"expert {expert} of rank {self.owners[expert]}: {where}")
        return "\n".join(lines)


def _between(sent_bytes: Ints) -> Ints:
    """Only what leaves a rank."""
    leaving: Ints = sent_bytes * ~np.eye(len(sent_bytes), dtype=bool)
    return leaving


def add_by(keys: Ints, amounts: Ints, count: int) -> Ints:
    """Sums of int64 amounts by key, int64 [count]."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, keys, amounts)
    return sums


def owners_of(experts: int, *, ranks: int) -> Ints:
    """The rank that keeps each expert, int64 [X].

    Raises:
        LayoutError: a rank would have no expert.

    >>> owners_of(7, ranks=4).tolist()
    [0, 0, 1, 1, 2, 2, 3]
    """
    return np.repeat(np.arange(ranks, dtype=np.int64), split_experts(experts, ranks=ranks))


MOST_ROWS = 1 << 48
"""Rows of all ranks together; sums of them times ranks are int64."""


def require_rows(rows: Sequence[Sequence[int]] | Ints) -> Ints:
    """Rows of each rank for each expert, int64 [ranks, X], whatever holds them.

    Raises:
        LayoutError: they are not a table of counts of at least one rank, or too many.

    >>> require_rows([[3, 0], [1, 2]]).sum(axis=0).tolist()
    [4, 2]
    """
    try:
        table = np.asarray(rows)
    except ValueError:
        raise LayoutError(
            "Rows of experts must be int64 [ranks, experts]; these ranks have rows for different "
            "numbers of experts. Give every rank a count for each expert, 0 where it has none."
        ) from None
    if table.ndim != 2 or table.dtype.kind != "i":
        raise LayoutError(
            f"Rows of experts must be int64 [ranks, experts]; these are {table.dtype} of "
            f"shape {list(table.shape)}."
        )
    ranks, experts = table.shape
    if ranks == 0 or (table < 0).any():
        raise LayoutError(
            f"Rows of {experts} experts on {ranks} ranks must be counts of at least 0, of at "
            f"least one rank."
        )
    if table.sum(dtype=np.float64) > MOST_ROWS:
        raise LayoutError(
            f"Rows of experts sum to {sum(map(int, table.reshape(-1))):,}, and plans are exact for "
            f"{MOST_ROWS:,} at most. Give the rows of one micro-batch."
        )
    return table.astype(np.int64, copy=False)


def schedule_experts(rows: Sequence[Sequence[int]] | Ints) -> ExpertSchedule:
    """Every expert is computed by its owner, given each rank's rows for each expert.

    Raises:
        LayoutError: a rank would have no expert, or rows are not counts.

    >>> schedule_experts([[3, 0, 1, 1], [0, 2, 0, 5]]).sent.tolist()
    [[3, 2], [2, 5]]
    """
    rows = require_rows(rows)
    owners = owners_of(rows.shape[1], ranks=len(rows))
    places = np.stack((np.arange(len(owners)), owners), axis=1)
    return ExpertSchedule("fixed", rows, owners, places, rows, remakes=False)
