"""One meaning for each name: classes are unique over all rooms, arrays are named once."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "equipoise"
ARRAYS = {"Ints", "Floats", "Flags"}


@functools.cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in SOURCE.rglob("*.py")}


def files_by_name(names: dict[Path, set[str]]) -> dict[str, list[str]]:
    """The files in which each name stands, relative to the source."""
    files = defaultdict(list)
    for path, found in names.items():
        for name in found:
            files[name].append(str(path.relative_to(SOURCE)))
    return files


def test_no_class_name_stands_in_two_files() -> None:
    # Lines that look like a class are read first: parsing the whole tree takes seconds.
    looks = {
        path: set(re.findall(r"^\s*class (\w+)", text, re.M)) for path, text in texts().items()
    }
    twice = {name for name, files in files_by_name(looks).items() if len(files) > 1}
    classes = {
        path: {
            node.name
            for node in ast.walk(ast.parse(texts()[path]))
            if isinstance(node, ast.ClassDef)
        }
        for path, names in looks.items()
        if names & twice
    }
    assert {name: where for name, where in files_by_name(classes).items() if len(where) > 1} == {}


def test_arrays_are_named_in_one_file() -> None:
    looks = re.compile(rf"^\s*(?:{'|'.join(sorted(ARRAYS))})\b.*=", re.M)
    named = {
        str(path.relative_to(SOURCE))
        for path, text in texts().items()
        if looks.search(text)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and {ast.unparse(target) for target in node.targets} & ARRAYS
    }
    assert named == {"base/arrays.py"}
