"""What an embedding table is to a planner: rows, width, and how many ids a sample looks up.

Kept true (tests/unit/spec/test_tables.py)
    A table that cannot be is refused by name.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.base.errors import SpecError

Pooling = Literal["sum", "mean"]
SparseOptimizer = Literal["sgd", "adagrad", "row-wise-adagrad", "adam"]
SPARSE_OPTIMIZERS: tuple[SparseOptimizer, ...] = get_args(SparseOptimizer)

MOST_ROWS = 2**40
FLOAT_BYTES = 4
"""Weights and their state are fp32."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table, looked up by the feature of its name.

    >>> TableSpec("user", rows=943, width=16).weight_bytes
    60352
    """

    name: str
    rows: int
    width: int
    """Length of a row [floats]."""
    ids_per_sample: float = 1.0
    """Mean ids that one sample looks up."""
    pooling: Pooling = "sum"
    """What becomes of a sample's rows; an empty bag is zero under both."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise SpecError("A table has no name. Give it one.")
        if not 1 <= self.rows <= MOST_ROWS:
            raise SpecError(
                f"Table {self.name} has {self.rows:,} rows. Give from 1 to {MOST_ROWS:,}."
            )
        if not 1 <= self.width <= 1 << 16:
            raise SpecError(f"Table {self.name} has width {self.width:,}. Give from 1 to 65,536.")
        if not 0 <= self.ids_per_sample <= 1e6:
            raise SpecError(
                f"Table {self.name} has {self.ids_per_sample} ids per sample. Give from 0 to "
                "1,000,000."
            )
        if self.pooling not in get_args(Pooling):
            raise SpecError(f'Table {self.name} has pooling "{self.pooling}". Choose sum or mean.')

    @property
    def weight_bytes(self) -> int:
        """All rows, without an optimizer's state [bytes]."""
        return self.rows * self.width * FLOAT_BYTES


def row_bytes(width: int, optimizer: SparseOptimizer) -> int:
    """A row of some columns with what its optimizer keeps of it [bytes].

    >>> row_bytes(16, "sgd"), row_bytes(16, "row-wise-adagrad"), row_bytes(16, "adam")
    (64, 68, 192)
    """
    state = {"sgd": 0, "adagrad": width, "row-wise-adagrad": 1, "adam": 2 * width}[optimizer]
    return (width + state) * FLOAT_BYTES
