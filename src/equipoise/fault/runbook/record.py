"""What a guide said of a run, kept in the run's folder for its report.

Kept true (tests/unit/fault/runbook/test_record.py)
    What is written is read back equal; a file that is damaged is one sentence.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from equipoise.base.disk import explain_refusal
from equipoise.base.durable import write_whole
from equipoise.base.errors import FaultError
from equipoise.base.read import read_json, reason
from equipoise.fault.runbook.run import GuideRun

FOLDER = "runbooks"
"""In a run's folder: a file for each guide that was run on it, as it ran last."""

_VERSION = 1


def as_json(run: GuideRun) -> dict[str, Any]:
    """JSON's types."""
    return {"v": _VERSION, **dataclasses.asdict(run), "one_by_one_s": run.one_by_one_s}


def write_record(folder: Path, run: GuideRun) -> Path:
    """Write what a guide said to a run's folder.

    Raises:
        FaultError: the folder cannot be written.
    """
    path = folder / FOLDER / f"{run.guide}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(as_json(run), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise FaultError(
            f"{path} cannot be written ({explain_refusal(error, path)}), so the run's report will "
            f"not show this guide."
        ) from error
    return path


def read_records(folder: Path) -> tuple[list[GuideRun], list[str]]:
    """Every guide that was run on a run, oldest first; and a sentence for each file that is bad."""
    runs: list[GuideRun] = []
    faults: list[str] = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            data = read_json(path)
            if not isinstance(data, dict) or data.get("v") != _VERSION:
                raise ValueError(f"it is not of version {_VERSION}")
            own = {name: data[name] for name in data.keys() - {"v", "one_by_one_s"}}
            runs.append(TypeAdapter(GuideRun).validate_python(own))
        except (OSError, ValueError, ValidationError) as error:
            said = "its fields are wrong" if isinstance(error, ValidationError) else reason(error)
            faults.append(
                f"{path} cannot be read ({said}). Run its guide again: equipoise drill --runbook "
                f"{path.stem} {folder}."
            )
    return sorted(runs, key=lambda run: run.t), faults
