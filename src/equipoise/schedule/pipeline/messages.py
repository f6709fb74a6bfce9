"""Derive a pipeline's messages from the order of computation.

Why
    An executor posts receives before it needs them and sends without waiting. Both ends of a
    link must agree on the order, though each knows only its own computation.

What it decides
    An activation travels from each stage to the next on the path and a gradient back, if the
    stages are on different ranks. Messages of a link are numbered in the order in which the
    sender produces them, and the receiver posts them in that order, even if it needs them in
    another. Sizes are not listed: every rank knows each micro-batch's tokens from the pack.

Kept true (tests/unit/schedule/pipeline/test_messages.py, by Hypothesis)
    Each micro-batch crosses each boundary between ranks once each way; what is sent is needed
    later; both ends list a link's messages in the same order.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.replay import needed_places
from equipoise.schedule.pipeline.schedule import PipelineSchedule

PipelineCarries = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class PipelineMessage:
    """One tensor from rank to rank."""

    source: int
    target: int
    carries: PipelineCarries
    """An activation, or its gradient."""
    micro_batch: int
    from_stage: int
    to_stage: int
    number: int
    """Its place among the messages from ``source`` to ``target``, from 0."""
    sent_at: int
    """Place of the instruction that produces it in the source's order."""
    needed_at: int
    """Place of the instruction that waits for it in the target's order."""


def list_messages(schedule: PipelineSchedule) -> tuple[PipelineMessage, ...]:
    """Every message of a step, by source and target, and in each link's order.

    The schedule passes ``check_pipeline``.

    Cost: O(instructions x log).
    """
    needs, travels = needed_places(schedule)
    lengths = [len(table) for table in schedule.orders]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    ranks = np.repeat(np.arange(schedule.ranks), lengths)
    table = np.concatenate(schedule.orders)
    ends = np.flatnonzero(travels)
    begins = needs[ends]
    by_link = np.lexsort((begins, ranks[ends], ranks[begins]))
    messages: list[PipelineMessage] = []
    link, number = (-1, -1), 0
    for begin, end in zip(begins[by_link].tolist(), ends[by_link].tolist(), strict=True):
        source, target = int(ranks[begin]), int(ranks[end])
        number = number + 1 if link == (source, target) else 0
        link = source, target
        op, from_stage, micro_batch = table[begin].tolist()
        messages.append(
            PipelineMessage(
                source,
                target,
                "activation" if op == Op.FORWARD else "gradient",
                micro_batch,
                from_stage,
                int(table[end, 1]),
                number,
                begin - int(starts[source]),
                end - int(starts[target]),
            )
        )
    return tuple(messages)


@dataclass(frozen=True, slots=True)
class RankMessages:
    """What one rank sends and receives."""

    sends: tuple[PipelineMessage, ...]
    """Ordered by the place that produces them."""
    receives: tuple[PipelineMessage, ...]
    """In the order in which they are posted: by the place that needs them, and on each link by
    number."""


def rank_messages(messages: tuple[PipelineMessage, ...], rank: int) -> RankMessages:
    """The messages of one rank.

    A receive is posted before any later message of its link is needed.
    """
    sends = sorted((m for m in messages if m.source == rank), key=lambda m: m.sent_at)
    mine = [m for m in messages if m.target == rank]
    due: dict[int, int] = {}
    latest: list[tuple[int, int, int, PipelineMessage]] = []
    for m in reversed(mine):  # each link's last message first
        due[m.source] = min(due.get(m.source, m.needed_at), m.needed_at)
        latest.append((due[m.source], m.source, m.number, m))
    receives = [m for *_, m in sorted(latest, key=lambda each: each[:3])]
    return RankMessages(tuple(sends), tuple(receives))
