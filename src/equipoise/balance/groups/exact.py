"""Choose groups and assign documents to them exactly, by mixed-integer programming.

Why
    A greedy choice of group sizes cannot know that two groups of 8 leave no room for the one
    of 16 that the longest document needs. The solver weighs all of them at once.

What it decides
    For one micro-batch: how many groups of each size there are, and how many documents of each
    bucket each one runs, so that the slowest group is as fast as possible.

Kept true (tests/unit/balance/groups/test_flexsp.py)
    Caps hold; every document is counted once; the answer is within 2% of brute force on small
    cases, and repeatable, since a count of nodes ends the search and not the clock.

Sources
    FlexSP, arXiv:2412.01523, section 4. HiGHS: Huangfu and Hall, "Parallelizing the dual
    revised simplex method", 2018.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.silent import silent_stdout


@dataclass(frozen=True, slots=True)
class Buckets:
    """Documents of one micro-batch, grouped by similar length."""

    tokens: Ints
    """Length of the longest document of each bucket, which stands for all [tokens]."""
    bucket_of: Ints
    """The bucket of each document."""

    @property
    def counts(self) -> Ints:
        """Documents of each bucket."""
        return np.bincount(self.bucket_of, minlength=len(self.tokens)).astype(np.int64)


def make_buckets(doc_tokens: Ints, most: int) -> Buckets:
    """Buckets whose longest documents overstate the others by the fewest tokens in total.

    Dynamic programming over ascending lengths ``s``: ``err[k][q]`` is the least over ``j`` of
    ``err[j][q - 1]`` plus the sum of ``s_k - s_i`` over documents ``j < i <= k``.

    Args:
        doc_tokens: Length of each document [tokens].
        most: Buckets at most, >= 1.

    Cost: O(most x n^2) in distinct lengths, vectorised over one n.

    >>> buckets = make_buckets(np.array([100, 8, 7, 99]), 2)
    >>> buckets.tokens.tolist(), buckets.bucket_of.tolist()
    ([8, 100], [1, 0, 0, 1])
    """
    lengths, index, copies = np.unique(doc_tokens, return_inverse=True, return_counts=True)
    count = len(lengths)
    before = np.concatenate(([0], np.cumsum(copies)))
    summed = np.concatenate(([0], np.cumsum(copies * lengths)))
    # error[j, k]: lengths j .. k - 1 in one bucket, each counted as long as the last.
    last = np.concatenate(([0], lengths))
    error = last[None, :] * (before[None, :] - before[:, None]) - (
        summed[None, :] - summed[:, None]
    )
    error[np.tril_indices(count + 1)] = np.iinfo(np.int64).max // 4
    best = error[0].copy()
    cuts: list[Ints] = []
    best[0] = 0
    for _ in range(1, min(most, count)):
        total = best[:, None] + error
        cut = total.argmin(0)
        errors = total[cut, np.arange(count + 1)]
        cut[errors >= best] = -1  # one bucket more does not help
        best, cuts = np.minimum(errors, best), [*cuts, cut]
    edges, at = [count], count
    for cut in reversed(cuts):
        if at and cut[at] >= 0:
            at = int(cut[at])
            edges.append(at)
    edges = sorted({edge for edge in edges if edge})
    of_length = np.searchsorted(edges, np.arange(count), side="right")
    return Buckets(lengths[np.array(edges) - 1], of_length[index].astype(np.int64))


@dataclass(frozen=True, slots=True)
class GroupProblem:
    """One micro-batch: what each bucket's documents cost at each group size."""

    counts: Ints
    """int64[buckets]: documents of each."""
    times_ns: Ints
    """int64[buckets, sizes]: share of one document [ns]."""
    held: Ints
    """int64[buckets, sizes]: tokens of one document on each rank [tokens]."""
    sizes: tuple[int, ...]
    """Possible group sizes, in ranks."""
    ranks: int
    cap: int
    fixed_ns: int


def solve_groups(
    problem: GroupProblem, limit_ns: int, nodes: int
) -> list[tuple[int, list[int]]] | None:
    """Groups and their documents, the slowest group no slower than ``limit_ns``.

    Args:
        problem: What to assign.
        limit_ns: Time of a known answer; slower ones are not searched [ns].
        nodes: Most nodes of the search tree; the best answer among them is returned.

    Returns:
        Each group's ranks and its documents of each bucket; None if the search finds no answer
        within the limit.

    Raises:
        ModuleNotFoundError: SciPy is not installed.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    counts, sizes = problem.counts, problem.sizes
    buckets, documents = len(counts), int(counts.sum())
    groups = [
        which
        for which, size in enumerate(sizes)
        for _ in range(min(problem.ranks // size, documents))
    ]
    many, scale = len(groups), 1.0 / limit_ns
    # Columns: count of bucket k in group p, then whether group p exists, then the slowest time.
    of_count = np.arange(buckets * many).reshape(buckets, many)
    exists = buckets * many + np.arange(many)
    slowest = buckets * many + many
    upper = np.concatenate((np.repeat(counts, many), np.ones(many), [1.0])).astype(float)
    upper[:-1][: buckets * many][(problem.held[:, groups] > problem.cap).ravel()] = 0.0
    rows: list[tuple[np.ndarray, np.ndarray, float, float]] = []  # columns, values, low, high
    for bucket in range(buckets):
        wanted = float(counts[bucket])
        rows.append((of_count[bucket], np.ones(many), wanted, wanted))
    for group, which in enumerate(groups):
        columns = np.append(of_count[:, group], exists[group])
        held = problem.held[:, which] / problem.cap
        rows.append((columns, np.append(held, -1.0), -np.inf, 0.0))
        time = np.append(problem.times_ns[:, which], problem.fixed_ns) * scale
        rows.append((np.append(columns, slowest), np.append(time, -1.0), -np.inf, 0.0))
        if group and groups[group - 1] == which:  # the first of equal groups are used
            rows.append((exists[group - 1 : group + 1], np.array([1.0, -1.0]), 0.0, np.inf))
    width = np.array([sizes[which] for which in groups], dtype=float)
    rows.append((exists, width, -np.inf, float(problem.ranks)))
    # Implied by the others, but tightens the relaxation: all rank-seconds fit under the slowest.
    spent = problem.times_ns[:, groups] * width * scale
    columns = np.concatenate((of_count.ravel(), exists, [slowest]))
    values = np.concatenate((spent.ravel(), problem.fixed_ns * width * scale, [-problem.ranks]))
    rows.append((columns, values, -np.inf, 0.0))
    matrix = csr_array(
        (
            np.concatenate([values for _, values, _, _ in rows]),
            (
                np.repeat(np.arange(len(rows)), [len(columns) for columns, _, _, _ in rows]),
                np.concatenate([columns for columns, _, _, _ in rows]),
            ),
        ),
        shape=(len(rows), slowest + 1),
    )
    objective = np.zeros(slowest + 1)
    objective[slowest] = 1.0
    whole = np.ones(slowest + 1)
    whole[slowest] = 0
    with silent_stdout():  # HiGHS 1.12 prints when it repairs an answer, whatever it is asked
        solution = milp(
            objective,
            integrality=whole,
            bounds=Bounds(np.zeros(slowest + 1), upper),
            constraints=LinearConstraint(
                matrix, [low for _, _, low, _ in rows], [high for _, _, _, high in rows]
            ),
            options={"node_limit": nodes, "mip_rel_gap": 1e-3},
        )
    if solution.x is None:
        return None
    chosen = np.rint(solution.x[: buckets * many]).astype(np.int64).reshape(buckets, many)
    return [
        (sizes[which], chosen[:, group].tolist())
        for group, which in enumerate(groups)
        if chosen[:, group].any()
    ]
