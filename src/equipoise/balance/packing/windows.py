"""Packs of fixed windows: every micro-batch holds at most ``context_tokens``, and is cut to it.

What it decides
    ``in-order``     fill windows in order and cut at their edges, as most trainers do.
    ``fixed``        whole documents, longest first, each in the window of least work that has
                     room; what fits nowhere is cut to fill the remaining holes.
    ``fixed-exact``  the pack without cuts whose heaviest window is lightest, by CP-SAT; falls
                     back to ``fixed`` if there is none or none is found.

Sources
    Fixed-length packing by work: WLB-LLM, arXiv:2503.17924, sections 3 and 4.1.
"""

import numpy as np

from equipoise.balance.exact import exact_partition
from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec

_EXACT_EFFORT = 0.5
"""CP-SAT's deterministic time per step; about half a second of one core."""


def cut_at_windows(pieces: Pieces, context_tokens: int) -> Pieces:
    """Cut pieces, laid end to end, at every multiple of ``context_tokens``.

    >>> cut_at_windows(np.array([[7, 0, 3], [9, 2, 7]]), 4).tolist()
    [[7, 0, 3], [9, 2, 3], [9, 3, 7]]
    """
    if not len(pieces):  # of a mixture whose documents are whole
        return pieces
    stops = np.cumsum(lengths_of(pieces))
    total = int(stops[-1])
    cuts = np.union1d(stops, np.arange(context_tokens, total, context_tokens))
    starts = np.concatenate(([0], cuts[:-1]))
    owner = np.searchsorted(stops, starts, side="right")
    shift = pieces[owner, 2] - stops[owner]
    return np.stack((pieces[owner, 0], starts + shift, cuts + shift), axis=1)


def windows_of(pieces: Pieces, context_tokens: int, ranks: int) -> int:
    """Windows that a step needs, a multiple of the ranks; one for each at least."""
    total = int(lengths_of(pieces).sum())
    return max(1, -(-total // (ranks * context_tokens))) * ranks


def pack_in_order(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Fill windows of ``context_tokens`` in order and cut at their edges; deal them to ranks."""
    del curve  # a plain pack counts only tokens
    cut = cut_at_windows(pieces, pack.context_tokens)
    lengths = lengths_of(cut)
    window_of = (np.cumsum(lengths) - lengths) // pack.context_tokens
    windows = windows_of(pieces, pack.context_tokens, ranks)
    batches = [MicroBatch(cut[window_of == index]) for index in range(windows)]
    return PackedStep("in-order", tuple(tuple(batches[rank::ranks]) for rank in range(ranks)))


def deal_to_ranks(
    policy: str, batches: list[Pieces], ranks: int, curve: LoadCurve, *, turns: int
) -> PackedStep:
    """Deal finished micro-batches to ranks, ``turns`` each, so that the ranks' sums are even."""
    loads = np.array([int(curve.pieces_ns(b).sum()) for b in batches])
    ones = np.ones(len(batches), dtype=np.int64)
    rank_of = partition(loads, ranks, sizes=ones, capacity=turns)
    if rank_of is None:
        raise LayoutError(
            f"{len(batches)} micro-batches are more than {ranks} ranks run in {turns} turns. Give "
            f"{-(-len(batches) // ranks)} turns."
        )
    packed = []
    for rank in range(ranks):
        mine = np.flatnonzero(rank_of == rank)
        mine = mine[np.lexsort((mine, -loads[mine]))]
        row = [MicroBatch(batches[index]) for index in mine]
        row += [MicroBatch(batches[0][:0])] * (turns - len(row))
        packed.append(tuple(row))
    return PackedStep(policy, tuple(packed))


def _by_window(pieces: Pieces, window_of: Ints, windows: int) -> list[Pieces]:
    return [pieces[window_of == index] for index in range(windows)]


def pack_fixed(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Put whole documents in the window of least work with room; cut what fits nowhere."""
    windows = windows_of(pieces, pack.context_tokens, ranks)
    batches = fill_windows(pieces, pack.context_tokens, windows, curve)
    return deal_to_ranks("fixed", batches, ranks, curve, turns=windows // ranks)


def fill_windows(
    pieces: Pieces, context_tokens: int, windows: int, curve: LoadCurve
) -> list[Pieces]:
    """Fill windows greedily by work, and return the pieces of each."""
    sizes = lengths_of(pieces)
    loads = curve.pieces_ns(pieces)
    work = np.zeros(windows, dtype=np.int64)
    free = np.full(windows, context_tokens, dtype=np.int64)
    held: list[list[list[int]]] = [[] for _ in range(windows)]
    left = []
    for item in np.lexsort((np.arange(len(sizes)), -sizes)).tolist():
        room = np.flatnonzero(free >= sizes[item])
        if not len(room):
            left.append(item)
            continue
        window = int(room[work[room].argmin()])
        work[window] += loads[item]
        free[window] -= sizes[item]
        held[window].append(pieces[item].tolist())
    for item in left:
        document, start, stop = pieces[item].tolist()
        while start < stop:
            window = int(free.argmax())
            taken = min(int(free[window]), stop - start)
            held[window].append([document, start, start + taken])
            free[window] -= taken
            start += taken
    return [np.array(rows, dtype=np.int64).reshape(-1, 3) for rows in held]


def pack_fixed_exact(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """Balance windows exactly without cutting a document; falls back to ``fixed``."""
    windows = windows_of(pieces, pack.context_tokens, ranks)
    sizes = lengths_of(pieces)
    try:
        exact = exact_partition(
            curve.pieces_ns(pieces),
            windows,
            sizes=sizes,
            capacity=pack.context_tokens,
            effort=_EXACT_EFFORT,
        )
        batches = _by_window(pieces, exact.bin_of, windows)
    except LayoutError:  # whole documents seldom fill windows exactly
        batches = fill_windows(pieces, pack.context_tokens, windows, curve)
    return deal_to_ranks("fixed-exact", batches, ranks, curve, turns=windows // ranks)
