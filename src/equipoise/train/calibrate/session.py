"""What a calibration has measured so far, in a file: stopped at any moment, it goes on from there.

What it decides
    The form of the file. It belongs to one machine, one torch and one list of sizes; of another it
    is ignored, as is one older than a day, for a machine of yesterday is another one. What was
    measured is kept as plain numbers.

Kept true (tests/unit/train/calibrate/test_session.py)
    What is written reads back equal; a damaged file, or one of other sizes, begins a new session.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.base.durable import write_whole
from equipoise.base.read import read_json
from equipoise.train.calibrate.parts_plan import StepRecord, WaySamples
from equipoise.train.calibrate.ranks import Samples

_FORM = 1
_MOST_AGE_S = 86_400.0


@dataclass(slots=True)
class CalibrationSession:
    """Everything measured so far."""

    file: Path
    key: str
    """Digest of machine, torch and sizes."""
    done: list[str] = field(default_factory=list)
    """Names of tasks, in order."""
    taken: Samples = field(default_factory=dict)
    """Samples of the machine's kernels and links."""
    ways: dict[str, list[WaySamples]] = field(default_factory=dict)
    """Samples of every rank, by way."""
    seconds: float = 0.0
    """Spent measuring kernels and links."""
    others_s: float = 0.0
    """Core seconds of other programs meanwhile."""
    began: float = field(default_factory=time.time)

    @property
    def other_cores(self) -> float:
        """Cores that other programs kept busy meanwhile."""
        return self.others_s / self.seconds if self.seconds else 0.0

    def write(self) -> None:
        """Keep the session, whole."""
        row = {
            "form": _FORM,
            "key": self.key,
            "done": self.done,
            "taken": [[list(place), values] for place, values in self.taken.items()],
            "ways": {way: [_plain(rank) for rank in ranks] for way, ranks in self.ways.items()},
            "seconds": self.seconds,
            "others_s": self.others_s,
            "began": self.began,
        }
        write_whole(self.file, json.dumps(row))

    def end(self) -> None:
        """Remove the file: everything is in the device file."""
        self.file.unlink(missing_ok=True)


def session_file(device_file: Path) -> Path:
    """Where the session of a device file is kept.

    >>> session_file(Path("lab/this-cpu.json")).name
    'this-cpu.session.json'
    """
    return device_file.with_suffix(".session.json")


def open_session(file: Path, key: str) -> CalibrationSession:
    """The session that was begun there, or a new one.

    Args:
        file: Of ``session_file``.
        key: Digest of what is to be measured, and on what.
    """
    try:
        row: Any = read_json(file)
        is_mine = row["form"] == _FORM and row["key"] == key
        if is_mine and 0 <= time.time() - row["began"] < _MOST_AGE_S:
            return CalibrationSession(
                file,
                key,
                [str(name) for name in row["done"]],
                {tuple(place): [float(s) for s in values] for place, values in row["taken"]},
                {way: [_samples(rank) for rank in ranks] for way, ranks in row["ways"].items()},
                float(row["seconds"]),
                float(row["others_s"]),
                float(row["began"]),
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing that can be gone on with
    return CalibrationSession(file, key)


def _plain(rank: WaySamples) -> dict[str, Any]:
    return {
        "steps": [
            [
                *key,
                record.step_s,
                [[*span, values] for span, values in record.spans.items()],
                record.began,
                record.ended,
            ]
            for key, record in rank.steps.items()
        ],
        "documents": [[tokens, *both] for tokens, both in rank.documents.items()],
        "context": [[*key, *both] for key, both in rank.context.items()],
    }


def _samples(row: dict[str, Any]) -> WaySamples:
    steps = {
        (depth, schedule): StepRecord(
            step_s,
            {(name, stage, batch): values for name, stage, batch, values in spans},
            began,
            ended,
        )
        for depth, schedule, step_s, spans, began, ended in row["steps"]
    }
    documents = {tokens: (forward, backward) for tokens, forward, backward in row["documents"]}
    context = {(name, at): (forward, backward) for name, at, forward, backward in row["context"]}
    return WaySamples(steps, documents, context)
