"""The house: rooms of at most 20 files, files of at most 400 lines, names without their room's."""

import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_LINES = 20, 400


def kept_files() -> list[Path]:
    """Every file of the repository that is there, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_folder_holds_more_than_twenty_files() -> None:
    inside = (path for path in kept_files() if len(path.parts) > 1)
    files = Counter(path.parent.as_posix() for path in inside if path.name != "__init__.py")
    assert {folder: n for folder, n in files.items() if n > MOST_FILES} == {}


def test_no_source_file_is_longer_than_four_hundred_lines() -> None:
    source = [path for path in kept_files() if path.parts[0] == "src" and path.suffix == ".py"]
    lines = {path.as_posix(): (ROOT / path).read_bytes().count(b"\n") for path in source}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_no_file_carries_the_name_of_its_room() -> None:
    source = [path for path in kept_files() if path.parts[0] == "src" and path.suffix == ".py"]
    assert [path for path in source if path.stem.startswith(f"{path.parent.name}_")] == []


def test_a_sub_room_is_not_named_after_its_room() -> None:
    rooms = {path.parent for path in kept_files() if path.parts[0] == "src"}
    doubled = [room for room in rooms for above, below in pairwise(room.parts) if above == below]
    assert doubled == []


def test_every_test_that_a_source_file_names_is_there() -> None:
    """``Kept true (tests/unit/a/test_b.py, test_c.py)``: the second stands beside the first."""
    missing = []
    for path in kept_files():
        if path.parts[0] != "src" or path.suffix != ".py":
            continue
        folder = Path()
        for listed in re.findall(r"Kept true \(([^)]*)\)", (ROOT / path).read_text()):
            for name in re.findall(r"[\w/]*\btest_\w+\.py", listed):
                folder = Path(name).parent if "/" in name else folder
                if not (ROOT / folder / Path(name).name).is_file():
                    missing.append(f"{path}: {name}")
    assert missing == []
