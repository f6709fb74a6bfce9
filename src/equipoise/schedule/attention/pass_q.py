"""Strategies in which queries travel to the keys, and partial outputs travel back: pass-Q.

Why
    Queries are smaller than keys if few of them read many keys, or if there are as many
    key/value heads as query heads. Each rank returns an output over some of the keys with its
    log-sum-exp, and the owner merges them.

What it decides
    ``pass-q``      queries go round; at the end all partial outputs go home at once.
    ``token-ring``  queries go round, and each partial output goes straight home while the
                    next one is computed, so both directions of the links are in use.
    ``gather-q``    queries go to all ranks at once: three rounds, however many ranks. It suits
                    few queries, as when each of several texts is continued by one token.

    A rank sends no partial output for a query that reads none of its keys.

Kept true (tests/unit/schedule/attention/test_strategies.py, by Hypothesis)
    Every schedule passes the checker; all three send each rank the same queries.

Sources
    pass-Q: Context Parallelism for Scalable Million-Token Inference, arXiv:2411.01783,
    algorithm 3. TokenRing: arXiv:2412.20501.
"""

from equipoise.schedule.attention.request import AttentionRequest
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.write import Writer, query_runs


def _pass_queries(request: AttentionRequest, *, is_at_once: bool) -> Writer:
    writer, ranks = Writer(request.ranks), request.ranks
    for at in range(ranks):
        for rank in range(ranks):
            owner = (rank - at) % ranks
            queries = request.home[owner]
            if at < ranks - 1:
                writer.send(at, rank, (rank + 1) % ranks, "q", queries, request.all_heads)
            tiles = writer.attend(at, rank, request.tiles(queries, request.keys_of(rank)))
            done = at + 1 if is_at_once else ranks
            writer.send(done, rank, owner, "partial", query_runs(tiles), request.all_heads)
    return writer


def pass_q(request: AttentionRequest) -> AttentionSchedule:
    """Pass queries around all ranks; partial outputs go home at the end."""
    return request.finish("pass-q", _pass_queries(request, is_at_once=False))


def token_ring(request: AttentionRequest) -> AttentionSchedule:
    """Pass queries around all ranks; each partial output goes home at once."""
    return request.finish("token-ring", _pass_queries(request, is_at_once=True))


def gather_q(request: AttentionRequest) -> AttentionSchedule:
    """Send every rank all queries at once; partial outputs go home at once."""
    writer, ranks = Writer(request.ranks), request.ranks
    for rank in range(ranks):
        keys = request.keys_of(rank)
        writer.attend(0, rank, request.tiles(request.home[rank], keys))
        for distance in range(1, ranks):  # so that not all begin with rank 0
            owner = (rank - distance) % ranks
            queries = request.home[owner]
            writer.send(0, owner, rank, "q", queries, request.all_heads)
            tiles = writer.attend(1, rank, request.tiles(queries, keys))
            writer.send(2, rank, owner, "partial", query_runs(tiles), request.all_heads)
    return request.finish("gather-q", writer)
