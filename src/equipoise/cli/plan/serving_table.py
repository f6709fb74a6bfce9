"""What ``equipoise plan --requests`` prints: the best replicas, the next, and what bounds them."""

from collections.abc import Mapping
from typing import Any

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.show import refused_sentence
from equipoise.cli.table import Column, print_columns
from equipoise.plan.serving.request import PlannedServing, ServingPlanAnswer


def print_serving_plan(answer: ServingPlanAnswer, command: str, *, is_quiet: bool) -> None:
    """The best, and unless quiet the next ones and how they were found.

    Args:
        answer: What was found.
        command: Command that simulates a choice, without its layout.
        is_quiet: Whether the headline is all.
    """
    console = make_console()
    best, price = answer.best, answer.best.as_row()["price"]
    goal = ""
    has_goals = bool(best.answer.objectives)
    if has_goals:
        goal = (
            f"; {price['good_share']:.1%} met their objectives, "
            f"{price['good_requests_per_s']:.2f} a second"
        )
    console.print(
        f"{_said(best)}: {format_seconds(best.latency_s)} a request, TTFT "
        f"{_pair(price['ttft_s'])}, TPOT {_pair(price['tpot_s'])} (median, p99), "
        f"{price['output_tokens_per_s'] or 0.0:,.0f} output tokens/s{goal}.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    console.print(_counted(answer), soft_wrap=True)
    columns = [
        Column(""),
        Column("replicas", is_left=True, wraps=22),
        Column("latency"),
        Column("TTFT p50", goes=2),
        Column("p99"),
        Column("TPOT p50", goes=2),
        Column("p99"),
        Column("tokens/s", goes=3),
        Column("J/token", goes=4),
        Column("$/M tokens", goes=5),
        Column("KV", goes=1),
        Column("bounded by", is_left=True),
    ]
    rows = [_cells(place, each) for place, each in enumerate((best, *answer.runners_up), start=1)]
    if has_goals:
        columns.insert(2, Column("in time"))
    else:
        rows = [(*cells[:2], *cells[3:]) for cells in rows]
    print_columns(console, columns, rows, box=None, pad_edge=False)
    for line in _lines(answer):
        console.print(line, soft_wrap=True)
    console.print(f"Simulate the best: {command} {best.as_row()['flags']}", soft_wrap=True)


def _cells(place: int, each: PlannedServing) -> tuple[str, ...]:
    price = each.as_row()["price"]
    usd = price["usd_per_million_output_tokens"]
    joule = price["energy_j_per_output_token"]
    return (
        str(place),
        _said(each),
        "" if price["good_share"] is None else f"{price['good_share']:.1%}",
        format_seconds(each.latency_s),
        *_both(price["ttft_s"]),
        *_both(price["tpot_s"]),
        f"{price['output_tokens_per_s'] or 0.0:,.0f}",
        "" if joule is None else f"{joule:.3g}",
        "" if usd is None else f"{usd:,.2f}",
        f"{max(price['kv_peak']):.0%}",
        each.bounded_by,
    )


def _said(each: PlannedServing) -> str:
    """Replicas as people say them."""
    words = each.choice.words()
    if not each.choice.is_apart:
        return words["layout"]
    return f"{words['layout']} + {words['decode-layout']} to generate"


def _counted(answer: ServingPlanAnswer) -> str:
    said = f"{answer.listed:,} {'choice' if answer.listed == 1 else 'choices'}"
    if answer.unfit:
        said += f", {answer.unfit:,} of them do not fit"
    said += f"; {answer.simulated:,} simulated, {answer.left_out:,} left out by bounds."
    if answer.is_whole:
        return f"{said} None of the others is better."
    if answer.gap is None:
        return f"{said} There was no time for the rest, so a better one may be among them."
    return (
        f"{said} There was no time for the rest; none of them takes less than "
        f"{format_seconds(answer.bound_s)} a request, {answer.gap:.1%} below the best."
    )


def _lines(answer: ServingPlanAnswer) -> list[str]:
    best = answer.best
    shares = [
        f"{_PARTS[name]} {format_seconds(seconds)}"
        for name, seconds in best.spent_s.items()
        if seconds > 0.005 * best.latency_s
    ]
    lines = [f"The best's latency: {', '.join(shares)}."]
    refused = len(best.answer.run.refused)
    if refused:
        lines.append(refused_sentence(refused))
    return lines


_PARTS: Mapping[str, str] = {
    "waiting": "waiting for a turn",
    "prompts": "computing the prompt",
    "sending": "sending keys and values",
    "decoding": "decoding as if alone",
    "batching": "slowed by what runs beside",
}


def _both(spread: Mapping[str, Any] | None) -> tuple[str, str]:
    if spread is None:
        return "", ""
    return format_seconds(spread["p50"]), format_seconds(spread["p99"])


def _pair(spread: Mapping[str, Any] | None) -> str:
    return "none" if spread is None else ", ".join(_both(spread))
