"""What ``equipoise simulate --requests`` prints."""

from collections.abc import Mapping
from typing import Any

from equipoise.base.shown import shorten
from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.show import refused_sentence
from equipoise.cli.table import Column, print_columns
from equipoise.sim.serve.answer import ServingAnswer


def print_serving(answer: ServingAnswer, title: str, *, is_quiet: bool) -> None:
    """The headline, and unless quiet a row for each tenant and what the devices did."""
    console = make_console()
    row = answer.as_row()
    console.print(
        f"{title}: {row['requests']:,} requests in {format_seconds(row['makespan_s'])}, "
        f"{row['output_tokens_per_s'] or 0:,.0f} output tokens/s, "
        f"TTFT {_pair(row['ttft_s'])}, TPOT {_pair(row['tpot_s'])} (median, p99)"
        f"{_goodput(answer, row)}.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    columns = [
        Column("tenant", is_left=True),
        Column("requests"),
        Column("prompt", goes=1),
        Column("output", goes=2),
        Column("TTFT p50"),
        Column("p99"),
        Column("TPOT p50"),
        Column("p99"),
        Column("latency p50", goes=3),
        Column("p99", goes=3),
        Column("tokens/s", goes=4),
    ]
    rows = [_cells(shorten(name) or "(none)", each) for name, each in row["tenants"].items()]
    if len(rows) > 1:
        rows.append(_cells("all", row))
    if answer.objectives:
        columns.append(Column("in time"))
    else:
        rows = [cells[:-1] for cells in rows]
    print_columns(console, columns, rows, box=None, pad_edge=False)
    for line in _lines(answer, row):
        console.print(line, soft_wrap=True)


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    spreads = [row["ttft_s"], row["tpot_s"], row["latency_s"]]
    times = [
        "" if each is None else format_seconds(each[share])
        for each in spreads
        for share in ("p50", "p99")
    ]
    return (
        name,
        f"{row['requests']:,}",
        f"{row['prompt_tokens']:,}",
        f"{row['output_tokens']:,}",
        *times,
        _rate(row["output_tokens_per_s"]),
        f"{row['good_share']:.1%}",
    )


def _lines(answer: ServingAnswer, row: Mapping[str, Any]) -> list[str]:
    gaps = row["gap_s"]
    lines = []
    if gaps is not None:
        lines.append(
            f"Between two tokens of a request: {_pair(gaps)} (median, p99). "
            f"{row['iterations']:,} iterations kept the devices busy for "
            f"{sum(row['busy']) / len(row['busy']):.1%} of the time."
        )
    peak = max(row["kv_peak"])
    if row.get("sent_s") is not None:
        lines.append(
            f"Keys and values of {row['sent_tokens']:,} tokens were sent to the "
            f"{row['decode']['replicas']} that generate, a request's in {_pair(row['sent_s'])} "
            "(median, p99)."
        )
    lines.append(
        f"A device holds {row['weights_gib']:.1f} GiB of weights and up to "
        f"{row['activations_gib']:.1f} of activations. Keys and values filled up to {peak:.1%} of "
        f"{_room(row)} GiB; "
        f"{row['preemptions']:,} preemptions; {row['cached_tokens']:,} prompt tokens came from "
        f"the cache. MFU: {row['mfu']:.1%}."
    )
    if row["refused"]:
        lines.append(refused_sentence(row["refused"]))
    usd = row["usd_per_million_output_tokens"]
    money = "no public price" if usd is None else f"${usd:,.2f} a million output tokens"
    per_token = row["energy_j_per_output_token"]
    if per_token is not None:
        lines.append(
            f"{per_token:.3g} J an output token, {money}, on {row['devices']} "
            f"{'device' if row['devices'] == 1 else 'devices'}. Policy: {answer.policy}."
        )
    return lines


def _room(row: Mapping[str, Any]) -> str:
    """Memory for keys and values, of both kinds of replicas where they are apart."""
    rooms = [row, *([row["decode"]] if "decode" in row else [])]
    return " and ".join(f"{each['kv_gib']:.1f}" for each in rooms)


def _pair(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "none"
    return f"{format_seconds(spread['p50'])}, {format_seconds(spread['p99'])}"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _goodput(answer: ServingAnswer, row: Mapping[str, Any]) -> str:
    if not answer.objectives or row["good_share"] is None:
        return ""
    return (
        f"; {row['good_share']:.1%} met their objectives, {row['good_requests_per_s']:.2f} a second"
    )
