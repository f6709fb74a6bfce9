"""What ``equipoise explain attention`` prints: tables, and pictures in time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from equipoise.base.units import format_bytes, format_count, format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.explain.asked import DIGITS
from equipoise.cli.table import Column, print_columns
from equipoise.schedule.attention.count import tile_pairs
from equipoise.schedule.attention.price import Replay
from equipoise.schedule.attention.schedule import Message
from equipoise.schedule.attention.score import AttentionScore

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from equipoise.balance.context.compare import AttentionSetting

_WIDE = 72
"""Most characters of the longest document, and of the time of both passes."""

_NAMED = 22
"""Characters of a picture's line that are not picture."""

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
    columns = (
        Column("strategy", is_left=True),
        Column("sharding", is_left=True, goes=5),
        Column("forward", goes=4),
        Column("backward", goes=4),
        Column("messages", goes=1),
        Column("skew"),
        Column("under way", goes=3),
        Column("kept", goes=2),
        Column("time"),
        Column("exposed"),
    )
    rows = [
        (
            score.name,
            score.sharding,
            format_bytes(int(score.counts.forward_bytes.sum())),
            format_bytes(int(score.counts.backward_bytes.sum())),
            f"{score.messages:,}",
            f"{score.counts.pair_skew:.3f}",
            format_bytes(int(score.counts.in_flight_bytes.max(initial=0))),
            format_bytes(int(score.counts.kept_bytes.max(initial=0))),
            format_seconds(score.price.total_ns / 1e9),
            f"{score.exposed_share:.0%}",
        )
        for score in scores
    ]
    print_columns(console, columns, rows)
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
    _print_ranks(score, console)
    rounds = len(score.schedule.rounds[0])
    if rounds * score.schedule.ranks <= _ROWS:
        _print_rounds_by_rank(score, console)
    else:
        _print_rounds(score, console)
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


def _wide(console: "Console") -> int:
    return max(1, min(_WIDE, console.width - _NAMED))


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
    scale = max(1.0, float(lengths.max()) / _wide(console))
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


def _print_ranks(score: AttentionScore, console: "Console") -> None:
    counts, price = score.counts, score.price
    columns = (
        Column("rank"),
        Column("tokens"),
        Column("pairs"),
        Column("tiles", goes=1),
        Column("sends", goes=4),
        Column("receives", goes=4),
        Column("under way", goes=3),
        Column("kept", goes=2),
        Column("tiles take"),
    )
    both = counts.forward_bytes + counts.backward_bytes
    rows = [
        (
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
        for rank, home in enumerate(score.schedule.home)
    ]
    print_columns(console, columns, rows)


def _print_rounds_by_rank(score: AttentionScore, console: "Console") -> None:
    columns = (
        Column("round"),
        Column("rank"),
        Column("sends, forward", is_left=True, wraps=18),
        Column("tiles", goes=1),
        Column("pairs", goes=2),
        Column("begins"),
        Column("tiles end"),
    )
    forward, ranks = score.price.forward, score.schedule.ranks
    rows = []
    for at in range(len(score.schedule.rounds[0])):
        for rank in range(ranks):
            each = score.schedule.rounds[rank][at]
            begin = float(forward.begins_ns[rank, at])
            rows.append(
                (
                    "" if rank else str(at),
                    str(rank),
                    _sends(score, each.sends),
                    f"{len(each.tiles):,}",
                    format_count(int(tile_pairs(each.tiles).sum())),
                    format_seconds(begin / 1e9),
                    format_seconds((begin + float(forward.compute_ns[rank, at])) / 1e9),
                )
            )
    print_columns(console, columns, rows, sections=range(ranks - 1, len(rows), ranks))


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


def _print_rounds(score: AttentionScore, console: "Console") -> None:
    columns = (
        Column("round"),
        Column("messages", goes=2),
        Column("bytes, forward"),
        Column("tiles", goes=1),
        Column("most pairs of a rank", goes=3),
        Column("begins"),
        Column("tiles end"),
    )
    forward, schedule = score.price.forward, score.schedule
    rows = []
    for at in range(len(schedule.rounds[0])):
        rounds = [rounds[at] for rounds in schedule.rounds]
        sends = [message for each in rounds for message in each.sends]
        ends = forward.begins_ns[:, at] + forward.compute_ns[:, at]
        rows.append(
            (
                str(at),
                f"{len(sends):,}",
                format_bytes(sum(map(score.wire.forward_bytes, sends))),
                f"{sum(len(each.tiles) for each in rounds):,}",
                format_count(max(int(tile_pairs(each.tiles).sum()) for each in rounds)),
                format_seconds(float(forward.begins_ns[:, at].min()) / 1e9),
                format_seconds(float(ends.max()) / 1e9),
            )
        )
    print_columns(console, columns, rows)


def _print_time(score: AttentionScore, console: "Console") -> None:
    """A lane for each rank: the round whose tiles it computes, and where it waits."""
    price = score.price
    total = price.total_ns
    if not total:
        return
    passes = (price.forward, price.backward)
    wide = _wide(console)
    letters = [max(1, round(wide * float(each.ends_ns.max()) / total)) for each in passes]
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
