"""Where each patch of an item lies, in the order in which an encoder reads them."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from equipoise.base.arrays import Ints

_Number = TypeVar("_Number", bound=np.generic)

Grid = tuple[int, int]
"""Rows and columns of an item's patches."""


def places_of(grid: Grid, merge: tuple[int, int]) -> Ints:
    """Row and column of each patch, int64 [patches, 2], block by block of those that are merged.

    Args:
        grid: Rows and columns of patches, multiples of the block's.
        merge: Rows and columns of a block.

    >>> places_of((2, 4), (2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    rows, columns = np.indices(grid)
    return np.stack((in_blocks(rows, merge), in_blocks(columns, merge)), axis=1)


def in_blocks(values: NDArray[_Number], merge: tuple[int, int]) -> NDArray[_Number]:
    """A grid's values in the order of blocks, [patches, ...].

    Args:
        values: One for each patch, [rows, columns, ...].
        merge: Rows and columns of a block.
    """
    rows, columns = values.shape[0] // merge[0], values.shape[1] // merge[1]
    blocks = values.reshape(rows, merge[0], columns, merge[1], *values.shape[2:])
    ordered: NDArray[_Number] = blocks.swapaxes(1, 2).reshape(-1, *values.shape[2:])
    return ordered
