"""Ranks of the next start, kept ready beside those that work.

Why
    After a fault all ranks start again, and what takes longest is that each imports its program.

What it decides
    When each of them imports: one after the other while the run goes on, so that at most one core
    is shared, and all at once as soon as somebody waits for them. They are one gang with its own
    agent, so what starts is whole or not used: if one of them has ended, all are dismissed.

Kept true (tests/unit/launch/test_spares.py, tests/multi/fault/test_spares.py)
    Nobody is taken before all have come; whoever is not taken ends with the launcher.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from equipoise.launch.doctor.cgroup import read_quota
from equipoise.launch.gang import Launch, RankGang
from equipoise.launch.spare import IMPORT, READY
from equipoise.launch.still import Note
from equipoise.observe.machine import available_bytes

SpareState = Literal["none", "starting", "ready"]

_LOOK_S = 0.02

_PROCESS_BYTES = 384 << 20
"""Memory of the agent and of each rank that waits, at most; measured with torch 2.13 for CPUs: 320
MiB resident, 235 of them not shared."""


def has_room(ranks: int) -> bool:
    """Whether this machine has memory for ``ranks`` ranks that wait, twice over."""
    quota = read_quota().free_bytes
    free = available_bytes() if quota is None else min(available_bytes(), quota)
    return free >= 2 * (ranks + 1) * _PROCESS_BYTES


class Spares:
    """A gang that is kept ready.

    Args:
        launch: What it will train.
        show: Gets sentences of its ranks for the user.
        note: As for ``StoppedRanks``.
        log: Its agent's error stream; begun anew.

    Raises:
        OSError: the log cannot be opened.
    """

    def __init__(
        self, launch: Launch, show: Callable[[str], object], note: Note, log: Path
    ) -> None:
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lines: list[socket.socket] = []
        self._lock = threading.Lock()
        self._hurries = threading.Event()
        self._is_ready = threading.Event()
        try:
            self._door.bind("")
            self._door.listen(launch.ranks)
            address = self._door.getsockname()[1:].decode()
            self._gang = RankGang(launch, show, note, log, "w+b", address)
        except OSError:
            self._door.close()
            raise
        self._ranks = launch.ranks
        self._host = threading.Thread(target=self._meet, daemon=True)
        self._host.start()

    def _meet(self) -> None:
        """Let one after the other import."""
        with suppress(OSError):  # they were dismissed
            while len(self._lines) < self._ranks:
                line, _ = self._door.accept()
                with self._lock:
                    self._lines.append(line)
                    if self._hurries.is_set():
                        line.send(IMPORT)
            for line in self._lines:
                line.send(IMPORT)
                if line.recv(64) != READY:  # it has ended
                    return
            self._is_ready.set()
            for line in self._lines:
                line.send(READY)

    @property
    def state(self) -> SpareState:
        """Whether all are ready, on their way, or not to be reckoned with any more."""
        if self._has_ended():
            return "none"
        return "ready" if self._is_ready.is_set() else "starting"

    def _has_ended(self) -> bool:
        return self._gang.agent.poll() is not None

    def wait(self, most_s: float, is_off: Callable[[], bool] = bool) -> bool:
        """Wait until all are ready; whether they were before ``most_s`` had passed.

        Args:
            most_s: Longest wait [s].
            is_off: Whether nobody waits for them any more.
        """
        with self._lock, suppress(OSError):
            self._hurries.set()
            for line in self._lines:
                line.send(IMPORT)
        until = time.monotonic() + most_s
        while self.state == "starting" and time.monotonic() < until and not is_off():
            self._is_ready.wait(_LOOK_S)
        return self.state == "ready"

    def take(self, ranks: int) -> RankGang | None:
        """Let the first ``ranks`` of them begin, and end the others; None if one has ended."""
        try:
            for line in self._lines:
                line.send(str(ranks).encode())
        except OSError:
            return None
        self._gang.stopped.ranks = ranks
        self._close()
        return self._gang

    def dismiss(self) -> None:
        """End them; returns when their agent is gone."""
        self._gang.agent.kill()  # its ranks end with it
        self._gang.agent.wait()
        self._close()
        self._gang.close()
        self._gang.wait_until_gone()

    def _close(self) -> None:
        for each in (self._door, *self._lines):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._host.join()
