"""One meaning for each name: classes are unique over all rooms, arrays are named once."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "equipoise"
TREES = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def test_no_class_name_stands_in_two_files() -> None:
    files = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_arrays_are_named_in_one_file() -> None:
    named = {
        str(path.relative_to(SOURCE))
        for path, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and {ast.unparse(target) for target in node.targets} & {"Ints", "Floats", "Flags"}
    }
    assert named == {"base/arrays.py"}
