"""Strategies that divide heads as well as tokens: Ulysses, alone and around a ring.

Why
    A rank that has all tokens of some heads needs nobody else's keys. One all-to-all before
    attention and one after it move ``2 (H + G) E / ranks`` elements per token.

What it decides
    Query heads are dealt evenly: rank r gets heads ``r H / ranks`` and on. If that cuts a group
    of query heads, both ranks get the group's keys; with more ranks than heads some ranks only
    send and receive. ``ulysses`` divides the heads over all ranks, ``usp`` over the ranks of a
    node, and the keys of those heads go round the nodes::

        usp, 2 nodes of 2 ranks       node 0         node 1
        heads 0:4                     rank 0   -->   rank 2      keys of one half of the
        heads 4:8                     rank 1   -->   rank 3      tokens, in 4 heads

    Outputs go home over all keys, so no log-sum-exp travels with them.

Kept true (tests/unit/schedule/attention/test_strategies.py, by Hypothesis)
    Every schedule passes the checker for any number of heads; if heads divide, the bytes of the
    forward pass equal the formula.

Sources
    Ulysses: arXiv:2309.14509. USP: arXiv:2405.07719.
"""

from equipoise.schedule.attention.request import AttentionRequest
from equipoise.schedule.attention.runs import join_runs
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.write import Writer, kv_heads_of


def _deal_heads(request: AttentionRequest, groups_of: int) -> Writer:
    """Deal heads over every ``groups_of`` neighbouring ranks, with a ring over those groups."""
    writer, ranks, heads = Writer(request.ranks), request.ranks, request.heads
    groups = ranks // groups_of
    shares = [
        (heads * place // groups_of, heads * (place + 1) // groups_of) for place in range(groups_of)
    ]
    kv_shares = [kv_heads_of(*share, heads, request.kv_heads) for share in shares]
    tokens = [
        join_runs(*request.home[group * groups_of : (group + 1) * groups_of])
        for group in range(groups)
    ]
    for source, pieces in enumerate(request.home):
        for distance in range(1, groups_of):
            group, place = divmod(source, groups_of)
            to = (place + distance) % groups_of
            target = group * groups_of + to
            writer.send(0, source, target, "q", pieces, shares[to])
            writer.send(0, source, target, "kv", pieces, kv_shares[to])
            mine = request.home[target]
            writer.send(groups + 1, source, target, "output", mine, shares[place])
    for step in range(groups):
        for rank in range(ranks):
            group, place = divmod(rank, groups_of)
            keys = tokens[(group - step) % groups]
            if step < groups - 1:
                target = (group + 1) % groups * groups_of + place
                writer.send(step + 1, rank, target, "kv", keys, kv_shares[place])
            writer.attend(step + 1, rank, request.tiles(tokens[group], keys, shares[place]))
    return writer


def ulysses(request: AttentionRequest) -> AttentionSchedule:
    """Give each rank all tokens of its share of the heads."""
    return request.finish("ulysses", _deal_heads(request, request.ranks))


def usp(request: AttentionRequest) -> AttentionSchedule:
    """Deal heads over the ranks of a node, with a ring over the nodes."""
    return request.finish("usp", _deal_heads(request, request.ranks_per_node))
