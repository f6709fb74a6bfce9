"""Instructions of a pipeline: what one rank computes, for which micro-batch, on which stage.

Why
    A schedule that names each forward and backward can be checked, priced, drawn and run by
    one executor. Sends and receives are not listed: the order of computation already implies
    them (``messages`` derives them), and a second list could only contradict it.

What it decides
    Four operations. ``BACKWARD`` is both halves at once. If split, the input gradient, for which
    the previous stage waits, comes first; the weight gradient, for which nobody waits, comes
    whenever there is time.

Kept true (tests/unit/schedule/pipeline/test_schedule.py)
    A table of instructions and its instructions agree.

Sources
    Split backward: Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from equipoise.base.arrays import Ints

OP, STAGE, MICRO_BATCH = 0, 1, 2
"""Columns of a table of instructions, int64 [n, 3]."""


class Op(IntEnum):
    """What is computed."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of input and weights together."""
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

    @property
    def letter(self) -> str:
        """Its letter in pictures and text: F, B, I or W."""
        return "FBIW"[self]

    @property
    def words(self) -> str:
        """Its name in messages."""
        return ("forward", "backward", "input gradient", "weight gradient")[self]

    @property
    def span(self) -> str:
        """Its span's name in journals."""
        return ("forward", "backward", "backward-input", "backward-weight")[self]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One row of a rank's table, with named fields."""

    op: Op
    stage: int
    micro_batch: int
    slice: int = 0
    """Its slice of the unit: 0 unless micro-batches share documents over time."""

    def __str__(self) -> str:
        return f"{self.stage}{self.op.letter}{self.micro_batch}"


def name_instruction(op: int, stage: int, micro_batch: int) -> str:
    """Name an instruction in a message.

    >>> name_instruction(0, 2, 5)
    'forward of micro-batch 5 on stage 2'
    """
    return f"{Op(op).words} of micro-batch {micro_batch} on stage {stage}"


def make_table(rows: list[tuple[int, int, int]] | Ints) -> Ints:
    """Rows (operation, stage, micro-batch) as a table, int64 [n, 3]."""
    return np.asarray(rows, dtype=np.int64).reshape(-1, 3)
