"""Read the lines of a run's journals, one JSON object each, and sort them by kind.

Why
    Processes that append to journals may be killed between two bytes, and a resumed run reports
    some steps twice.

What it decides
    A line that is not a JSON object was torn by a kill, and one that fails its checksum, or whose
    step is not a number of steps, was changed later; they are skipped and counted.
    If a step appears twice, the later line counts. The order of lines decides which is later, since
    a clock can be set back.

Kept true (tests/unit/observe/test_reader.py)
    Any prefix of a journal's bytes reads as well as the whole; a newer schema is refused.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import DataError, SpecError
from equipoise.base.read import parse_json
from equipoise.observe.event import is_whole

NEWEST_SCHEMA = 1
MOST_RANKS = 1 << 20
"""A journal that names more is damaged."""

ALARMS = ("slow", "slow-why", "even", "slow-link", "even-link", "stopped", "continued")
"""Instants that tell the user what a run noticed while it went on."""

Event = dict[str, Any]


@dataclass(slots=True)
class JournalLines:
    """One rank's lines by kind; a step's later line replaces an earlier one."""

    starts: list[Event] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)
    packs: dict[int, Event] = field(default_factory=dict)
    evaluations: dict[int, Event] = field(default_factory=dict)
    experts: dict[int, Event] = field(default_factory=dict)
    encoders: dict[int, Event] = field(default_factory=dict)
    spans: list[Event] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    """How often the rank had restarted before each span."""
    faults: list[Event] = field(default_factory=list)
    recoveries: list[Event] = field(default_factory=list)
    alarms: list[Event] = field(default_factory=list)
    memory: Event | None = None
    stop: Event | None = None
    torn_lines: int = 0
    _session: int = 0
    _span_step: int = 0

    def add(self, event: Event) -> None:
        """Keep an event; kinds and names unknown to this version are dropped."""
        match event.get("kind"), event.get("name"), event.get("step"):
            case "span", _, step:
                # A session begins by measuring, outside any step; within it, steps only rise.
                if not isinstance(step, int) or step < self._span_step:
                    self._session += 1
                self._span_step = step if isinstance(step, int) else 0
                self.spans.append(event)
                self.sessions.append(self._session)
            case "scalar", "step", int(step):
                self.steps[step] = event
            case "scalar", "eval", int(step):
                self.evaluations[step] = event
            case "scalar", "experts", int(step):
                self.experts[step] = event
            case "scalar", "encoders", int(step):
                self.encoders[step] = event
            case "decision", "pack", int(step):
                self.packs[step] = event
            case "decision", "recovery", _:
                self.recoveries.append(event)
            case "decision", "memory", _:
                self.memory = event
            case "instant", "start", _:
                self.starts.append(event)
                self.stop = None  # undone by resuming
            case "instant", "stop", _:
                self.stop = event
            case "instant", str(name), _ if name in ALARMS:
                self.alarms.append(event)
            case "fault", _, _:
                self.faults.append(event)


def read_journals(folder: Path) -> dict[int, JournalLines]:
    """Every rank's journal of a run folder.

    Raises:
        SpecError: no such folder.
        DataError: the folder does not hold a run, a journal is not a file that can be read, or a
            newer equipoise wrote it.
    """
    return {rank: _read_journal(path) for rank, path in journal_files(folder).items()}


def journal_files(folder: Path) -> dict[int, Path]:
    """Every rank's journal file in a run folder.

    Raises:
        SpecError: no such folder.
        DataError: the folder does not hold a run.
    """
    if not folder.exists():
        raise SpecError(
            f"No such folder: {folder}. Give the folder of a run, which `equipoise train` wrote, "
            "with journal/ inside it."
        )
    files: dict[int, Path] = {}
    for path in sorted((folder / "journal").glob("rank-*.jsonl")):
        rank = path.stem.removeprefix("rank-")
        if rank.isdecimal() and int(rank) < MOST_RANKS:
            files[int(rank)] = path
    if not files:
        inside = sorted(path.parent.parent for path in folder.glob("*/journal/rank-00000.jsonl"))
        near = ", ".join(str(path) for path in inside[:4])
        fix = (
            f"Runs inside it: {near}." if near else "Give the folder that `equipoise train` wrote."
        )
        raise DataError(f"{folder} has no journal/rank-00000.jsonl: not a run. {fix}")
    return files


def _read_journal(path: Path) -> JournalLines:
    journal = JournalLines()
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise DataError(
            f"{path} is {kind}, so no journal can be read from it. Put the run's journal back in "
            f"its place, or remove it."
        )
    try:
        return _read_lines(path, journal)
    except OSError as fault:
        raise DataError(
            f"{path} cannot be read: {explain_refusal(fault, path)}. Make it readable, or copy it "
            f"again from where the run was written."
        ) from fault


def _read_lines(path: Path, journal: JournalLines) -> JournalLines:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            event, is_torn = parse_line(line, path, number)
            journal.torn_lines += is_torn
            if event is not None:
                journal.add(event)
    return journal


def parse_line(line: bytes, path: Path, number: int) -> tuple[Event | None, bool]:
    """The event of a line, and whether part of the line was lost.

    If another line was appended to a torn one, the event is the appended one.

    Raises:
        DataError: a newer equipoise wrote the line.
    """
    for data in (line, line[line.rfind(b'{"v"') :]):
        try:
            text = data.decode()
            event = parse_json(text)
        except ValueError:  # bad JSON or bad UTF-8
            continue
        if isinstance(event, dict) and _has_kinds(event) and is_whole(text):
            if event["v"] > NEWEST_SCHEMA:
                raise DataError(
                    f"{path}:{number} is of journal schema {event['v']}; this equipoise reads "
                    f"schemas up to {NEWEST_SCHEMA}. Report with the equipoise that trained the "
                    "run, or a newer one."
                )
            return _finite(event) if _NOT_FINITE.search(text) else event, data is not line
    return None, True


_LATEST_STEP = 1 << 53
"""A step beyond it is damage: columns of steps are float64."""


def _has_kinds(event: Event) -> bool:
    """Whether the fields that every reader relies on are of their kinds."""
    step, name = event.get("step"), event.get("name")
    return (
        type(event.get("v")) is int
        and (name is None or isinstance(name, str))
        and (step is None or (type(step) is int and 0 <= step <= _LATEST_STEP))
    )


_NOT_FINITE = re.compile(r"NaN|Infinity|\de\+?\d{3}")


def _finite(value: Any) -> Any:
    """The value with null for each number that no writer writes."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not abs(value) < _LARGEST else value


_LARGEST = 1e100
"""Larger numbers are damage: nothing that is measured or counted comes near."""
