"""What a search has priced, kept in a folder: the same request goes on from it.

Kept true (tests/unit/cli/plan/test_verb.py)
    What was priced once is not priced again; another request's state is not read, and a line that a
    killed search left torn is passed over.
"""

import dataclasses
import json
from pathlib import Path

from equipoise.base.disk import writing
from equipoise.base.read import parse_json, read_text
from equipoise.plan.search.incumbent import Priced
from equipoise.plan.search.search import Search

_FILE = "search.jsonl"


def keep_priced(folder: Path, search: Search, digest: str) -> None:
    """Read what was priced before, and write down what is priced from now on.

    Args:
        folder: Made where it is missing.
        search: Knows what was priced afterwards, and notes what it prices.
        digest: Of all that prices depend on.

    Raises:
        SpecError: the folder cannot be written.
    """
    file = folder / _FILE
    with writing("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lines = _read_lines(file)
    header = json.dumps({"digest": digest})
    if lines and lines[0] == header:
        for line in lines[1:]:
            try:
                priced = Priced(**parse_json(line))
            except (ValueError, TypeError):  # the last line of a search that was killed
                continue
            search.known[priced.row] = priced
    known = "".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in search.known.values())
    with writing("out", folder):
        file.write_text(f"{header}\n{known}")

    def note(priced: Priced) -> None:
        with writing("out", folder), file.open("a") as opened:
            opened.write(json.dumps(dataclasses.asdict(priced)) + "\n")

    search.note = note


def _read_lines(file: Path) -> list[str]:
    """The lines of a file; none where it is missing or damaged."""
    try:
        return read_text(file).splitlines()
    except (FileNotFoundError, ValueError):
        return []
