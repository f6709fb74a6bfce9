"""The picture at the top of a report: which runs, which step, and what was predicted of it."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from equipoise.dash.before_after import predicted_block
from equipoise.dash.picture import choose_picture
from equipoise.dash.predicted import COMPUTE, REST, predict_spans
from equipoise.dash.report import write_report
from equipoise.observe.reader import read_run


def test_two_runs_are_drawn_before_and_after_in_the_order_given(
    journals: ModuleType, tmp_path: Path
) -> None:
    before = read_run(journals.write_run(tmp_path / "before", policy="by-work"))
    after = read_run(journals.write_run(tmp_path / "after", policy="in-order"))
    picture = choose_picture([before, after], ["one", "other"])
    assert picture is not None
    assert [block.title for block in picture.blocks] == ["one", "other"]
    assert [len(block.lanes) for block in picture.blocks] == [2, 2]
    html = picture.as_html()
    assert html.count("<svg") == 2 and 'class="wide"' in html and 'class="narrow"' in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "2026-09-21, equipoise 0.1.0, x86_64, 2 cores." in html


def test_one_run_is_drawn_as_predicted_and_as_measured(
    journals: ModuleType, tmp_path: Path
) -> None:
    record = read_run(journals.write_run(tmp_path / "run", ranks=3))
    picture = choose_picture([record], ["by-work"])
    assert picture is not None
    predicted, measured = picture.blocks
    assert (predicted.title, measured.title) == ("predicted", "measured")
    step = int(re.search(r"Step (\d+)", picture.foot)[1])  # type: ignore[index]
    row = step - 1
    assert predicted.step_s == pytest.approx(record.predicted_step_s[row])
    for rank, _, spans in predicted.lanes:
        assert [name for name, *_ in spans] == [COMPUTE, REST]
        assert spans[0][2] == pytest.approx(record.predicted_s[row, rank])
        assert spans[1][1] == pytest.approx(record.longest_s[row])


def test_runs_on_other_documents_are_not_drawn_as_one_step(
    journals: ModuleType, tmp_path: Path
) -> None:
    one = read_run(journals.write_run(tmp_path / "one", policy="in-order"))
    other = read_run(journals.write_run(tmp_path / "other", seed=7))
    picture = choose_picture([one, other], ["in-order", "by-work"])
    assert picture is not None
    assert [block.title for block in picture.blocks] == ["by-work, predicted", "by-work, measured"]


def test_a_page_of_a_run_without_steps_has_no_picture(journals: ModuleType, tmp_path: Path) -> None:
    run = journals.write_run(tmp_path / "run", steps=0, stop=False)
    assert choose_picture([read_run(run)], ["run"]) is None
    page = write_report([run], tmp_path / "report.html").read_text()
    assert 'id="picture"' not in page


def test_a_hostile_name_stays_text(journals: ModuleType, tmp_path: Path) -> None:
    runs = [
        read_run(journals.write_run(tmp_path / name, policy=policy))
        for name, policy in (("one", "<script>"), ("other", "</svg>&"))
    ]
    picture = choose_picture(runs, ["<script>", "</svg>&"])
    assert picture is not None
    assert "<script>" not in picture.as_html() and picture.as_html().count("</svg>") == 2


def test_predictions_begin_where_the_first_rank_computes(
    journals: ModuleType, tmp_path: Path
) -> None:
    record = read_run(journals.write_run(tmp_path / "run", ranks=2, steps=5))
    spans = predict_spans(record, [2, 4])
    first = {
        step: min(
            float(mine.t[(mine.step == step) & (mine.name == mine.names.index("forward"))].min())
            for mine in record.spans
        )
        for step in (2, 4)
    }
    for rank in (0, 1):
        computes = [each for each in spans[rank] if each.name == COMPUTE]
        assert {each.step: each.begin_s for each in computes} == first
    assert predict_spans(record, [9]) == {0: [], 1: []}
    assert predicted_block(record, 2, "predicted").lanes[1][0] == 1
