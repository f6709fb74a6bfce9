"""Divide outliers instead of delaying them: nobody waits, and micro-batches come out even.

Why
    The longest document bounds how evenly whole documents can be packed: with 64 micro-batches
    of a long-tailed corpus, to 2.7 times the mean. A document that several micro-batches share
    sets no such bound.

What it decides
    Which documents are divided, into how many parts, and where each part goes. Two forms:

    ``divided``          over ranks. A document gets any number of ranks: rank j holds the j-th
                         run from the front and the j-th from the back, so that all have equal
                         tokens and equal pairs; or consecutive runs, cut where a rank is full.
                         Its parts share one turn, which their ranks run at the same time; a
                         rank waits only for the partners of its documents.
    ``divided-in-time``  over the micro-batches of one pipeline. A document is cut at equal
                         work; its slices lie in consecutive micro-batches, and each reads
                         the keys of those before it, which stay resident. The backward of a
                         slice needs the gradients of later ones, so ``macro_units`` says
                         which micro-batches run forward in order and backward in reverse.

    Both forms divide as few documents as make the step even: first those heavier than a
    micro-batch, then those of half its work, and so on. Over ranks that answer competes with
    whole documents and with wraps over neighbours; the cheapest wins, travel included
    (``balance.packing.divided_price``).

Kept true (tests/unit/balance/packing/test_divided.py, by Hypothesis)
    Each token appears once; a document's parts together have its pairs; they lie on different
    ranks of one turn, or in consecutive micro-batches of one rank; the token cap holds; the
    answer depends on the arguments alone.

Sources
    Ranks for a document by its work: ByteScale, arXiv:2502.21231, section 4. Head and tail
    runs: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.packing.divided_choice import cheapest_division
from equipoise.balance.packing.divided_price import travel_ns_of
from equipoise.balance.packing.parts import (
    DocumentParts,
    shares_in_time,
    shares_over_ranks,
    wrapped_in_time,
)
from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec

_EVEN = 1.01
"""Skew at which no further document is divided."""

_NO_ROOM = np.iinfo(np.int64).max

_FINEST = 6
"""Documents are divided down to ``2 ** -_FINEST`` of a micro-batch's work."""


@dataclass(frozen=True, slots=True)
class _Cells:
    """Micro-batches being filled: ``turns`` on each of ``ranks`` ranks, rank-major."""

    ranks: int
    turns: int
    cap: int
    load: Ints
    tokens: Ints
    rows: list[list[tuple[int, int, int, int]]]
    """Each cell's rows of (document, start, stop, attends_from)."""

    @classmethod
    def empty(cls, ranks: int, turns: int, cap: int) -> "_Cells":
        count = ranks * turns
        nothing = np.zeros(count, dtype=np.int64)
        return cls(ranks, turns, cap, nothing, nothing.copy(), [[] for _ in range(count)])

    @property
    def skew(self) -> float:
        return float(self.load.max() / max(1.0, self.load.mean()))

    def lighter(self, other: "_Cells | None") -> "_Cells":
        """The one with the lighter heaviest micro-batch; the other on a tie."""
        if other is None or self.load.max() < other.load.max():
            return self
        return other

    def add(
        self, cell: int, load: int, piece: list[int], runs: tuple[tuple[int, int], ...]
    ) -> None:
        document, first, _ = piece
        self.load[cell] += load
        self.tokens[cell] += sum(stop - start for start, stop in runs)
        self.rows[cell] += [(document, first + start, first + stop, first) for start, stop in runs]


def _put_over_ranks(cells: _Cells, piece: list[int], share: DocumentParts) -> bool:
    """Put a document's parts on ranks of one turn; False if no turn has room."""
    parts, largest = len(share.prices), int(share.tokens.max())
    by_turn = cells.load.reshape(cells.ranks, cells.turns)
    for turn in np.lexsort((np.arange(cells.turns), by_turn.sum(0))).tolist():
        here = np.arange(cells.ranks) * cells.turns + turn
        here = here[cells.tokens[here] + largest <= cells.cap]
        if len(here) < parts:
            continue
        chosen = here[np.lexsort((here, cells.tokens[here], cells.load[here]))][:parts]
        heaviest_first = np.lexsort((np.arange(parts), -share.prices))
        for part, cell in zip(heaviest_first.tolist(), chosen.tolist(), strict=True):
            cells.add(cell, int(share.prices[part]), piece, share.runs[part])
        return True
    return False


def _put_in_time(cells: _Cells, piece: list[int], share: DocumentParts) -> bool:
    """Put a document's slices in consecutive micro-batches of one rank; False if none has room."""
    parts = len(share.prices)
    # int64[windows, parts]: turns of each run of consecutive ones. An index is far cheaper to make
    # than a view of windows.
    at = np.add.outer(np.arange(cells.turns - parts + 1), np.arange(parts))
    load = cells.load.reshape(cells.ranks, cells.turns)[:, at]
    tokens = cells.tokens.reshape(cells.ranks, cells.turns)[:, at]
    peak = (load + share.prices).max(2)
    peak[(tokens + share.tokens).max(2) > cells.cap] = _NO_ROOM
    rank, turn = np.unravel_index(int(peak.argmin()), peak.shape)
    if peak[rank, turn] == _NO_ROOM:
        return False
    for part in range(parts):
        cell = int(rank) * cells.turns + int(turn) + part
        cells.add(cell, int(share.prices[part]), piece, share.runs[part])
    return True


def _parts(loads: Ints, sizes: Ints, cells: _Cells, width: int, share: float) -> Ints:
    """Parts of each document such that none is heavier than ``share`` of a micro-batch."""
    mean = loads.sum() / len(cells.load)
    parts = np.maximum(np.ceil(loads / (share * mean)), np.ceil(sizes / cells.cap))
    bounded: Ints = np.minimum(np.minimum(parts.astype(np.int64), width), sizes)
    return bounded


def _attempt(
    pieces: Pieces, loads: Ints, parts: Ints, cells: _Cells, curve: LoadCurve, *, in_time: bool
) -> bool:
    """Divide documents into ``parts`` parts, pack the rest whole; False if there is no room."""
    sizes = lengths_of(pieces)
    divided = np.flatnonzero(parts > 1)
    divided = divided[np.lexsort((divided, -loads[divided]))]
    if len(divided):
        cut, put = (
            (shares_in_time, _put_in_time) if in_time else (shares_over_ranks, _put_over_ranks)
        )
        shares = cut(sizes[divided], parts[divided], curve)
        for piece, share in zip(pieces[divided].tolist(), shares, strict=True):
            if not put(cells, piece, share):
                return False
    return _add_whole(pieces, loads, np.flatnonzero(parts <= 1), cells)


def _wrap(pieces: Pieces, loads: Ints, parts: Ints, cells: _Cells, curve: LoadCurve) -> bool:
    """Lay the documents to divide end to end on a rank, and cut where a turn is full."""
    sizes = lengths_of(pieces)
    divided = np.flatnonzero(parts > 1)
    rank_of = partition(loads[divided], cells.ranks)
    if rank_of is None or not len(divided):
        return False
    for rank in range(cells.ranks):
        mine = divided[rank_of == rank]
        if not len(mine):
            continue
        wrapped = wrapped_in_time(sizes[mine], loads[mine], cells.turns, curve)
        for piece, (turn, share) in zip(pieces[mine].tolist(), wrapped, strict=True):
            for part, run in enumerate(share.runs):
                cell = rank * cells.turns + turn + part
                cells.add(cell, int(share.prices[part]), piece, run)
    if cells.tokens.max() > cells.cap:
        return False
    return _add_whole(pieces, loads, np.flatnonzero(parts <= 1), cells)


def _add_whole(pieces: Pieces, loads: Ints, whole: Ints, cells: _Cells) -> bool:
    """Pack documents whole into the remaining room; False if they do not fit."""
    sizes = lengths_of(pieces)
    filled = (cells.load, cells.tokens)
    cell_of = partition(
        loads[whole], len(cells.load), sizes=sizes[whole], capacity=cells.cap, filled=filled
    )
    if cell_of is None:
        return False
    for item, cell in zip(whole.tolist(), cell_of.tolist(), strict=True):
        cells.add(cell, int(loads[item]), pieces[item].tolist(), ((0, int(sizes[item])),))
    return True


def _divide(
    policy: str,
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    in_time: bool,
    travel_ns: float = 0.0,
    most_ns: int | None = None,
) -> PackedStep | None:
    """The best division; None if travel alone makes every answer dearer than ``most_ns``."""
    sizes, cap = lengths_of(pieces), pack.most_tokens
    loads = curve.document_ns(sizes)
    # Fewer turns than their caps hold would be tried in vain.
    turns = -(-int(sizes.sum()) // (ranks * min(pack.context_tokens, cap)))
    # With a turn for each document and each full micro-batch, everything that can fit does.
    most_turns = 2 * (max(turns, -(-int(sizes.sum()) // cap)) + len(sizes))
    if not in_time and int(sizes.max()) > ranks * cap:
        most_turns = 0
    while turns <= most_turns:
        best: _Cells | None = None
        is_too_dear = False
        parts = np.zeros_like(loads)
        for finer in range(_FINEST + 1):
            width = turns if in_time else ranks
            cells = _Cells.empty(ranks, turns, cap)
            before, parts = parts, _parts(loads, sizes, cells, width, 1.005 * 2.0**-finer)
            if np.array_equal(before, parts):
                continue
            sent = int((sizes * np.maximum(parts - 1, 0)).sum())
            if most_ns is not None and (loads.sum() + travel_ns * sent) / ranks > most_ns:
                is_too_dear = True  # as is any finer division
                break
            if _attempt(pieces, loads, parts, cells, curve, in_time=in_time):
                best = cells.lighter(best)
            if in_time and (best is None or best.skew > _EVEN):
                cells = _Cells.empty(ranks, turns, cap)
                if _wrap(pieces, loads, parts, cells, curve):
                    best = cells.lighter(best)
            if best is not None and best.skew <= _EVEN:
                break
        if best is not None:
            return PackedStep(policy, _batches(best))
        if is_too_dear:
            return None
        turns += 1
    raise LayoutError(
        f"A step of {int(sizes.sum()):,} tokens does not fit micro-batches of {cap:,}. Set a "
        f"larger pack.max_tokens."
    )


def _batches(cells: _Cells) -> tuple[tuple[MicroBatch, ...], ...]:
    made = []
    for rows in cells.rows:
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
        made.append(MicroBatch(table[:, :3].copy(), table[:, 3].copy()))
    return tuple(
        tuple(made[rank * cells.turns : (rank + 1) * cells.turns]) for rank in range(cells.ranks)
    )


def pack_divided(
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    travel_ns: float | None = None,
    meets_each_turn: bool = False,
) -> PackedStep:
    """Divide only as far as it pays: the cheapest of whole, wrapped and divided documents.

    The arguments are those of ``balance.packing.pack.make_packer``.
    """
    each_ns = travel_ns_of(curve, travel_ns)

    def share_outliers(most_ns: int | None) -> tuple[PackedStep, int] | None:
        packed = _divide(
            "divided", pieces, pack, ranks, curve, in_time=False, travel_ns=each_ns, most_ns=most_ns
        )
        return None if packed is None else (packed, 0)

    return cheapest_division(
        "divided",
        [share_outliers],
        pieces,
        pack,
        ranks,
        curve,
        travel_ns=each_ns,
        meets_each_turn=meets_each_turn,
    )


def pack_divided_in_time(
    pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve
) -> PackedStep:
    """Cut outliers into slices for consecutive micro-batches; pack the rest whole."""
    packed = _divide("divided-in-time", pieces, pack, ranks, curve, in_time=True)
    if packed is None:
        raise LayoutError("Slices in time send nothing, and yet were dearer than a price.")
    return packed


def macro_units(micro_batches: tuple[MicroBatch, ...]) -> list[tuple[int, int]]:
    """Runs ``[first, stop)`` of one rank's micro-batches that share documents over time.

    A pipeline runs a unit's forwards in order and its backwards in reverse, since a slice's
    keys get gradients from every later slice of its document.

    >>> whole = MicroBatch(np.array([[4, 0, 9]]))
    >>> head = MicroBatch(np.array([[7, 0, 6]]), np.array([0]))
    >>> tail = MicroBatch(np.array([[7, 6, 9]]), np.array([0]))
    >>> macro_units((whole, head, tail))
    [(0, 1), (1, 3)]
    """
    first_of: dict[tuple[int, int], int] = {}
    joined = list(range(len(micro_batches)))  # earliest micro-batch that each is bound to
    for turn, batch in enumerate(micro_batches):
        froms = batch.begins
        for document, start in zip(batch.pieces[:, 0].tolist(), froms.tolist(), strict=True):
            joined[turn] = min(joined[turn], first_of.setdefault((document, start), turn))
    units: list[tuple[int, int]] = []
    for turn, earliest in enumerate(joined):
        begin = turn
        while units and units[-1][1] > earliest:
            begin = units.pop()[0]
        units.append((begin, turn + 1))
    return units
