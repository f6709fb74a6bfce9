"""Check that each rank of an attention schedule uses only what it has.

What it decides
    It follows a rank through its rounds: what has arrived, which queries it has computed, and
    which outputs it has sent home. Tokens that lie in the same runs of everything form one cell,
    and so do heads, so long documents cost no more than short ones.

Kept true (tests/unit/schedule/attention/test_check.py)
    Every use of something absent, and every output sent too early or never, is reported.
"""

from collections.abc import Iterator

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.attention.schedule import AttentionSchedule, Message, Round, write_tile
from equipoise.spec.pack import Pieces


class _TokenCells:
    """Tokens and heads between the points where any run of the schedule begins or ends."""

    def __init__(self, schedule: AttentionSchedule) -> None:
        lengths = schedule.doc_tokens
        documents = np.arange(len(lengths))
        tiles = [each.tiles for _, _, each in schedule if len(each.tiles)]
        messages = [m for _, _, each in schedule for m in (*each.sends, *each.receives)]
        runs = np.concatenate(
            [
                np.stack((documents, 0 * lengths, lengths), axis=1),
                *schedule.home,
                *schedule.cached,
                *(each[:, :3] for each in tiles),
                *(each[:, [0, 3, 4]] for each in tiles),
                *(message.runs for message in messages),
            ]
        )
        self.span = int(runs[:, 2].max(initial=0)) + 1
        self.cuts = np.unique(runs[:, :1] * self.span + runs[:, 1:])
        self.ratio = schedule.heads // schedule.kv_heads
        of_tiles = {int(head) for each in tiles for head in np.unique(each[:, 6:8])}
        of_queries = {h for m in messages if m.carries != "kv" for h in m.heads} | of_tiles
        of_keys = {h for m in messages if m.carries == "kv" for h in m.heads}
        of_keys |= {side for h in of_tiles for side in (h // self.ratio, -(-h // self.ratio))}
        self.head_cuts = np.array(sorted(of_queries | {0, schedule.heads}))
        self.kv_cuts = np.array(sorted(of_keys | {0, schedule.kv_heads}))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of token cells, and of query-head cells."""
        return len(self.cuts), len(self.head_cuts) - 1

    def spans(self, runs: Pieces) -> Ints:
        """First cell and cell stop of each run, int64 [n, 2]."""
        cells: Ints = np.searchsorted(self.cuts, runs[:, :1] * self.span + runs[:, 1:3])
        return cells

    def rows(self, runs: Pieces) -> Ints:
        """Token cells of the runs, int64 [n]."""
        first, stop = self.spans(runs).T
        sizes = stop - first
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        cells: Ints = np.repeat(first, sizes) + within
        return cells

    def heads(self, first: int, stop: int) -> slice:
        """Cells of query heads ``first:stop``."""
        return slice(*np.searchsorted(self.head_cuts, (first, stop)).tolist())

    def kv_heads(self, first: int, stop: int) -> slice:
        """Cells of key/value heads ``first:stop``."""
        return slice(*np.searchsorted(self.kv_cuts, (first, stop)).tolist())

    def name(self, cell: int, head: int) -> tuple[int, int, int]:
        """Document, token and query head at which a cell begins."""
        document, token = divmod(int(self.cuts[cell]), self.span)
        return document, token, int(self.head_cuts[head])


class _RankState:
    """What one rank has and has done, per cell, bool [token cells, head cells]."""

    def __init__(self, schedule: AttentionSchedule, rank: int, cells: _TokenCells) -> None:
        self.rank, self.cells = rank, cells
        self.is_home = np.zeros(cells.shape[0], dtype=bool)
        self.is_home[cells.rows(schedule.home[rank])] = True
        has_keys = np.zeros_like(self.is_home)
        has_keys[cells.rows(schedule.keys_of(rank))] = True
        self.has = {
            "q": np.repeat(self.is_home[:, None], cells.shape[1], axis=1),
            "kv": np.repeat(has_keys[:, None], len(cells.kv_cuts) - 1, axis=1),
        }
        self.computed = np.zeros(cells.shape, dtype=bool)
        self.sent_home = np.zeros_like(self.computed)
        self.arrived_whole = np.zeros_like(self.computed)

    def _heads(self, message: Message) -> slice:
        of_keys = message.carries == "kv"
        return (self.cells.kv_heads if of_keys else self.cells.heads)(*message.heads)

    def receive(self, message: Message, at: int) -> Iterator[str]:
        rows, heads = self.cells.rows(message.runs), self._heads(message)
        if message.carries in ("q", "kv"):
            has = self.has[message.carries]
            if has[rows, heads].any():
                yield f"Rank {self.rank} receives {message} in round {at} but has some of it."
            has[rows, heads] = True
            return
        if not self.is_home[rows].all():
            yield (
                f"Rank {self.rank} receives {message} in round {at}, but some of these queries "
                f"are not at home there."
            )
        if message.carries == "output":
            self.arrived_whole[rows, heads] = True

    def send(self, message: Message, at: int) -> Iterator[str]:
        rows, heads = self.cells.rows(message.runs), self._heads(message)
        if message.carries in ("q", "kv"):
            if not self.has[message.carries][rows, heads].all():
                yield f"Rank {self.rank} sends {message} in round {at} but does not have all of it."
            return
        if self.is_home[rows].any() or not self.computed[rows, heads].all():
            yield (
                f"Rank {self.rank} sends {message} in round {at} but has not computed all of it "
                f"for another rank."
            )
        if self.sent_home[rows, heads].any():
            yield f"Rank {self.rank} sends {message} in round {at} but has already sent some of it."
        self.sent_home[rows, heads] = True

    def compute(self, each: Round, at: int) -> Iterator[str]:
        cells, ratio = self.cells, self.cells.ratio
        places = np.concatenate(
            (cells.spans(each.tiles), cells.spans(each.tiles[:, [0, 3, 4]]), each.tiles[:, 6:8]),
            axis=1,
        )
        for tile, (q0, q1, k0, k1, h0, h1) in zip(each.tiles, places.tolist(), strict=True):
            queries, keys, heads = slice(q0, q1), slice(k0, k1), cells.heads(h0, h1)
            kv = cells.kv_heads(h0 // ratio, -(-h1 // ratio))
            is_right = self.has["q"][queries, heads].all() and self.has["kv"][keys, kv].all()
            if is_right and not self.sent_home[queries, heads].any():
                self.computed[queries, heads] = True
                continue
            what = f"Rank {self.rank} computes in round {at} {write_tile(tile)}"
            if not self.has["q"][queries, heads].all():
                yield f"{what}: it lacks some of these queries."
            if not self.has["kv"][keys, kv].all():
                yield f"{what}: it lacks some of these keys."
            if self.sent_home[queries, heads].any():
                yield f"{what}: it has already sent some of these outputs home."
            self.computed[queries, heads] = True

    def end(self) -> Iterator[str]:
        left = self.computed & ~self.sent_home & ~self.is_home[:, None]
        for cell in np.argwhere(left)[:1].tolist():
            document, token, head = self.cells.name(*cell)
            yield (
                f"Rank {self.rank} computes query {token} of document {document} in head {head} "
                f"but never sends it home."
            )


def rank_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Yield uses of absent data, doubled arrivals, and outputs that do not come home."""
    cells = _TokenCells(schedule)
    computing = np.zeros(cells.shape, dtype=np.int64)
    whole = np.zeros(cells.shape, dtype=bool)
    owner_of = np.empty(cells.shape[0], dtype=np.int64)
    for rank, rounds in enumerate(schedule.rounds):
        mine = _RankState(schedule, rank, cells)
        owner_of[mine.is_home] = rank
        for at, each in enumerate(rounds):
            for then, before in enumerate(rounds[:at]):
                for message in before.receives:
                    if then + message.rounds == at:
                        yield from mine.receive(message, then)
            for message in each.sends:
                yield from mine.send(message, at)
            yield from mine.compute(each, at)
        for then, before in enumerate(rounds):
            for message in before.receives:
                if then + message.rounds == len(rounds):
                    yield from mine.receive(message, then)
        yield from mine.end()
        computing += mine.computed
        whole |= mine.arrived_whole
    for cell, head in np.argwhere(whole & (computing != 1))[:1].tolist():
        document, token, first = cells.name(cell, head)
        yield (
            f"Rank {owner_of[cell]} receives the output of token {token} of document {document} in "
            f"head {first} as complete, but {computing[cell, head]} ranks compute it."
        )
