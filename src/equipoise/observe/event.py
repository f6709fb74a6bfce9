"""Events: versioned facts of a run, as the journal holds them.

A journal is one file per rank, ``journal/rank-00000.jsonl``, one JSON object per line, appended
and never rewritten. Each event has ``v`` (schema version), ``kind``, ``name``, ``t`` (unix
seconds; a span's start) and ``rank``, and last ``crc``, a checksum of the preceding part of the
line. A number that is not finite is written as null. A run that resumes appends; a step computed
twice appears twice, and the later one counts.
"""

import zlib
from typing import Literal

SCHEMA_VERSION = 1

Kind = Literal["span", "scalar", "instant", "decision", "fault"]


def seal(line: str) -> str:
    """Add a line's checksum, so that later changes are noticed.

    >>> seal('{"v":1}')
    '{"v":1,"crc":"6acc9348"}'
    """
    return f'{line[:-1]},"crc":"{zlib.crc32(line[:-1].encode()):08x}"}}'


def is_whole(line: str) -> bool:
    """Whether a line matches its checksum; lines of older writers without one pass.

    >>> is_whole(seal('{"v":1}')), is_whole(seal('{"v":1}').replace("1", "0", 1))
    (True, False)
    """
    body, mark, crc = line.rstrip().rpartition(',"crc":"')
    return not mark or crc == f'{zlib.crc32(body.encode()):08x}"}}'


def journal_name(rank: int) -> str:
    """File name of a rank's journal.

    >>> journal_name(3)
    'rank-00003.jsonl'
    """
    return f"rank-{rank:05d}.jsonl"
