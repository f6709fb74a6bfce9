"""What ``equipoise explain attention --json`` prints: each strategy with its whole schedule."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from equipoise.schedule.attention.count import Wire, tile_pairs
from equipoise.schedule.attention.price import LinkPrice, Replay
from equipoise.schedule.attention.schedule import Message, Round
from equipoise.schedule.attention.score import AttentionScore

if TYPE_CHECKING:
    from equipoise.balance.context.compare import AttentionSetting

Row = dict[str, Any]


def attention_rows(scores: Sequence[AttentionScore], setting: "AttentionSetting") -> Row:
    """One document: what was asked and assumed, and each strategy with its whole schedule."""
    machine = setting.machine
    in_node = machine.link_in_node
    return {
        "documents": list(setting.doc_tokens),
        "origin": setting.origin,
        "mask": str(setting.mask),
        "ranks": setting.ranks,
        "ranks_per_node": setting.node_ranks,
        "model": {
            "name": setting.model_name,
            "heads": setting.model.heads,
            "kv_heads": setting.model.kv_heads,
            "head_width": setting.model.head_width,
        },
        "dtype": setting.dtype,
        "assumed": {
            "flop_per_s": machine.flop_per_s,
            "block_tokens": machine.block,
            "tile_s": machine.tile_s,
            "link": _link(machine.link),
            "link_in_node": None if in_node is None else _link(in_node),
        },
        "strategies": [_strategy(score) for score in scores],
    }


def _link(link: LinkPrice) -> Row:
    return {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}


def _strategy(score: AttentionScore) -> Row:
    counts, price, schedule = score.counts, score.price, score.schedule
    return {
        "name": score.name,
        "strategy": schedule.strategy,
        "sharding": score.sharding,
        "digest": schedule.digest,
        "forward_bytes": int(counts.forward_bytes.sum()),
        "backward_bytes": int(counts.backward_bytes.sum()),
        "messages": score.messages,
        "pair_skew": counts.pair_skew,
        "in_flight_bytes": int(counts.in_flight_bytes.max(initial=0)),
        "kept_bytes": int(counts.kept_bytes.max(initial=0)),
        "predicted_s": price.total_ns / 1e9,
        "predicted_compute_s": score.compute_ns / 1e9,
        "predicted_peers_s": score.peers_ns / 1e9,
        "predicted_exposed_s": score.exposed_ns / 1e9,
        "links": {
            "forward_bytes": counts.forward_bytes.tolist(),
            "backward_bytes": counts.backward_bytes.tolist(),
            "forward_messages": counts.messages.tolist(),
        },
        "by_rank": [_rank(score, rank) for rank in range(schedule.ranks)],
        "forward": _flights(price.forward),
        "backward": _flights(price.backward),
    }


def _rank(score: AttentionScore, rank: int) -> Row:
    counts, price, schedule = score.counts, score.price, score.schedule
    home = schedule.home[rank]
    return {
        "home": home.tolist(),
        "tokens": int((home[:, 2] - home[:, 1]).sum()),
        "pairs": int(counts.pairs[rank]),
        "tiles": int(counts.tiles[rank]),
        "in_flight_bytes": int(counts.in_flight_bytes[rank]),
        "kept_bytes": int(counts.kept_bytes[rank]),
        "forward_s": float(price.forward_ns[rank]) / 1e9,
        "backward_s": float(price.backward_ns[rank]) / 1e9,
        "compute_s": float(price.compute_ns[rank]) / 1e9,
        "rounds": [
            _round(each, score.wire, price.forward, rank, at)
            for at, each in enumerate(schedule.rounds[rank])
        ],
    }


def _round(each: Round, wire: Wire, forward: Replay, rank: int, at: int) -> Row:
    return {
        "begins_s": float(forward.begins_ns[rank, at]) / 1e9,
        "compute_s": float(forward.compute_ns[rank, at]) / 1e9,
        "sends": [_message(message, wire) for message in each.sends],
        "receives": [_message(message, wire) for message in each.receives],
        "pairs": int(tile_pairs(each.tiles).sum()),
        "tiles": each.tiles.tolist(),
    }


def _message(message: Message, wire: Wire) -> Row:
    return {
        "peer": message.peer,
        "carries": message.carries,
        "runs": message.runs.tolist(),
        "heads": list(message.heads),
        "rounds": message.rounds,
        "forward_bytes": wire.forward_bytes(message),
        "backward_bytes": wire.backward_bytes(message),
    }


def _flights(replay: Replay) -> list[Row]:
    return [
        {
            "source": flight.source,
            "target": flight.target,
            "carries": flight.carries,
            "bytes": flight.size_bytes,
            "start_s": flight.start_ns / 1e9,
            "end_s": flight.end_ns / 1e9,
        }
        for flight in replay.flights
    ]
