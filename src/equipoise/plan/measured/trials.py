"""The journal of a measured search: what was begun and how it ended, a line each, only appended.

Why
    A trial costs minutes of a cluster, so a search that was stopped must not repeat one; and a
    trial that takes the whole machine down must not be tried forever.

What it decides
    The first line says what is searched, by digest. Each trial has a line when it begins and one
    when it ends. One that was begun twice and never ended counts as failed: it ends the search
    itself. One that the user stopped has not been tried.

Kept true (tests/unit/plan/measured/test_trials.py)
    A torn last line is passed over and never joined to the next; another search's file is refused.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from equipoise.base.errors import PlanError, SpecError
from equipoise.base.read import parse_json, read_text
from equipoise.plan.measured.next import Trial

_LOST = 2
"""Times that a trial may begin and not end before it counts as failed."""


class TrialJournal:
    """Append-only JSON lines."""

    def __init__(self, file: Path, digest: str) -> None:
        """Open or begin the journal.

        Args:
            file: Its folder is made.
            digest: Digest of everything that is searched and of what it runs on.

        Raises:
            PlanError: the file is of another search.
            SpecError: it cannot be written.
        """
        self.file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            text = read_text(file) if file.exists() else ""
        except (OSError, ValueError) as error:
            raise SpecError(
                f"{file} cannot be read or written ({getattr(error, 'strerror', error)}). Choose "
                f"another folder with --out."
            ) from None
        self._rows = [row for row in map(_row, text.splitlines()) if row is not None]
        first = self._rows[0] if self._rows else {"digest": digest}
        if first.get("digest") != digest:
            raise PlanError(
                f"{file} holds trials of another run, machine or version of equipoise, whose "
                f"seconds do not compare. Choose another folder with --out, or remove this one."
            )
        if text and not text.endswith("\n"):
            self._append("\n")
        if not self._rows:
            self._write({"digest": digest})

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Those that count, in the order in which they ended."""
        ended = {row["choice"]: Trial(**row) for row in self._rows if "wall_s" in row}
        begun = Counter(row["begin"] for row in self._rows if "begin" in row)
        stopped = Counter(row["stopped"] for row in self._rows if "stopped" in row)
        lost = [
            Trial(
                choice,
                None,
                "lost",
                f"Begun {times} times, and the search ended with it each time.",
            )
            for choice, times in (begun - stopped).items()
            if choice not in ended and times >= _LOST
        ]
        return (*ended.values(), *lost)

    def begin(self, choice: int) -> None:
        """A trial starts."""
        self._write({"begin": choice})

    def end(self, trial: Trial) -> None:
        """It has ended, well or not."""
        self._write(dataclasses.asdict(trial))

    def stop(self, choice: int) -> None:
        """The user ended the search during it."""
        self._write({"stopped": choice})

    def _write(self, row: dict[str, Any]) -> None:
        self._append(json.dumps(row) + "\n")
        self._rows.append(row)

    def _append(self, text: str) -> None:
        try:
            with self.file.open("a") as opened:
                opened.write(text)
        except OSError as error:
            raise SpecError(
                f"{self.file} cannot be written ({error.strerror}). Choose another folder with "
                f"--out."
            ) from None


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:  # the last line of a search that was killed
        return None
    return row if isinstance(row, dict) else None
