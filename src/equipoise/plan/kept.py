"""What a search has priced, kept in a folder: the same request goes on from it.

Kept true (tests/unit/cli/plan/test_verb.py)
    What was priced once is not priced again; another request's state is not read, and a line that a
    killed search left torn is passed over.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.read import parse_json
from equipoise.plan.search.outcome import Priced
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
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
    header = json.dumps({"digest": digest})
    if lines and lines[0] == header:
        for line in lines[1:]:
            try:
                priced = Priced(**parse_json(line))
            except (ValueError, TypeError):  # the last line of a search that was killed
                continue
            search.known[priced.row] = priced
    known = "".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in search.known.values())
    with _writing(folder):
        file.write_text(f"{header}\n{known}")

    def note(priced: Priced) -> None:
        with _writing(folder), file.open("a") as opened:
            opened.write(json.dumps(dataclasses.asdict(priced)) + "\n")

    search.note = note


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(
            f"{folder} cannot be written: {reason}. Choose another with --out."
        ) from error
