"""A run's groups of columns: batches that keep distinct rows once, and how many these will be.

Kept true (tests/multi/recsys/test_sessions.py)
    A run that shares rows has the losses of one that does not; rows are counted, and predicted from
    the first epoch's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from equipoise.base.arrays import Floats
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.models.vectors import Vectors
from equipoise.recsys.samples import Samples
from equipoise.recsys.sessions.dense import RowSharing
from equipoise.recsys.sessions.inverse import InverseJagged, share_rows
from equipoise.spec.recommend import RecommendSpec

_PREDICTED_STEPS = 16


def table_groups(spec: RecommendSpec) -> list[tuple[str, ...]]:
    """The tables of each group of ``tables.deduplicate`` that has any."""
    tables = (*spec.data.ids, *spec.data.bags)
    groups = [tuple(n for n in group if n in tables) for group in spec.tables.deduplicate]
    return [group for group in groups if group]


class BatchSharing:
    """Shares the rows of one rank's batches, and counts them."""

    def __init__(self, spec: RecommendSpec, dense: nn.Module) -> None:
        """Share as the run says; numbers in a group are computed once in the MLP for numbers."""
        self.groups = table_groups(spec)
        self.samples, self.rows = 0, [0] * len(self.groups)
        """Samples of all training batches, and distinct rows of each group."""
        numbers = spec.data.numbers
        mlps = [part.mlp for part in dense.modules() if isinstance(part, Vectors)]
        is_shared = any(numbers and numbers[0] in group for group in spec.tables.deduplicate)
        self.numbers = [RowSharing(mlp) for mlp in mlps if is_shared and mlp is not None]

    def share(self, batch: KeyedJagged) -> KeyedJagged | InverseJagged:
        """The batch with distinct rows once; as it is where the run names no group."""
        return share_rows(batch, self.groups) if self.groups else batch

    def count(self, batch: KeyedJagged | InverseJagged) -> None:
        """Count a batch that ``share`` made."""
        if self.groups:
            self.samples += batch.samples
            for place, count in enumerate(batch.group_rows[: len(self.groups)]):
                self.rows[place] += count


@dataclass(frozen=True, slots=True)
class SharedLoads:
    """What a mean step looks up and exchanges where rows are shared."""

    sizes: Mapping[str, float]
    """For each table, bags of a rank."""
    lookups: Mapping[str, Floats]
    """For each table, lookups of each row by all ranks, float64 [rows]."""
    distinct: Mapping[str, tuple[float, float]]
    """For each table, distinct rows of a rank's samples, and of those of all ranks."""
    groups: int
    """Groups of tables, with that of all the others."""


def predict_loads(spec: RecommendSpec, samples: Samples, ranks: int) -> SharedLoads:
    """Loads of a mean step: exact means without groups, means of some first steps with them."""
    groups, train, batch = table_groups(spec), samples.edges[1], spec.train.batch
    sizes = dict.fromkeys(samples.keys, batch / ranks)
    shares = {key: counts / train for key, counts in samples.row_counts().items()}
    lookups = {key: share * batch for key, share in shares.items()}
    if not groups and spec.train.shuffle == "samples":
        distinct = {
            key: (_distinct(share, batch / ranks), _distinct(share, batch))
            for key, share in shares.items()
        }
        return SharedLoads(sizes, lookups, distinct, 1)
    source = np.random.Generator(np.random.Philox(key=[spec.train.seed, 0]))
    order = samples.order(source, spec.train.shuffle)
    steps = min(_PREDICTED_STEPS, max(1, train // batch))
    rows = dict(zip(samples.keys, samples.rows, strict=True))
    for key in (key for group in groups for key in group):
        sizes[key], lookups[key] = 0.0, np.zeros(rows[key])
    touched = {key: np.zeros(2) for key in samples.keys}
    for step in range(steps):
        index = order[step * batch : (step + 1) * batch]
        every = samples.batch(index)[0]
        for key in samples.keys:
            touched[key][1] += len(np.unique(every.bags(key)[1])) / steps
        for rank in range(ranks):
            own = samples.batch(
                index[rank * len(index) // ranks : (rank + 1) * len(index) // ranks]
            )[0]
            for key in samples.keys:
                touched[key][0] += len(np.unique(own.bags(key)[1])) / steps / ranks
            shared = share_rows(own, groups)
            for group in shared.groups[: len(groups)]:
                for key in group.bags.keys:
                    sizes[key] += group.bags.samples / steps / ranks
                    ids = group.bags.bags(key)[1].numpy()
                    lookups[key] += np.bincount(ids, minlength=rows[key]) / steps
    has_rest = sum(map(len, groups)) < len(samples.keys)
    distinct = {key: (float(each[0]), float(each[1])) for key, each in touched.items()}
    return SharedLoads(sizes, lookups, distinct, len(groups) + has_rest)


def _distinct(shares: Floats, count: float) -> float:
    """Rows that some samples look up, of rows that are in these shares of all samples."""
    return float((1 - (1 - np.minimum(1.0, shares)) ** count).sum())
