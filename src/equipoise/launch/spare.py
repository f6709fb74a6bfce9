"""A rank of the next start, kept ready: its program is imported, and it waits for its turn.

Why
    Most of the time in which a run starts goes into imports: some seconds of a core for every
    rank, and the agent's own before that. Ranks that have them behind them start in a tenth.

What it decides
    Nothing: the launcher (``launch.spares``) says when to import and when to begin. Imports run
    in a thread of the lowest priority, since a process that has no privileges could not raise its
    own again. While it waits, the process is the first that the kernel ends for want of memory. It
    ends with its launcher and with its agent.

Kept true (tests/unit/launch/test_spares.py, tests/multi/fault/test_spares.py)
    What it then runs is what a fresh process would run; a launcher that is gone leaves none behind.

Sources
    Priority of one thread: setpriority(2), under C library/kernel differences. Order of victims:
    proc_pid_oom_score_adj(5).
"""

import importlib
import os
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from equipoise.launch.agent import SPARE, end_with_agent
from equipoise.launch.leave import run_and_leave

VARIABLE = "EQUIPOISE_SPARES"
"""The address at which the launcher of such ranks waits for them."""

IMPORT, READY = b"import", b"ready"

EARLY, WAITING, AT_WORK = "equipoise-early", "equipoise-spare", "equipoise-rank"
"""Names of the process before its launcher knows that all have done their imports, until its turn,
and from then on, as ``ps -o comm`` shows them."""

_LOWEST_PRIORITY = 19
_EXPENDABLE = 500
"""What the kernel adds to this process's score, of at most 1,000, when it looks for a victim."""

_SCORE = Path("/proc/self/oom_score_adj")


def state_of(process: int) -> str:
    """``EARLY``, ``WAITING`` or ``AT_WORK``; ``AT_WORK`` also if it was never kept ready."""
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return AT_WORK
    if SPARE[1].encode() not in words or name == AT_WORK:
        return AT_WORK
    return WAITING if name == WAITING else EARLY


def main() -> NoReturn:
    """Wait, import, wait, and run the program whose module is the first argument."""
    end_with_agent()
    _call_process(EARLY)
    program, rank = sys.argv[1], int(os.environ["RANK"])
    score = _read_score()
    _write_score(min(1000, score + _EXPENDABLE))
    imports: threading.Thread | None = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        try:
            line.connect(b"\0" + os.environ[VARIABLE].encode())
        except OSError:  # nobody waits any more
            os._exit(0)
        while (word := line.recv(64)) in (IMPORT, READY):
            if word == READY:  # the launcher has heard of all, and counts on them from now on
                _call_process(WAITING)
            elif imports is None:
                imports = threading.Thread(target=_import, args=(program, line))
                imports.start()
        if not word or rank >= int(word):  # the launcher is gone; or fewer go on
            os._exit(0)
        if imports is not None:
            imports.join()
    _write_score(score)
    _call_process(AT_WORK)
    os.environ |= {name: str(int(word)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    del sys.argv[0]
    run_and_leave(importlib.import_module(program).main)


def _import(program: str, line: socket.socket) -> None:
    """Import the program in the background, and say so."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    try:
        for name in importlib.import_module(program).AHEAD:
            importlib.import_module(name)
        with suppress(OSError):
            line.send(READY)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _call_process(name: str) -> None:
    with suppress(OSError):
        Path(f"/proc/self/task/{os.getpid()}/comm").write_text(name)


def _read_score() -> int:
    try:
        return int(_SCORE.read_text())
    except (OSError, ValueError):
        return 0


def _write_score(score: int) -> None:
    with suppress(OSError):
        _SCORE.write_text(str(score))


if __name__ == "__main__":
    main()
