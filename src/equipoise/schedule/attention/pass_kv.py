"""Strategies in which keys and values travel to the queries: pass-KV in four forms.

What it decides
    ``all-gather``   every rank gets all other ranks' keys at once: few messages, few large
                     tiles, and the memory of all keys.
    ``needed-kv``    the same, but only the keys that some query of the receiver reads: a
                     document on one rank moves nothing, and a piece under a window of w gets
                     the w - 1 keys before it.
    ``ring``         keys go round, one neighbour per round, while each rank attends to those
                     that it has; also where no query of a rank reads them.
    ``double-ring``  rings within nodes while the next node's keys are in flight: a message
                     between nodes may take as long as the whole inner ring::

                         2 nodes of 2 ranks; on rank 0, whose keys

                         round        0       1       2       3
                         computes     0       1       2       3
                         from rank    1 (1)           3 (3)         next of the ring within
                         from rank    2 (2 ......)                  next node, two rounds

Kept true (tests/unit/schedule/attention/test_strategies.py, by Hypothesis)
    Every schedule passes the checker, whatever the pieces; a ring sends exactly as much as an
    all-gather; needed keys equal ``travel_tokens`` of ``balance``.

Sources
    All-gather: Llama 3, arXiv:2407.21783, section 3.3.2. Ring: arXiv:2310.01889. Needed keys:
    GroupCast of MagiAttention. Double ring: LoongTrain, arXiv:2406.18485.
"""

from equipoise.schedule.attention.request import AttentionRequest
from equipoise.schedule.attention.runs import cut_runs, join_runs
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.write import Writer


def _exchange(request: AttentionRequest, *, is_needed_only: bool) -> Writer:
    writer = Writer(request.ranks)
    for target, queries in enumerate(request.home):
        received, read = [], request.runs_read(queries)
        for distance in range(1, request.ranks):  # so that not all begin with rank 0
            source = (target - distance) % request.ranks
            keys = request.keys_of(source)
            if is_needed_only:
                keys = cut_runs(keys, read)
            writer.send(0, source, target, "kv", keys, request.all_kv_heads)
            received.append(keys)
        writer.attend(0, target, request.tiles(queries, request.keys_of(target)))
        writer.attend(1, target, request.tiles(queries, join_runs(*received)))
    return writer


def all_gather(request: AttentionRequest) -> AttentionSchedule:
    """Send every rank all keys."""
    writer = _exchange(request, is_needed_only=False)
    return request.finish("all-gather", writer)


def needed_kv(request: AttentionRequest) -> AttentionSchedule:
    """Send every rank the keys that its queries read."""
    return request.finish("needed-kv", _exchange(request, is_needed_only=True))


def ring(request: AttentionRequest) -> AttentionSchedule:
    """Pass all keys around all ranks."""
    writer, ranks = Writer(request.ranks), request.ranks
    for at in range(ranks):
        for rank, queries in enumerate(request.home):
            keys = request.keys_of((rank - at) % ranks)
            if at < ranks - 1:
                writer.send(at, rank, (rank + 1) % ranks, "kv", keys, request.all_kv_heads)
            writer.attend(at, rank, request.tiles(queries, keys))
    return request.finish("ring", writer)


def double_ring(request: AttentionRequest) -> AttentionSchedule:
    """Pass keys around all ranks of a node before those of the next node."""
    writer, inner = Writer(request.ranks), request.ranks_per_node
    nodes = request.ranks // inner
    for outer in range(nodes):
        for step in range(inner):
            at = outer * inner + step
            for rank, queries in enumerate(request.home):
                node, place = divmod(rank, inner)
                owner = (node - outer) % nodes * inner + (place - step) % inner
                keys = request.keys_of(owner)
                if step == 0 and outer < nodes - 1:
                    target = (node + 1) % nodes * inner + place
                    writer.send(at, rank, target, "kv", keys, request.all_kv_heads, rounds=inner)
                if step < inner - 1:
                    target = node * inner + (place + 1) % inner
                    writer.send(at, rank, target, "kv", keys, request.all_kv_heads)
                writer.attend(at, rank, request.tiles(queries, keys))
    return request.finish("double-ring", writer)
