"""Events: facts of a run, versioned, as they stand in the journal.

A journal is one file a rank, ``journal/rank-00000.jsonl``, one JSON object a line, appended
and never rewritten. Each event has ``v`` (schema version), ``kind``, ``name``, ``t`` (unix
seconds; a span's start) and ``rank``. A number that is not finite is written as null. A run
that resumes appends; a step that was computed twice appears twice, and the later one counts.
"""

from typing import Literal

SCHEMA_VERSION = 1

Kind = Literal["span", "scalar", "instant", "decision", "fault"]


def journal_name(rank: int) -> str:
    """File name of a rank's journal.

    >>> journal_name(3)
    'rank-00003.jsonl'
    """
    return f"rank-{rank:05d}.jsonl"
