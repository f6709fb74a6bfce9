"""Measure what attention over ranks costs here, in under two seconds, when a server starts.

What it decides
    All ranks measure at the same time, as they work. Tiles of three shapes give what a tile, a
    key that is read and a query-key pair cost. Rounds of the executor in which every rank sends to
    the next one give the link's latency and bandwidth, and what messages take of the processors.
    Single tokens are computed in another way, which is timed as a whole: few texts, many, and many
    long ones. The pool's contents stay as they are.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from equipoise.balance.context.variant import ContinuedPrice, GatheredPrice
from equipoise.comm.mail import Parcel
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.batching.iteration import PageRun
from equipoise.serve.longctx.gathered import GatheredAttention
from equipoise.serve.longctx.message import Text
from equipoise.serve.longctx.part import RankPart

_KEYS, _QUERIES, _TEXTS = 2048, 128, 8
_SMALL, _LARGE = 64, 1 << 20
_LEAST_S = 1e-12


def measure(part: RankPart) -> ContinuedPrice:
    """Prices in seconds; every rank calls it, and rank 0's are used."""
    model, dtype = part.decoder.model, part.pool.dtype

    def tile(queries: int, keys: int) -> float:
        q = torch.full((queries, model.heads, model.head_width), 0.1, dtype=dtype)
        k = torch.full((keys, model.kv_heads, model.head_width), 0.1, dtype=dtype)
        return _seconds(lambda: part.attend(q, k, k, "full"), 5)

    part.mail.barrier()
    one_s, row_s, block_s = tile(1, 1), tile(1, _KEYS), tile(_QUERIES, _KEYS)
    pair_s = max(_LEAST_S, (block_s - row_s) / ((_QUERIES - 1) * _KEYS * model.heads))
    key_s = max(_LEAST_S, (row_s - one_s) / (_KEYS * model.kv_heads) - pair_s)
    gathered = _gathered(part)
    part.mail.barrier()
    if part.mail.ranks == 1:
        return ContinuedPrice(one_s, pair_s, key_s, LinkPrice(0.0, 1e12), gathered=gathered)
    small_s, small_core_s = _rounds(part, _SMALL)
    large_s, large_core_s = _rounds(part, _LARGE)
    byte_s = max(_LEAST_S, (large_s - small_s) / (_LARGE - _SMALL))
    # Each rank is one end of two messages.
    core_s = max(0.0, (large_core_s - small_core_s) / (2 * (_LARGE - _SMALL)))
    core_s = min(core_s, byte_s / 2)
    round_s = min(small_core_s, small_s)
    latency_s = max(0.0, small_s - round_s)
    return ContinuedPrice(
        one_s,
        pair_s,
        key_s,
        LinkPrice(latency_s, 1 / max(_LEAST_S, byte_s - 2 * core_s)),
        core_s,
        round_s,
        gathered,
    )


def _gathered(part: RankPart) -> GatheredPrice:
    """Prices of texts with one new token each."""
    pool, mail, model = part.pool, part.mail, part.decoder.model
    size, ranks = pool.page_rows, mail.ranks
    ledger = mail.ledger.sent_bytes.copy()

    def seconds(texts: int, keys: int) -> float:
        """One layer of this many texts, each with this many keys on every rank [s]."""
        pages = keys // size + 1
        starts = [min(at * pages, pool.pages - pages) for at in range(texts)]
        known = [
            Text(keys * ranks, 1, 0, (keys,) * ranks, (PageRun(start, pages),)) for start in starts
        ]
        homes = [np.arange(rank, texts, ranks) for rank in range(ranks)]
        attention = GatheredAttention(pool, mail, known, homes)
        own = [starts[at] * size + keys for at in homes[mail.rank].tolist()]
        k, v = pool.keys(0)[own], pool.values(0)[own]  # what is there is written again
        q = torch.full((len(own), model.heads, model.head_width), 0.1, dtype=pool.dtype)
        return _seconds(lambda: attention.attend(0, q, k, v), 5)

    many, keys = _TEXTS * ranks, min(_KEYS // ranks, pool.pages * size - 1)
    short = min(1, keys)
    few_s, many_s, long_s = seconds(ranks, short), seconds(many, short), seconds(many, keys)
    mail.ledger.sent_bytes[:] = ledger
    row_s = max(_LEAST_S, (many_s - few_s) / (many - ranks))
    key_s = max(_LEAST_S, (long_s - many_s) / (many * max(1, keys - 1)))
    return GatheredPrice(max(_LEAST_S, few_s - ranks * row_s), row_s, key_s)


def _rounds(part: RankPart, size: int, times: int = 16) -> tuple[float, float]:
    """Seconds of a round in which each rank sends to the next, and of its processors."""
    mail = part.mail
    sent, arriving = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    after, before = (mail.rank + 1) % mail.ranks, (mail.rank - 1) % mail.ranks
    ledger = mail.ledger.sent_bytes.copy()

    def once() -> None:
        mail.post([Parcel(after, 0, sent, 0)], [Parcel(before, 0, arriving, 0)])
        mail.wait(0)

    mail.barrier()
    once()
    begin_core_s = time.process_time()
    seconds = _seconds(once, times)
    core_s = (time.process_time() - begin_core_s) / (times + 1)
    mail.ledger.sent_bytes[:] = ledger
    return seconds, core_s


def _seconds(call: Callable[[], object], times: int) -> float:
    """Shortest time of a call, after one to warm up: longer ones are others' work."""
    call()
    taken = list[float]()
    for _ in range(times):
        begin_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin_s)
    return min(taken)
