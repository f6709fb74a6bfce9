"""The line locator: hand-made traps, and random layouts whose lines are known."""

import tomllib
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.spec.run.load import TomlPath, locate

TRAPS = '''\
# [not.a.table] = "x"
title = """one [two]
three = 3
four \\""" five""""

"quoted key" . 'b#c' = { x = [1, # ] }
  2], "y" = '}' }  # z = 3
[a.b]  # comment
c = \'\'\'
d = 1\'\'\'\'
"\\u00e9" = 1979-05-27 07:32:00
[[list]]
n = 1
[list.sub]
m = 1
[[list]]
  n = [[1], [2,
    { deep = true }]]
[ a ]
e.f = "[#" # "
e.g = ""
'''


def test_traps() -> None:
    assert tomllib.loads(TRAPS)
    assert locate(TRAPS) == {
        ("title",): 2,
        ("quoted key",): 6,
        ("quoted key", "b#c"): 6,
        ("quoted key", "b#c", "x"): 6,
        ("quoted key", "b#c", "x", 0): 6,
        ("quoted key", "b#c", "x", 1): 7,
        ("quoted key", "b#c", "y"): 7,
        ("a",): 8,
        ("a", "b"): 8,
        ("a", "b", "c"): 9,
        ("a", "b", "é"): 11,
        ("list",): 12,
        ("list", 0): 12,
        ("list", 0, "n"): 13,
        ("list", 0, "sub"): 14,
        ("list", 0, "sub", "m"): 15,
        ("list", 1): 16,
        ("list", 1, "n"): 17,
        ("list", 1, "n", 0): 17,
        ("list", 1, "n", 0, 0): 17,
        ("list", 1, "n", 1): 17,
        ("list", 1, "n", 1, 0): 17,
        ("list", 1, "n", 1, 1): 18,
        ("list", 1, "n", 1, 1, "deep"): 18,
        ("a", "e"): 20,
        ("a", "e", "f"): 20,
        ("a", "e", "g"): 21,
    }


def test_windows_line_ends() -> None:
    assert locate("a = 1\r\n[b]\r\nc = '''\r\n'''\r\nd = 2\r\n") == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "d"): 5,
    }


@dataclass(frozen=True)
class Layout:
    """A TOML text and the line of each of its keys, by construction."""

    text: str
    lines: dict[TomlPath, int]


VALUES = st.sampled_from(
    [
        "1",
        "true",
        "1e-8",
        "2026-08-01",
        '"[a] # b = \\" ="',
        "'\"'",
        '"""\na = 1\n\\"""\n[b]"""',
        "'''x\n\n'''",
        '""',
        "[]",
        "[ 1,\n  # ] x = 1\n 2,\n]",
        '["]", "a"]',
        "{}",
        '{ in = "}", side = [1,\n 2] }',
    ]
)
NAMES = st.sampled_from(["a", "b-c", "d_1", "7", '"e f"', "'g.h'", '"\\t"'])
GAPS = st.sampled_from(["", "\n", "\n\n", "# [x] y = 1\n", "  \t"])
ENDS = st.sampled_from(["\n", "  # [c] = 1\n", "\t\n"])


def plain(name: str) -> str:
    [key] = tomllib.loads(f"{name} = 1")
    return key


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    text = ""
    lines: dict[TomlPath, int] = {}
    tables = [*draw(st.lists(NAMES, unique=True, max_size=4))]
    for place, table in enumerate(["", *tables]):
        path: tuple[str, ...] = ()
        if place:
            text += draw(GAPS)
            # A second part that no key below uses, so that no table is named twice.
            under = draw(st.sampled_from(["", " . under"]))
            path = ("table " + plain(table), *(["under"] if under else []))
            for stop in range(1, len(path) + 1):
                lines[path[:stop]] = text.count("\n") + 1
            text += f"[ {quote(path[0])}{under} ]{draw(ENDS)}"
        for name in draw(st.lists(NAMES, unique=True, max_size=4)):
            text += draw(GAPS)
            dotted = draw(st.sampled_from(["", ".x", ' . "y z"']))
            line = text.count("\n") + 1
            lines[(*path, plain(name))] = line
            if dotted:
                lines[(*path, plain(name), plain(dotted.strip(" .")))] = line
            text += f"{name}{dotted} = {draw(VALUES)}{draw(ENDS)}"
    return Layout(text, lines)


def quote(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace("\t", "\\t") + '"'


def paths(part: Any, path: TomlPath = ()) -> set[TomlPath]:
    if isinstance(part, dict):
        items = list(part.items())
    elif isinstance(part, list):
        items = list(enumerate(part))
    else:
        return set()
    found = {(*path, key) for key, _ in items}
    return found.union(*(paths(value, (*path, key)) for key, value in items))


@settings(deadline=None)
@given(layouts())
def test_every_key_is_found_where_it_was_put(layout: Layout) -> None:
    found = locate(layout.text)
    assert set(found) == paths(tomllib.loads(layout.text))
    assert {path: found[path] for path in layout.lines} == layout.lines
