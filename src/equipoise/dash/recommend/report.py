"""A recommender's run as one HTML page: how it ranks, its tables, their traffic by rank.

Kept true (tests/unit/dash/test_recommend.py)
    Predicted stands beside measured for every rank; names from data cannot become markup.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from equipoise.base.disk import explain_refusal
from equipoise.base.durable import write_whole
from equipoise.base.errors import DataError, SpecError
from equipoise.base.read import read_json, reason
from equipoise.base.units import format_bytes
from equipoise.spec.names import RECOMMEND, unread_record

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1d2733}table{border-collapse:collapse;width:100%;margin:1rem 0}"
    "td,th{padding:.25rem .6rem;border-bottom:1px solid #e7ebef;text-align:right}"
    "td:first-child,th:first-child{text-align:left}td{white-space:nowrap}div{overflow-x:auto}"
)
_WIDTH, _BAR = 640, 14


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run.

    Raises:
        DataError: it cannot be read.
    """
    file = folder / RECOMMEND
    try:
        record: dict[str, Any] = read_json(file)
    except (OSError, ValueError) as error:
        raise DataError(unread_record(file, reason(error))) from None
    if not isinstance(record, dict):
        raise DataError(unread_record(file, "it does not hold a JSON object"))
    try:
        render(record)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(unread_record(file, "it does not hold a run's record")) from None
    return record


def headline(record: Mapping[str, Any]) -> str:
    """How well the run ranks samples that it has not seen, and how even its ranks are."""
    best = record["best"]
    ids = [float(row["ids"]) for row in record["traffic"]]
    when = "later" if record["samples"]["by_time"] else "held-out"
    text = (
        "No epoch has ended yet"
        if best is None
        else f"On {when} samples: AUC {best['test_auc']:.4f}, normalised entropy "
        f"{best['test_entropy']:.4f} (epoch {best['epoch']})"
    )
    if not sum(ids):
        return f"{text}."
    skew = max(ids) / (sum(ids) / len(ids))
    return f"{text}; ids looked up by the busiest rank are {skew:.3f} times the mean."


def write_report(record: Mapping[str, Any], out: Path) -> Path:
    """Write the page.

    Raises:
        SpecError: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, render(record))
    except OSError as fault:
        raise SpecError(
            f"The report cannot be written to {out}: {explain_refusal(fault, out)}. "
            "Give another file with --out FILE."
        ) from fault
    return out


def render(record: Mapping[str, Any]) -> str:
    """The page as text; it fetches nothing and runs nothing."""
    tables = [
        [
            row["name"],
            f"{row['rows']:,}",
            str(row["width"]),
            f"{row['ids_per_sample']:.2f}",
            row["kind"],
            row["buckets"] or "",
            ", ".join(map(str, row["ranks"])),
        ]
        for row in record["tables"]
    ]
    title = f"equipoise report: {record['spec']['name']}"
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
        '<meta name=viewport content="width=device-width">',
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; "
        "style-src 'unsafe-inline'\">",
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p><strong>{escape(headline(record))}</strong></p>",
        "<h2>Loss</h2>",
        _draw_loss(record["losses"]),
        "<h2>A mean step's traffic by rank: measured (filled) and predicted (outlined)</h2>",
        *_traffic(record),
        *_dense(record.get("dense", [])),
        "<h2>Tables</h2>",
        _table(
            ("table", "rows", "width", "ids a sample", "kind", "buckets", "ranks"),
            tables,
        ),
        *_placed(record.get("placed_by")),
        *_shared(record.get("sharing", [])),
        *_held(record.get("held", [])),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _traffic(record: Mapping[str, Any]) -> list[str]:
    """What ranks looked up and sent."""
    traffic = record["traffic"]
    if not traffic:
        return ["<p>No step was taken since the record was written anew.</p>"]
    by_rank = [
        [
            f"rank {row['rank']}",
            f"{row['ids']:,.0f}",
            f"{row['predicted_ids']:,}",
            format_bytes(round(row["sent_bytes"])),
            format_bytes(row["predicted_sent_bytes"]),
            format_bytes(row["held_bytes"]),
        ]
        for row in traffic
    ]
    return [
        "<h3>Ids looked up</h3>",
        _draw_bars([(row["ids"], row["predicted_ids"]) for row in traffic])
        if any(row["ids"] for row in traffic)
        else "<p>Every rank has a copy of all tables, so no ids travel.</p>",
        "<h3>Bytes sent</h3>",
        _draw_bars([(row["sent_bytes"], row["predicted_sent_bytes"]) for row in traffic]),
        _table(("", "ids", "predicted", "sent", "predicted", "rows and state"), by_rank),
        *_across(record),
    ]


def _across(record: Mapping[str, Any]) -> list[str]:
    """What ranks send to other hosts, and the towers from which it leaves."""
    hosts = record.get("hosts", 1)
    if hosts < 2:
        return []
    rows = [
        [
            f"rank {row['rank']}",
            format_bytes(round(row["across_bytes"])),
            format_bytes(row["predicted_across_bytes"]),
        ]
        for row in record["traffic"]
    ]
    towers = [
        [str(at), ", ".join(names)] for at, names in enumerate(record.get("towers", []), start=1)
    ]
    return [
        f"<h2>Sent to other hosts, of {hosts}</h2>",
        _table(("", "sent", "predicted"), rows),
        *([_table(("tower", "columns"), towers)] if towers else []),
    ]


def _dense(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ranks send for a dense part that is divided inside hosts."""
    keys = ("inside_bytes", "predicted_inside_bytes", "across_bytes", "predicted_across_bytes")
    rows = [[f"rank {r['rank']}", *(format_bytes(round(r[key])) for key in keys)] for r in ranks]
    head = ("", "inside its host", "predicted", "to other hosts", "predicted")
    return ["<h2>Sent for shards of the dense part</h2>", _table(head, rows)] if rows else []


def _placed(rates: Mapping[str, Any] | None) -> list[str]:
    """By which rates tables were placed."""
    if rates is None:
        return []
    origin = f"rates measured on {escape(rates['date'])}" if rates["date"] else "assumed rates"
    return [f"<p>Placed by {origin}.</p>"]


def _shared(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows that samples share, by group of columns."""
    rows = [
        [
            ", ".join(each["columns"]),
            f"{each['samples']:,}",
            f"{each['rows']:,}",
            f"{each['samples'] / max(1, each['rows']):.2f}",
        ]
        for each in groups
    ]
    head = ("columns", "samples", "distinct rows", "samples a row")
    return ["<h2>Rows that samples share</h2>", _table(head, rows)] if rows else []


def _held(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables of few bits: what they take, and how often their caches were hit."""
    rows = [
        [
            each["name"],
            each["form"],
            format_bytes(each["bytes"]),
            format_bytes(each["fp32_bytes"]),
            f"{100 * each['hits'] / max(1, each['reads']):.1f}%",
            f"{100 * each['predicted_hit_rate']:.1f}%",
            f"{each['stall_s']:.2f} s" if "stall_s" in each else "",
        ]
        for each in tables
    ]
    head = (
        "table",
        "rows",
        "memory",
        "as fp32",
        "rows in the cache",
        "predicted",
        "waits for the file",
    )
    return ["<h2>Rows behind a cache</h2>", _table(head, rows)] if rows else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<div><table><tr>{top}</tr>{body}</table></div>"


def _draw_bars(pairs: Sequence[tuple[float, float]]) -> str:
    most = max((max(pair) for pair in pairs), default=0.0) or 1.0
    height = len(pairs) * 2 * _BAR
    bars = "".join(
        f'<text x="0" y="{2 * _BAR * at + 12}" font-size="12">{at}</text>'
        f'<rect x="8%" y="{2 * _BAR * at + 1}" width="{91 * measured / most:.2f}%" '
        f'height="{_BAR}" fill="#9db8d6"/>'
        f'<rect x="8%" y="{2 * _BAR * at + 1}" width="{91 * predicted / most:.2f}%" '
        f'height="{_BAR}" fill="none" stroke="#c8553d"/>'
        for at, (measured, predicted) in enumerate(pairs)
    )
    return f'<svg width="100%" height="{height}" role="img">{bars}</svg>'


def _draw_loss(losses: Sequence[float]) -> str:
    if len(losses) < 2:
        return "<p>Too few steps to draw.</p>"
    size = max(1, len(losses) // 160)
    means = [
        sum(losses[at : at + size]) / len(losses[at : at + size])
        for at in range(0, len(losses), size)
    ]
    low, high = min(means), max(means)
    across, down = _WIDTH / max(1, len(means) - 1), 144 / (high - low or 1.0)
    points = " ".join(
        f"{across * at:.1f},{8 + down * (high - each):.1f}" for at, each in enumerate(means)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} 160" role="img"><polyline fill="none" stroke="#1d2733" '
        f'stroke-width="1.5" vector-effect="non-scaling-stroke" points="{points}"/></svg>'
        f"<p>{high:.4f} to {low:.4f} over {len(losses):,} steps</p>"
    )
