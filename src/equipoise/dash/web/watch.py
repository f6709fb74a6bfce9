"""All runs that a dashboard shows: found, followed, and given as the JSON that its page reads.

Why
    A page asks every second. What has not changed is not read, not computed and not sent again,
    and the dashboard takes a small share of one core from the training beside it.

What it decides
    Files are read when a page asks, for ``_READ_S`` at most; a page that should come back does
    so at once. An answer stands for ten times as long as it took to compute. Runs that do not
    grow are put away when more than ``_FOLLOWED`` are open; their cards stay.

Kept true (tests/unit/dash/web/test_watch.py)
    A run is known by a digest of its path: no request can name a file.
"""

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.base.errors import DataError
from equipoise.dash.figures import page_data
from equipoise.dash.web.cards import card, events
from equipoise.dash.web.find import find_runs
from equipoise.dash.web.follow import Follower
from equipoise.dash.web.state import State, silence, state_of
from equipoise.observe.run_record import RunRecord

Table = dict[str, Any]

_READ_S = 0.25
_FIND_S = 3.0
"""How often folders are searched."""
_FOLLOWED = 12
_SHARE = 10.0
"""An answer is kept for this many times the seconds that it took."""
MOST_COMPARED = 8
_MOST_LISTED = 200


_UNREAD = State("reading", "Its journals are not read yet.")


@dataclass(slots=True)
class _Run:
    """One run of the list; ``follower`` and ``record`` are None while it is put away."""

    folder: Path
    label: str
    follower: Follower | None = None
    record: RunRecord | None = None
    row: Table | None = None
    state: State = _UNREAD
    version: int = -1
    """The follower's version that ``row`` shows."""
    size_bytes: int = 0
    changed_s: float = 0.0
    until_s: float = 0.0
    """How long ``row`` stands [monotonic seconds]."""
    shown_s: float = 0.0
    """When its page was last asked for [monotonic seconds]."""


@dataclass(slots=True)
class _Page:
    """The last answer about some runs, and what it was made of."""

    versions: tuple[object, ...]
    text: bytes
    until_s: float


class Watch:
    """Runs below some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._runs: dict[str, _Run] = {}
        self._pages: dict[tuple[str, ...], _Page] = {}
        self._found_s = -1e9
        self._find_took_s = 0.0
        self._left_out = 0
        self._lock = threading.Lock()

    def list_runs(self) -> bytes:
        """Cards of all runs, as JSON: ``{"runs": [...], "is_behind", "left_out"}``."""
        with self._lock:
            self._find()
            until_s = time.monotonic() + _READ_S
            rows = [self._row(key, run, until_s) for key, run in self._runs.items()]
            newest = [-run.changed_s for run in self._runs.values()]
            order = {"running": 0, "reading": 1}
            ranked = sorted(
                zip(rows, newest, strict=True),
                key=lambda each: (
                    order.get(each[0]["state"], 2),
                    each[1] if each[0]["state"] not in order else 0.0,
                ),
            )
            rows = [row for row, _ in ranked]
            self._put_away()
            is_behind = any(row["state"] == "reading" for row in rows)
            return _json({"runs": rows, "is_behind": is_behind, "left_out": self._left_out})

    def show(self, keys: Sequence[str]) -> bytes | None:
        """The page of some runs, as JSON: the report's data and ``live``; None if one is unknown.

        Args:
            keys: Ids of runs, as ``list_runs`` gives them.
        """
        with self._lock:
            self._find()
            if not keys or any(key not in self._runs for key in keys):
                return None
            until_s = time.monotonic() + _READ_S
            chosen = [self._runs[key] for key in dict.fromkeys(keys)]
            for run in chosen:
                run.shown_s = time.monotonic()
            rows = [self._row(key, self._runs[key], until_s) for key in dict.fromkeys(keys)]
            versions = tuple((run.version, run.state) for run in chosen)
            page = self._pages.get(tuple(keys))
            if page and (page.versions == versions or time.monotonic() < page.until_s):
                return page.text
            began_s = time.monotonic()
            text = _json(self._page(chosen, rows))
            took_s = time.monotonic() - began_s
            if len(self._pages) >= _FOLLOWED:
                self._pages.clear()
            standing_s = time.monotonic() + _SHARE * took_s
            self._pages[tuple(keys)] = _Page(versions, text, standing_s)
            return text

    def _page(self, chosen: Sequence[_Run], rows: Sequence[Table]) -> Table:
        """What the report draws of the runs that have started, and what is live about all."""
        started = [run for run in chosen if run.record is not None]
        records = [run.record for run in started if run.record is not None]
        data: Table = {}
        if records:
            names = [str(run.row["label"]) for run in started if run.row]
            data = page_data(records, names)
            data.pop("picture")
        live = [
            row | {"events": events(run.record) if run.record else [], "spark": None}
            for run, row in zip(chosen, rows, strict=True)
        ]
        is_behind = any(row["state"] == "reading" for row in rows)
        return {"live": live, "data": data, "is_behind": is_behind}

    def _row(self, key: str, run: _Run, until_s: float) -> Table:
        """A run's row; one whose journals hold what no run writes does not hide the others."""
        try:
            return self._card(key, run, until_s)
        except Exception as fault:
            run.state = State("unreadable", f"Its journals are damaged: {fault}")
            run.record, run.follower = None, run.follower or Follower(run.folder)
            return {"id": key} | card(run.follower, None, run.state, run.label)

    def _card(self, key: str, run: _Run, until_s: float) -> Table:
        """A run's row, read further until a time [monotonic seconds]."""
        if run.follower is None:
            is_read = run.row is not None and _size_bytes(run.folder) == run.size_bytes
            if run.row is not None and is_read and run.shown_s < run.until_s:
                if run.state.kind == "silent":
                    run.row["state_sentence"] = silence(time.time() - run.changed_s)
                return run.row
            run.follower, run.version = Follower(run.folder), -1
        follower = run.follower
        if run.version < 0 and time.monotonic() > until_s:
            return {"id": key} | card(follower, None, _UNREAD, run.label)
        follower.advance(until_s)
        now_s = time.monotonic()
        state = state_of(follower, run.record)
        is_due = run.version != follower.version and now_s >= run.until_s
        if is_due or run.row is None or state != run.state:
            if state.kind != "reading":  # what was read in part alone has no numbers
                run.record, run.version = _record(follower), follower.version
                state = state_of(follower, run.record)
            run.row = {"id": key} | card(follower, run.record, state, run.label)
            run.until_s = time.monotonic() + _SHARE * (time.monotonic() - now_s)
        run.state, run.size_bytes = state, follower.size_bytes
        run.changed_s = follower.changed_s
        return run.row

    def _find(self) -> None:
        now_s = time.monotonic()
        if now_s - self._found_s < max(_FIND_S, _SHARE * self._find_took_s):
            return
        folders = find_runs(self.folders)
        self._left_out = max(0, len(folders) - _MOST_LISTED)
        before, self._runs = self._runs, {}
        for folder in folders[:_MOST_LISTED]:
            key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
            self._runs[key] = before.get(key) or _Run(folder, self._label(folder))
        # Folders that were given apart may have runs of one name.
        labels = Counter(run.label for run in self._runs.values())
        for run in self._runs.values():
            run.label = str(run.folder) if labels[run.label] > 1 else run.label
        self._found_s = time.monotonic()
        self._find_took_s = self._found_s - now_s

    def _put_away(self) -> None:
        """Forget the lines of runs that do not grow, oldest first, beyond a number of them."""
        still = [
            run
            for run in self._runs.values()
            if run.follower and run.state.kind not in ("running", "reading")
        ]
        still.sort(key=lambda run: (run.shown_s, run.changed_s))
        for run in still[: max(0, len(still) - _FOLLOWED)]:
            run.follower = run.record = None
            run.until_s = time.monotonic()

    def _label(self, folder: Path) -> str:
        """A run's path below the folder that was given."""
        for given in self.folders:
            if folder != given and folder.is_relative_to(given):
                return str(folder.relative_to(given))
        return folder.resolve().name


def _record(follower: Follower) -> RunRecord | None:
    try:
        return follower.record()
    except DataError:  # not started yet
        return None


def _size_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in (folder / "journal").glob("rank-*.jsonl"))
    except OSError:
        return -1


def _json(value: Table) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
