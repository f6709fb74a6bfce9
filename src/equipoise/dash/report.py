"""Write the report of one or more runs: one HTML file that needs nothing but a browser.

Why
    A report is mailed, archived and opened years later on a train. So it holds its style,
    its scripts and its numbers, and its Content-Security-Policy forbids it to fetch
    anything at all.

Kept true (tests/browser/test_report.py)
    In a real browser: no request, no error, no sideways scrolling at 390 and 1440 px.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.base.disk import explain_refusal
from equipoise.base.durable import write_whole
from equipoise.base.errors import SpecError
from equipoise.base.read import real_path
from equipoise.dash.figures import page_data
from equipoise.observe.reader import read_sides
from equipoise.observe.run_record import RunRecord

SCRIPTS = (
    "format.js",
    "draw.js",
    "charts.js",
    "timeline.js",
    "tables.js",
    "plan.js",
    "runbook.js",
    "report.js",
)
"""Parts of the page's one script, in the order in which they build on each other."""


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read run folders and write their report.

    Args:
        runs: Run folders, at least one; several are compared with each other, as are the sides of
            one that compares policies.
        out: The HTML file to write; its folder is made.

    Returns:
        ``out``.

    Raises:
        SpecError: no run, no such folder, the same folder twice, or no writing to ``out``.
        DataError: a folder is not a run.
    """
    return write_page(read_runs(runs), out)


def read_runs(runs: Sequence[Path]) -> list[RunRecord]:
    """Every run, each once; every side of a run that compares policies.

    Raises:
        SpecError: no run, no such folder, or the same folder twice.
        DataError: a folder is not a run.
    """
    if not runs:
        raise SpecError("There is no run to report on. Give one or more run folders.")
    seen: set[Path] = set()
    for run in runs:
        if real_path(run) in seen:
            raise SpecError(f"{run} is given twice. Give each run once.")
        seen.add(real_path(run))
    return [record for run in runs for record in read_sides(run)]


def write_page(records: Sequence[RunRecord], out: Path) -> Path:
    """Write the report of runs that are already read.

    Raises:
        SpecError: the file cannot be written.
    """
    text = render(page_data(records))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    except OSError as fault:
        raise SpecError(
            f"The report cannot be written to {out}: {explain_refusal(fault, out)}. "
            "Give another file with --out FILE."
        ) from fault
    return out


def render(data: dict[str, Any]) -> str:
    """The page as text: the template with style, scripts and data in place."""
    page = resources.files("equipoise.dash") / "page"
    # In a script element only "<" can end the element or open a comment.
    drawn = {key: value for key, value in data.items() if key != "picture"}
    embedded = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    labels = ", ".join(run["label"] for run in data["runs"])
    parts = {
        "{{title}}": escape(f"equipoise report: {labels}"),
        "{{headline}}": escape(data["headline"]),
        "{{picture}}": data["picture"],
        "{{style}}": (page / "report.css").read_text(encoding="utf-8"),
        "{{data}}": embedded,
        "{{script}}": "\n".join((page / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    text = (page / "report.html").read_text(encoding="utf-8")
    # Only the template's own marks are replaced: a value may contain one, too.
    answer = []
    while marks := [(text.find(mark), mark) for mark in parts if mark in text]:
        at, mark = min(marks)
        answer += [text[:at], parts[mark]]
        text = text[at + len(mark) :]
    return "".join([*answer, text])
