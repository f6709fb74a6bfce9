"""The list of events is what the source writes and what the page describes."""

import ast
import re
from pathlib import Path

import equipoise
from equipoise.observe.catalog import COMMON, EVENTS, find_events

SOURCE = Path(equipoise.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "start" / "run-folder.md"
IN_JOURNALS_OF_RUNS = ("train", "parallel", "fault", "observe")
"""Rooms that write to a run's journal; servers keep none."""


def written() -> set[tuple[str, str]]:
    """Kinds and names that the source writes by literal words."""
    events = set()
    for room in IN_JOURNALS_OF_RUNS:
        for path in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                verb = getattr(node.func, "attr", getattr(node.func, "id", ""))
                words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                words = [each for each in words if isinstance(each, str)]
                if verb == "span" and words:
                    events.add(("span", words[0]))
                if verb in ("write", "note", "_note") and len(words) >= 2:
                    events.add((words[0], words[1]))
    return events


def test_every_event_that_the_source_writes_by_name_is_listed() -> None:
    literal = written()
    assert {("scalar", "step"), ("fault", "killed"), ("span", "wait")} <= literal
    assert literal - {(each.kind, each.name) for each in EVENTS} == set()


def test_every_event_and_field_is_described_on_the_page_of_the_run_s_folder() -> None:
    words = set(re.findall(r"`([\w-]+)`", PAGE.read_text(encoding="utf-8")))
    for each in EVENTS:
        assert each.name in words, each.name
        assert set(each.fields) - words == set(), each.name


def test_each_is_listed_once_and_no_field_hides_a_common_one() -> None:
    keys = [(each.kind, each.name) for each in EVENTS]
    assert len(keys) == len(set(keys))
    assert not any(COMMON.keys() & each.fields.keys() for each in EVENTS)
    assert find_events("fault", "*") == tuple(each for each in EVENTS if each.kind == "fault")
    assert find_events("fault", "nothing") == ()
