"""The report in a real Chromium, from a file, with the network watched."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equipoise.cli.main import main
from equipoise.dash.report import write_report
from equipoise.observe.reader import read_sides
from equipoise.spec.plan import LOCK, Candidate, Plan
from support.planned_price import PRICE

FIGURES = [
    "lengths", "work", "skew", "timeline", "steps", "errors", "wait", "throughput", "mfu", "loss",
    "memory", "configuration", "environment",
]  # fmt: skip

WITHOUT_STEPS = {"lengths", "memory", "configuration", "environment"}


def obeys(folder: Path) -> Path:
    """A run that says it obeyed the plan beside it."""
    file = folder / "journal" / "rank-00000.jsonl"
    said, says = '"layout.zero": "default"', f'"layout.zero": "{LOCK}"'
    file.write_text(file.read_text().replace(said, says))
    terms = {"products": 0.7, "attention": 0.2, "optimizer": 0.02, "data traffic": 0.03}
    price = PRICE | {"step_s": 0.95, "terms": terms}
    best = Candidate({"layout": "dp=2,zero=1"}, price, {}, {"layout.dp": 2, "layout.zero": 1})
    asked = {"run.toml": "run.toml", "ranks": "2"}
    Plan(asked, best, (), 0.95, 0.0, 1, 1, (), None, (), {}, {}).write(folder / LOCK)
    return folder


@pytest.fixture(scope="module")
def browser(devtools: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with devtools.chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(journals: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of reports, by what is in them."""
    root = tmp_path_factory.mktemp("reports")
    in_order = journals.write_run(root / "in-order", policy="in-order")
    by_work = journals.write_run(root / "by-work")
    many = journals.write_run(root / "many", ranks=20, steps=300, name="many")
    unborn = journals.write_run(root / "unborn", steps=0, stop=False)
    alone = journals.write_run(root / "alone", ranks=1, steps=1, stop=False)
    sides = read_sides(journals.write_sides(root / "sides"))
    planned = obeys(journals.write_run(root / "planned"))
    explained = journals.write_run(root / "explained")
    assert main(["drill", "--runbook", "slow-rank", str(explained), "--quiet"]) == 0
    sets = {
        "two": [in_order, by_work],
        "many": [many],
        "four": [in_order, by_work, many, alone],
        "sides": [side.folder for side in sides],
        "unborn": [unborn],
        "alone": [alone],
        "planned": [planned],
        "explained": [explained],
        "planned beside": [in_order, planned],
    }
    return {name: write_report(runs, root / f"{name}.html").as_uri() for name, runs in sets.items()}


@pytest.fixture
def page(browser: Any, reports: dict[str, str]) -> Iterator[Any]:
    page = browser.open(reports["two"], width=1440)
    yield page
    page.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize(
    ("which", "scheme"),
    [("two", "light"), ("two", "dark")]
    + [(which, "light") for which in ("many", "four", "unborn", "alone")]
    + [(which, "light") for which in ("planned", "planned beside", "explained")],
)
def test_it_is_whole(
    browser: Any, reports: dict[str, str], which: str, width: int, scheme: str
) -> None:
    page = browser.open(reports[which], width=width, scheme=scheme)
    # Opened tables must not widen the page either.
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    page.settle()
    assert page.faults() == []
    assert page.requests() == [reports[which]]
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("[...document.querySelectorAll('figure')].map(each => each.id)")
    assert page.evaluate("window.reportFigures") == len(drawn)
    absent = {"alone": {"work", "skew"}, "unborn": set(FIGURES) - WITHOUT_STEPS}
    more = {"plan"} if which.startswith("planned") else set()
    more |= {"runbook-0"} if which == "explained" else set()
    assert set(drawn) == set(FIGURES) - absent.get(which, set()) | more
    assert page.evaluate("document.body.innerText.match(/NaN|undefined|null|Infinity/)") is None
    assert page.evaluate("document.querySelectorAll('svg [d*=NaN], svg [x*=NaN]').length") == 0
    page.close()


def test_a_paired_ratio_has_its_interval(browser: Any, reports: dict[str, str]) -> None:
    page = browser.open(reports["sides"], width=390)
    rows = page.evaluate("[...document.querySelectorAll('#runs tr')].map(row => row.innerText)")
    at = next(index for index, row in enumerate(rows) if row.startswith("Speed over in-order"))
    kinds = ["measured", "90% interval", "predicted", "processor time"]
    assert [kind in row for kind, row in zip(kinds, rows[at:], strict=False)] == [True] * 4
    low, high = re.findall(r"(\d\.\d\d)–(\d\.\d\d)", rows[at + 1])[0]
    measured = re.findall(r"(\d\.\d\d)×", rows[at])[0]
    assert float(low) <= float(measured) <= float(high)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_a_plan_stands_beside_the_run(browser: Any, reports: dict[str, str]) -> None:
    page = browser.open(reports["planned"], width=1440)
    bars = page.evaluate(
        "[...document.querySelectorAll('#plan svg rect title')].map(each => each.textContent)"
    )
    assert bars[:3] == [
        "computing, planned: 900 ms",
        "optimizer, planned: 20.0 ms",
        "messages and waiting, planned: 30.0 ms",
    ]
    assert [each.split(":")[0] for each in bars[3:]] == [
        "computing, measured",
        "optimizer, measured",
        "messages and waiting, measured",
    ]
    table = page.evaluate("document.querySelector('table.runs').innerText")
    assert "planned" in table and "950 ms" in table and "768 MiB" in table
    page.close()


def test_a_runbook_is_drawn_with_a_row_for_each_step(browser: Any, reports: dict[str, str]) -> None:
    page = browser.open(reports["explained"], width=390)
    steps = "[...document.querySelectorAll('#runbook-0 svg .runbook-step')]"
    names = page.evaluate(f"{steps}.map(each => each.textContent)")
    assert names[0].startswith("Who is waited for")
    assert len(names) >= 11
    boxes = page.evaluate(
        "[...document.querySelectorAll('#runbook-0 svg text')]"
        ".map(each => each.getBoundingClientRect()).map(each => [each.left, each.right, each.top])"
    )
    assert all(0 < left < right <= 390 for left, right, _ in boxes)
    assert [top for *_, top in boxes] == sorted(top for *_, top in boxes)
    page.close()


def test_it_says_the_headline_and_follows_the_scheme(
    browser: Any, reports: dict[str, str], page: Any
) -> None:
    told = page.evaluate("document.querySelector('h1').textContent")
    assert "less time per step than in-order (predicted " in told
    dark = browser.open(reports["two"], width=1440, scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) != dark.evaluate(paper)
    dark.close()


@pytest.mark.parametrize(("width", "shown"), [(390, "narrow"), (1280, "wide")])
@pytest.mark.parametrize("which", ["two", "alone", "many", "four"])
def test_the_picture_comes_first_with_letters_of_full_size(
    browser: Any, reports: dict[str, str], which: str, width: int, shown: str
) -> None:
    page = browser.open(reports[which], width=width)
    tops = page.evaluate(
        "['h1', '#picture', 'table.runs', 'figure'].map(each =>"
        " document.querySelector(each).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    box = (
        "(each => { const box = each.getBoundingClientRect();"
        " return {left: box.left, right: box.right, top: box.top, bottom: box.bottom} })"
    )
    drawn = f"#picture .{shown} svg"
    assert page.evaluate(f"getComputedStyle(document.querySelector('{drawn}')).display") != "none"
    texts = page.evaluate(f"[...document.querySelectorAll('{drawn} text')].map({box})")
    svg = page.evaluate(f"{box}(document.querySelector('{drawn}'))")
    assert texts
    for at, text in enumerate(texts):
        assert svg["left"] - 1 <= text["left"] and text["right"] <= svg["right"] + 1
        assert text["bottom"] - text["top"] >= 11  # of letters of 12 px and more
        for other in texts[:at]:
            beside = text["left"] >= other["right"] or other["left"] >= text["right"]
            assert (
                beside or text["top"] >= other["bottom"] - 3 or other["top"] >= text["bottom"] - 3
            )
    page.close()


def test_no_figure_leaves_a_hole_beside_it(browser: Any, reports: dict[str, str]) -> None:
    for which in ("two", "alone", "planned", "many"):
        page = browser.open(reports[which], width=1280)
        rows = page.evaluate(
            "[...document.querySelectorAll('figure')].map(each => ({id: each.id,"
            " top: each.getBoundingClientRect().top, width: each.clientWidth,"
            " plot: each.querySelector('.plot').clientHeight}))"
        )
        whole = max(row["width"] for row in rows)
        for row in rows:
            level = [each for each in rows if each["top"] == row["top"]]
            assert sum(each["width"] for each in level) > 0.9 * whole, row["id"]
        heights = {row["id"]: row["plot"] for row in rows}
        assert heights["errors"] >= 0.9 * heights["steps"] or which in ("alone", "many")
        page.close()


def test_a_spike_is_ringed_and_the_rule_stated(
    browser: Any, journals: ModuleType, tmp_path: Path
) -> None:
    run = journals.write_run(tmp_path / "run", steps=60)
    file = run / "journal" / "rank-00000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["name"] == "step" and line["step"] == 50:
            line["loss"] += 4
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = browser.open(write_report([run], tmp_path / "report.html").as_uri(), width=1280)
    assert page.evaluate("document.querySelectorAll('#loss circle.spike').length") == 1
    assert "It spikes at step 50." in page.evaluate(
        "document.querySelector('#loss .finding').textContent"
    )
    assert "6 times the usual scatter" in page.evaluate(
        "document.querySelector('#loss .hint').textContent"
    )
    page.close()


def test_colours_of_memory_are_nowhere_else(page: Any) -> None:
    colours = (
        "(root => [...new Set([...document.querySelectorAll(root)]"
        ".map(each => getComputedStyle(each).fill))])"
    )
    memory = set(page.evaluate(f"{colours}('#memory .legend rect')"))
    others = set(
        page.evaluate(f"{colours}('figure:not(#memory) rect, figure:not(#memory) circle')")
    )
    assert len(memory) == 7  # six terms and the measured peak
    assert memory & others <= {"rgb(27, 30, 35)"}  # ink


def test_the_foot_says_when_by_which_command_and_where(page: Any) -> None:
    told = page.evaluate("document.getElementById('footer').innerText")
    assert "equipoise train run.toml --pack.policy in-order --train.steps 40" in told
    assert "2026-09-21 " in told and " UTC · equipoise 0.1.0 · x86_64, 2 cores, 16.0 GiB" in told


def test_every_figure_has_a_name_and_a_label(page: Any) -> None:
    assert page.evaluate(
        "[...document.querySelectorAll('figure')].every(each =>"
        " document.getElementById(each.getAttribute('aria-labelledby')).textContent)"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('.plot > svg, .plot > canvas')].every(each =>"
        " each.getAttribute('aria-label'))"
    )
    marked = page.evaluate(
        "[...document.querySelectorAll('figure')].filter(each => each.querySelector('.mark'))"
        ".map(each => each.id)"
    )
    assert sorted(marked) == sorted(set(FIGURES) - {"configuration", "environment"})
    tables = page.evaluate(
        "[...document.querySelectorAll('figure')].filter(each => each.querySelector('details'))"
        ".map(each => each.id)"
    )
    assert sorted(tables) == sorted(set(FIGURES) - {"environment"})


class Timeline:
    def __init__(self, page: Any) -> None:
        self.page = page
        page.evaluate("document.querySelector('canvas').scrollIntoView({block: 'center'})")
        box = page.evaluate(
            "(({x, y, width, height}) => ({x, y, width, height}))"
            "(document.querySelector('canvas').getBoundingClientRect())"
        )
        self.x, self.y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def span(self) -> tuple[float, float]:
        data = self.page.evaluate("({...document.querySelector('canvas').dataset})")
        return float(data["from"]), float(data["to"])

    def width(self) -> float:
        from_, to = self.span()
        return to - from_

    def mouse(self, kind: str, x: float = 0, **more: Any) -> None:
        self.page.call("Input.dispatchMouseEvent", type=kind, x=self.x + x, y=self.y, **more)

    def press(self, key: str) -> None:
        self.page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.page.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, label: str) -> None:
        self.page.evaluate(f"document.querySelector('#timeline [aria-label=\"{label}\"]').click()")


def test_the_timeline_zooms_and_moves(page: Any) -> None:
    timeline = Timeline(page)
    whole = timeline.width()

    timeline.click("zoom in")
    zoomed = timeline.width()
    assert zoomed == pytest.approx(whole * 0.6)
    timeline.click("zoom out")
    assert timeline.width() == pytest.approx(whole)

    # A wheel that only passes by scrolls the page; with Ctrl it zooms.
    timeline.mouse("mouseWheel", deltaX=0, deltaY=-50)
    assert timeline.width() == pytest.approx(whole)
    page.settle()
    timeline = Timeline(page)
    timeline.mouse("mouseWheel", deltaX=0, deltaY=-50, modifiers=2)
    assert timeline.width() < whole * 0.8

    before = timeline.span()
    timeline.mouse("mousePressed", button="left", clickCount=1)
    for x in (-40, -80, -120):
        timeline.mouse("mouseMoved", x, button="left", buttons=1)
    timeline.mouse("mouseReleased", -120, button="left", clickCount=1)
    after = timeline.span()
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])

    # Now it is focused: keys work, and so does the bare wheel.
    page.evaluate("document.querySelector('canvas').focus()")
    width = timeline.width()
    timeline.press("+")
    assert timeline.width() == pytest.approx(width * 0.7)
    timeline.mouse("mouseWheel", deltaX=0, deltaY=50)
    assert timeline.width() > width * 0.71
    timeline.press("0")
    assert timeline.width() > 30 * whole
    timeline.press("Home")
    first = timeline.span()
    timeline.press("]")
    assert timeline.span()[0] > first[0]
    assert page.evaluate("document.querySelector('#timeline select').value") == "1"
    assert page.faults() == []


def test_the_timeline_shows_the_same_step_of_another_run(page: Any) -> None:
    timeline = Timeline(page)
    page.evaluate("document.querySelector('#timeline select').value = 7")
    page.evaluate("document.querySelector('#timeline select').dispatchEvent(new Event('change'))")
    width = timeline.width()
    page.evaluate("document.querySelector('#timeline .switch button').click()")
    data = page.evaluate("({...document.querySelector('canvas').dataset})")
    assert data["run"] == "in-order"
    assert page.evaluate("document.querySelector('#timeline select').value") == "7"
    assert timeline.width() == pytest.approx(width)


def test_spans_and_points_tell_what_they_are(page: Any) -> None:
    timeline = Timeline(page)
    timeline.y -= 20  # the upper part of rank 0's lane, as measured
    timeline.mouse("mouseMoved", -200)
    told = page.evaluate("document.getElementById('tooltip').innerText")
    assert "rank 0" in told and "duration" in told and "micro-batch" in told
    timeline.y += 20  # the lower part, as predicted
    timeline.mouse("mouseMoved", -200)
    told = page.evaluate("document.getElementById('tooltip').innerText")
    assert told.startswith("predicted compute · rank 0") and "micro-batch" not in told
    page.evaluate("document.querySelector('#wait svg').scrollIntoView({block: 'center'})")
    box = page.evaluate(
        "(({x, y}) => ({x, y}))(document.querySelector('#wait svg').getBoundingClientRect())"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + 300, y=box["y"] + 90)
    told = page.evaluate("document.getElementById('tooltip').innerText")
    assert told.startswith("step ") and "in-order" in told and "%" in told
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    assert page.evaluate("document.getElementById('tooltip').hidden")


def test_fingers_zoom_the_timeline(browser: Any, reports: dict[str, str]) -> None:
    page = browser.open(reports["two"], width=390)
    timeline = Timeline(page)
    width = timeline.width()

    def touch(kind: str, *xs: float) -> None:
        points = [
            {"x": timeline.x + x, "y": timeline.y, "id": number} for number, x in enumerate(xs)
        ]
        page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    touch("touchStart", -20)
    touch("touchStart", -20, 20)
    touch("touchMove", -40, 40)
    touch("touchMove", -80, 80)
    touch("touchEnd")
    page.settle()
    assert timeline.width() < width * 0.5
    assert page.faults() == []
    page.close()


def test_the_step_slider_redraws_the_bars(page: Any) -> None:
    bars = "document.querySelector('#work .plot').innerHTML"
    before = page.evaluate(bars)
    page.evaluate(
        "(slider => { slider.value = 3; slider.dispatchEvent(new Event('input')) })"
        "(document.querySelector('#work input'))"
    )
    assert page.evaluate(bars) != before
    assert page.evaluate("document.querySelector('#work output').textContent") == "step 4"


def test_long_runs_say_what_is_left_out(browser: Any, reports: dict[str, str]) -> None:
    page = browser.open(reports["many"], width=1440)
    told = page.evaluate("document.querySelector('#timeline .hint').textContent")
    assert "the page holds" in told and "of 300 steps" in told
    assert "median of up to 2 steps" in page.evaluate(
        "document.querySelector('#wait .hint').textContent"
    )
    page.close()


def test_a_machine_without_chromium_is_told_what_to_install(
    devtools: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AssertionError, match="apt-get install chromium"):
        devtools.find_chromium()
