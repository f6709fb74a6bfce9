"""What each rank of an attention schedule has: sent or computed with only while it is there.

What it decides
    A rank is followed token by token and head by head through its rounds: what has arrived,
    which queries it has computed for, and which outputs it has sent home.

Kept true (tests/unit/schedule/test_attention_check.py)
    Every use of what is not there, and every output that is not sent or sent too early, is
    told.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from equipoise.schedule.attention import AttentionSchedule, Message, Round, write_tile

Flags = npt.NDArray[np.bool_]


class _Rank:
    """One rank's tokens in each head, bool [tokens, heads]."""

    def __init__(self, schedule: AttentionSchedule, rank: int) -> None:
        self.rank = rank
        self.lengths = schedule.doc_tokens
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.ratio = schedule.heads // schedule.kv_heads
        self.is_home = np.zeros(schedule.tokens, dtype=bool)
        for document, start, stop in schedule.home[rank].tolist():
            begin = self.begins[document]
            self.is_home[begin + start : begin + stop] = True
        self.has = {
            "q": np.repeat(self.is_home[:, None], schedule.heads, axis=1),
            "kv": np.repeat(self.is_home[:, None], schedule.kv_heads, axis=1),
        }
        self.computed = np.zeros((schedule.tokens, schedule.heads), dtype=bool)
        self.sent_home = np.zeros_like(self.computed)
        self.arrived_whole = np.zeros_like(self.computed)

    def rows(self, message: Message) -> npt.NDArray[np.int64]:
        """Tokens of a message, counted from the first of all."""
        starts = self.begins[message.runs[:, 0]] + message.runs[:, 1]
        sizes = message.runs[:, 2] - message.runs[:, 1]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.asarray(np.repeat(starts, sizes) + within)

    def receive(self, message: Message, at: int) -> Iterator[str]:
        rows, heads = self.rows(message), slice(*message.heads)
        if message.carries in ("q", "kv"):
            has = self.has[message.carries]
            if has[rows, heads].any():
                yield f"Rank {self.rank} receives {message} in round {at}, and has some of it."
            has[rows, heads] = True
            return
        if not self.is_home[rows].all():
            yield (
                f"Rank {self.rank} receives {message} in round {at}, and some of these queries "
                f"are not at home there."
            )
        if message.carries == "output":
            self.arrived_whole[rows, heads] = True

    def send(self, message: Message, at: int) -> Iterator[str]:
        rows, heads = self.rows(message), slice(*message.heads)
        if message.carries in ("q", "kv"):
            if not self.has[message.carries][rows, heads].all():
                yield f"Rank {self.rank} sends {message} in round {at}, and has not all of it."
            return
        if self.is_home[rows].any() or not self.computed[rows, heads].all():
            yield (
                f"Rank {self.rank} sends {message} in round {at}, and has not computed all of it "
                f"for another rank."
            )
        if self.sent_home[rows, heads].any():
            yield f"Rank {self.rank} sends {message} in round {at}, and has sent some of it."
        self.sent_home[rows, heads] = True

    def compute(self, each: Round, at: int) -> Iterator[str]:
        for tile in each.tiles:
            document, q0, q1, k0, k1, _, h0, h1 = tile.tolist()
            begin = self.begins[document]
            queries, heads = slice(begin + q0, begin + q1), slice(h0, h1)
            keys = slice(begin + k0, begin + k1)
            kv = slice(h0 // self.ratio, -(-h1 // self.ratio))
            what = f"Rank {self.rank} computes in round {at} {write_tile(tile)}"
            if not self.has["q"][queries, heads].all():
                yield f"{what}: it has not all of these queries."
            if not self.has["kv"][keys, kv].all():
                yield f"{what}: it has not all of these keys."
            if self.sent_home[queries, heads].any():
                yield f"{what}: it has sent the output of some of these queries home."
            self.computed[queries, heads] = True

    def end(self) -> Iterator[str]:
        left = self.computed & ~self.sent_home & ~self.is_home[:, None]
        for token, head in np.argwhere(left)[:1].tolist():
            document = int(np.searchsorted(np.cumsum(self.lengths), token, side="right"))
            yield (
                f"Rank {self.rank} computes for query {token - self.begins[document]} of document "
                f"{document} in head {head}, and never sends it home."
            )


def rank_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Uses of what is not there, doubled arrivals, and outputs that do not come home."""
    computing = np.zeros((schedule.tokens, schedule.heads), dtype=np.int64)
    whole = np.zeros((schedule.tokens, schedule.heads), dtype=bool)
    owner_of = np.empty(schedule.tokens, dtype=np.int64)
    for rank, rounds in enumerate(schedule.rounds):
        mine = _Rank(schedule, rank)
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
    for token, head in np.argwhere(whole & (computing != 1))[:1].tolist():
        yield (
            f"Rank {owner_of[token]} receives as whole the output of token {token} of the pack in "
            f"head {head}, which {computing[token, head]} ranks compute."
        )
