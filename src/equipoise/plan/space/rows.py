"""Rows of a table that grow by crossing: each with each value of one more column.

Kept true (tests/unit/plan/space/test_columns.py)
    No row is there twice; a column that is fixed has one value.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from equipoise.base.arrays import Flags, Ints


class Rows:
    """Columns that grow by crossing.

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
        only: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Begin with no column.

        Args:
            fixed: Columns that have one value; of those that are named, a name.
            named: Names of columns whose numbers are places in them.
            only: Numbers that some columns are limited to, unless they are fixed.
        """
        self.columns: dict[str, Ints] = {}
        self._fixed = dict(fixed)
        self._only = {name: kept for name, kept in (only or {}).items() if name not in fixed}
        for name, names in named.items():
            if name in self._fixed:
                value = str(self._fixed[name])
                self._fixed[name] = names.index(value) if value in names else -1

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def is_fixed(self, name: str) -> bool:
        """Whether a column has one value."""
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
        if name in self._only:
            self.keep(np.isin(column, self._only[name]))

    def keep(self, rows: Flags) -> None:
        """Drop the others."""
        if rows.all():
            return
        self.columns = {key: column[rows] for key, column in self.columns.items()}
