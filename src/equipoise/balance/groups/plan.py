"""A plan of dynamic groups: which ranks run which documents together, and in what order.

Why
    A grid of dp x cp ranks gives every document the same number of ranks: too many for a
    short one, too few for a long one. Here each document has its own *gang*, and a rank's next
    document may have other partners::

        rank 0  [ doc 7            ][ docs 1 4 ][ doc 2 ]
        rank 1  [ doc 7            ][ doc 9        ]
        rank 2  [ doc 3 ][ doc 5   ][ doc 9        ]

    A gang begins when all its ranks are free. There is no barrier and no new communicator: all
    ranks are in one process group, and a gang is a list of addresses in it. Ranks may run
    different numbers of micro-batches.

What it decides
    Nothing: it holds what a policy decided, replays it, and adds the bound that no plan beats.
    The order of ``gangs`` is global: each rank runs its gangs in it, so ranks never wait for
    each other in a circle.

Kept true (tests/unit/balance/groups/test_policies.py, by Hypothesis)
    Each document runs once; no rank is over its cap; gangs never overlap on a rank; ranks that
    follow their own lists, served in any order, all finish at the planned times; no plan is
    below the bound; the answer depends on the arguments alone.

Sources
    One process group for groups of every size: ByteScale, arXiv:2502.21231, section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from equipoise.balance.groups.cost import GroupCosts
from equipoise.base.arrays import Ints
from equipoise.base.digest import digest_bytes


@dataclass(frozen=True, slots=True)
class Gang:
    """One micro-batch that its ranks run together, each with a share of every document."""

    ranks: tuple[int, ...]
    documents: tuple[int, ...]
    """Indices into the planned lengths."""
    load_ns: int
    """Time on each of its ranks, with the fixed price of a micro-batch [ns]."""
    tokens_per_rank: int
    """Tokens whose activations each rank holds at once, which the cap limits [tokens]."""
    start_ns: int = 0
    offload: float = 0.0
    """Share of the activations that may be offloaded to host memory that is."""

    @property
    def stop_ns(self) -> int:
        """When it ends [ns]."""
        return self.start_ns + self.load_ns

    @property
    def seconds(self) -> float:
        """Time on each of its ranks [s]."""
        return self.load_ns * 1e-9


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Gangs in their global order, with their cost and its lower bound."""

    policy: str
    ranks: int
    cap_tokens: int
    gangs: tuple[Gang, ...]
    work_ns: int
    """Time of all documents, each on one rank, without travel [ns]."""
    bound_ns: int
    """No plan under this cap ends sooner [ns]."""
    barriers: tuple[int, ...] = ()
    """Gangs before which all ranks meet, if the published policy has barriers."""
    plan_s: float = field(default=0.0, compare=False)
    """Time to make the plan [s]."""

    @property
    def rank_gangs(self) -> list[list[int]]:
        """Each rank's gangs, in the order in which it runs them."""
        lists: list[list[int]] = [[] for _ in range(self.ranks)]
        for index, gang in enumerate(self.gangs):
            for rank in gang.ranks:
                lists[rank].append(index)
        return lists

    @property
    def busy_ns(self) -> Ints:
        """Time in which each rank computes or sends, int64[ranks] [ns]."""
        busy = np.zeros(self.ranks, dtype=np.int64)
        for gang in self.gangs:
            busy[list(gang.ranks)] += gang.load_ns
        return busy

    @property
    def peak_tokens(self) -> Ints:
        """Most tokens that each rank holds at once, int64[ranks] [tokens]."""
        peak = np.zeros(self.ranks, dtype=np.int64)
        for gang in self.gangs:
            held = list(gang.ranks)
            peak[held] = np.maximum(peak[held], gang.tokens_per_rank)
        return peak

    @property
    def critical_ns(self) -> int:
        """When the last rank ends [ns]."""
        return max((gang.stop_ns for gang in self.gangs), default=0)

    @property
    def ideal_ns(self) -> float:
        """Time if all ranks shared the work evenly, without travel or waiting [ns]."""
        return self.work_ns / self.ranks

    @property
    def critical_over_ideal(self) -> float:
        """``critical_ns`` over ``ideal_ns`` [ratio]; 1.0 without documents."""
        return self.critical_ns / self.ideal_ns if self.work_ns else 1.0

    @property
    def gap(self) -> float:
        """``critical_ns`` over ``bound_ns``, minus 1 [ratio]."""
        return self.critical_ns / self.bound_ns - 1 if self.bound_ns else 0.0

    @property
    def micro_batches(self) -> list[int]:
        """Micro-batches of each rank."""
        return [len(mine) for mine in self.rank_gangs]

    @property
    def digest(self) -> str:
        """Digest of the whole decision; equal on ranks that decided alike."""
        rows = [
            (gang.ranks, gang.documents, gang.start_ns, gang.load_ns, gang.tokens_per_rank)
            for gang in self.gangs
        ]
        return digest_bytes(repr((self.policy, self.ranks, rows, self.barriers)).encode())


def replay(gangs: Sequence[Gang], ranks: int, barriers: Sequence[int] = ()) -> tuple[Gang, ...]:
    """Set each gang's start: when all its ranks are free and earlier barriers have passed.

    >>> first, second = Gang((0,), (0,), 5, 1), Gang((0, 1), (1,), 3, 1)
    >>> [gang.start_ns for gang in replay([first, second], 2)]
    [0, 5]
    """
    free = [0] * ranks
    meet = set(barriers)
    timed = []
    for index, gang in enumerate(gangs):
        if index in meet:
            free = [max(free)] * ranks
        start = max(free[rank] for rank in gang.ranks)
        for rank in gang.ranks:
            free[rank] = start + gang.load_ns
        timed.append(gang if gang.start_ns == start else replace(gang, start_ns=start))
    return tuple(timed)


def make_gang(
    ranks: Sequence[int], documents: Sequence[int], doc_tokens: Ints, costs: GroupCosts
) -> Gang:
    """A gang of these ranks and documents, at its price."""
    tokens, width = doc_tokens[list(documents)], len(ranks)
    load = costs.fixed_ns + int(costs.share_ns(tokens, np.array(width)).sum())
    return Gang(tuple(ranks), tuple(documents), load, int((-(-tokens // width)).sum()))


def finish_plan(
    policy: str,
    gangs: Sequence[Gang],
    doc_tokens: Ints,
    ranks: int,
    costs: GroupCosts,
    cap_tokens: int,
    *,
    barriers: Sequence[int] = (),
    largest_share: int | None = None,
    bound_ns: int | None = None,
    plan_s: float = 0.0,
) -> GroupPlan:
    """Replay the gangs, and add the bound.

    ``largest_share`` is the most tokens [tokens] that a rank may compute in one micro-batch, if
    offloading lifts it above the cap; ``bound_ns`` is ``critical_bound``, if already computed [ns].
    """
    if bound_ns is None:
        share = max(cap_tokens, largest_share or 0)
        bound_ns = critical_bound(doc_tokens, ranks, costs, share)
    return GroupPlan(
        policy,
        ranks,
        cap_tokens,
        replay(gangs, ranks, barriers),
        int(costs.document_ns(doc_tokens).sum()) if len(doc_tokens) else 0,
        bound_ns,
        tuple(barriers),
        plan_s,
    )


def critical_bound(doc_tokens: Ints, ranks: int, costs: GroupCosts, cap_tokens: int) -> int:
    """Earliest time at which the last rank can end, whatever the gangs [ns].

    The larger of: all documents at their least wasteful width, shared evenly, with as many
    micro-batches as the tokens need; and the slowest document at its fastest width.
    """
    if not len(doc_tokens):
        return 0
    lengths, copies = np.unique(doc_tokens, return_counts=True)
    least_work, slowest, tokens = 0, 0, 0
    for begin in range(0, len(lengths), 1024):
        some = lengths[begin : begin + 1024]
        count = copies[begin : begin + 1024]
        width = np.arange(1, ranks + 1)
        time = costs.share_ns(some[:, None], width[None, :])
        fits = -(-some[:, None] // width[None, :]) <= cap_tokens
        fits[:, -1] = True
        never = np.iinfo(np.int64).max
        least_work += int((np.where(fits, time * width, never).min(1) * count).sum())
        slowest = max(slowest, int(np.where(fits, time, never).min(1).max()))
        tokens += int((some * count).sum())
    fixed = costs.fixed_ns
    batches = max(1, -(-tokens // max(cap_tokens, -(-int(lengths[-1]) // ranks))))
    return max(-(-(least_work + batches * fixed) // ranks), slowest + fixed)
