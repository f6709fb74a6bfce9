"""Ends a run whose ranks wait for one that does not come, and says who, where and since when.

Why
    gloo and NCCL wait ten minutes and then name an address. What one wants to know is which rank
    to look at.

What it decides
    A thread on every rank looks twenty times in a deadline where its rank stands and leaves that in
    the store. When its own rank has been in one wait for longer than the deadline, it reads what
    the others left, judges, and leaves the verdict, with which every rank ends. Then it ends the
    culprits that run on its own host, as a stopped process cannot do that itself.

    A thread that was itself not run for a while, in a stopped process that goes on, begins anew:
    it must not blame those who waited for it.

Kept true (tests/multi/test_watchdog.py)
    A rank that is stopped, or sleeps, in any phase of a step ends the run within the deadline and
    a few looks; a slow rank within the deadline ends nothing.
"""

import dataclasses
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from equipoise.base.errors import FaultError
from equipoise.comm.progress import Looker, Standing, Wait, keep_few_calls
from equipoise.comm.standstill import Beat, Standstill, judge

LOOKS = 20
"""Looks in a deadline."""

_MOST_PAUSE_S = 5.0
_SILENT_LOOKS = 4
"""A rank whose beat has not changed for so many looks is silent."""

_STORE_S = 5.0
"""The longest wait for the store, which a dead host may have held."""


class Watchdog:
    """Watches the thread that makes it, for as long as the block lasts."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        deadline_s: float,
        tell: Callable[[Standstill], None],
    ) -> None:
        """Prepare to watch; before the first process group is made.

        Args:
            store: Which all ranks reach.
            rank: This one.
            world: How many there are.
            deadline_s: The longest wait of one rank for another [s].
            tell: Called on every rank before its process ends.
        """
        keep_few_calls()
        self.rank, self.world, self.deadline_s, self.tell = rank, world, deadline_s, tell
        self.pause_s = min(deadline_s / LOOKS, _MOST_PAUSE_S)
        # A connection of its own: a wait may hold the other's.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._looker = Looker(threading.get_ident(), world)
        self._phase = ""
        self._beat = self._make_beat(0, Standing(None))
        self._since: tuple[object, float] = (None, 0.0)
        self._heard: dict[int, tuple[int, int]] = {}
        """Of each rank: its last beat, and at how many looks it was the same."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the block does, for those who wait for it."""
        before = "" if self._phase.startswith("after ") else self._phase
        self._phase = name
        try:
            yield
        finally:
            self._phase = before or f"after {name}"

    def __enter__(self) -> Self:
        if self.world > 1:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self.world > 1:
            self._thread.join(2 * _STORE_S)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(self.pause_s):
            now = time.monotonic()
            if now - last > _SILENT_LOOKS * self.pause_s + 1.0:
                self._since = (None, now)
                self._heard.clear()
            last = now
            # A store that has gone, or went on without us, does not end the watch.
            with suppress(RuntimeError):
                self._look(now)
        with suppress(RuntimeError):
            self._leave_beat(Standing(None), has_left=True)

    def _look(self, now: float) -> None:
        standing = self._looker.look()
        wait = standing.wait
        key = None if wait is None else (wait, self._phase, sorted(standing.calls.items()))
        if key != self._since[0]:
            self._since = (key, now)
        waited_s = now - self._since[1]
        if wait is not None and waited_s > self.deadline_s:
            self._end_all(wait, waited_s)
        self._leave_beat(standing)
        if self._store.check(["standstill"]):
            self._end(Standstill.read(json.loads(self._store.get("standstill"))))
        if wait is not None and waited_s > self.deadline_s / 2:
            self._hear()

    def _make_beat(self, count: int, standing: Standing, *, has_left: bool = False) -> Beat:
        return Beat(count, self._phase, standing, socket.gethostname(), os.getpid(), has_left)

    def _leave_beat(self, standing: Standing, *, has_left: bool = False) -> None:
        self._beat = self._make_beat(self._beat.count + 1, standing, has_left=has_left)
        self._store.set(f"beat/{self.rank}", json.dumps(dataclasses.asdict(self._beat)))

    def _hear(self) -> dict[int, Beat]:
        """Everybody's last beat."""
        keys = {rank: f"beat/{rank}" for rank in range(self.world)}
        beats = {
            rank: Beat.read(json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }
        for rank, beat in beats.items():
            count, looks = self._heard.get(rank, (-1, 0))
            self._heard[rank] = (beat.count, looks + 1 if beat.count == count else 0)
        return beats

    def _end_all(self, wait: Wait, waited_s: float) -> None:
        """Judge, unless another rank has, and end every rank."""
        beats: dict[int, Beat] = {}
        with suppress(RuntimeError):
            if self._store.add("judges", 1) > 1 and waited_s < 2 * self.deadline_s:
                return
            beats = self._hear()
        beats[self.rank] = self._beat
        silent = {rank for rank, (_, looks) in self._heard.items() if looks >= _SILENT_LOOKS}
        found = judge(
            self.rank,
            wait,
            waited_s,
            beats,
            silent - {self.rank},
            deadline_s=self.deadline_s,
        )
        with suppress(RuntimeError):
            self._store.set("standstill", json.dumps(dataclasses.asdict(found)))
        self.tell(found)
        time.sleep(2 * self.pause_s)  # the others end by themselves, with the same words
        for rank in found.culprits:
            self._end_process(beats.get(rank))
        os._exit(FaultError.exit_code)

    @staticmethod
    def _end_process(beat: Beat | None) -> None:
        if beat is not None and not beat.has_left and beat.host == socket.gethostname():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.process, signal.SIGKILL)

    def _end(self, found: Standstill) -> None:
        self.tell(found)
        os._exit(FaultError.exit_code)
