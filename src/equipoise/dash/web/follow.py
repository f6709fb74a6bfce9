"""Follow a run while it is written: its newest steps whole, older ones thinned, in bounded memory.

Why
    The report reads a whole run and ends. A dashboard stays open for days, beside a training that
    needs the memory and the cores.

What it decides
    The rank that lies furthest behind is read first, so that ranks stay together. If a run has more
    steps than ``_CELLS`` step lines of all ranks, every second one of the older steps is dropped,
    again and again; loss spikes and the newest steps stay. Spans are kept of the newest steps
    alone. A journal that was replaced is read from its beginning.

Kept true (tests/unit/dash/web/test_follow.py)
    While nothing was dropped, the record equals ``observe.reader.read_run``'s but for older spans.
"""

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import DataError, EquipoiseError
from equipoise.dash.summary import find_spikes
from equipoise.dash.web.tail import Tail
from equipoise.observe.journal_lines import Event, JournalLines, journal_files
from equipoise.observe.reader import make_record
from equipoise.observe.run_record import RunRecord

_CELLS = 1 << 14
"""Most step lines of a run, over all ranks: some 64 MiB."""
_LEAST_STEPS = 512
_NEWEST_STEPS = 64
"""Never dropped."""
_SPANS = 24_000
"""Most spans of a run, over all ranks."""
_DRAWN_STEPS = 12
"""Steps that the live timeline shows."""
_DRAWN_SPANS = 6_000
_FAULTS = 200
_ENDS = ("error", "exception", "killed")
"""Faults with which a rank ends."""


class Follower:
    """One run folder, read as far as it was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        """Rises whenever anything about the run is new."""
        self.refusal = ""
        """Why the run cannot be read; empty if it can."""
        self.grew_s: float | None = None
        """When it was seen to grow [monotonic seconds]; None if it never was."""
        self._begin()

    def _begin(self) -> None:
        self.journals: dict[int, JournalLines] = {}
        self._ends: dict[int, Event] = {}
        self.is_thinned = False
        self._tails: dict[int, Tail] = {}
        self._stride = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of all journals."""
        return sum(tail.size for tail in self._tails.values())

    @property
    def read_share(self) -> float:
        """Share of the journals that has been read."""
        return sum(tail.offset for tail in self._tails.values()) / max(1, self.size_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read than a look reads."""
        return any(tail.has_more for tail in self._tails.values())

    @property
    def changed_s(self) -> float:
        """When a journal last changed [unix seconds]."""
        return max((tail.changed_s for tail in self._tails.values()), default=0.0)

    def advance(self, until_s: float) -> None:
        """Read what is new, until a time [monotonic seconds], and at least one chunk."""
        try:
            self._look()
            while pending := [tail for tail in self._tails.items() if tail[1].has_more]:
                rank, tail = min(pending, key=lambda each: each[1].offset / each[1].size)
                for event in tail.read():
                    self._add(rank, event)
                    self.version += 1
                self._bound(rank)
                if time.monotonic() >= until_s:
                    break
            self._say("")
        except FileNotFoundError:
            self._say(f"{self.folder} has lost a journal while it was read. It may be moving.")
        except OSError as fault:
            path = Path(fault.filename or self.folder)
            self._say(f"{path} cannot be read: {explain_refusal(fault, path)}.")
        except EquipoiseError as fault:
            self._say(str(fault))

    def record(self) -> RunRecord:
        """The run as arrays; spans of its newest steps alone.

        Raises:
            DataError: rank 0's journal is missing, or the run has not started.
        """
        journals = {rank: self._newest(lines) for rank, lines in self.journals.items()}
        return make_record(self.folder, journals)

    @property
    def newest_step(self) -> int:
        """Number of the last step that rank 0 wrote; 0 if none."""
        steps = self.journals[0].steps if 0 in self.journals else {}
        return next(reversed(steps)) if steps else 0

    @property
    def stop(self) -> str:
        """Why the newest session stopped; empty if it did not, or was killed."""
        event = self.journals[0].stop if 0 in self.journals else None
        return str(event.get("reason", "unknown")) if event else ""

    @property
    def end(self) -> Event | None:
        """The first fault with which a rank of the newest session ended.

        A rank that wrote nothing since the run was resumed keeps the fault of the session before.
        """
        starts = self.journals[0].starts if 0 in self.journals else []
        began = _number(starts[-1].get("t")) if starts else -math.inf
        ends = [event for event in self._ends.values() if not _number(event.get("t")) < began]
        return min(ends, key=lambda event: _number(event.get("t")), default=None)

    @property
    def torn_lines(self) -> int:
        """Lines that a kill tore."""
        return sum(tail.torn_lines for tail in self._tails.values())

    def _say(self, refusal: str) -> None:
        if refusal != self.refusal:
            self.refusal = refusal
            self.version += 1

    def _look(self) -> None:
        """Find new journals and new sizes; begin again if a file was replaced."""
        files = journal_files(self.folder)
        before = self.size_bytes
        if any(files.get(rank) != tail.path for rank, tail in self._tails.items()):
            self._begin()
        for rank, path in files.items():
            if rank not in self._tails:
                self._tails[rank] = Tail(path)
                self.journals[rank] = JournalLines()
        for rank, tail in list(self._tails.items()):
            if not tail.path.is_file():
                raise DataError(f"{tail.path} is not a file. Put the run's journal back there.")
            if not tail.look():
                self._begin()
                self.version += 1
                self._look()
                return
            self.journals[rank].torn_lines = tail.torn_lines
        if before and self.size_bytes > before:
            self.grew_s = time.monotonic()

    def _add(self, rank: int, event: Event) -> None:
        lines = self.journals[rank]
        match event.get("kind"), event.get("name"), event.get("step"):
            case "instant", "start", _:
                self._ends.pop(rank, None)
            case "fault", name, _ if name in _ENDS:
                self._ends.setdefault(rank, event)
            case "scalar", "step", int(step):
                self._ends.pop(rank, None)
                lines.steps.pop(step, None)  # a repeated step is the newest
        lines.add(event)
        lines.torn_lines = self._tails[rank].torn_lines

    def _bound(self, rank: int) -> None:
        ranks = len(self._tails)
        lines = self.journals[rank]
        most_spans = max(256, _SPANS // ranks)
        if len(lines.spans) > 2 * most_spans:
            del lines.spans[:-most_spans], lines.sessions[:-most_spans]
        if len(lines.faults) > _FAULTS:
            del lines.faults[: -_FAULTS // 2]
        if len(lines.steps) > max(_LEAST_STEPS, _CELLS // ranks):
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        self.is_thinned = True
        steps = self.journals[0].steps if 0 in self.journals else {}
        loss = np.array([_number(event.get("loss")) for event in steps.values()])
        numbers = list(steps)
        kept = {numbers[row] for row in find_spikes(loss)}
        for lines in self.journals.values():
            newest = {*list(lines.steps)[-_NEWEST_STEPS:]} | kept
            for table in (lines.steps, lines.packs):
                for step in [each for each in table if each % self._stride and each not in newest]:
                    del table[step]

    def _newest(self, lines: JournalLines) -> JournalLines:
        """The lines with spans of the newest steps, as many as a page can hold."""
        steps = self.journals[0].steps if 0 in self.journals else {}
        newest = list(steps)[-_DRAWN_STEPS:]
        counts = dict.fromkeys(newest, 0)
        for event in lines.spans:
            if event.get("step") in counts:
                counts[event["step"]] += 1
        room = _DRAWN_SPANS // max(1, len(self._tails))
        drawn: set[object] = set()
        for step in reversed(newest):
            room -= counts[step]
            if room < 0 and drawn:
                break
            drawn.add(step)
        at = [row for row, event in enumerate(lines.spans) if event.get("step") in drawn]
        return replace(
            lines,
            spans=[lines.spans[row] for row in at],
            sessions=[lines.sessions[row] for row in at],
        )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
