"""Tables at 60, 80 and 200 columns: the verbs' real output, and the rule on its own."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from equipoise.cli.table import Column, fit_columns, left_out_note, print_columns
from support.journals import write_run
from support.verbs import run

WIDTHS = (60, 80, 200)

SMALL = (
    *("--model", "layers=4,hidden=1024,heads=8,vocab=8000", "--cluster", "h100-sxm:4"),
    *("--context-tokens", "4096", "--step-sequences", "16"),
)


@pytest.fixture
def at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """The lines that a verb prints on a console of this width."""

    def print_at(width: int, *argv: object) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = run(capsys, *argv)
        assert code == 0, err
        return out.splitlines()

    return print_at


def cells(lines: list[str]) -> list[list[str]]:
    """Cells of lines of tables, which two spaces, borders or the line's end divide."""
    return [re.split(r"\s{2,}|\s*[│┃]\s*", line.strip(" │┃")) for line in lines]


def rows_with(lines: list[str], *headings: str) -> list[list[str]]:
    """The lines of the table whose head has these words."""
    [head] = [number for number, line in enumerate(lines) if all(each in line for each in headings)]
    ends = [number for number, line in enumerate(lines) if number > head and "No room" in line]
    return cells(lines[head : ends[0] if ends else None])


VERBS = {
    "pack": (
        ("pack", "--lengths", "python-stdlib", "--micro-batches", "4", "--steps", "5"),
        ("policy", "skew", "cuts"),
    ),
    "attention": (
        ("explain", "attention", "--strategy", "all"),
        ("strategy", "skew", "time", "exposed"),
    ),
    "one attention": (("explain", "attention"), ("round", "sends, forward", "tiles end")),
    "pipeline": (
        ("explain", "pipeline", "--strategy", "all"),
        ("strategy", "step", "bubble", "most"),
    ),
    "one pipeline": (
        ("explain", "pipeline", "--strategy", "zb-v"),
        ("rank", "computes", "waits", "bytes"),
    ),
    "boxing": (
        ("explain", "boxing", "S(0), P -> B, S(1)", "--mesh", "2x4"),
        ("step", "all ranks", "predicted"),
    ),
    "plan": (
        ("plan", *SMALL, "--layout", "cp=1,zero=1"),
        ("layout", "step", "slower by", "GiB"),
    ),
    "simulate": (("simulate", *SMALL, "--layout", "dp=4,zero=1"), ("share",)),
    "systems": (("systems",), ("#", "state", "system")),
    "inspect": (("inspect", "RUN"), ()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_cell_is_cut_and_the_keys_stand_at_any_width(
    verb: str, at: Callable[..., list[str]], tmp_path: Path
) -> None:
    argv, keys = VERBS[verb]
    if "RUN" in argv:
        argv = (*argv[:-1], str(write_run(tmp_path / "run", steps=3)))
    for width in WIDTHS:
        lines = at(width, *argv)
        assert "…" not in "\n".join(lines)
        assert any(all(key in line for key in keys) for line in lines)
        table = [line for line in lines if re.search(r"[│┃]", line) or "  " in line.strip()]
        assert max(len(line.rstrip()) for line in table) <= width


def test_layouts_stand_in_plans_table_and_sources_behind_a_flag(
    at: Callable[..., list[str]],
) -> None:
    argv = ("plan", *SMALL, "--layout", "cp=1,zero=1")
    for width in WIDTHS:
        lines = at(width, *argv)
        rows = rows_with(lines, "layout", "slower by")
        by_place = {row[0].split()[0]: " ".join(row) for row in rows if row[0][:1].isdigit()}
        assert set(by_place) == {"1", "2", "3", "4"}
        assert all(re.match(r"\d (\w+=\d+,?)+", row) for row in by_place.values())
        assert "--sources says where each number comes from." in lines
        assert not any(line == "Sources" for line in lines)
    assert "Sources" in at(80, *argv, "--sources")


def test_every_skew_of_a_pack_is_the_same_at_any_width(at: Callable[..., list[str]]) -> None:
    argv = VERBS["pack"][0]
    skews = []
    for width in WIDTHS:
        lines = [line for line in at(width, *argv) if line.startswith("│")]
        skews.append([re.findall(r"\b1\.\d{3}\b", line)[0] for line in lines])
    assert len(skews[0]) == 9 and skews[0] == skews[1] == skews[2]


def test_systems_off_a_terminal_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "systems")
    assert code == 0 and len(out.splitlines()) == 1 + 72 + 2


COLUMNS = (
    Column("policy", is_left=True),
    Column("loads", is_left=True, goes=1),
    Column("skew"),
    Column("why", is_left=True, goes=2, wraps=8),
)
ROWS = (
    ("in-order", "▇▇▇▇▆▆▆▆", "1.077", "the same where ranks meet"),
    ("by-work", "▇▇▇▇▇▇▇▇", "1.004", ""),
)


def printed(width: int) -> str:
    out = StringIO()
    print_columns(Console(file=out, width=width), COLUMNS, ROWS, box=None, pad_edge=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_columns_leave_in_their_turn_and_are_named() -> None:
    assert printed(60) == (
        "policy    loads      skew  why\n"
        "in-order  ▇▇▇▇▆▆▆▆  1.077  the same where ranks meet\n"
        "by-work   ▇▇▇▇▇▇▇▇  1.004"
    )
    assert printed(40) == (
        "policy    loads      skew  why\n"
        "in-order  ▇▇▇▇▆▆▆▆  1.077  the same\n"
        "                           where ranks\n"
        "                           meet\n"
        "by-work   ▇▇▇▇▇▇▇▇  1.004"
    )
    assert printed(30) == (
        "policy     skew  why\n"
        "in-order  1.077  the same\n"
        "                 where ranks\n"
        "                 meet\n"
        "by-work   1.004\n"
        "No room for loads; a wider\n"
        "console shows it."
    )


def test_rows_stack_where_the_keys_alone_do_not_fit() -> None:
    assert printed(14).splitlines()[:4] == [
        "policy",
        "in-order",
        "  skew  1.077",
        "policy by-work",
    ]


@given(st.integers(1, 120), st.lists(st.tuples(*[st.text("ab…漢 ", max_size=30)] * 4), max_size=4))
def test_what_fits_is_no_wider_than_its_room(room: int, rows: list[tuple[str, ...]]) -> None:
    widths = fit_columns(COLUMNS, rows, room, lambda count: 2 * count)
    if widths is None:
        return
    assert {0, 2} <= set(widths)
    assert sum(widths.values()) + 2 * len(widths) <= room
    assert all(widths[at] >= max((len(row[at]) for row in rows), default=0) for at in (0, 2))
    names = left_out_note(COLUMNS, widths)
    assert all((column.name in names) == (at not in widths) for at, column in enumerate(COLUMNS))
