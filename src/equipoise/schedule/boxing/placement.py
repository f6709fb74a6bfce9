"""Where the parts of one tensor are on a mesh of ranks: split, broadcast or partial, axis by axis.

Why
    A layout says for each mesh axis what its ranks hold of a tensor. Which run of which dim is on
    which rank then follows, and so does everything that must move when the layout changes.

What it decides
    ``SplitDim`` cuts a dim in runs of equal length, the last ones shorter or empty where they must
    be, as torch cuts it; or in proportion to ``shares``, which are the very sizes where they add
    up to the dim. ``Broadcast`` is the same on every rank of the axis. ``Partial`` tensors are
    one only when they are added, or their largest elements are taken.

    Axes apply from the outermost in, so a dim that two axes split is cut by the outer one first::

        S(0), S(0) on 2x2, 6 rows        S(0: 3+1), B on 2x2, 6 rows

        rank 0 1    0 1 | 2              rank 0 1    0 1 2 3 | 0 1 2 3
        rank 2 3    3 4 | 5              rank 2 3    4 5     | 4 5

    The text of placements is what people write: ``S(0), P``; ``S(1: 3+0+2)``; ``P(max), B``.

Kept true (tests/unit/schedule/boxing/test_path.py, by Hypothesis)
    Every element is on some rank, and on one alone where no axis is broadcast or partial; text
    and placements are one to one.

Sources
    Split, broadcast, partial: OneFlow, arXiv:2110.15032.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError, SpecError

MOST_RANKS, MOST_AXES = 512, 3
"""For a mesh: what moves is counted pair by pair, and every placement of every axis is a state."""

MOST_ELEMENTS = 1 << 40
"""For a tensor: counts of all ranks' bytes are int64."""

_MOST = 1 << 62
"""For a dim times the shares that divide it."""


@dataclass(frozen=True, slots=True)
class SplitDim:
    """One run of a dim on each rank of the axis."""

    dim: int
    shares: tuple[int, ...] | None = None
    """How the dim is divided in proportion, one for each rank; None cuts as torch does."""

    def __str__(self) -> str:
        shares = "" if self.shares is None else f": {'+'.join(map(str, self.shares))}"
        return f"S({self.dim}{shares})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The same on every rank of the axis."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """A tensor on each rank of the axis; their sum, or maximum, is the value."""

    reduce: Literal["sum", "max"] = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"


Placement = SplitDim | Broadcast | Partial
Placements = tuple[Placement, ...]
"""One for each mesh axis, outermost first."""

_WORD = re.compile(r"B|P(?:\((sum|max)\))?|S\(([0-9]{1,18})(?::([0-9]{1,18}(?:\+[0-9]{1,18})*))?\)")


def read_placements(text: str) -> Placements:
    """Placements as people write them.

    Raises:
        SpecError: a word is none.

    >>> read_placements("S(0: 3+1), P(max), B")
    (SplitDim(dim=0, shares=(3, 1)), Partial(reduce='max'), Broadcast())
    """
    placements: list[Placement] = []
    for word in text.split(","):
        bare = word.replace(" ", "")
        match = _WORD.fullmatch(bare)
        if match is None:
            raise SpecError(
                f'"{word.strip()}" is not a placement. Give S(dim), S(dim: 3+1) with the share of '
                f"each rank, B, P or P(max), one for each mesh axis, as in S(0), B."
            )
        reduce, dim, shares = match.groups()
        if bare == "B":
            placements.append(Broadcast())
        elif dim is None:
            placements.append(Partial("max" if reduce == "max" else "sum"))
        else:
            sizes = None if shares is None else tuple(map(int, shares.split("+")))
            placements.append(SplitDim(int(dim), sizes))
    return tuple(placements)


def write_placements(placements: Placements) -> str:
    """Placements as ``read_placements`` reads them.

    >>> write_placements((SplitDim(0, (3, 1)), Partial()))
    'S(0: 3+1), P'
    """
    return ", ".join(map(str, placements))


@dataclass(frozen=True, slots=True)
class MeshTensor:
    """The sizes of a tensor and of its mesh.

    Ranks are numbered along the mesh, the last axis fastest.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    """Ranks of each axis, outermost first."""

    def __post_init__(self) -> None:
        for what, sizes, least in (("mesh", self.mesh, 1), ("shape", self.shape, 0)):
            if any(size < least for size in sizes) or (what == "mesh" and not sizes):
                raise LayoutError(
                    f"A {what} of {'x'.join(map(str, sizes)) or 'no axis'} is none. Give sizes of "
                    f"{least} or more, as in 2x4."
                )
        elements = math.prod(max(1, size) for size in self.shape)
        if elements > MOST_ELEMENTS:
            raise LayoutError(
                f"A tensor of {'x'.join(map(str, self.shape))} has {elements:.2g} elements, and "
                f"bytes are counted for at most {MOST_ELEMENTS:.2g}. Give a smaller one."
            )
        axes = f"{len(self.mesh)} ax{'i' if len(self.mesh) == 1 else 'e'}s"
        if self.ranks > MOST_RANKS or len(self.mesh) > MOST_AXES:
            raise LayoutError(
                f"A mesh of {'x'.join(map(str, self.mesh))} has {self.ranks:,} ranks on "
                f"{axes}, and paths are searched for at most {MOST_RANKS:,} on "
                f"{MOST_AXES}. Leave out an axis along which nothing changes."
            )

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        return math.prod(self.mesh)

    def require(self, placements: Placements) -> None:
        """Refuse placements that do not go with the tensor and the mesh.

        Raises:
            LayoutError: their number, a dim, shares, or two kinds of partial at once.
        """
        if len(placements) != len(self.mesh):
            what = f"{len(placements)} placement{'s' * (len(placements) != 1)}"
            raise LayoutError(
                f"{write_placements(placements)} is {what} for "
                f"a mesh of {len(self.mesh)} axes ({'x'.join(map(str, self.mesh))}). Give one for "
                f"each axis."
            )
        for each, size in zip(placements, self.mesh, strict=True):
            if not isinstance(each, SplitDim):
                continue
            if not 0 <= each.dim < len(self.shape):
                raise LayoutError(
                    f"{each} splits dim {each.dim} of a tensor of {len(self.shape)} dims "
                    f"({'x'.join(map(str, self.shape)) or 'a scalar'}). Dims are counted from 0."
                )
            if each.shares is None:
                continue
            if len(each.shares) != size:
                raise LayoutError(
                    f"{each} gives {len(each.shares)} shares to an axis of {size} ranks. Give one "
                    f"for each rank; 0 is a share too."
                )
            length = max(1, self.shape[each.dim])
            if sum(each.shares) > _MOST // length:
                raise LayoutError(
                    f"{each} gives shares that add up to {sum(each.shares):.2g}, and for a dim of "
                    f"{length:,} they may to {_MOST // length:.2g}. Give smaller ones in "
                    f"proportion."
                )
            is_empty = not self.shape[each.dim]  # where nothing is divided, by nothing
            if min(each.shares) < 0 or not (sum(each.shares) or is_empty):
                raise LayoutError(
                    f"{each} gives shares that add up to {sum(each.shares)}, or one below 0. "
                    f"Give whole numbers of 0 or more, not all 0."
                )
        reduces = {each.reduce for each in placements if isinstance(each, Partial)}
        if len(reduces) > 1:
            raise LayoutError(
                f"{write_placements(placements)} is partial by sum and by max at once, and nothing "
                f"says which comes first. Take one of them first."
            )

    def boxes(self, placements: Placements) -> Ints:
        """What each rank holds, first and stop of every dim, int64 [ranks, dims, 2].

        >>> MeshTensor((6,), (2, 2)).boxes((SplitDim(0), SplitDim(0)))[:, 0].tolist()
        [[0, 2], [2, 3], [3, 5], [5, 6]]
        """
        boxes = np.zeros((self.ranks, len(self.shape), 2), dtype=np.int64)
        boxes[:, :, 1] = self.shape
        places = coordinates(self.mesh)
        for axis, each in enumerate(placements):
            if isinstance(each, SplitDim):
                first, stop = boxes[:, each.dim, 0].copy(), boxes[:, each.dim, 1].copy()
                begin, end = _cut(stop - first, places[:, axis], self.mesh[axis], each.shares)
                boxes[:, each.dim, 0], boxes[:, each.dim, 1] = first + begin, first + end
        return boxes


def coordinates(mesh: tuple[int, ...]) -> Ints:
    """Where each rank stands on each axis, int64 [ranks, axes].

    >>> coordinates((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    grid: Ints = np.indices(mesh, dtype=np.int64).reshape(len(mesh), -1).T
    return grid


def _cut(size: Ints, place: Ints, ranks: int, shares: tuple[int, ...] | None) -> tuple[Ints, Ints]:
    """First and stop of a place's part of a run of some size."""
    if shares is None:
        longest = -(-size // ranks)
        return np.minimum(size, longest * place), np.minimum(size, longest * (place + 1))
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(shares, dtype=np.int64)))
    total = max(1, int(ends[-1]))
    return size * ends[place] // total, size * ends[place + 1] // total
