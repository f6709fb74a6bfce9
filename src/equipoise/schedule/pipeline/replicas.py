"""Pipeline replicas whose ranks meet within a step must meet in one order.

Why
    Data-parallel replicas of a stage that share its experts exchange tokens in every pass of a
    layer, and under ZeRO 2 and 3 they gather weights or reduce-scatter gradients there. A rank
    that takes another micro-batch first waits for ever, or gets rows meant for another.

What it decides
    Ranks of a group must agree on *when they meet*: which instructions contain collectives, in
    which order, and how many. All else may differ. Such replicas have equal numbers of
    micro-batches, some perhaps empty, and in practice one schedule. Ranks that follow one order
    cannot deadlock: a meeting waits only for what ``check_pipeline`` has proven to precede it on
    every replica.

Kept true (tests/unit/schedule/pipeline/test_replicas.py,
tests/multi/parallel/test_pipeline_experts.py)
    Orders that meet otherwise are refused at the first difference; ranks run as many collectives
    as are counted here.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import CheckError
from equipoise.schedule.pipeline.instruction import OP, STAGE, Op, name_instruction
from equipoise.schedule.pipeline.schedule import PipelineSchedule

_THERE_AND_BACK = 2
"""Rows go to their experts and outputs come back, or their gradients do."""


def count_exchanges(sparse_layers: Sequence[int]) -> Ints:
    """Collectives of each instruction over the ranks that share experts, int64 [4, stages].

    The same holds for the ranks that share each expert's hidden units. A forward exchanges row
    counts, rows and outputs; a backward the gradients of the latter two, after another forward
    if that is recomputed; a weight gradient exchanges nothing.

    Args:
        sparse_layers: Number of expert layers of each stage, without recomputation.

    >>> count_exchanges([0, 2]).tolist()
    [[0, 6], [0, 4], [0, 4], [0, 0]]
    """
    layers = np.asarray(sparse_layers, dtype=np.int64)
    forward = (1 + _THERE_AND_BACK) * layers
    backward = _THERE_AND_BACK * layers
    return np.stack((forward, backward, backward, np.zeros_like(layers)))


def count_splits(stages: int, *, zero: int) -> Ints:
    """Whether an instruction meets the ranks that ZeRO shards over, int64 [4, stages].

    Under 2 and 3 a backward reduce-scatters gradients; under 3 forward and backward gather
    weights. ``fully_shard`` decides how often, alike on every rank.

    >>> count_splits(1, zero=2).tolist(), count_splits(1, zero=1).any()
    ([[0], [1], [1], [0]], np.False_)
    """
    of_ops = (int(zero == 3), int(zero >= 2), int(zero >= 2), 0)
    return np.tile(np.array(of_ops, dtype=np.int64)[:, None], (1, stages))


def list_meetings(schedule: PipelineSchedule, counts: Ints) -> Ints:
    """The instructions in which each rank of a pipeline meets its replicas, rank by rank.

    Args:
        schedule: Schedule of one replica.
        counts: Collectives of each operation on each stage, int64 [4, stages].

    Returns:
        int64 [meetings, 5]: rank, operation, stage, micro-batch, collectives.
    """
    rows = []
    for rank, table in enumerate(schedule.orders):
        count = counts[table[:, OP], table[:, STAGE]]
        ranks = np.full(len(table), rank, dtype=np.int64)
        rows.append(np.column_stack((ranks, table, count))[count > 0])
    return np.concatenate(rows) if rows else np.zeros((0, 5), dtype=np.int64)


def check_meetings(replicas: Sequence[Ints]) -> None:
    """Refuse replicas of a pipeline whose ranks would not meet in the same order.

    Raises:
        CheckError: the first place at which a replica differs from the first one.
    """
    first = replicas[0]
    ranks = range(1 + max((int(each[:, 0].max(initial=-1)) for each in replicas), default=-1))
    for number, other in enumerate(replicas[1:], start=1):
        for rank in ranks:
            ours, theirs = (each[each[:, 0] == rank, 1:] for each in (first, other))
            if np.array_equal(ours, theirs):
                continue
            shared = min(len(ours), len(theirs))
            wrong = np.flatnonzero((ours[:shared] != theirs[:shared]).any(axis=1))
            at = int(wrong[0]) if len(wrong) else shared
            raise CheckError(
                f"Rank {rank} of the pipeline meets its replicas out of order: meeting {at} is "
                f"{_name(ours, at)} on replica 0 and {_name(theirs, at)} on replica {number}. "
                f"Give all replicas equally many micro-batches and one schedule, written from the "
                f"highest price of each micro-batch."
            )


def _name(meetings: Ints, at: int) -> str:
    if at >= len(meetings):
        return "none"
    op, stage, micro_batch, count = meetings[at].tolist()
    words = "collective" if count == 1 else "collectives"
    return f"the {name_instruction(Op(op), stage, micro_batch)} ({count} {words})"
