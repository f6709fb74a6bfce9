"""The space that is searched: everything that can be chosen about a step, one row a choice.

Why
    On 16,384 devices there are some hundred thousand ways to lay out one step, and no good reason
    to limit any degree to powers of two. As columns they are bounded a million at a time.

What it decides
    Which choices there are. Degrees multiply to the cluster's devices; heads divide over tp, the
    step's sequences over data-parallel ranks and micro-batches; experts fold over a stage's ranks.
    The axes, crossed one by one:

        tp cp pp dp          every divisor of the devices; tp to 16, cp to 1,024 tokens a rank
        micro_batch          every divisor of a rank's sequences, up to 16 or 65,536 tokens; of
                             packed documents a cap of tokens, as below
        order                whether data-parallel ranks or stages are neighbours
        ep etp               with experts; etp is 1 or tp
        zero replicas        0, 1, 3; of 3 without stages every number of copies; 2 where a step
                             is one micro-batch, for with more it pays for each
        schedule virtual     of pipelines: schedules that lose nothing and do not wait to hold
                             less; for each size of a stage in layers, the fewest such stages
        recompute            every setting of whole layers and of the core; where the program
                             recomputes modules, those of ``spec.recompute.planned_modules``, too
        offload              none unless it is fixed: ``plan.search.offload`` lists where it may
                             pay
        context_strategy     where cp > 1
        policy               of packed documents: the given one, or those that are asked for;
                             those that divide documents where ranks can run them

    With documents a micro-batch of m windows is a token cap: documents, each cut to a window, are
    packed as if m windows were one. ``by-work`` and ``by-tokens`` make as many micro-batches per
    rank as full windows would, more only if those do not hold all, and none has more than
    1.25 m windows' tokens (``spec.run.spec.PackSpec.most_tokens``); ``in-order`` and ``fixed`` cut
    at m.

Kept true (tests/unit/plan/space/test_columns.py, tests/unit/plan/space/test_alike.py)
    Every row is a legal layout of the model on the devices, and no row appears twice; rows of a
    published layout are there. Groups are the classes of rows that are equal in some columns.

Sources
    Five dimensions searched together, optimizer sharding and recomputation among them:
    PanGu-alpha, arXiv:2104.12369, section 4. ZeRO and micro-batches: the Frontier study,
    arXiv:2312.12705.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from equipoise.base.arrays import Flags, Ints
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.spec import catalog
from equipoise.spec.catalog import ScheduleTraits
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.offload import OFFLOADS
from equipoise.spec.recompute import MODULE_SETS
from equipoise.spec.run.spec import Recompute

SCHEDULES = tuple(name for name, traits in catalog.SCHEDULES.items() if traits.planned != "never")
"""Schedules that a search knows."""
WHOLE_LAYERS: tuple[Recompute, ...] = (
    "none",
    "attention",
    "selective",
    "every-4",
    "every-3",
    "every-2",
    "full",
)
"""Settings of recomputation that name no modules."""
RECOMPUTES: tuple[str, ...] = (*WHOLE_LAYERS, *MODULE_SETS)
"""Every setting of recomputation: those of whole layers, and every set of modules."""
CONTEXT_STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")

NAMED = {
    "order": tuple(ORDERS),
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "context_strategy": CONTEXT_STRATEGIES,
    "offload": OFFLOADS,
    "policy": tuple(catalog.POLICIES),
}
"""Columns whose numbers are places in a list of names."""

COLUMNS = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "zero", "replicas", "micro_batch", "virtual"),
    *NAMED,
)


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Choices as columns."""

    columns: dict[str, Ints]
    base: StepOptions
    """What no column says."""

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def __getitem__(self, column: str) -> Ints:
        return self.columns[column]

    def keep(self, rows: Ints | Flags) -> "Space":
        """Some of the rows."""
        return Space({name: values[rows] for name, values in self.columns.items()}, self.base)

    def runs(self, most: int) -> Iterator["Space"]:
        """All rows, ``most`` at a time, on the same memory."""
        for first in range(0, len(self), most):
            some = {name: values[first : first + most] for name, values in self.columns.items()}
            yield Space(some, self.base)

    def choice(self, row: int) -> Choice:
        """One row as layout and options; from ``len`` on, offloading what the quotient says."""
        offload, row = divmod(row, len(self))
        at = {name: int(values[row]) for name, values in self.columns.items()}
        at["offload"] += offload
        degrees = {axis: at[axis] for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "replicas")}
        layout = Layout(
            **cast(Any, degrees),
            zero=cast(Literal[0, 1, 2, 3], at["zero"]),
            order=ORDERS[NAMED["order"][at["order"]]],
        )
        options = dataclasses.replace(
            self.base,
            micro_batch=at["micro_batch"],
            virtual=at["virtual"],
            **cast(Any, {name: NAMED[name][at[name]] for name in NAMED if name != "order"}),
        )
        return Choice(layout, options)

    @property
    def micro_batches(self) -> Ints:
        """Micro-batches of each data-parallel rank, int64 [rows]."""
        return self.columns["micro_batches"]


class Rows:
    """Rows of a table that grow by crossing: each with each value of one more column.

    >>> rows = Rows({"b": 1}, {})
    >>> rows.cross("a", [1, 2, 3])
    >>> rows.cross("b", [0, 1], where=rows["a"] > 1)
    >>> rows["a"].tolist(), rows["b"].tolist()
    ([2, 3], [1, 1])
    """

    def __init__(
        self,
        fixed: Mapping[str, int | str],
        named: Mapping[str, Sequence[str]],
    ) -> None:
        """Begin with no column.

        Args:
            fixed: Columns that have one value; of those that are named, a name.
            named: Names of columns whose numbers are places in them.
        """
        self.columns: dict[str, Ints] = {}
        self._fixed = dict(fixed)
        for name, names in named.items():
            if name in self._fixed:
                value = str(self._fixed[name])
                self._fixed[name] = names.index(value) if value in names else -1

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def is_fixed(self, name: str) -> bool:
        """Whether a column has one fixed value."""
        return name in self._fixed

    def cross(self, name: str, values: Sequence[int], *, where: Flags | None = None) -> None:
        """Each row with each value; where not, with the first alone."""
        count = len(next(iter(self.columns.values()))) if self.columns else 1
        every = np.asarray(list(values) or [0], dtype=np.int64)
        if len(values) == 1 and where is None:  # no row twice
            self.derive(name, np.repeat(every, count))
            return
        wide = np.ones(count, dtype=bool) if where is None else where
        times = np.where(wide, len(every) if len(values) else 0, 1)
        self.columns = {key: np.repeat(column, times) for key, column in self.columns.items()}
        place = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        self.derive(name, every[place])

    def derive(self, name: str, column: Ints) -> None:
        """A column that follows from others; or is fixed."""
        self.columns[name] = column
        if name in self._fixed:
            self.keep(column == self._fixed[name])

    def keep(self, rows: Flags) -> None:
        """Drop the others."""
        if rows.all():
            return
        self.columns = {key: column[rows] for key, column in self.columns.items()}


def group_equal(columns: Sequence[Ints]) -> list[Ints]:
    """Symmetry: groups of places that are equal in every column.

    Args:
        columns: Numbers of 0 or more, int64 [n] each; the cost is linear in the largest.

    >>> [group.tolist() for group in group_equal([np.array([5, 2, 5]), np.array([1, 1, 1])])]
    [[1], [0, 2]]
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        place = np.cumsum(np.bincount(column) > 0) - 1
        if len(place) and place[-1]:
            code = code * (place[-1] + 1) + place[column]
    # Numbers of 16 bits are sorted digit by digit, ten times as fast.
    order = np.argsort(code.astype(np.min_scalar_type(code.max(initial=0))), kind="stable")
    breaks = np.flatnonzero(np.diff(code[order])) + 1
    return np.split(order, breaks) if len(order) else []


def schedules_with(trait: Callable[[ScheduleTraits], bool]) -> list[int]:
    """Places in ``SCHEDULES`` of those that have a trait.

    >>> [SCHEDULES[place] for place in schedules_with(lambda each: each.ahead == 2)]
    ['interleaved', 'zb-h2']
    """
    return [at for at, name in enumerate(SCHEDULES) if trait(catalog.SCHEDULES[name])]
