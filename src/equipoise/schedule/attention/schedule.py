"""Attention over several ranks as data: who holds, sends and computes what, and when.

Why
    Ring attention, all-gathered keys, passed queries and all-to-all over heads differ only in
    what moves and when. As data they share one executor, one checker and one price, and a
    strategy is a function that writes a schedule.

What it decides
    The nouns. Each rank runs its rounds in order. A round::

        posts its sends and receives  ->  computes its tiles  ->  waits for what is due

    Tiles and sends of a round use what the rank has at the round's start: its home pieces and
    what earlier rounds brought. So messages travel while tiles are computed. Only the forward
    pass is written. The backward pass mirrors it: the rounds in reverse order, every message in
    the other direction:

    ========= ============================== ======================================
    carries   forward                        backward, the other way
    ========= ============================== ======================================
    q         queries                        sums of their gradients
    kv        keys and values                sums of their gradients
    partial   outputs over some of the keys, outputs over all keys, their gradients,
              log-sum-exp of those keys      log-sum-exp over all keys
    output    outputs over all keys          their gradients
    ========= ============================== ======================================

    A tile is attention of a run of queries to a run of keys of one document: ``full`` (every
    query reads every key), or a square that is ``causal`` (query r reads keys 0 to r) or
    ``anticausal`` (query r reads keys from r on). Every mask is made of these three, and every
    query of a tile reads a key::

        home pieces of one rank: a = [2, 4) and b = [6, 8) of a causal document of 8 tokens

        queries 2  o o d . . . . .      d  causal: a with a, b with b
                3  o o d d . . . .      x  full: b with a
                6  o o x x o o d .      o  full, with keys that other ranks send:
                7  o o x x o o d d         a and b with [0, 2), b with [4, 6)

        the same under a window of 3

        queries 2  o o d . . . . .      o  full
                3  . o d d . . . .      o  a square of one token
                6  . . . . o o d .      o  full
                7  . . . . . o d d      o  a square of one token

    Keys that a rank has *cached* from earlier, as when a text is continued, are read like those of
    its home pieces; nobody has queries of them.

Kept true (tests/unit/schedule/, by Hypothesis)
    What every strategy writes passes ``check_attention``; counts equal what ranks send.

Sources
    Pieces, tiles and rounds generalize MagiAttention's GroupCast and the rings of
    arXiv:2310.01889 (Ring Attention).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from equipoise.base.digest import digest_bytes
from equipoise.schedule.attention.mask import write_masks
from equipoise.schedule.attention.runs import join_runs
from equipoise.spec.mask import Mask
from equipoise.spec.pack import Pieces

Tiles = Pieces
"""int64 [n, 8]: document, first query, query stop, first key, key stop (tokens of the
document), index of its kind in ``TILE_KINDS``, first query head, query head stop."""

TileKind = Literal["full", "causal", "anticausal"]

TILE_KINDS: tuple[TileKind, ...] = get_args(TileKind)
"""Kinds of tiles, in the numbering of column 5."""

Carries = Literal["q", "kv", "partial", "output"]

TILE_COLUMNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message of a round, as its sender or its receiver lists it."""

    peer: int
    """The rank at the other end."""
    carries: Carries
    runs: Pieces
    """The tokens, int64 [n, 3]: document, start, stop; in the order in which they travel."""
    heads: tuple[int, int]
    """First head and head stop: key/value heads of ``kv``, query heads of the others."""
    rounds: int = 1
    """Rounds that it may take: a message of round r arrives for round r + ``rounds``."""

    @property
    def tokens(self) -> int:
        """Tokens in the message."""
        return int((self.runs[:, 2] - self.runs[:, 1]).sum())

    def __str__(self) -> str:
        heads = f" heads {self.heads[0]}:{self.heads[1]}"
        late = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.carries} {write_runs(self.runs)}{heads}{late}"


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round of one rank."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    tiles: Tiles


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSchedule:
    """Attention of packed documents over several ranks."""

    strategy: str
    doc_tokens: Pieces
    """Length of each document, int64 [documents] [tokens]."""
    masks: tuple[Mask, ...]
    """Each document's mask: which keys its queries read."""
    heads: int
    kv_heads: int
    home: tuple[Pieces, ...]
    """Per rank, int64 [n, 3]: the pieces whose queries, keys, values and outputs it holds before
    and after, in the order of its tensors."""
    rounds: tuple[tuple[Round, ...], ...]
    """Each rank's rounds, in order."""
    cached: tuple[Pieces, ...] = ()
    """Per rank, int64 [n, 3]: the pieces of which it has keys and values from earlier, in order,
    and nobody has queries; none on any rank unless given."""

    def keys_of(self, rank: int) -> Pieces:
        """Runs of which a rank has keys and values before and after, in order."""
        return join_runs(self.cached[rank], self.home[rank]) if self.cached else self.home[rank]

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.home)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.doc_tokens.sum())

    @property
    def digest(self) -> str:
        """Digest of the whole schedule; equal on ranks that wrote the same."""
        masks = write_masks(self.masks)
        parts = [f"{self.strategy}|{self.heads}|{self.kv_heads}|{masks}".encode()]
        parts.append(np.ascontiguousarray(self.doc_tokens).tobytes())
        for name, held in ((b"home", self.home), (b"cached", self.cached)):
            for pieces in held:
                parts += (name, np.ascontiguousarray(pieces).tobytes())
        for rank, at, each in self:
            parts += (f"round {rank} {at}".encode(), np.ascontiguousarray(each.tiles).tobytes())
            for word, messages in (("send", each.sends), ("receive", each.receives)):
                for m in messages:
                    label = f"{word} {m.peer} {m.carries} {m.heads} {m.rounds}"
                    parts += (label.encode(), np.ascontiguousarray(m.runs).tobytes())
        return digest_bytes(b"|".join(parts))

    def __iter__(self) -> Iterator[tuple[int, int, Round]]:
        """Every (rank, index of the round, round), rank by rank."""
        for rank, rounds in enumerate(self.rounds):
            for at, each in enumerate(rounds):
                yield rank, at, each

    def __str__(self) -> str:
        """The whole schedule, one line per action."""
        lines = [
            f"{self.strategy}: {self.tokens:,} tokens of {len(self.doc_tokens)} documents over "
            f"{self.ranks} ranks, {self.heads} query heads, {self.kv_heads} key/value heads"
        ]
        if any(mask.kind != "causal" for mask in self.masks):
            lines.append(f"masks: {write_masks(self.masks)}")
        for rank, rounds in enumerate(self.rounds):
            lines.append(f"rank {rank} holds {write_runs(self.home[rank])}")
            if self.cached and len(self.cached[rank]):
                lines.append(f"  and keys of {write_runs(self.cached[rank])}")
            for at, each in enumerate(rounds):
                lines.append(f"  round {at}")
                lines += [f"    send to {m.peer}: {m}" for m in each.sends]
                lines += [f"    receive from {m.peer}: {m}" for m in each.receives]
                lines += [f"    attend {write_tile(tile)}" for tile in each.tiles]
        return "\n".join(lines)


def write_runs(runs: Pieces) -> str:
    """Runs as text.

    >>> write_runs(np.array([[0, 4, 6], [2, 0, 3]]))
    '0[4:6] 2[0:3]'
    """
    return " ".join(f"{d}[{start}:{stop}]" for d, start, stop in runs.tolist()) or "nothing"


def write_tile(tile: Tiles) -> str:
    """One tile as text.

    >>> write_tile(np.array([1, 4, 6, 0, 4, 0, 0, 8]))
    'document 1 queries 4:6 keys 0:4 full, heads 0:8'
    """
    document, q0, q1, k0, k1, kind, h0, h1 = tile.tolist()
    name = TILE_KINDS[kind] if kind in range(len(TILE_KINDS)) else f"kind {kind}"
    return f"document {document} queries {q0}:{q1} keys {k0}:{k1} {name}, heads {h0}:{h1}"
