"""One micro-batch on groups of powers of two: a quick answer, and a better one by search.

Why
    The exact search needs a known answer to bound it, and may find nothing better within its
    nodes. Groups of one size are best where travel is free; groups of several sizes where it is
    not.

What it decides
    The groups of one micro-batch and the documents of each, so that the slowest is fast.

Kept true (tests/unit/balance/groups/test_flexsp.py, by Hypothesis)
    Caps hold; the search never makes the quick answer slower; no answer is below ``bound_ns``.
"""

import numpy as np

from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.exact import GroupProblem, make_buckets, solve_groups
from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints

Groups = list[tuple[int, list[int]]]
"""The ranks and documents of each group of a micro-batch."""


class GroupBatch:
    """One micro-batch: its documents, longest first, at each group size."""

    def __init__(
        self, lengths: Ints, documents: Ints, ranks: int, costs: GroupCosts, cap: int
    ) -> None:
        self.documents, self.ranks, self.cap = documents, ranks, cap
        self.fixed_ns = costs.fixed_ns
        self.sizes = tuple(1 << power for power in range(ranks.bit_length()))
        self.tokens = lengths[documents]
        self.times = costs.share_ns(self.tokens[:, None], np.array(self.sizes)[None, :])
        self.held = -(-self.tokens[:, None] // np.array(self.sizes)[None, :])
        self._costs = costs
        self._row = {int(document): row for row, document in enumerate(documents)}

    def slowest(self, groups: Groups) -> int:
        """Time of the slowest group [ns]."""
        return max(
            self.fixed_ns
            + sum(int(self.times[self._row[d], size.bit_length() - 1]) for d in documents)
            for size, documents in groups
        )

    @property
    def bound_ns(self) -> int:
        """Lower bound on the time of the slowest group [ns]."""
        holds = self.held <= self.cap
        never = np.iinfo(np.int64).max // len(self.tokens)
        work = np.where(holds, self.times * np.array(self.sizes), never).min(1).sum()
        slowest = np.where(holds, self.times, never).min(1).max()
        return max(-(-int(work) // self.ranks), int(slowest) + self.fixed_ns)

    def improve(self, known: Groups, buckets: int, nodes: int) -> Groups:
        """The faster of the known groups and those of the exact search."""
        limit = self.slowest(known)
        if limit <= self.bound_ns * 1.001:
            return known
        exact = self._exact(buckets, nodes, limit)
        return known if exact is None else min(known, exact, key=self.slowest)

    def _exact(self, buckets: int, nodes: int, limit: int) -> Groups | None:
        made = make_buckets(self.tokens, buckets)
        size = np.array(self.sizes)[None, :]
        problem = GroupProblem(
            made.counts,
            self._costs.share_ns(made.tokens[:, None], size),
            -(-made.tokens[:, None] // size),
            self.sizes,
            self.ranks,
            self.cap,
            self.fixed_ns,
        )
        # Buckets overstate lengths, so the known answer may exceed its own time there.
        solved = solve_groups(problem, limit + limit // 16, nodes)
        if solved is None:
            return None
        waiting = [self.documents[made.bucket_of == b].tolist() for b in range(len(made.tokens))]
        return [
            (ranks, [waiting[b].pop(0) for b, taken in enumerate(counts) for _ in range(taken)])
            for ranks, counts in solved
        ]

    def greedy(self) -> Groups | None:
        """The better of groups of one size and groups sized by their documents.

        The latter put each document, longest first, into the narrowest group that ends by a
        limit, and bisect the limit.
        """
        best = self._one_size()
        fastest = np.where(self.held <= self.cap, self.times, np.iinfo(np.int64).max).min(1)
        low, high = int(fastest.max()) + self.fixed_ns, int(self.times[:, 0].sum()) + self.fixed_ns
        groups = self._fill(high)
        if groups is None:
            return best
        while high - low > low // 64:
            if groups is not None and (best is None or self.slowest(groups) < self.slowest(best)):
                best = groups
                high = min(high, self.slowest(groups))
            middle = (low + high) // 2
            groups = self._fill(middle)
            low, high = (middle + 1, high) if groups is None else (low, middle)
        return best

    def _one_size(self) -> Groups | None:
        """The fastest division into groups of one size."""
        best: Groups | None = None
        for which, size in enumerate(self.sizes):
            groups = self.ranks // size
            times, held = self.times[:, which], self.held[:, which]
            group_of = partition(times, groups, sizes=held, capacity=self.cap)
            if group_of is None:
                continue
            members = [self.documents[group_of == group].tolist() for group in range(groups)]
            candidate = [(size, documents) for documents in members if documents]
            if best is None or self.slowest(candidate) < self.slowest(best):
                best = candidate
        return best

    def _fill(self, limit: int) -> Groups | None:
        free = self.ranks
        groups: list[tuple[int, int, int, list[int]]] = []  # time, tokens, size index, rows
        for row in range(len(self.tokens)):
            times, held = self.times[row].tolist(), self.held[row].tolist()
            chosen = -1
            for index, (time_ns, tokens, which, _) in enumerate(groups):
                if time_ns + times[which] > limit or tokens + held[which] > self.cap:
                    continue
                # The narrowest group that ends in time; the fullest of equals.
                if chosen < 0 or (which, -time_ns) < (groups[chosen][2], -groups[chosen][0]):
                    chosen = index
            if chosen >= 0:
                time_ns, tokens, which, rows = groups[chosen]
                rows.append(row)
                groups[chosen] = (time_ns + times[which], tokens + held[which], which, rows)
                continue
            for which, size in enumerate(self.sizes):
                ends = self.fixed_ns + times[which] <= limit
                if size <= free and held[which] <= self.cap and ends:
                    groups.append((self.fixed_ns + times[which], held[which], which, [row]))
                    free -= size
                    break
            else:
                return None
        self._widen(groups, free)
        return [
            (self.sizes[which], [int(self.documents[row]) for row in rows])
            for _, _, which, rows in groups
        ]

    def _widen(self, groups: list[tuple[int, int, int, list[int]]], free: int) -> None:
        """Double the slowest group from the leftover ranks while that makes it faster."""
        while True:
            at = max(range(len(groups)), key=lambda index: (groups[index][0], -index))
            time_ns, _, which, rows = groups[at]
            if self.sizes[which] > free:
                return
            faster = self.fixed_ns + int(self.times[rows, which + 1].sum())
            if faster >= time_ns:
                return
            free -= self.sizes[which]
            groups[at] = (faster, int(self.held[rows, which + 1].sum()), which + 1, rows)
