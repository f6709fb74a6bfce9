"""The picture at the top of a report: one step before and after, or predicted and measured.

What it decides
    Which step of which runs: of two runs on the same documents, the step of their median ratio, the
    run given first above the other; else a typical step of one run, its prediction above what was
    measured. A page gets it twice, for wide and for narrow screens, so that letters keep their
    size.

Kept true (tests/unit/dash/test_picture.py, tests/browser/test_report.py)
    A run without a finished step, or without spans, has a page without a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from equipoise.base.errors import SpecError
from equipoise.dash.before_after import (
    StepBlock,
    describe,
    draw_blocks,
    measured_block,
    predicted_block,
    say_step,
    typical_pair,
)
from equipoise.dash.compare import compare
from equipoise.dash.summary import IN_ORDER
from equipoise.dash.trace import typical_step
from equipoise.observe.run_record import RunRecord

_WIDTHS = {"wide": 1096, "narrow": 354}
"""Pixels of a page's column on a desk and on a phone."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, and the words around it."""

    blocks: tuple[StepBlock, StepBlock]
    title: str
    foot: str

    def as_html(self) -> str:
        """The picture for wide and narrow screens, with its foot."""
        drawn = (
            f'<div class="{name}">'
            f"{draw_blocks(self.blocks, self.title, self.foot, width=width, is_bare=True)}</div>"
            for name, width in _WIDTHS.items()
        )
        foot = escape(f"{self.title}. {self.foot}.")
        return f'<div id="picture">\n{"".join(drawn)}<p class="foot">{foot}</p>\n</div>'


def choose_picture(records: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """The picture of a report on these runs; None if no run has a step that can be drawn.

    Args:
        records: Runs, in the order in which they were given.
        names: What the page calls them.
    """
    if len(records) > 1:
        try:
            return _before_after(records[0], records[1], names)
        except SpecError:  # no step that both have, or no span of it
            pass
    packed = [at for at, record in enumerate(records) if record.start.policy != IN_ORDER]
    at = packed[0] if packed else 0
    try:
        return _predicted_measured(records[at], f"{names[at]}, " if len(records) > 1 else "")
    except SpecError:
        return None


def _before_after(before: RunRecord, after: RunRecord, names: Sequence[str]) -> Picture:
    one, other = names[:2]
    if not compare(before, after, baseline_label=one, label=other).is_same_documents:
        raise SpecError(f"{one} and {other} trained other documents.")
    step = typical_pair(before, after)
    blocks = (measured_block(before, step, one), measured_block(after, step, other))
    return Picture(blocks, f"{say_step(before, step)}, packed twice", describe(after, step))


def _predicted_measured(record: RunRecord, whose: str) -> Picture:
    step = typical_step(record)
    blocks = (
        predicted_block(record, step, f"{whose}predicted"),
        measured_block(record, step, f"{whose}measured"),
    )
    return Picture(blocks, f"{say_step(record, step)}, of median duration", describe(record, step))
