"""One step of two runs as a picture."""

import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.dash.before_after import (
    SHARED,
    WORK,
    draw_before_after,
    draw_blocks,
    measured_block,
    typical_pair,
)
from equipoise.observe.reader import read_run
from equipoise.observe.run_record import RunRecord
from support.journals import write_run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RunRecord, RunRecord]:
    before = read_run(write_run(tmp_path / "a", policy="in-order", steps=9))
    return before, read_run(write_run(tmp_path / "b", policy="by-work", steps=9))


def rects(svg: str) -> list[tuple[str, float, float]]:
    """What each bar is, where it begins, and its width."""
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    return [
        (str(rect.findtext(f"{space}title")), float(rect.get("x", 0)), float(rect.get("width", 0)))
        for rect in root.iter(f"{space}rect")
        if rect.find(f"{space}title") is not None
    ]


def test_every_span_of_the_step_is_drawn_once_at_its_time(
    pair: tuple[RunRecord, RunRecord],
) -> None:
    bars = rects(draw_before_after(*pair, 5))
    drawn = [bar for bar in bars if bar[0] != "waiting"]
    journaled = 0
    for record in pair:
        for spans in record.spans:
            names = np.array(spans.names)[spans.name]
            journaled += int((np.isin(names, [*WORK, *SHARED]) & (spans.step == 5)).sum())
    assert len(drawn) == journaled
    lanes = [bar for bar in bars if bar[0] == "waiting"]
    assert len(lanes) == 4
    # The lanes are as long as their steps.
    row = int(np.flatnonzero(pair[0].step == 5)[0])
    measured = pair[0].step_s[row] / pair[1].step_s[row]
    assert math.isclose(lanes[0][2] / lanes[2][2], measured, rel_tol=0.02)
    # Forwards and backwards of a rank do not overlap.
    first = sorted((x, width) for name, x, width in drawn[: len(drawn) // 4] if name in WORK)
    assert all(x + width <= later + 0.2 for (x, width), (later, _) in pairwise(first))


def test_a_rank_without_a_journal_does_not_wait(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=3, steps=9)
    (run / "journal" / "rank-00001.jsonl").unlink()
    svg = draw_blocks([measured_block(read_run(run), 5, "measured")], "", "")
    bars = rects(svg)
    [lost] = [bar for bar in bars if bar[0] == "not journaled"]
    waiting = [bar for bar in bars if bar[0] == "waiting"]
    assert len(waiting) == 2 and {bar[1:] for bar in waiting} == {lost[1:]}
    assert svg.count("% busy") == 2 and svg.count("no journal") == 1


def test_the_foot_says_when_and_where(pair: tuple[RunRecord, RunRecord]) -> None:
    svg = draw_before_after(*pair, 5)
    assert "Step 5, 2026-09-21, equipoise 0.1.0, x86_64, 2 cores" in svg
    assert re.search(r"One step of [\d,]+ tokens on 2 ranks, packed twice", svg)
    assert "<script" not in svg


def test_the_typical_step_has_the_ratio_of_all_steps(pair: tuple[RunRecord, RunRecord]) -> None:
    before, after = pair
    ratios = before.step_s / after.step_s
    whole = before.step_s[1:].sum() / after.step_s[1:].sum()
    row = typical_pair(before, after) - 1
    assert row > 0  # the first step warms up
    assert abs(np.log(ratios[row] / whole)) == min(abs(np.log(ratios[1:] / whole)))


def test_a_step_that_a_run_lacks_is_refused(
    pair: tuple[RunRecord, RunRecord], tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        draw_before_after(*pair, 12)
    assert str(caught.value) == f"{tmp_path / 'a'} has no step 12. Its steps are 1 to 9."
