"""Prove an attention schedule correct before a rank runs it.

Why
    A dropped message hangs a run; a dropped or doubled tile silently trains on wrong gradients.
    Both are visible in the schedule.

What it decides
    A schedule is correct if

    - every token has one home or is cached on one rank, and every rank's pieces are in order and
      apart;
    - every send has its receive, in the same order for each pair of ranks, and no rank waits
      for one that waits for it, even if no message leaves before its receive is posted;
    - what is sent or computed with is present at the round's start, and arrives once;
    - every tile is one that a kernel computes, and every pair of the mask, in every head,
      is in exactly one tile, and no other pair in any;
    - what a rank computes for another's queries goes home once, when it is complete.

Kept true (tests/unit/schedule/attention/test_check.py)
    What strategies write passes; with any send, receive or tile dropped, doubled or shifted it
    fails, and the message says where.
"""

from collections.abc import Iterator

import numpy as np

from equipoise.base.errors import CheckError
from equipoise.schedule.attention.check_messages import deadlock_faults, message_faults
from equipoise.schedule.attention.check_ranks import rank_faults
from equipoise.schedule.attention.check_tiles import coverage_faults, tile_faults
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.schedule import AttentionSchedule


def find_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Yield each fault of a schedule as a sentence.

    A check runs only if the checks that it builds on passed.
    """
    for check in (
        _home_faults,
        message_faults,
        deadlock_faults,
        tile_faults,
        rank_faults,
        coverage_faults,
    ):
        is_right = True
        for fault in check(schedule):
            is_right = False
            yield fault
        if not is_right:
            return


def check_attention(
    schedule: AttentionSchedule,
    *,
    wire: Wire | None = None,
    in_flight_bytes: int | None = None,
) -> None:
    """Refuse an incorrect schedule.

    Args:
        schedule: The schedule to check.
        wire: Sizes of what travels; bf16 heads of width 128 unless given.
        in_flight_bytes: Most bytes that a rank may have in flight; no limit unless given.

    Raises:
        CheckError: the first fault, in one sentence.

    Cost: O(messages x runs + tiles x cuts in their runs), and one pass over tokens.
    """
    for fault in find_faults(schedule):
        raise CheckError(f"{schedule.strategy}: {fault}")
    if in_flight_bytes is None:
        return
    counts = count_attention(schedule, Wire(128) if wire is None else wire)
    worst = int(counts.in_flight_bytes.argmax())
    if counts.in_flight_bytes[worst] > in_flight_bytes:
        raise CheckError(
            f"{schedule.strategy}: Rank {worst} has {int(counts.in_flight_bytes[worst]):,} bytes "
            f"in flight; the limit is {in_flight_bytes:,}. A ring has fewer in flight than an "
            f"all-gather."
        )


def _home_faults(schedule: AttentionSchedule) -> Iterator[str]:
    lengths = schedule.doc_tokens
    begins = np.cumsum(lengths) - lengths
    owners = np.zeros(schedule.tokens, dtype=np.int64)
    parts = [(pieces, "tokens") for pieces in schedule.home]
    parts += [(pieces, "cached keys of tokens") for pieces in schedule.cached]
    for number, (pieces, what) in enumerate(parts):
        rank = number % schedule.ranks
        for at, (document, start, stop) in enumerate(pieces.tolist()):
            if not (0 <= document < len(lengths) and 0 <= start < stop <= lengths[document]):
                yield (
                    f"Rank {rank} holds {what} {start}:{stop} of document {document}, which do "
                    f"not exist in the {len(lengths)} documents."
                )
                return
            owners[begins[document] + start : begins[document] + stop] += 1
            if at and pieces[at - 1, :2].tolist() >= [document, start]:
                yield (
                    f"Rank {rank} holds its pieces out of order: {document}[{start}:{stop}] comes "
                    f"after document {pieces[at - 1, 0]} from {pieces[at - 1, 1]}."
                )
    for token in np.flatnonzero(owners != 1)[:1].tolist():
        document = int(np.searchsorted(np.cumsum(lengths), token, side="right"))
        yield (
            f"Token {token - begins[document]} of document {document} is at home on "
            f"{owners[token]} ranks instead of one."
        )
