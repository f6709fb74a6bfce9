"""What ``equipoise explain attention`` prints: tables, pictures in time, and the same as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.base.units import format_bytes, format_count, format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.explain.asked import DIGITS, make_table
from equipoise.schedule.attention.count import Wire, tile_pairs
from equipoise.schedule.attention.price import LinkPrice, Replay
from equipoise.schedule.attention.schedule import Message, Round
from equipoise.schedule.attention.score import AttentionScore

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from equipoise.balance.context.compare import AttentionSetting

Row = dict[str, Any]

_WIDE = 72
"""Characters of the longest document, and of the time of both passes."""

_DOCUMENTS = 12
"""Documents that are drawn; of more, the longest."""

_ROWS = 24
"""Rows of rounds that are shown rank by rank; of more, totals of all ranks."""

_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


def print_lines(scores: Sequence[AttentionScore]) -> None:
    """A line for each strategy."""
    console = make_console()
    for score in scores:
        console.print(f"{score.name}, {score.sharding}: {_summary(score)}", soft_wrap=True)


def print_tables(scores: Sequence[AttentionScore], setting: "AttentionSetting") -> None:
    """One strategy in detail, or a row for each of several."""
    if len(scores) == 1:
        _print_one(scores[0], setting)
    else:
        _print_all(scores, setting)


def _print_all(scores: Sequence[AttentionScore], setting: "AttentionSetting") -> None:
    """A row for each strategy."""
    console = make_console()
    nodes = f"Strategies in two levels take nodes of {setting.node_ranks}."
    console.print(f"{_asked(setting)} {nodes}")
    numbers = ("forward", "backward", "messages", "skew", "under way", "kept", "time", "exposed")
    table = make_table(("strategy", "sharding", *numbers), left=("strategy", "sharding"))
    for score in scores:
        counts = score.counts
        table.add_row(
            score.name,
            score.sharding,
            format_bytes(int(counts.forward_bytes.sum())),
            format_bytes(int(counts.backward_bytes.sum())),
            f"{score.messages:,}",
            f"{counts.pair_skew:.3f}",
            format_bytes(int(counts.in_flight_bytes.max(initial=0))),
            format_bytes(int(counts.kept_bytes.max(initial=0))),
            format_seconds(score.price.total_ns / 1e9),
            f"{score.exposed_share:.0%}",
        )
    console.print(table)
    console.print(
        "forward, backward: bytes that all ranks send in one layer. messages: of both passes. "
        "skew: most pairs of a rank over the mean. under way: most at a time on a rank. kept: "
        "received and held for the backward pass. time: both passes, predicted. exposed: what "
        f"of it free links would save. {_assumed(setting)}",
        style="dim",
    )


def _print_one(score: AttentionScore, setting: "AttentionSetting") -> None:
    """One strategy: who holds what, rank by rank, round by round, and in time."""
    console = make_console()
    console.print(f"{score.name}, {score.sharding} sharding. {_asked(setting)}")
    console.print()
    _print_home(score, console)
    console.print(_ranks(score))
    rounds = len(score.schedule.rounds[0])
    if rounds * score.schedule.ranks <= _ROWS:
        console.print(_rounds_by_rank(score))
    else:
        console.print(_rounds(score))
        console.print("--text prints what each rank does in each round.", style="dim")
    _print_time(score, console)
    console.print()
    console.print(_summary(score))
    console.print(_assumed(setting), style="dim")


def _asked(setting: "AttentionSetting") -> str:
    model = setting.model
    documents = len(setting.doc_tokens)
    return (
        f"{sum(setting.doc_tokens):,} tokens of {documents} document{'s' * (documents != 1)} "
        f"({setting.origin}) over {setting.ranks} ranks; one layer of {setting.model_name}: "
        f"{model.heads} query heads, {model.kv_heads} key/value heads of width "
        f"{model.head_width}, {setting.mask} mask, {setting.dtype}."
    )


def _assumed(setting: "AttentionSetting") -> str:
    return f"Times are predicted, not measured, for {setting.machine} (assumed)."


def _summary(score: AttentionScore) -> str:
    counts, price = score.counts, score.price
    return (
        f"{format_bytes(int(counts.forward_bytes.sum()))} sent forward, "
        f"{format_bytes(int(counts.backward_bytes.sum()))} backward, in {score.messages:,} "
        f"messages; skew of pairs {counts.pair_skew:.3f}; predicted "
        f"{format_seconds(price.total_ns / 1e9)}: {format_seconds(score.compute_ns / 1e9)} tiles "
        f"of the slowest rank, {format_seconds(score.peers_ns / 1e9)} waiting for peers' tiles, "
        f"{format_seconds(score.exposed_ns / 1e9)} ({score.exposed_share:.0%}) exposed "
        f"communication."
    )


def _digit(rank: int) -> str:
    return DIGITS[rank % len(DIGITS)]


def _painted(ranks: "np.ndarray", letters: str) -> "Text":
    """Letters, each in the colour of its rank; -1 is dim."""
    from rich.text import Text

    text = Text()
    for rank, letter in zip(ranks.tolist(), letters, strict=True):
        text.append(letter, style="dim" if rank < 0 else _STYLES[rank % len(_STYLES)])
    return text


def _print_home(score: AttentionScore, console: "Console") -> None:
    lengths = score.schedule.doc_tokens
    if not lengths.sum():
        return
    scale = max(1.0, float(lengths.max()) / _WIDE)
    shown = np.sort(np.argsort(-lengths, kind="stable")[:_DOCUMENTS])
    console.print(f"document   tokens   who holds them, a character for {scale:,.0f} tokens")
    for document in shown.tolist():
        letters = max(1, round(int(lengths[document]) / scale))
        middles = (np.arange(letters) + 0.5) * int(lengths[document]) / letters
        owners = np.full(letters, -1)
        for rank, home in enumerate(score.schedule.home):
            for _, start, stop in home[home[:, 0] == document].tolist():
                owners[(start <= middles) & (middles < stop)] = rank
        line = _painted(owners, "".join(_digit(owner) for owner in owners.tolist()))
        console.print(f"{document:>8}  {lengths[document]:>7,}  ", line, sep="", soft_wrap=True)
    if len(lengths) > len(shown):
        console.print(f"and {len(lengths) - len(shown):,} shorter ones", style="dim")
    console.print()


def _ranks(score: AttentionScore) -> "Table":
    counts, price = score.counts, score.price
    sizes = ("tokens", "pairs", "tiles", "sends", "receives", "under way", "kept", "tiles take")
    table = make_table(("rank", *sizes))
    both = counts.forward_bytes + counts.backward_bytes
    for rank, home in enumerate(score.schedule.home):
        table.add_row(
            str(rank),
            f"{int((home[:, 2] - home[:, 1]).sum()):,}",
            format_count(int(counts.pairs[rank])),
            f"{int(counts.tiles[rank]):,}",
            format_bytes(int(both[rank].sum())),
            format_bytes(int(both[:, rank].sum())),
            format_bytes(int(counts.in_flight_bytes[rank])),
            format_bytes(int(counts.kept_bytes[rank])),
            format_seconds(float(price.compute_ns[rank]) / 1e9),
        )
    return table


def _rounds_by_rank(score: AttentionScore) -> "Table":
    sent = "sends, forward"
    table = make_table(
        ("round", "rank", sent, "tiles", "pairs", "begins", "tiles end"), wraps=(sent,)
    )
    forward, rounds = score.price.forward, len(score.schedule.rounds[0])
    for at in range(rounds):
        for rank in range(score.schedule.ranks):
            each = score.schedule.rounds[rank][at]
            begin = float(forward.begins_ns[rank, at])
            table.add_row(
                "" if rank else str(at),
                str(rank),
                _sends(score, each.sends),
                f"{len(each.tiles):,}",
                format_count(int(tile_pairs(each.tiles).sum())),
                format_seconds(begin / 1e9),
                format_seconds((begin + float(forward.compute_ns[rank, at])) / 1e9),
                end_section=rank == score.schedule.ranks - 1,
            )
    return table


def _sends(score: AttentionScore, sends: tuple[Message, ...]) -> str:
    """Messages in words, those of one kind and size together."""
    groups: dict[tuple[str, int], list[int]] = {}
    for message in sends:
        key = message.carries, score.wire.forward_bytes(message)
        groups.setdefault(key, []).append(message.peer)
    return "; ".join(
        f"{carries} {format_bytes(size)} to {', '.join(map(str, sorted(peers)))}"
        for (carries, size), peers in groups.items()
    )


def _rounds(score: AttentionScore) -> "Table":
    names = ("round", "messages", "bytes, forward", "tiles", "most pairs of a rank", "begins")
    table = make_table((*names, "tiles end"))
    forward, schedule = score.price.forward, score.schedule
    for at in range(len(schedule.rounds[0])):
        rounds = [rounds[at] for rounds in schedule.rounds]
        sends = [message for each in rounds for message in each.sends]
        ends = forward.begins_ns[:, at] + forward.compute_ns[:, at]
        table.add_row(
            str(at),
            f"{len(sends):,}",
            format_bytes(sum(map(score.wire.forward_bytes, sends))),
            f"{sum(len(each.tiles) for each in rounds):,}",
            format_count(max(int(tile_pairs(each.tiles).sum()) for each in rounds)),
            format_seconds(float(forward.begins_ns[:, at].min()) / 1e9),
            format_seconds(float(ends.max()) / 1e9),
        )
    return table


def _print_time(score: AttentionScore, console: "Console") -> None:
    """A lane for each rank: the round whose tiles it computes, and where it waits."""
    price = score.price
    total = price.total_ns
    if not total:
        return
    passes = (price.forward, price.backward)
    letters = [max(1, round(_WIDE * float(each.ends_ns.max()) / total)) for each in passes]
    ahead = f"forward {format_seconds(float(price.forward_ns.max()) / 1e9)}"
    console.print(
        f"time       {ahead:<{letters[0]}} | backward "
        f"{format_seconds(float(price.backward_ns.max()) / 1e9)}"
    )
    for rank in range(min(score.schedule.ranks, len(DIGITS))):
        lanes = [
            _lane(each, rank, size, is_mirrored=each is price.backward)
            for each, size in zip(passes, letters, strict=True)
        ]
        parts = [_painted(np.where(np.array(list(lane)) == "·", -1, rank), lane) for lane in lanes]
        parts[0].pad_right(max(0, len(ahead) - letters[0]))
        console.print(f"{f'rank {rank}':<9}  ", parts[0], " | ", parts[1], sep="", soft_wrap=True)
    console.print("digits: the round whose tiles are computed; dots: waiting", style="dim")


def _lane(replay: Replay, rank: int, letters: int, *, is_mirrored: bool) -> str:
    middles = (np.arange(letters) + 0.5) * float(replay.ends_ns.max()) / letters
    lane = np.full(letters, "·")
    rounds = replay.begins_ns.shape[1]
    for at in range(rounds):
        begin = replay.begins_ns[rank, at]
        is_busy = (begin <= middles) & (middles < begin + replay.compute_ns[rank, at])
        lane[is_busy] = _digit(rounds - 1 - at if is_mirrored else at)
    return "".join(lane.tolist())


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
