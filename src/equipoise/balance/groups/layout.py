"""Lay gangs of given widths out over ranks and time, and short documents around them.

Why
    A gang begins when its last rank is free, so its other ranks may wait. Two things keep that
    small: wide before narrow on nested blocks, where nobody waits, and short documents in the
    holes where somebody does.

What it decides
    The ranks and start of each gang, and the micro-batches of the other documents.

Kept true (tests/unit/balance/groups/test_policies.py, by Hypothesis)
    Each document runs once; no micro-batch is over the cap; nothing overlaps on a rank.
"""

import bisect
import heapq
from dataclasses import dataclass

import numpy as np

from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.plan import Gang, replay
from equipoise.balance.packing.whole import best_fit_decreasing
from equipoise.balance.partition import repair
from equipoise.base.arrays import Ints


@dataclass(frozen=True, slots=True)
class GroupJob:
    """What to plan, with prices looked up once."""

    doc_tokens: Ints
    ranks: int
    costs: GroupCosts
    cap: int
    alone_ns: Ints
    """Time of each document on one rank [ns]."""
    candidates: Ints
    """Documents that may be given several ranks."""
    times: Ints
    """int64[candidates, ranks]: time of each on 1, 2, ... ranks [ns]."""
    least: Ints
    """Fewest ranks that hold each candidate."""

    def widths(self, limit_ns: float) -> Ints:
        """Fewest ranks that hold each candidate and finish it by the limit.

        If none do, the fewest that are nearly as fast as any.
        """
        holds = np.arange(1, self.ranks + 1)[None, :] >= self.least[:, None]
        fastest = np.where(holds, self.times, np.iinfo(np.int64).max).min(1)
        enough = np.maximum(limit_ns, fastest + fastest // 64)
        chosen: Ints = (holds & (self.times <= enough[:, None])).argmax(1) + 1
        return chosen


def make_job(
    doc_tokens: Ints, ranks: int, costs: GroupCosts, cap: int, least_ns: float
) -> GroupJob:
    """Price documents longer than ``least_ns``, or over the cap, on every number of ranks."""
    alone = costs.document_ns(doc_tokens)
    candidates = np.flatnonzero((alone > least_ns) | (doc_tokens > cap))
    times = costs.share_ns(doc_tokens[candidates][:, None], np.arange(1, ranks + 1)[None, :])
    least = -(-doc_tokens[candidates] // cap)
    return GroupJob(doc_tokens, ranks, costs, cap, alone, candidates, times, least)


@dataclass(slots=True)
class _Placed:
    """A gang in the making."""

    ranks: list[int]
    documents: list[int]
    start: int
    stop: int
    tokens: int

    def done(self) -> Gang:
        load = self.stop - self.start
        return Gang(tuple(self.ranks), tuple(self.documents), load, self.tokens, self.start)


@dataclass(slots=True)
class _Board:
    """Gangs placed so far, when each rank is free, and the holes left behind."""

    job: GroupJob
    free: Ints
    last: list[_Placed | None]
    """The last gang of each rank."""
    gangs: list[_Placed]
    holes: list[tuple[int, int, int]]
    """(length, rank, start)."""

    def place(self, document: int, width: int, load: int, *, on_blocks: bool) -> None:
        """Put a document on the ``width`` ranks that are free earliest."""
        free = self.free
        if on_blocks:
            block = int(free.reshape(-1, width).max(1).argmin())
            chosen = list(range(block * width, (block + 1) * width))
        else:
            chosen = sorted(np.argsort(free, kind="stable")[:width].tolist())
        tokens = -(-int(self.job.doc_tokens[document]) // width)
        last = self.last[chosen[0]]
        # The same ranks as the previous gang: one micro-batch for both, if it holds both.
        if (
            last is not None
            and last.ranks == chosen
            and last.tokens + tokens <= self.job.cap
            and all(self.last[rank] is last for rank in chosen)
        ):
            last.documents.append(document)
            last.stop += load
            last.tokens += tokens
            free[chosen] = last.stop
            return
        start = int(free[chosen].max())
        self.holes += [
            (start - int(free[rank]), rank, int(free[rank]))
            for rank in chosen
            if free[rank] < start
        ]
        gang = _Placed(chosen, [document], start, start + load + self.job.costs.fixed_ns, tokens)
        self.gangs.append(gang)
        for rank in chosen:
            self.last[rank] = gang
        free[chosen] = gang.stop


def lay_out(job: GroupJob, widths: Ints, *, on_blocks: bool) -> tuple[Gang, ...]:
    """Place gangs widest first, then short documents in the holes and at the ends.

    Args:
        job: What to plan.
        widths: Ranks of each candidate; on blocks they divide the ranks.
        on_blocks: Use only blocks of neighbours.
    """
    board = _Board(job, np.zeros(job.ranks, dtype=np.int64), [None] * job.ranks, [], [])
    loads = job.times[np.arange(len(widths)), widths - 1]
    long = np.flatnonzero(widths > 1)
    for at in long[np.lexsort((long, -loads[long], -widths[long]))].tolist():
        board.place(int(job.candidates[at]), int(widths[at]), int(loads[at]), on_blocks=on_blocks)
    is_short = np.ones(len(job.doc_tokens), dtype=bool)
    is_short[job.candidates[long]] = False
    short = np.flatnonzero(is_short)
    short = short[np.lexsort((short, -job.doc_tokens[short], -job.alone_ns[short]))]
    rest = _fill_holes(board, short.tolist())
    gangs = [gang.done() for gang in board.gangs] + _fill_ends(job, board.free, rest)
    # Nothing overlaps on a rank, so every rank keeps the order of starts.
    gangs.sort(key=lambda gang: (gang.start_ns, gang.ranks))
    return replay(gangs, job.ranks)


def _fill_holes(board: _Board, short: list[int]) -> list[int]:
    """Put documents, heaviest first, into the tightest holes; return those that fit none."""
    job, fixed = board.job, board.job.costs.fixed_ns
    if not board.holes:
        return short
    holes = sorted(board.holes)
    open_in: dict[tuple[int, int], _Placed] = {}
    rest = []
    for document in short:
        load, tokens = int(job.alone_ns[document]), int(job.doc_tokens[document])
        at = bisect.bisect_left(holes, (load,))
        while at < len(holes):
            length, rank, start = holes[at]
            batch = open_in.get((rank, start))
            joins = batch is not None and batch.tokens + tokens <= job.cap
            if load + (0 if joins else fixed) <= length:
                break
            at += 1
        else:
            rest.append(document)
            continue
        del holes[at]
        if batch is None or not joins:
            begin = start if batch is None else batch.stop
            del batch
            batch = open_in[rank, start] = _Placed([rank], [], begin, begin + fixed, 0)
            board.gangs.append(batch)
            length -= fixed
        batch.documents.append(document)
        batch.stop += load
        batch.tokens += tokens
        bisect.insort(holes, (length - load, rank, start))
    return rest


def _fill_ends(job: GroupJob, free: Ints, rest: list[int]) -> list[Gang]:
    """Put the remaining documents in micro-batches on the ranks that end first."""
    if not rest:
        return []
    documents = np.array(rest, dtype=np.int64)
    options = [_documents_first(job, free, documents)]
    if job.costs.fixed_ns:
        options.append(_micro_batches_first(job, free, documents))
    return min(options, key=lambda gangs: max(gang.stop_ns for gang in gangs))


def _documents_first(job: GroupJob, free: Ints, documents: Ints) -> list[Gang]:
    """Assign documents, heaviest first, to the rank that ends first; then form micro-batches."""
    tokens = job.doc_tokens[documents]
    # Each token pays its part of a full micro-batch's fixed price.
    weights = job.alone_ns[documents] + job.costs.fixed_ns * tokens // job.cap
    rank_of = _longest_first(weights, free)
    everything = int(tokens.sum())
    repair(weights, tokens, rank_of, everything, filled=(free, np.zeros_like(free)))
    gangs = []
    for rank in range(job.ranks):
        mine = documents[rank_of == rank]
        batches = [mine[members] for members in _micro_batches(job.doc_tokens[mine], job.cap)]
        gangs += _one_after_another(job, rank, int(free[rank]), batches)
    return gangs


def _micro_batches_first(job: GroupJob, free: Ints, documents: Ints) -> list[Gang]:
    """Form as few micro-batches as possible; assign them, heaviest first, to the earliest rank."""
    batches = [documents[members] for members in _micro_batches(job.doc_tokens[documents], job.cap)]
    loads = np.array([int(job.alone_ns[batch].sum()) for batch in batches]) + job.costs.fixed_ns
    order = np.lexsort((np.arange(len(loads)), -loads))
    rank_of = _longest_first(loads[order], free)
    gangs = []
    for rank in range(job.ranks):
        mine = [batches[int(at)] for at in order[rank_of == rank]]
        gangs += _one_after_another(job, rank, int(free[rank]), mine)
    return gangs


def _longest_first(weights: Ints, free: Ints) -> Ints:
    """The rank of each item: in the given order, the one that is free first."""
    heap = [(end, rank) for rank, end in enumerate(free.tolist())]
    heapq.heapify(heap)
    rank_of = np.empty(len(weights), dtype=np.int64)
    for item, weight in enumerate(weights.tolist()):
        end, rank = heap[0]
        heapq.heapreplace(heap, (end + weight, rank))
        rank_of[item] = rank
    return rank_of


def _one_after_another(job: GroupJob, rank: int, start: int, batches: list[Ints]) -> list[Gang]:
    """One rank's micro-batches from ``start`` on."""
    gangs = []
    for batch in batches:
        load = job.costs.fixed_ns + int(job.alone_ns[batch].sum())
        tokens = int(job.doc_tokens[batch].sum())
        gangs.append(Gang((rank,), tuple(batch.tolist()), load, tokens, start))
        start += load
    return gangs


def _micro_batches(tokens: Ints, cap: int) -> list[Ints]:
    """The fewest micro-batches under the cap that best fit finds."""
    if not len(tokens):
        return []
    count = -(-int(tokens.sum()) // cap)
    if count == 1:
        return [np.arange(len(tokens))]
    while True:
        batch_of = best_fit_decreasing(tokens, count, cap)
        if batch_of is not None:
            groups = [np.flatnonzero(batch_of == batch) for batch in range(count)]
            return [members for members in groups if len(members)]
        count += 1
