"""One step as a picture of ranks and time: under two packing policies, or predicted and measured.

Why
    A ratio has to be believed; a picture of the same tokens on the same ranks is seen. It is plain
    SVG, so that a page holds it inline and a README as a file.

What it decides
    Both steps share one axis of seconds, from each step's first span. What a rank does not compute
    is waiting: the lane is grey, and spans are drawn over it. A rank without any span is not known
    to wait: its lane is an outline. A rank that waits inside a span, for
    keys of a partner, shows in its busy share: processor time over the step's time, without that in
    which other programs had its core. Each shape has a class for what it shows, by which a page may
    colour it anew.

Kept true (tests/unit/dash/test_before_after.py)
    Every span of the step is there once, at its time; lanes are as long as their step.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.units import format_seconds
from equipoise.dash.predicted import predict_spans
from equipoise.dash.sample import choose_evenly
from equipoise.dash.summary import labels, steady_steps
from equipoise.observe.run_record import RunRecord

WORK = {"forward": "#5a9bd0", "backward": "#1f5f97"}
"""Colours of a rank's own micro-batches."""
SHARED = {"reduce": "#a9c6df", "optimizer": "#a9c6df"}
"""Colours of what all ranks do at the same time: gradients are summed, weights updated."""
_COMPUTE = {
    "compute": "#3a7cb3",
    "backward-input": WORK["backward"],
    "backward-weight": "#58508d",
}
_COLOURS = {**WORK, **SHARED, **_COMPUTE, "rest": SHARED["reduce"]}
_WAITING, _INK, _SOFT, _PAPER, _LINE = "#c9ccd1", "#1b1e23", "#5b616b", "#ffffff", "#e5e2dc"

_MOST_RANKS = 8
_LANE, _GAP, _TITLE, _FOOT = 26, 6, 30, 36
_MARGIN, _NAMED, _RIGHT = 20, 64, 84
_CHARACTER = 7.4
"""Pixels of a letter of 13 pixels' height, about."""
_ALIKE = 0.005
"""Steps that differ by a smaller share look alike."""


@dataclass(frozen=True, slots=True)
class StepBlock:
    """One step, in seconds from its first span."""

    title: str
    step_s: float
    lanes: tuple[tuple[int, float, tuple[tuple[str, float, float], ...]], ...]
    """Rank, busy share, and (name, begin, duration) of each span."""

    @property
    def height(self) -> int:
        """Pixels of its title and its lanes."""
        return _TITLE + len(self.lanes) * (_LANE + _GAP)


def typical_pair(before: RunRecord, after: RunRecord) -> int:
    """The step whose ratio of durations is nearest to that of all steps that both runs have.

    Raises:
        SpecError: no step is in both.
    """
    common, ours, theirs = np.intersect1d(after.step, before.step, return_indices=True)
    steady = steady_steps(after)[ours] & steady_steps(before)[theirs]
    known = (before.step_s[theirs] > 0) & (after.step_s[ours] > 0)
    chosen = np.flatnonzero(known & steady if (known & steady).any() else known)
    if not chosen.size:
        raise SpecError(f"{before.folder} and {after.folder} have no step in common.")
    before_s, after_s = before.step_s[theirs[chosen]], after.step_s[ours[chosen]]
    away = np.abs(np.log(before_s / after_s) - np.log(before_s.sum() / after_s.sum()))
    return int(common[chosen[np.argmin(away)]])


def draw_before_after(before: RunRecord, after: RunRecord, step: int) -> str:
    """One step of two runs, one above the other, as SVG.

    Args:
        before: The run to compare with, drawn first.
        after: The other.
        step: Number of a step that both have.

    Raises:
        SpecError: a run does not have the step, or no span of it.
    """
    one, other = labels([before, after])
    blocks = (measured_block(before, step, one), measured_block(after, step, other))
    return draw_blocks(blocks, f"{say_step(before, step)}, packed twice", describe(after, step))


def predicted_block(record: RunRecord, step: int, title: str) -> StepBlock:
    """One step as it was predicted.

    Raises:
        SpecError: the run does not have the step, or no prediction of it.
    """
    row = _row(record, step)
    ranks = choose_evenly(record.ranks, _MOST_RANKS)
    spans = predict_spans(record, [step], ranks)
    begins = [each.begin_s for mine in spans.values() for each in mine]
    if not begins:
        raise SpecError(f"{record.folder} has no prediction of step {step}.")
    first = min(begins)
    ends = [each.begin_s + each.duration_s - first for mine in spans.values() for each in mine]
    lanes = tuple(
        (
            rank,
            float(record.predicted_s[row, rank]) / max(ends),
            tuple((each.name, each.begin_s - first, each.duration_s) for each in spans[rank]),
        )
        for rank in ranks
    )
    return StepBlock(title, max(ends), lanes)


def draw_blocks(
    blocks: Sequence[StepBlock], title: str, foot: str, *, width: int = 960, is_bare: bool = False
) -> str:
    """Steps on one axis of seconds, the first above, as SVG.

    Args:
        blocks: What is drawn, two or more.
        title: The picture in words.
        foot: Which step, when and where.
        width: Of the picture [px]; letters keep their size.
        is_bare: Leave out title and foot, which the page around it has.
    """
    margin = 0 if is_bare else _MARGIN
    longest_s = max(block.step_s for block in blocks)
    left = margin + _NAMED
    scale = (width - left - _RIGHT) / longest_s
    names = {name for block in blocks for *_, spans in block.lanes for name, _, _ in spans}
    legend, head = _legend(names, width, margin, 0 if is_bare else 44)
    height = head + sum(block.height for block in blocks) + _FOOT + (0 if is_bare else 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect class="paper" width="{width}" height="{height}" rx="8" fill="{_PAPER}"/>',
        *([] if is_bare else [_text(margin, 32, title, size=18, weight=600)]),
        *legend,
    ]
    top = head
    for block in blocks:
        parts += _draw(block, (margin, left), top, scale, blocks[0])
        top += block.height
    parts += _axis(top, longest_s, scale, (left, width - _RIGHT))
    if blocks[-1].step_s < (1 - _ALIKE) * longest_s:
        x = left + blocks[-1].step_s * scale
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{head + _TITLE - 4}" y2="{top}" '
            f'stroke="{_INK}" stroke-dasharray="3 3"/>'
        )
    if not is_bare:
        parts.append(_text(margin, height - 12, foot, size=12, colour=_SOFT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(record: RunRecord, step: int) -> int:
    rows = np.flatnonzero(record.step == step)
    if not rows.size:
        known = f"{record.step[0]} to {record.step[-1]}" if record.step.size else "none"
        raise SpecError(f"{record.folder} has no step {step}. Its steps are {known}.")
    return int(rows[0])


def measured_block(record: RunRecord, step: int, title: str) -> StepBlock:
    """One step as it was measured.

    Raises:
        SpecError: the run does not have the step, or no span of it.
    """
    row = _row(record, step)
    ranks = choose_evenly(record.ranks, _MOST_RANKS)
    spans = {rank: list(_spans(record, rank, step)) for rank in ranks}
    begins = [begin for mine in spans.values() for _, begin, _ in mine]
    if not begins:
        raise SpecError(f"{record.folder} has no span of step {step} in its journals.")
    first = min(begins)
    step_s, delay_s = float(record.step_s[row]), np.nan_to_num(record.run_delay_s[row])
    lanes = tuple(
        (
            rank,
            float(record.busy_s[row, rank]) / (step_s - float(delay_s[rank])),
            tuple((name, begin - first, took) for name, begin, took in spans[rank]),
        )
        for rank in ranks
    )
    ends = [begin + took for _, _, mine in lanes for _, begin, took in mine]
    return StepBlock(title, max(step_s, *ends), lanes)


def _spans(record: RunRecord, rank: int, step: int) -> Iterator[tuple[str, float, float]]:
    spans = record.spans[rank]
    for at in np.flatnonzero((spans.step == step) & ~np.isnan(spans.duration_s)).tolist():
        name = spans.names[spans.name[at]]
        if name in _COLOURS:
            yield name, float(spans.t[at]), float(spans.duration_s[at])


def _draw(
    block: StepBlock, sides: tuple[int, int], top: int, scale: float, first: StepBlock
) -> list[str]:
    margin, left = sides
    change = block.step_s / first.step_s - 1
    beside = (
        f", {abs(change):.0%} {'more' if change > 0 else 'less'}" if abs(change) > _ALIKE else ""
    )
    title = f"{block.title}: {format_seconds(block.step_s)}{beside}"
    parts = [_text(margin, top + 20, title, weight=600)]
    y = top + _TITLE
    for rank, busy, spans in block.lanes:
        end = left + block.step_s * scale
        parts.append(_text(margin, y + 18, f"rank {rank}", size=13, colour=_SOFT))
        if spans:
            parts.append(_bar(left, y, block.step_s * scale, _WAITING, "waiting"))
        else:
            parts.append(_outline(left, y, block.step_s * scale))
        for name, begin, took in spans:
            parts.append(_bar(left + begin * scale, y, took * scale, _COLOURS[name], name))
        share = "no journal" if not spans else "" if np.isnan(busy) else f"{busy:.0%} busy"
        parts.append(_text(end + 8, y + 18, share, size=13, colour=_SOFT))
        y += _LANE + _GAP
    return parts


def _bar(x: float, y: float, width: float, colour: str, name: str) -> str:
    return (
        f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" '
        f'height="{_LANE}" fill="{colour}"><title>{escape(name)}</title></rect>'
    )


def _outline(x: float, y: float, width: float) -> str:
    """The lane of a rank of which nothing is known."""
    return (
        f'<rect class="lost" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE}" '
        f'fill="none" stroke="{_SOFT}" stroke-dasharray="2 4"><title>not journaled</title></rect>'
    )


def _text(
    x: float, y: float, text: str, *, size: int = 14, weight: int = 400, colour: str = _INK
) -> str:
    return (
        f'<text class="{"soft" if colour == _SOFT else "ink"}" x="{x:.1f}" y="{y}" '
        f'font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _legend(names: Collection[str], width: int, margin: int, top: int) -> tuple[list[str], int]:
    """Keys of the spans that are drawn, in as many lines as they need, and where those end."""
    kinds = {
        "computing": "compute",
        "forward": "forward",
        "backward": "backward",
        "input gradients": "backward-input",
        "weight gradients": "backward-weight",
        "sum, update": "reduce",
    }
    keys = [(words, name) for words, name in kinds.items() if name in names or name in SHARED]
    x, y, parts = margin, top + 2, []
    for words, name in [*keys, ("waiting", "waiting")]:
        takes = 34 + int(_CHARACTER * len(words))
        if x > margin and x + takes > width:
            x, y = margin, y + 22
        colour = _COLOURS.get(name, _WAITING)
        parts += [
            f'<rect class="{name}" x="{x}" y="{y}" width="12" height="12" rx="2" fill="{colour}"/>',
            _text(x + 17, y + 11, words, size=13, colour=_SOFT),
        ]
        x += takes
    return parts, y + 18


def _axis(top: int, longest_s: float, scale: float, ends: tuple[int, int]) -> Iterator[str]:
    left, right = ends
    tick_s = _tick(longest_s, most=max(2, (right - left) // 60))
    unit, name = (1e-3, "ms") if longest_s < 1 else (1.0, "s")
    for number in range(int(longest_s / tick_s) + 1):
        x = left + number * tick_s * scale
        yield (
            f'<line class="soft" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 5}" '
            f'stroke="{_SOFT}"/>'
        )
        yield (
            f'<text class="soft" x="{x:.1f}" y="{top + 20}" font-size="12" text-anchor="middle" '
            f'fill="{_SOFT}">{number * tick_s / unit:g} {name}</text>'
        )
    yield (f'<line class="line" x1="{left}" x2="{right}" y1="{top}" y2="{top}" stroke="{_LINE}"/>')


def _tick(longest_s: float, most: int = 10) -> float:
    """A round number of seconds, so that an axis has at most ``most`` ticks after 0.

    >>> _tick(3.4), _tick(0.9), _tick(12.0), _tick(3.4, most=3)
    (0.5, 0.1, 2.0, 2.0)
    """
    unit = 10.0 ** np.floor(np.log10(longest_s))
    for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        if longest_s / (unit * step) <= most:
            return float(unit * step)
    return float(unit * 10)


def say_step(record: RunRecord, step: int) -> str:
    """How much a step is, and on how many ranks."""
    ranks = f"{record.ranks} rank{'s' * (record.ranks > 1)}"
    return f"One step of {record.tokens[record.step == step][0]:,.0f} tokens on {ranks}"


def describe(record: RunRecord, step: int) -> str:
    """Which step, when it began, by which equipoise, on which machine."""
    start, day = record.start, ""
    if not np.isnan(start.t):
        day = str(np.datetime64(int(start.t), "s").astype("datetime64[D]"))
    environment = start.environment
    facts: Sequence[str] = (
        f"Step {step}",
        day,
        f"equipoise {start.version}",
        str(environment.get("cpu", "")),
        f"{environment['cores']} cores" if "cores" in environment else "",
    )
    return ", ".join(fact for fact in facts if fact)
