"""One step under two packing policies as a picture: when each rank worked, and when it waited.

Why
    A ratio has to be believed; a picture of the same tokens on the same ranks is seen. It is plain
    SVG, so that a page holds it inline and a README as a file.

What it decides
    Both steps share one axis of seconds, from each step's first span. What a rank does not compute
    is waiting: the lane is grey, and spans are drawn over it. A rank that waits inside a span, for
    keys of a partner, shows in its busy share, which is measured by processor time.

Kept true (tests/unit/dash/test_before_after.py)
    Every span of the step is there once, at its time; lanes are as long as their step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.units import format_seconds
from equipoise.dash.sample import choose_evenly
from equipoise.dash.summary import steady_steps
from equipoise.observe.run_record import RunRecord

WORK = {"forward": "#5a9bd0", "backward": "#1f5f97"}
"""Colours of a rank's own micro-batches."""
SHARED = {"reduce": "#a9c6df", "optimizer": "#a9c6df"}
"""Colours of what all ranks do at the same time: gradients are summed, weights updated."""
_WAITING, _INK, _SOFT, _PAPER, _LINE = "#c9ccd1", "#1b1e23", "#5b616b", "#ffffff", "#e5e2dc"
_SPLIT_BACKWARD = {"backward-input": WORK["backward"], "backward-weight": "#58508d"}
_COLOURS = {**WORK, **_SPLIT_BACKWARD, **SHARED}

_MOST_RANKS = 8
_WIDTH, _LEFT, _RIGHT = 960, 96, 104
_LANE, _GAP, _TITLE, _TOP, _FOOT = 26, 6, 30, 52, 66


@dataclass(frozen=True, slots=True)
class _Block:
    """One policy's step, in seconds from its first span."""

    policy: str
    step_s: float
    lanes: tuple[tuple[int, float, tuple[tuple[str, float, float], ...]], ...]
    """Rank, busy share, and (name, begin, duration) of each span."""

    @property
    def height(self) -> int:
        return _TITLE + len(self.lanes) * (_LANE + _GAP)


def typical_pair(before: RunRecord, after: RunRecord) -> int:
    """The step whose ratio of durations is the median, of those that both runs have.

    Raises:
        SpecError: no step is in both.
    """
    common, ours, theirs = np.intersect1d(after.step, before.step, return_indices=True)
    steady = steady_steps(after)[ours] & steady_steps(before)[theirs]
    chosen = np.flatnonzero(steady) if steady.any() else np.arange(common.size)
    if not chosen.size:
        raise SpecError(f"{before.folder} and {after.folder} have no step in common.")
    ratios = before.step_s[theirs[chosen]] / after.step_s[ours[chosen]]
    order = chosen[np.argsort(ratios, kind="stable")]
    return int(common[order[(len(order) - 1) // 2]])


def draw_before_after(before: RunRecord, after: RunRecord, step: int) -> str:
    """One step of two runs, one above the other, as SVG.

    Args:
        before: The run to compare with, drawn first.
        after: The other.
        step: Number of a step that both have.

    Raises:
        SpecError: a run does not have the step, or no span of it.
    """
    blocks = [_block(record, step) for record in (before, after)]
    longest_s = max(block.step_s for block in blocks)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
    height = _TOP + sum(block.height for block in blocks) + _FOOT
    title = f"One step of {_tokens(before, step)} tokens on {before.ranks} ranks, packed twice"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{_PAPER}"/>',
        _text(20, 32, title, size=18, weight=600),
        *_legend(),
    ]
    top = _TOP
    for block in blocks:
        parts += _draw(block, top, scale)
        top += block.height
    parts += _axis(top, longest_s, scale)
    saved = blocks[1].step_s
    if saved < longest_s:
        x = _LEFT + saved * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP + _TITLE - 4}" y2="{top}" '
            f'stroke="{_INK}" stroke-dasharray="3 3"/>'
        )
    parts.append(_text(20, height - 12, _foot(after, step), size=11, colour=_SOFT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _block(record: RunRecord, step: int) -> _Block:
    rows = np.flatnonzero(record.step == step)
    if not rows.size:
        known = f"{record.step[0]} to {record.step[-1]}" if record.step.size else "none"
        raise SpecError(f"{record.folder} has no step {step}. Its steps are {known}.")
    row = int(rows[0])
    ranks = choose_evenly(record.ranks, _MOST_RANKS)
    spans = {rank: list(_spans(record, rank, step)) for rank in ranks}
    begins = [begin for mine in spans.values() for _, begin, _ in mine]
    if not begins:
        raise SpecError(f"{record.folder} has no span of step {step} in its journals.")
    first = min(begins)
    step_s = float(record.step_s[row])
    lanes = tuple(
        (
            rank,
            float(record.busy_s[row, rank]) / step_s,
            tuple((name, begin - first, took) for name, begin, took in spans[rank]),
        )
        for rank in ranks
    )
    ends = [begin + took for _, _, mine in lanes for _, begin, took in mine]
    return _Block(record.start.policy, max(step_s, *ends), lanes)


def _spans(record: RunRecord, rank: int, step: int) -> Iterator[tuple[str, float, float]]:
    spans = record.spans[rank]
    for at in np.flatnonzero((spans.step == step) & ~np.isnan(spans.duration_s)).tolist():
        name = spans.names[spans.name[at]]
        if name in _COLOURS:
            yield name, float(spans.t[at]), float(spans.duration_s[at])


def _draw(block: _Block, top: int, scale: float) -> list[str]:
    parts = [_text(20, top + 20, f"{block.policy}: {format_seconds(block.step_s)}", weight=600)]
    y = top + _TITLE
    for rank, busy, spans in block.lanes:
        end = _LEFT + block.step_s * scale
        parts.append(_text(20, y + 18, f"rank {rank}", size=13, colour=_SOFT))
        parts.append(_bar(_LEFT, y, block.step_s * scale, _WAITING, "waiting"))
        for name, begin, took in spans:
            parts.append(_bar(_LEFT + begin * scale, y, took * scale, _COLOURS[name], name))
        share = "" if np.isnan(busy) else f"{busy:.0%} busy"
        parts.append(_text(end + 8, y + 18, share, size=13, colour=_SOFT))
        y += _LANE + _GAP
    return parts


def _bar(x: float, y: float, width: float, colour: str, name: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" height="{_LANE}" '
        f'fill="{colour}"><title>{escape(name)}</title></rect>'
    )


def _text(
    x: float, y: float, text: str, *, size: int = 14, weight: int = 400, colour: str = _INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _legend() -> Iterator[str]:
    x = 560
    for colour, words, width in (
        (WORK["forward"], "forward", 76),
        (WORK["backward"], "backward", 86),
        (SHARED["reduce"], "sum, update", 104),
        (_WAITING, "waiting", 0),
    ):
        yield f'<rect x="{x}" y="22" width="12" height="12" rx="2" fill="{colour}"/>'
        yield _text(x + 17, 33, words, size=13, colour=_SOFT)
        x += width + 8


def _axis(top: int, longest_s: float, scale: float) -> Iterator[str]:
    tick_s = _tick(longest_s)
    for number in range(int(longest_s / tick_s) + 1):
        x = _LEFT + number * tick_s * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 5}" stroke="{_SOFT}"/>'
        yield (
            f'<text x="{x:.1f}" y="{top + 19}" font-size="11" text-anchor="middle" '
            f'fill="{_SOFT}">{number * tick_s:g} s</text>'
        )
    yield (f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top}" y2="{top}" stroke="{_LINE}"/>')


def _tick(longest_s: float) -> float:
    """A round number of seconds, so that an axis has four to ten ticks.

    >>> _tick(3.4), _tick(0.9), _tick(12.0)
    (0.5, 0.1, 2.0)
    """
    unit = 10.0 ** np.floor(np.log10(longest_s))
    for step in (0.1, 0.2, 0.5, 1.0):
        if longest_s / (unit * step) <= 10:
            return float(unit * step)
    return float(unit)


def _tokens(record: RunRecord, step: int) -> str:
    return f"{record.tokens[record.step == step][0]:,.0f}"


def _foot(record: RunRecord, step: int) -> str:
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
