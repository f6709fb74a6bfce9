"""A pipeline's step as data: the order in which each rank runs its stages and micro-batches.

Why
    GPipe, 1F1B, interleaving and the zero-bubble family differ only in the order of the same
    work. As data they share one executor, one checker and one price, and a strategy is a
    function that writes a schedule.

What it decides
    The nouns. A *stage* is a run of layers; a rank holds one or several (virtual) stages::

        loop, 4 ranks, 8 stages            V, 4 ranks, 8 stages
        rank 0   0 4                       rank 0   0 7
        rank 1   1 5                       rank 1   1 6
        rank 2   2 6                       rank 2   2 5
        rank 3   3 7                       rank 3   3 4

    A *unit* is a run of micro-batches that share documents divided over time: forward in
    order, since a slice reads the keys of those before it, and backward in reverse, since a
    slice's keys get gradients from all after it. Any other micro-batch is a unit of its own.

    A *path* is the stages that a micro-batch visits, in order: all of them, unless layers are
    skipped on purpose, which computes another model.

    Micro-batches may have any sizes; no order here needs equal ones.

Kept true (tests/unit/schedule/pipeline/test_schedule.py, by Hypothesis)
    What every strategy writes passes ``check_pipeline``, for any stages, prices and units.

Sources
    Interleaved stages: Megatron-LM, arXiv:2104.04473, section 2.2. V: arXiv:2405.15362.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.digest import digest
from equipoise.schedule.pipeline.instruction import Instruction, Op, make_table


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSchedule:
    """One step of a pipeline."""

    strategy: str
    rank_of: Ints
    """The rank that holds each stage, int64 [stages]."""
    orders: tuple[Ints, ...]
    """Each rank's instructions in order, int64 [n, 3]: operation, stage, micro-batch."""
    paths: Ints
    """Stages that each micro-batch visits, int64 [micro-batches, most]; -1 beyond its last."""
    units: Ints
    """Runs ``[first, stop)`` of micro-batches that share documents, int64 [units, 2]."""

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """How many stages there are, over all ranks."""
        return len(self.rank_of)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the step has."""
        return len(self.paths)

    @property
    def is_lossy(self) -> bool:
        """Whether some micro-batch skips stages, or visits them out of order."""
        whole = np.arange(self.stages)
        return self.paths.shape[1:] != whole.shape or bool((self.paths != whole).any())

    @property
    def unit_of(self) -> Ints:
        """The unit of each micro-batch, int64 [micro-batches]."""
        return np.repeat(np.arange(len(self.units)), self.units[:, 1] - self.units[:, 0])

    @property
    def digest(self) -> str:
        """Digest of the whole schedule; equal on ranks that wrote the same."""
        return digest([self.strategy, self.rank_of, *self.orders, self.paths, self.units])

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """The instructions of one rank, in order."""
        first = self.units[:, 0][self.unit_of]
        for op, stage, micro_batch in self.orders[rank].tolist():
            yield Instruction(Op(op), stage, micro_batch, micro_batch - int(first[micro_batch]))

    def __str__(self) -> str:
        """The whole schedule, one line per rank: stage, operation, micro-batch."""
        lines = [
            f"{self.strategy}: {self.micro_batches} micro-batches through {self.stages} stages on "
            f"{self.ranks} ranks"
        ]
        lines += [
            f"rank {rank}: {' '.join(map(str, self.instructions(rank)))}"
            for rank in range(self.ranks)
        ]
        return "\n".join(lines)


Order = list[tuple[int, int, int]]
"""One rank's order while it is being written: (operation, stage, micro-batch)."""


def place_in_loop(ranks: int, stages: int) -> Ints:
    """The rank of each stage when stages go around the ranks.

    >>> place_in_loop(2, 4).tolist()
    [0, 1, 0, 1]
    """
    return np.arange(stages, dtype=np.int64) % ranks


def place_in_v(ranks: int) -> Ints:
    """The rank of each of ``2 * ranks`` stages when they go down the ranks and back up.

    >>> place_in_v(3).tolist()
    [0, 1, 2, 2, 1, 0]
    """
    down = np.arange(ranks, dtype=np.int64)
    return np.concatenate((down, down[::-1]))


def whole_paths(stages: int, micro_batches: int) -> Ints:
    """Paths of micro-batches that visit every stage in order."""
    return np.tile(np.arange(stages, dtype=np.int64), (micro_batches, 1))


def single_units(micro_batches: int) -> Ints:
    """One unit per micro-batch."""
    first = np.arange(micro_batches, dtype=np.int64)
    return np.stack((first, first + 1), axis=1)


def finish_orders(orders: Sequence[Order] | Sequence[Ints]) -> tuple[Ints, ...]:
    """Convert written orders to tables."""
    return tuple(make_table(order) for order in orders)


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The stages before and after each stage on each micro-batch's path."""

    before: Ints
    """int64 [stages, micro-batches]; -1 at a path's first stage, -2 off the path."""
    after: Ints
    """int64 [stages, micro-batches]; -1 at a path's last stage, -2 off the path."""

    @classmethod
    def of(cls, paths: Ints, stages: int) -> "Neighbours":
        """Neighbours on paths, int64 [micro-batches, most], each stage at most once in each."""
        micro_batches, most = paths.shape
        whole = np.arange(stages)
        if most == stages and bool((paths == whole).all()):
            ends = np.append(whole[1:], -1)
            return cls(*(np.tile(each[:, None], micro_batches) for each in (whole - 1, ends)))
        before = np.full((stages, micro_batches), -2, dtype=np.int64)
        after = before.copy()
        every = np.arange(micro_batches)
        for at in range(most):
            here = paths[:, at]
            on = here >= 0
            left = paths[:, at - 1] if at else np.full(micro_batches, -1)
            right = paths[:, at + 1] if at + 1 < most else np.full(micro_batches, -1)
            before[here[on], every[on]] = left[on]
            after[here[on], every[on]] = right[on]
        return cls(before, after)
