"""Pictures and traces of a pipeline's step."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from equipoise.dash.pipeline_plot import plot_pipeline, trace_events, write_trace
from equipoise.schedule.pipeline.messages import list_messages
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import PipelineTimeline, replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline

PRICES = make_prices([[30], [20]], 25, 10, hop_ns=5, micro_batches=3)
SCHEDULE = write_pipeline("zb-h1", PRICES, ranks=2)
TIMELINE = replay_pipeline(SCHEDULE, PRICES)


def test_a_trace_has_every_instruction_with_its_time(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [TIMELINE, TIMELINE])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        (process, rank, name)
        for process in (0, 1)
        for rank, name in ((0, "zb-h1"), (0, "rank 0"), (1, "rank 1"))
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 18
    for rank in (0, 1):
        mine = [e for e in spans if (e["pid"], e["tid"]) == (1, rank)]
        assert [e["name"] for e in mine] == [str(each) for each in SCHEDULE.instructions(rank)]
        assert sum(e["dur"] for e in mine) == pytest.approx(TIMELINE.busy_ns[rank] / 1e3)
    last = max(e["ts"] + e["dur"] for e in spans)
    assert last == pytest.approx(TIMELINE.makespan_ns / 1e3)


def test_arrows_follow_the_messages() -> None:
    events = trace_events([TIMELINE], SCHEDULE)
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(begins) == len(list_messages(SCHEDULE)) == 6
    assert begins.keys() == ends.keys()
    for name, begin in begins.items():
        assert round(1e3 * (ends[name]["ts"] - begin["ts"])) >= 5
        assert ends[name]["tid"] != begin["tid"]


def test_a_picture_has_a_rectangle_for_each_instruction(tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    plot_pipeline(file, [TIMELINE])
    groups = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}g")
    (drawn,) = [g for g in groups if "PatchCollection" in g.get("id", "")]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) == 18


def test_narrow_rectangles_have_no_white_edge(tmp_path: Path) -> None:
    """Edges as wide as what they are around would look like waiting."""
    many = make_prices([[30], [20]], 25, 10, hop_ns=5, micro_batches=200)
    crowded = replay_pipeline(write_pipeline("1f1b", many, ranks=2), many)
    for timeline, edged in ((TIMELINE, True), (crowded, False)):
        file = tmp_path / "picture.svg"
        plot_pipeline(file, [timeline])
        groups = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}g")
        (drawn,) = [g for g in groups if "PatchCollection" in g.get("id", "")]
        styles = [each.get("style", "") for each in drawn.iter("{http://www.w3.org/2000/svg}path")]
        assert len(styles) == len(timeline.rank)
        assert all(("stroke: #ffffff" in style) == edged for style in styles)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_same_timelines_give_the_same_bytes(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for second in ("1", "1000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", second)  # what matplotlib takes for now
        file = tmp_path / f"{second}.{ending}"
        plot_pipeline(file, [TIMELINE])
        made.append(file.read_bytes())
    assert made[0] == made[1]


def test_png_steps_of_no_work_and_ranks_without_any(tmp_path: Path) -> None:
    none = np.zeros(0, dtype=np.int64)
    nothing = PipelineTimeline("nothing", 2, none, none, none, none, none, none)
    assert nothing.makespan_ns == 0
    file = tmp_path / "picture.png"
    plot_pipeline(file, [nothing, TIMELINE])
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [e["ph"] for e in trace_events([nothing])] == ["M", "M", "M"]
