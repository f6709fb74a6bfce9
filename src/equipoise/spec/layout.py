"""Each rank's coordinates on the axes of a layout, for attention and, folded anew, for experts.

Why
    Every process group, shard and message is addressed by coordinates. Only this module turns
    ranks into coordinates and back, so no two parts of a run can disagree about who is who.

What it decides
    A rank is a number in mixed radix with digits named by ``order``, outermost first; the
    default puts tensor parallelism on neighbours, then context, pipeline and data parallelism::

        dp = 2, cp = 1, tp = 2, pp = 2, order = dp pp cp tp

        rank       0 1   2 3   4 5   6 7
        tp         0 1   0 1   0 1   0 1
        pp         0 0   1 1   0 0   1 1
        dp         0 0   0 0   1 1   1 1

    Experts fold the same ranks differently (MoE Parallel Folding): the ranks of one pipeline
    stage, ascending, are numbered by ``expert_order``. A rank's stage is the same in both
    foldings::

        ep = 4, etp = 1, so edp = 1:   stage 0 is ranks 0 1 4 5, with ep = 0 1 2 3

    ZeRO shards over dp x cp, in ``replicas`` copies (hybrid sharding).

Kept true (tests/unit/spec/test_layout.py, by Hypothesis)
    Ranks and coordinates are one to one in any order of axes; the groups of any axes partition
    the ranks, and ranks of a group differ only in those axes.

Sources
    Order of axes: Llama 3, arXiv:2407.21783, section 3.3.2. Folding: arXiv:2504.14960.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.spec.model.experts import require_units, split_experts
from equipoise.spec.model.presets import ModelSpec

ATTENTION_AXES = ("dp", "pp", "cp", "tp")
EXPERT_AXES = ("edp", "ep", "etp")

ORDERS = {"dp-pp": ATTENTION_AXES, "pp-dp": ("pp", "dp", "cp", "tp")}
"""Orders of attention's axes by name: which of two is outermost."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism, and the order in which ranks are numbered along them."""

    dp: int = 1
    """Data parallelism: ranks with their own micro-batches."""
    cp: int = 1
    """Context parallelism: ranks that share the tokens of a micro-batch."""
    tp: int = 1
    """Tensor parallelism: ranks that share the weights of each layer."""
    pp: int = 1
    """Pipeline parallelism: ranks that share the layers."""
    ep: int = 1
    """Expert parallelism: ranks that share the experts of a layer."""
    etp: int = 1
    """Ranks that share the weights of each expert."""
    zero: Literal[0, 1, 2, 3] = 1
    replicas: int = 1
    """Copies of what ZeRO shards over dp x cp; 1 shards over all of them."""
    order: tuple[str, ...] = ATTENTION_AXES
    """Axes of attention, outermost first."""
    expert_order: tuple[str, ...] = EXPERT_AXES
    """Axes of experts within a stage, outermost first."""

    def __post_init__(self) -> None:
        for axis in ("dp", "cp", "tp", "pp", "ep", "etp", "replicas"):
            if getattr(self, axis) < 1:
                raise LayoutError(f"{axis} = {getattr(self, axis)} must be 1 or more.")
        for name, axes in (("order", ATTENTION_AXES), ("expert_order", EXPERT_AXES)):
            if sorted(getattr(self, name)) != sorted(axes):
                raise LayoutError(
                    f"{name} is {' '.join(getattr(self, name))} but must name each of "
                    f"{' '.join(axes)} once, outermost first."
                )
        if self.stage_ranks % (self.ep * self.etp):
            raise LayoutError(
                f"ep x etp = {self.ep} x {self.etp} does not divide the {self.stage_ranks} ranks "
                f"of a stage, dp x cp x tp = {self.dp} x {self.cp} x {self.tp}. Give degrees "
                f"whose product is one of {_divisors(self.stage_ranks)}."
            )
        if self.zero_ranks % self.replicas:
            raise LayoutError(
                f"replicas = {self.replicas} does not divide the {self.zero_ranks} ranks that "
                f"ZeRO shards over, dp x cp = {self.dp} x {self.cp}. Give one of "
                f"{_divisors(self.zero_ranks)}."
            )

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def stage_stride(self) -> int:
        """How far apart a rank and its like in the next stage are numbered.

        >>> [Layout(dp=4, tp=2, pp=2, order=order).stage_stride for order in ORDERS.values()]
        [2, 8]
        """
        return math.prod(self.size(axis) for axis in self.order[self.order.index("pp") + 1 :])

    @property
    def zero_ranks(self) -> int:
        """Ranks that hold the same weights and compute different tokens."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards a weight outside experts.

        >>> Layout(dp=8, replicas=2).shards, Layout(dp=8, zero=0).shards
        (4, 1)
        """
        return self.zero_ranks // self.replicas if self.zero else 1

    @property
    def of_encoders(self) -> "Layout":
        """The layout of encoders beside this one's decoder: all ranks share the data alone.

        >>> encoders = Layout(dp=2, tp=2, pp=2, zero=3).of_encoders
        >>> encoders.dp, encoders.tp, encoders.pp, encoders.zero
        (8, 1, 1, 3)
        """
        return Layout(dp=self.world, zero=self.zero, replicas=self.replicas)

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same share of the same experts."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def meets_each_turn(self) -> bool:
        """Whether data-parallel ranks wait for each other in every micro-batch.

        ZeRO 2 and 3 reduce-scatter gradients in each backward, and ZeRO 3 gathers parameters in
        each pass; tokens travel to experts on other data-parallel ranks.

        >>> Layout(dp=4).meets_each_turn, Layout(dp=4, zero=2).meets_each_turn
        (False, True)
        >>> Layout(dp=2, tp=2, ep=2).meets_each_turn, Layout(dp=2, tp=2, ep=4).meets_each_turn
        (False, True)
        """
        if self.dp == 1 or self.ep * self.etp == 1:
            return self.zero >= 2 and self.dp > 1
        if self.zero >= 2:
            return True
        data_rank = np.empty(self.world, dtype=np.int64)
        data_rank[self.grid("dp", "pp", "cp", "tp")] = np.arange(self.dp)[:, None, None, None]
        return bool(np.ptp(data_rank[self.groups("ep", "etp")], axis=1).any())

    def size(self, axis: str) -> int:
        """Ranks along one axis.

        Raises:
            LayoutError: no such axis.
        """
        if axis not in (*ATTENTION_AXES, *EXPERT_AXES):
            raise LayoutError(
                f'No axis is called "{axis}". All: {", ".join((*ATTENTION_AXES, *EXPERT_AXES))}.'
            )
        degree: int = getattr(self, axis)
        return degree

    def grid(self, *axes: str) -> Ints:
        """All ranks, indexed by the axes of one folding in the given order.

        Args:
            axes: Any order of dp, pp, cp, tp; or of pp, edp, ep, etp.

        Returns:
            int64 [size of each axis].

        Raises:
            LayoutError: these are not the axes of one folding.

        >>> Layout(dp=2, tp=2, pp=2).grid("pp", "tp", "dp", "cp").tolist()
        [[[[0], [4]], [[1], [5]]], [[[2], [6]], [[3], [7]]]]
        """
        for axis in axes:
            self.size(axis)
        if sorted(axes) == sorted(ATTENTION_AXES):
            own = self.order
            ranks = np.arange(self.world, dtype=np.int64).reshape([self.size(a) for a in own])
        elif sorted(axes) == sorted(("pp", *EXPERT_AXES)):
            own = ("pp", *self.expert_order)
            stages = self.grid("pp", *(axis for axis in self.order if axis != "pp"))
            ranks = stages.reshape([self.size(axis) for axis in own])
        else:
            raise LayoutError(
                f"{' '.join(axes) or 'No axis'}: not the axes of one folding. Give {_FOLDINGS}, "
                f"in any order."
            )
        return np.ascontiguousarray(ranks.transpose([own.index(axis) for axis in axes]))

    def groups(self, *axes: str) -> Ints:
        """The groups of ranks that differ only in these axes.

        Args:
            axes: Some of the axes of one folding, outermost first within a group.

        Returns:
            int64 [groups, ranks of a group]; each rank once.

        Raises:
            LayoutError: the axes are not of one folding, or one is given twice.

        >>> Layout(dp=2, tp=2, pp=2).groups("tp").tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> Layout(dp=2, tp=2, pp=2, ep=4).groups("ep").tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        folding = self._folding(axes)
        own = self._numbered(folding)
        others = [axis for axis in own if axis not in axes]
        count = math.prod(self.size(axis) for axis in axes)
        return self.grid(*others, *axes).reshape(-1, count)

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from this one only in these axes, and this one."""
        mine: list[int] = self.ranks_of(rank, *axes).tolist()
        return mine

    def ranks_of(self, rank: int, *axes: str) -> Ints:
        """The same as an array, int64 [ranks].

        Cost: that of the group, however many other ranks there are.
        """
        self._require_rank(rank)
        folding = self._folding(axes)
        strides = self._strides(folding)
        number = self._number(rank, folding)
        own = sum(number // strides[axis] % self.size(axis) * strides[axis] for axis in axes)
        ranks = np.array([number - own])
        for axis in axes:
            ranks = (ranks[:, None] + strides[axis] * np.arange(self.size(axis))).ravel()
        return self._rank(ranks, folding)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on every axis of attention and of experts.

        Raises:
            LayoutError: no such rank.

        >>> Layout(dp=2, tp=2, pp=2, ep=4).coordinates(5)
        {'dp': 1, 'pp': 0, 'cp': 0, 'tp': 1, 'edp': 0, 'ep': 3, 'etp': 0}
        """
        self._require_rank(rank)
        place_on: dict[str, int] = {}
        for axes in _FOLDED:
            number, strides = self._number(rank, axes), self._strides(axes)
            place_on |= {axis: number // strides[axis] % self.size(axis) for axis in axes}
        return {axis: place_on[axis] for axis in (*ATTENTION_AXES, *EXPERT_AXES)}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at some coordinates; axes not given are at 0.

        Args:
            coordinates: Coordinates on axes of one folding.

        Raises:
            LayoutError: a coordinate is off its axis, or the axes are of two foldings.

        >>> Layout(dp=2, tp=2, pp=2, ep=4).rank_at(dp=1, tp=1)
        5
        """
        for axis, place in coordinates.items():
            if not 0 <= place < self.size(axis):
                raise LayoutError(
                    f"{axis} = {place} is off its axis of {self.size(axis)}. Give 0 to "
                    f"{self.size(axis) - 1}."
                )
        folding = next((each for each in _FOLDED if set(coordinates) <= set(each)), None)
        if folding is None:
            raise LayoutError(
                f"{' '.join(coordinates)}: coordinates of two foldings. Give some of {_FOLDINGS}."
            )
        strides = self._strides(folding)
        number = sum(place * strides[axis] for axis, place in coordinates.items())
        return int(self._rank(np.array([number]), folding)[0])

    def _folding(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The folding that these axes are of; refuses those of none, and one given twice."""
        for folding in _FOLDED:
            if set(axes) <= set(folding) and len(set(axes)) == len(axes):
                return folding
        for axis in axes:
            self.size(axis)
        raise LayoutError(
            f"{' '.join(axes)}: no group runs along these axes. Give some of {_FOLDINGS}, each "
            f"once."
        )

    def _numbered(self, folding: tuple[str, ...]) -> tuple[str, ...]:
        """Its axes in the order of numbers, outermost first: ranks, or stage by stage."""
        return self.order if folding is ATTENTION_AXES else ("pp", *self.expert_order)

    def _strides(self, folding: tuple[str, ...]) -> dict[str, int]:
        """How far apart the numbers of neighbours on each axis are."""
        strides, stride = dict[str, int](), 1
        for axis in reversed(self._numbered(folding)):
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    def _number(self, rank: int, folding: tuple[str, ...]) -> int:
        """A rank's number in a folding: the rank, or the stage's first number and a place in it."""
        if folding is ATTENTION_AXES:
            return rank
        stride = self.stage_stride
        turn, rest = divmod(rank, self.pp * stride)
        return rest // stride * self.stage_ranks + turn * stride + rest % stride

    def _rank(self, numbers: Ints, folding: tuple[str, ...]) -> Ints:
        """The ranks of some numbers in a folding."""
        if folding is ATTENTION_AXES:
            return numbers
        stride = self.stage_stride
        stage, place = np.divmod(numbers, self.stage_ranks)
        return np.asarray(place // stride * (self.pp * stride) + stage * stride + place % stride)

    def require_world(self, world: int) -> None:
        """Refuse a number of ranks other than the product of the degrees.

        Raises:
            LayoutError: names a degree that fits.
        """
        if world == self.world:
            return
        degrees = f"dp x cp x tp x pp = {self.dp} x {self.cp} x {self.tp} x {self.pp}"
        dp, left = divmod(world, self.world // self.dp)
        fix = f"Give degrees whose product is {world}." if left else f"Set dp = {dp}."
        raise LayoutError(f"{degrees} = {self.world} ranks, but there are {world}. {fix}")

    def require_model(self, model: ModelSpec) -> None:
        """Refuse degrees that do not fit a model's sizes.

        Raises:
            LayoutError: heads do not divide over tp, or there are fewer layers than stages,
                fewer words or hidden units than tp needs, or fewer experts than ep needs.
        """
        if model.heads % self.tp:
            raise LayoutError(
                f"{model.heads} heads do not divide over {self.tp} tensor-parallel ranks. Set tp "
                f"(layout.tp) to one of {_divisors(model.heads)}, or share tokens, which needs "
                f"no division of heads: cp (layout.cp) = {self.cp * self.tp} with needed-kv."
            )
        for name, width in (("ffn", model.ffn), ("vocab", model.vocab)):
            part = -(-width // self.tp)
            if part * (self.tp - 1) >= width:
                raise LayoutError(
                    f"model.{name} = {width} in parts of {part} leaves the last of {self.tp} "
                    f"tensor-parallel ranks without any. Lower tp (layout.tp)."
                )
        if model.layers < self.pp:
            raise LayoutError(
                f"{model.layers} layers are fewer than pp = {self.pp} stages. Set pp to "
                f"{model.layers} or less."
            )
        if self.ep * self.etp > 1:
            split_experts(model.experts, ranks=self.ep if model.experts else self.ep * self.etp)
            require_units(model.expert_ffn, ranks=self.etp)

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise LayoutError(
                f"Rank {rank} does not exist among {self.world}. Give 0 to {self.world - 1}."
            )


def rows_of(tokens: int, *, ranks: int, rank: int) -> range:
    """The tokens of a pack that one of several weight-sharing ranks keeps between blocks.

    >>> [list(rows_of(5, ranks=3, rank=rank)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(tokens * rank // ranks, tokens * (rank + 1) // ranks)


_FOLDED = (ATTENTION_AXES, ("pp", *EXPERT_AXES))
_FOLDINGS = " or ".join(" ".join(axes) for axes in _FOLDED)


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
