"""Where a rank is: what it waits for, how many collectives it has entered, what it does.

Why
    To say who is missing from a collective, the watchdog must know where every rank is. A note at
    each collective would cost time and would miss torch's own: the gathers of ``fully_shard``,
    the redistributions of DTensor.

What it decides
    Nothing is noted. torch's flight recorder counts every collective in C++ anyway, by group,
    on gloo as on NCCL, and has what the last ones were (``comm.signature``). It lacks messages
    between two ranks, so the training thread's stack is searched for ``Mail.wait``, and for
    torch's functions that meet before there is a group. One look takes some two milliseconds, and
    only the watchdog looks.

Kept true (tests/multi/comm/test_watchdog.py)
    Waits in our collectives, in those of ``fully_shard``, and for messages are named.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

import equipoise
from equipoise.comm.mail import Mail
from equipoise.comm.signature import Trail, read_call
from equipoise.observe.stack import StackReader

_RECORDED = "TORCH_FR_BUFFER_SIZE"
_KEPT_CALLS = 64
"""Collectives to keep. torch keeps 2,000, and takes 0.26 s to report them."""

_KEPT_LINES = 12
"""Lines of a stack to keep."""

_PACKAGE = str(Path(equipoise.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank waits for."""

    what: str
    """In words: ``all_gather of ranks 0, 1``."""
    ranks: tuple[int, ...]
    """Who takes part."""
    group: str = ""
    """Name of the process group; empty for messages, and before there is a group."""
    call: int = 0
    """Number of the collective in its group; for messages a count that grows with each."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is at a moment."""

    wait: Wait | None
    calls: dict[str, int] = field(default_factory=dict)
    """Collectives entered, by group."""
    place: str = ""
    """Innermost line of this package that runs: ``train/step.py:151 (_compute)``."""
    stack: tuple[str, ...] = ()
    """Innermost lines that run, of any package, innermost first."""
    core_s: float = 0.0
    """Processor time of the thread so far [s]: a thread that is blocked takes none."""


def keep_few_calls() -> None:
    """Limit torch's recorder to the calls that are read; call it before the first group."""
    os.environ.setdefault(_RECORDED, str(_KEPT_CALLS))


class Looker:
    """Looks repeatedly where a thread of this process is."""

    def __init__(self, thread: int, world: int) -> None:
        self.thread, self.world = thread, world
        self._names: dict[str, str] = {}
        """Group names by torch's number, since old calls drop out of the record."""
        self.trail = Trail()
        """What the thread's collectives were; read it under ``lock``."""
        self.lock = threading.Lock()
        self._clock = time.pthread_getcpuclockid(thread)
        self._reader = StackReader(thread)

    def look(self) -> Standing:
        """Where the thread is now."""
        record = json.loads(_dump_fr_trace_json(True, True))
        entries = record.get("entries", [])
        self._names |= {str(each["pg_id"]): each["process_group"][0] for each in entries}
        calls = {
            self._names[number]: int(status["last_enqueued_collective"])
            for number, status in record.get("pg_status", {}).items()
            if number in self._names
        }
        place, caller, stack, stacked = self._stack()
        under_way = [each for each in entries if not each["retired"]]
        self._note(entries, caller)
        wait = _collective(under_way[0]) if under_way else stacked
        return Standing(wait, calls, place, stack, time.clock_gettime(self._clock))

    def _note(self, entries: list[dict[str, Any]], caller: str) -> None:
        """Add what is recorded to the trail; the last call under way is the one that runs."""
        calls = [each for each in entries if not each["is_p2p"]]
        running = next((each for each in reversed(calls) if not each["retired"]), None)
        with self.lock:
            for entry in calls:
                group, number = entry["process_group"][0], int(entry["collective_seq_id"])
                if number in self.trail.calls[group] and entry is not running:
                    continue
                call = read_call(entry)
                if entry is running:
                    call = dataclasses.replace(call, place=caller)
                self.trail.note(group, _members(group), number, call)

    def _stack(self) -> tuple[str, str, tuple[str, ...], Wait | None]:
        """Innermost line of the package, and outside of torch; all lines; the wait they show."""
        place, caller, wait = "", "", self._message()
        stack: list[str] = []
        for at in self._reader.read():
            if len(stack) < _KEPT_LINES:
                stack.append(f"{at.file}:{at.line} ({at.name})")
            if not place and at.file.startswith(_PACKAGE):
                place = f"{at.file.removeprefix(_PACKAGE)}:{at.line} ({at.name})"
            if not caller and not at.file.startswith(_TORCH):
                within = at.file.removeprefix(_PACKAGE)
                short = within if within != at.file else str(Path(*Path(at.file).parts[-2:]))
                caller = f"{short}:{at.line} ({at.name})"
            if at.file == distributed_c10d.__file__ and (wait is None or not wait.call):
                wait = Wait(at.name, tuple(range(self.world)))
        return place, caller, tuple(stack), wait

    def _message(self) -> Wait | None:
        """What a thread in ``Mail.wait`` waits for; its innermost frame is that one."""
        frame = sys._current_frames().get(self.thread)
        return _messages(frame) if frame and frame.f_code is Mail.wait.__code__ else None


def _collective(entry: dict[str, Any]) -> Wait:
    group, call = entry["process_group"][0], int(entry["collective_seq_id"])
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    members = _members(group)
    listed = f" of ranks {', '.join(map(str, members))}" if members else ""
    return Wait(f"{name}{listed}", members, group, call)


def _members(group: str) -> tuple[int, ...]:
    """Ranks of a group; none if it is gone."""
    try:
        ranks = dist.get_process_group_ranks(
            distributed_c10d._resolve_process_group(GroupName(group))
        )
    except (RuntimeError, KeyError, ValueError):
        return ()
    return tuple(ranks)


def _messages(frame: FrameType) -> Wait | None:
    """The wait of a thread in ``Mail.wait``."""
    mail, parcels = frame.f_locals.get("self"), frame.f_locals.get("parcels")
    if not isinstance(mail, Mail) or parcels is None:
        return None
    members = dist.get_process_group_ranks(mail.group)
    peers = sorted({members[parcel.peer] for parcel in parcels})
    ledger = mail.ledger
    count = int(ledger.sent_messages.sum() + ledger.received_bytes.sum()) + 1
    plural = "rank" if len(peers) == 1 else "ranks"
    return Wait(f"messages of {plural} {', '.join(map(str, peers))}", tuple(peers), "", count)
