"""What the report's page shows of how runs were configured, and where they ran.

Kept true (tests/unit/dash/test_report.py)
    Every key of run.toml is there once, with what each run says and why.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.base.units import format_bytes
from equipoise.observe.command import asked_words, flat, shown_value
from equipoise.observe.run_record import RunRecord
from equipoise.spec.plan import LOCK

Table = dict[str, Any]


def configuration(records: Sequence[RunRecord]) -> list[Table]:
    """Every key of run.toml: each run's value, where it came from, and whether runs differ."""
    specs = [_resolved(record) for record in records]
    keys = list(dict.fromkeys(key for spec in specs for key in spec))
    return [
        {
            "key": key,
            "values": [shown_value(spec.get(key)) for spec in specs],
            "origins": [record.start.origins.get(key, "unknown") for record in records],
            "differs": len({repr(spec.get(key)) for spec in specs}) > 1,
            "is_unsaid": all(
                _is_unsaid(record.start.origins.get(key, "unknown"), keys) for record in records
            ),
        }
        for key in keys
    ]


def _is_unsaid(origin: str, keys: Sequence[str]) -> bool:
    """Whether a value was not given: a default, a preset's, or one that another key implies."""
    return origin == "default" or origin.startswith("preset ") or origin in keys


def _resolved(record: RunRecord) -> Table:
    """Keys of run.toml; sizes that it leaves out are the preset's."""
    return {
        key: record.start.model.get(key.removeprefix("model."))
        if value is None and key.startswith("model.")
        else value
        for key, value in flat(record.start.spec).items()
    }


def environment(records: Sequence[RunRecord]) -> list[Table]:
    """Versions and machine of each run."""

    def facts(record: RunRecord) -> Mapping[str, Any]:
        return {"equipoise": record.start.version} | flat(record.start.environment)

    tables = [facts(record) for record in records]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    return [
        {
            "key": key,
            "values": [
                table.get(key) if key.endswith("_bytes") else shown_value(table.get(key))
                for table in tables
            ],
            "differs": len({repr(table.get(key)) for table in tables}) > 1,
        }
        for key in keys
    ]


def origin(record: RunRecord) -> Table:
    """When a run began, the command that it was, what computed it, and the machine."""
    start = record.start
    facts = start.environment
    commit = facts.get("commit")
    cores = facts.get("cores")
    memory_bytes = facts.get("memory_bytes")
    machine = (
        str(facts.get("cpu", "")),
        f"{cores} core{'s' * (cores != 1)}" if cores else "",
        format_bytes(memory_bytes) if isinstance(memory_bytes, int) else "",
    )
    return {
        "date": "" if math.isnan(start.t) else f"{_day(start.t)} UTC",
        "command": _command(record),
        "version": f"equipoise {start.version}" + (f", commit {commit}" if commit else ""),
        "machine": ", ".join(part for part in machine if part),
    }


def _day(t: float) -> str:
    """A day and a minute of unix seconds."""
    return str(np.datetime64(int(t), "s").astype("datetime64[m]")).replace("T", " ")


def _command(record: RunRecord) -> str:
    """`equipoise train` with the file and the flags that the journal says values came from."""
    origins = record.start.origins
    asked = asked_words(record.start.spec, origins)
    plan = ["--plan", LOCK] if LOCK in origins.values() else []
    compared = record.start.compared.get("policies")
    sides = ["--compare", ",".join(map(str, compared))] if isinstance(compared, list) else []
    return shlex.join(["equipoise", "train", *asked, *sides, *plan])
