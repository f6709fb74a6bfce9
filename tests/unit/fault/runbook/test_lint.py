"""Guides with one flaw each: the line, and the whole sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cli.drill.commands import judge_command
from equipoise.fault.runbook.lint import check_guide, load_guide
from equipoise.fault.runbook.markdown import read_guide
from equipoise.fault.runbook.shipped import shipped_guides
from support.runbooks.guides import GOOD, flaws


def test_a_good_guide_has_no_flaw() -> None:
    assert flaws(GOOD) == []
    guide = check_guide(GOOD, "mine", judge_command, file="mine.md")
    assert [step.name for step in guide.steps] == ["First", "Second"]
    assert (guide.title, guide.about) == ("Something is late", "A short guide.")


def test_every_flaw_is_reported_at_once_in_the_order_of_lines() -> None:
    text = GOOD.replace("of instant late\n", "of instant lat\n").replace("report RUN", "repot RUN")
    lines = [int(flaw.split(":")[1]) for flaw in flaws(text)]
    assert lines == sorted(lines)
    assert {10, 23} <= {*lines}


def test_a_cycle_of_several_steps_is_named_in_its_order() -> None:
    text = """\
# Round
## A
after: C
> a
## B
after: A
> b
## C
after: B
> c
"""
    assert flaws(text) == ["mine.md:3: These steps wait for each other: A -> B -> C -> A."]


def test_a_value_that_only_one_way_sets_cannot_be_read_behind_both() -> None:
    text = """\
# Two ways
## Begin
```query
late = count of instant late
```
- if `late > 1`: **many**
- else: **few**
## Left
after: Begin = many
```query
left = late + 1
```
## Right
after: Begin = few
```query
right = late - 1
```
## End
after: Left or Right
> {left} {late}
"""
    assert flaws(text) == ["mine.md:20: Nothing has set `left` here. Nearest: late."]


def test_steps_that_need_outcomes_of_both_sides_are_never_reached() -> None:
    text = """\
# Two sides
## Begin
```query
late = count of instant late
```
- if `late > 1`: **many**
- else: **few**
## Left
after: Begin = many
> left
## Right
after: Begin = few
> right
## Both
after: Left and Right
> both
"""
    assert flaws(text) == [
        'mine.md:15: "Both" is never reached: what it comes after cannot all happen.'
    ]


def test_a_file_that_is_none_or_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as missing:
        load_guide(tmp_path / "no.md", judge_command)
    assert str(missing.value) == (
        f"The guide {tmp_path / 'no.md'} cannot be read (No such file or directory). Give a "
        f"Markdown file, or the name of a guide: equipoise drill --runbook list."
    )
    (tmp_path / "bytes.md").write_bytes(b"# \xff")
    with pytest.raises(SpecError) as bytes_:
        load_guide(tmp_path / "bytes.md", judge_command)
    assert str(bytes_.value) == (
        f"{tmp_path / 'bytes.md'}:1: The file is not UTF-8 text, so it is not a guide."
    )
    with pytest.raises(SpecError) as empty:
        check_guide("", "mine", judge_command, file="mine.md")
    assert str(empty.value) == (
        "mine.md:1: The guide has no step. Begin one with ##.\n"
        "mine.md:1: The guide has no title. Begin it with # and what is wrong."
    )


SHIPPED = [text for _, text in shipped_guides()]


@given(text=st.sampled_from(SHIPPED), data=st.data())
def test_a_guide_cut_anywhere_or_missing_a_line_is_read_or_refused(
    text: str, data: st.DataObject
) -> None:
    lines = text.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    cut = data.draw(st.integers(0, len(lines[at])))
    whole = data.draw(st.booleans())
    changed = [*lines[:at], lines[at][:cut], *(lines[at + 1 :] if whole else [])]
    for flaw in flaws_without_commands("\n".join(changed)):
        assert flaw.startswith("mine.md:")


def flaws_without_commands(text: str) -> list[str]:
    try:
        check_guide(text, "mine", lambda words: "", file="mine.md")
    except SpecError as error:
        return str(error).split("\n")
    return []


@given(text=st.text(alphabet="#-> `*:=\nabi", max_size=80))
def test_any_text_is_a_guide_or_has_a_flaw_with_a_line(text: str) -> None:
    guide, found = read_guide(text, "mine")
    assert found or guide.steps
    assert all(flaw.line >= 1 for flaw in found)


def test_the_guide_of_the_page_has_no_flaw_and_its_flaws_are_those_that_the_page_shows() -> None:
    page = (Path(__file__).parents[4] / "docs" / "train" / "runbooks.md").read_text()
    text = page.partition("````markdown\n")[2].partition("````")[0]
    assert flaws(text) == []
    wrong = text.replace("instant late over", "instant lat over", 1).replace("doctor", "dcotor")
    wrong = wrong.replace(
        "- else: **seldom**; stop: only {late} waits were long in the last hour.\n", ""
    )
    shown = page.partition("with their lines:\n\n```text\n")[2].partition("```")[0]
    assert [each.replace("mine.md", "late.md") for each in flaws(wrong)] == shown.splitlines()
