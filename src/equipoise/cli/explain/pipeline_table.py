"""What ``equipoise explain pipeline`` prints: tables, a step as text, and the same as JSON.

What it decides
    A step as text has two lines a rank, of micro-batches above and operations below. A character
    is a moment, and shows what its rank computes then. Letters are those of a schedule's text, F,
    B, I and W; small ones stand for stages after a rank's first. Lines are as wide as the console.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.balance.pipeline import PipelineAnswer, PipelineScore, PipelineStep
from equipoise.base.units import format_bytes, format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.explain.asked import DIGITS, StepOrigin
from equipoise.cli.table import Column, print_columns
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.replay import PipelineTimeline

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]

_LISTED = 4
"""Ranks whose activations are listed one by one; of more, the most and the least."""

_ROOMY = 100
"""Characters of a console from which columns stand further apart."""

_STYLES = {"F": "cyan", "B": "red", "I": "magenta", "W": "green"}

_RANKS = 32
"""Ranks that are drawn."""

_WIDEST = 160


def print_lines(answer: PipelineAnswer) -> None:
    """A line for each strategy."""
    console, step = make_console(), answer.step
    for score in answer.scores:
        console.print(
            f"{score.title}: {_summary(score, step)} Assumed: {step.setting.machine}.",
            soft_wrap=True,
        )


def print_tables(answer: PipelineAnswer, origin: StepOrigin) -> None:
    """One strategy in detail, or a row for each of all."""
    if answer.step.setting.strategy == "all":
        _print_all(answer, origin)
    else:
        _print_one(answer.scores[0], answer.step, origin)


def _print_all(answer: PipelineAnswer, origin: StepOrigin) -> None:
    """A row for each strategy, and why others have none."""
    console, step = make_console(), answer.step
    console.print(_asked(step, origin))
    columns = (
        Column("strategy", is_left=True),
        Column("stages"),
        Column("step"),
        Column("bubble"),
        Column("bound", goes=3),
        Column("in flight", goes=1),
        Column("most"),
        Column("lossy", goes=2),
    )
    rows = [
        (
            score.name,
            f"{score.split.stages}",
            format_seconds(score.timeline.makespan_ns / 1e9),
            f"{score.timeline.bubble_rate:.1%}",
            "" if score.over_bound is None else f"{score.over_bound:.3f}",
            _in_flight(score, step),
            format_bytes(score.most_bytes),
            "yes" if score.schedule.is_lossy else "no",
        )
        for score in answer.scores
    ]
    print_columns(console, columns, rows, **_style(console))
    _print_left_out(answer.left_out, console)
    console.print(
        "step: makespan. bubble: share of all ranks' time that is waiting. bound: step over a "
        f"time that no schedule of these stages beats. {_held_words(step)} lossy: trains "
        f"another model, as stages are left out. {_assumed(step, origin)}",
        style="dim",
    )


def _print_left_out(left_out: tuple[tuple[str, str], ...], console: "Console") -> None:
    """Strategies that cannot run for one reason together."""
    names: dict[tuple[bool, str], list[str]] = {}
    for name, reason in left_out:
        is_named = reason.startswith(f"{name} ")
        names.setdefault((is_named, reason.removeprefix(f"{name} ")), []).append(name)
    for (is_named, reason), who in names.items():
        first, *others = dict.fromkeys(who)
        all_of_them = ", ".join((first, *others))
        if not is_named:
            console.print(f"Not run: {all_of_them}. {reason}")
        elif others:
            console.print(f"Not run: {all_of_them}: each {reason}")
        else:
            console.print(f"Not run: {first} {reason}")


def _print_one(score: PipelineScore, step: PipelineStep, origin: StepOrigin) -> None:
    """One strategy: its step as a picture, and what each rank computes and holds."""
    console = make_console()
    stages = score.split.stages
    console.print(f"{score.name}, {stages} stages. {_asked(step, origin)}")
    console.print()
    _print_lanes(score.timeline, console)
    _print_ranks(score, step, console)
    console.print(_summary(score, step))
    console.print(f"{_held_words(step)} {_assumed(step, origin)}", style="dim")


def _asked(step: PipelineStep, origin: StepOrigin) -> str:
    setting, layers = step.setting, step.layers
    load = layers.linear_ns + layers.attention_ns
    tokens = layers.tokens
    least, most = int(tokens.min()), int(tokens.max())
    size = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    count = len(setting.batches)
    pieces = sum(len(batch.pieces) for batch in setting.batches)
    documents = f"{step.documents} documents or pieces of one"
    if step.documents < pieces:
        documents = f"{step.documents} documents, divided into {pieces} pieces"
    shared = sum(stop - first for first, stop in step.units if stop - first > 1)
    in_time = f" {shared} of them share documents over time." if shared else ""
    return (
        f"{count} micro-batch{'es' * (count != 1)} of {size} tokens, of {documents} "
        f"({origin.documents}; packed by the policy {origin.policy}); the heaviest is "
        f"{float(load.max() / load.mean()):.3f}x the mean.{in_time} {origin.model}, "
        f"{setting.model.layers} layers on {setting.ranks} ranks, {setting.dtype}, recompute "
        f"{setting.recompute}."
    )


def _assumed(step: PipelineStep, origin: StepOrigin) -> str:
    alone = "" if origin.is_alone else " layout.cp and layout.tp are not priced."
    return f"Times are predicted, not measured, for {step.setting.machine} (assumed).{alone}"


def _held_words(step: PipelineStep) -> str:
    bound = ""
    if step.most_bytes is not None:
        bound = f", at most {format_bytes(step.most_bytes)} allowed"
    return (
        f"in flight: activations of layers that a rank holds at its worst moment, in mean "
        f"micro-batches (of {format_bytes(step.share_bytes)} in a rank's share of the layers)"
        f"{bound}."
    )


def _summary(score: PipelineScore, step: PipelineStep) -> str:
    timeline, over = score.timeline, score.over_bound
    bound = ""
    if over is not None and score.bound_ns is not None:
        bound = f", {over:.3f}x the lower bound of {format_seconds(score.bound_ns / 1e9)}"
    most = score.most_bytes
    lossy = " Lossy: it trains another model, as stages are left out." * score.schedule.is_lossy
    return (
        f"predicted step {format_seconds(timeline.makespan_ns / 1e9)}{bound}; bubble "
        f"{timeline.bubble_rate:.1%}; at most {most / step.share_bytes:.1f} micro-batches "
        f"({format_bytes(most)}) in flight on a rank.{lossy}"
    )


def _in_flight(score: PipelineScore, step: PipelineStep) -> str:
    held = score.held_bytes / step.share_bytes
    if len(held) <= _LISTED:
        return "/".join(f"{each:.1f}" for each in held.tolist())
    return f"{held.max():.1f} to {held.min():.1f}"


def _style(console: "Console") -> Row:
    from rich import box

    padding = (0, int(console.width >= _ROOMY), 0, 0)
    return {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": padding}


def _print_ranks(score: PipelineScore, step: PipelineStep, console: "Console") -> None:
    columns = (
        Column("rank", is_left=True),
        Column("stages", is_left=True, goes=2, wraps=8),
        Column("layers", goes=3),
        Column("computes"),
        Column("waits"),
        Column("in flight", goes=1),
        Column("bytes"),
    )
    timeline, layers = score.timeline, score.split.layers
    rows = []
    for rank in range(timeline.ranks):
        mine = np.flatnonzero(score.schedule.rank_of == rank)
        held = int(score.held_bytes[rank])
        rows.append(
            (
                str(rank),
                " ".join(map(str, mine.tolist())),
                " + ".join(str(layers[stage]) for stage in mine.tolist()),
                format_seconds(int(timeline.busy_ns[rank]) / 1e9),
                format_seconds(int(timeline.idle_ns[rank]) / 1e9),
                f"{held / step.share_bytes:.1f}",
                format_bytes(held),
            )
        )
    print_columns(console, columns, rows, **_style(console))


def draw_lanes(timeline: PipelineTimeline, width: int) -> list[tuple[str, str]]:
    """Each rank's micro-batches and operations, a character a moment.

    Args:
        timeline: Predicted or measured.
        width: Characters of the whole step, >= 1.

    >>> from equipoise.schedule.pipeline.prices import make_prices
    >>> from equipoise.schedule.pipeline.replay import replay_pipeline
    >>> from equipoise.schedule.pipeline.strategies import write_pipeline
    >>> prices = make_prices(2, 1, 1, stages=2, micro_batches=2)
    >>> step = replay_pipeline(write_pipeline("1f1b", prices, ranks=2), prices)
    >>> for line in draw_lanes(step, step.makespan_ns):
    ...     print(*line)
    0011··00··11 FFFF··BB··BB
    ··00001111·· ··FFBBFFBB··
    """
    first = int(timeline.begin_ns.min(initial=np.iinfo(np.int64).max)) if len(timeline.rank) else 0
    middles = first + (np.arange(width) + 0.5) * timeline.makespan_ns / width
    lanes = []
    for rank in range(timeline.ranks):
        mine = np.flatnonzero((timeline.rank == rank) & (timeline.end_ns > timeline.begin_ns))
        mine = mine[np.argsort(timeline.begin_ns[mine], kind="stable")]
        above, below = np.full(width, "·"), np.full(width, "·")
        if len(mine):
            at = np.searchsorted(timeline.begin_ns[mine], middles, side="right") - 1
            row = mine[np.maximum(at, 0)]
            is_busy = (at >= 0) & (middles < timeline.end_ns[row])
            digits = np.array(list(DIGITS))[timeline.micro_batch % len(DIGITS)]
            letters = np.array([op.letter for op in Op])[timeline.op]
            is_later = timeline.stage != timeline.stage[mine].min()
            letters = np.where(is_later, np.char.lower(letters), letters)
            above[is_busy], below[is_busy] = digits[row[is_busy]], letters[row[is_busy]]
        lanes.append(("".join(above.tolist()), "".join(below.tolist())))
    return lanes


def _print_lanes(timeline: PipelineTimeline, console: "Console") -> None:
    """Show the step as wide as the console, and what its characters mean."""
    from rich.text import Text

    total = format_seconds(timeline.makespan_ns / 1e9)
    width = max(20, min(console.width, _WIDEST) - 9)
    console.print(f"time     0{total:>{width - 1}}", soft_wrap=True)
    for rank, lane in enumerate(draw_lanes(timeline, width)[:_RANKS]):
        for name, line in zip((f"rank {rank}", ""), lane, strict=True):
            text = Text(f"{name:<9}")
            for letter, style in zip(line, lane[1], strict=True):
                text.append(letter, _STYLES.get(style.upper(), "dim"))
            console.print(text, soft_wrap=True)
    if timeline.ranks > _RANKS:
        console.print(f"and {timeline.ranks - _RANKS} more ranks", style="dim")
    ops = {Op(op) for op in np.unique(timeline.op).tolist()}
    words = ", ".join(f"{op.letter} {op.words}" for op in Op if op in ops)
    small = "; small: a later stage of the rank" if _is_chunked(timeline) else ""
    each_s = timeline.makespan_ns / width / 1e9
    each = format_seconds(each_s) if each_s >= 1e-3 else f"{1e6 * each_s:.1f} us"
    console.print(
        f"above: the micro-batch; below: {words}{small}; dots: waiting. A character is "
        f"{each}.{_too_narrow(timeline, width)}",
        style="dim",
    )


def _is_chunked(timeline: PipelineTimeline) -> bool:
    return any(
        len(np.unique(timeline.stage[timeline.rank == rank])) > 1 for rank in range(timeline.ranks)
    )


def _too_narrow(timeline: PipelineTimeline, width: int) -> str:
    takes = timeline.end_ns - timeline.begin_ns
    short = int(((takes > 0) & (takes * width < timeline.makespan_ns)).sum())
    if not short:
        return ""
    return f" {short:,} of {len(takes):,} instructions are shorter; --plot draws them all."


def pipeline_rows(answer: PipelineAnswer, origin: StepOrigin) -> Row:
    """One document: what was asked and assumed, and each strategy with its whole schedule."""
    step = answer.step
    setting, layers = step.setting, step.layers
    machine, attention = setting.machine, layers.attention_ns
    return {
        "origin": origin.documents,
        "policy": origin.policy,
        "documents": step.documents,
        "ranks": setting.ranks,
        "model": {"name": origin.model, "layers": setting.model.layers},
        "dtype": setting.dtype,
        "recompute": setting.recompute,
        "assumed": {
            "flop_per_s": machine.flop_per_s,
            "link": {
                "latency_s": machine.link.latency_s,
                "bytes_per_s": machine.link.bytes_per_s,
            },
        },
        "most_held_bytes": step.most_bytes,
        "arranged": setting.is_arranged,
        "micro_batches": [
            {
                "documents": batch.doc_tokens.tolist(),
                "history_tokens": batch.history_tokens.tolist(),
                "layer_forward_s": float(layers.linear_ns[at] + attention[at]) / 1e9,
                "activation_bytes": batch.tokens * step.token_bytes * setting.model.layers,
                "hop_s": int(step.hop_ns[at]) / 1e9,
            }
            for at, batch in enumerate(setting.batches)
        ],
        "units": [list(unit) for unit in step.units],
        "strategies": [_strategy(score, step) for score in answer.scores],
        "left_out": [{"strategy": name, "reason": reason} for name, reason in answer.left_out],
    }


def _strategy(score: PipelineScore, step: PipelineStep) -> Row:
    timeline, schedule = score.timeline, score.schedule
    columns = (
        timeline.op.tolist(),
        timeline.stage.tolist(),
        timeline.micro_batch.tolist(),
        timeline.begin_ns.tolist(),
        timeline.end_ns.tolist(),
    )
    lists: list[list[Row]] = [[] for _ in range(timeline.ranks)]
    for rank, op, stage, micro_batch, begin, end in zip(
        timeline.rank.tolist(), *columns, strict=True
    ):
        lists[rank].append(
            {
                "op": Op(op).words,
                "stage": stage,
                "micro_batch": micro_batch,
                "begin_s": begin / 1e9,
                "end_s": end / 1e9,
            }
        )
    return {
        "name": score.name,
        "stages_a_rank": score.chunks,
        "digest": schedule.digest,
        "lossy": schedule.is_lossy,
        "layers": score.split.layers.tolist(),
        "rank_of_stage": schedule.rank_of.tolist(),
        "predicted_s": timeline.makespan_ns / 1e9,
        "predicted_bubble_rate": timeline.bubble_rate,
        "predicted_span_bubble_rate": timeline.span_bubble_rate,
        "bound_s": None if score.bound_ns is None else score.bound_ns / 1e9,
        "by_rank": [
            {
                "held_bytes": held,
                "held_micro_batches": held / step.share_bytes,
                "predicted_busy_s": busy / 1e9,
                "instructions": instructions,
            }
            for held, busy, instructions in zip(
                score.held_bytes.tolist(), timeline.busy_ns.tolist(), lists, strict=True
            )
        ],
    }
