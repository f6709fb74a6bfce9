"""What ``equipoise explain --schedule`` shows: one step as a picture, or a row a strategy."""

from typing import TYPE_CHECKING

import numpy as np

from equipoise.base.units import format_bytes, format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.explain.pipeline_lanes import print_lanes
from equipoise.cli.explain.pipeline_score import LeftOut, PipelineScore

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from equipoise.cli.explain.pipeline_setting import PipelineSetting

_LISTED = 4
"""Ranks whose activations are listed one by one; of more, the most and the least."""

_ROOMY = 100
"""Characters of a console from which columns stand further apart."""


def print_lines(scores: list[PipelineScore], setting: "PipelineSetting") -> None:
    """A line for each strategy."""
    console = make_console()
    for score in scores:
        console.print(
            f"{score.title}: {_summary(score, setting)} Assumed: {setting.machine}.",
            soft_wrap=True,
        )


def print_all(scores: list[PipelineScore], left_out: LeftOut, setting: "PipelineSetting") -> None:
    """A row for each strategy, and why others have none."""
    console = make_console()
    console.print(_asked(setting))
    table = _table("strategy", console)
    names: tuple[str, ...] = ("stages", "step", "bubble", "bound", "in flight", "most", "lossy")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for score in scores:
        timeline, over = score.timeline, score.over_bound
        table.add_row(
            score.name,
            f"{score.split.stages}",
            format_seconds(timeline.makespan_ns / 1e9),
            f"{timeline.bubble_rate:.1%}",
            "" if over is None else f"{over:.3f}",
            _in_flight(score, setting),
            format_bytes(score.most_bytes),
            "yes" if score.schedule.is_lossy else "no",
        )
    console.print(table)
    _print_left_out(left_out, console)
    console.print(
        "step: makespan. bubble: share of all ranks' time that is waiting. bound: step over a "
        f"time that no schedule of these stages beats. {_held_words(setting)} lossy: trains "
        f"another model, as stages are left out. {_assumed(setting)}",
        style="dim",
    )


def _print_left_out(left_out: LeftOut, console: "Console") -> None:
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


def print_one(score: PipelineScore, setting: "PipelineSetting") -> None:
    """One strategy: its step as a picture, and what each rank computes and holds."""
    console = make_console()
    stages = score.split.stages
    console.print(f"{score.name}, {stages} stages. {_asked(setting)}")
    console.print()
    print_lanes(score.timeline, console)
    console.print(_ranks(score, setting, console))
    console.print(_summary(score, setting))
    console.print(f"{_held_words(setting)} {_assumed(setting)}", style="dim")


def _asked(setting: "PipelineSetting") -> str:
    layers = setting.layers
    load = layers.linear_ns + layers.attention_ns
    tokens = layers.tokens
    least, most = int(tokens.min()), int(tokens.max())
    size = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    count = len(setting.batches)
    pieces = sum(len(batch.pieces) for batch in setting.batches)
    documents = f"{setting.documents} documents or pieces of one"
    if setting.documents < pieces:
        documents = f"{setting.documents} documents, divided into {pieces} pieces"
    shared = sum(stop - first for first, stop in setting.units if stop - first > 1)
    in_time = f" {shared} of them share documents over time." if shared else ""
    return (
        f"{count} micro-batch{'es' * (count != 1)} of {size} tokens, of {documents} "
        f"({setting.origin}; packed by the policy {setting.policy}); the heaviest is "
        f"{float(load.max() / load.mean()):.3f}x the mean.{in_time} {setting.model_name}, "
        f"{setting.model.layers} layers on {setting.ranks} ranks, {setting.dtype}, recompute "
        f"{setting.recompute}."
    )


def _assumed(setting: "PipelineSetting") -> str:
    alone = "" if setting.is_alone else " layout.cp and layout.tp are not priced."
    return f"Times are predicted, not measured, for {setting.machine} (assumed).{alone}"


def _held_words(setting: "PipelineSetting") -> str:
    bound = ""
    if setting.most_bytes is not None:
        bound = f", at most {format_bytes(setting.most_bytes)} allowed"
    return (
        f"in flight: activations of layers that a rank holds at its worst moment, in mean "
        f"micro-batches (of {format_bytes(setting.share_bytes)} in a rank's share of the layers)"
        f"{bound}."
    )


def _summary(score: PipelineScore, setting: "PipelineSetting") -> str:
    timeline, over = score.timeline, score.over_bound
    bound = ""
    if over is not None and score.bound_ns is not None:
        bound = f", {over:.3f}x the lower bound of {format_seconds(score.bound_ns / 1e9)}"
    most = score.most_bytes
    lossy = " Lossy: it trains another model, as stages are left out." * score.schedule.is_lossy
    return (
        f"predicted step {format_seconds(timeline.makespan_ns / 1e9)}{bound}; bubble "
        f"{timeline.bubble_rate:.1%}; at most {most / setting.share_bytes:.1f} micro-batches "
        f"({format_bytes(most)}) in flight on a rank.{lossy}"
    )


def _in_flight(score: PipelineScore, setting: "PipelineSetting") -> str:
    held = score.held_bytes / setting.share_bytes
    if len(held) <= _LISTED:
        return "/".join(f"{each:.1f}" for each in held.tolist())
    return f"{held.max():.1f} to {held.min():.1f}"


def _table(first: str, console: "Console") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, int(console.width >= _ROOMY), 0, 0)
    )
    table.add_column(first, no_wrap=True)
    return table


def _ranks(score: PipelineScore, setting: "PipelineSetting", console: "Console") -> "Table":
    table = _table("rank", console)
    table.add_column("stages")
    for name in ("layers", "computes", "waits", "in flight", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    timeline, layers = score.timeline, score.split.layers
    for rank in range(timeline.ranks):
        mine = np.flatnonzero(score.schedule.rank_of == rank)
        held = int(score.held_bytes[rank])
        table.add_row(
            str(rank),
            " ".join(map(str, mine.tolist())),
            " + ".join(str(layers[stage]) for stage in mine.tolist()),
            format_seconds(int(timeline.busy_ns[rank]) / 1e9),
            format_seconds(int(timeline.idle_ns[rank]) / 1e9),
            f"{held / setting.share_bytes:.1f}",
            format_bytes(held),
        )
    return table
