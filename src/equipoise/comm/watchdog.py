"""End a run whose ranks wait for one that does not come, and say who, where and since when.

Why
    gloo and NCCL wait ten minutes and then name an address. The user needs to know which rank to
    look at.

What it decides
    On every rank, one thread looks twenty times per deadline where the rank is, and another
    writes that to the store. When a wait exceeds the deadline, the rank judges what the others
    wrote and stores the verdict, with which every rank ends. Then it kills culprits on its own
    host, since a stopped process cannot end itself.

    The looking thread never touches the store, whose host may be what has stopped. If the other
    thread is still blocked at the deadline, the rank ends with what it knows.

    A rank whose process was stopped and then continued starts over: it must not blame those who
    waited for it.

Kept true (tests/multi/comm/test_watchdog.py)
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
from equipoise.comm.standstill import Beat, Standstill, judge, judge_alone

LOOKS = 20
"""Looks per deadline."""

_MOST_PAUSE_S = 5.0
_SILENT_LOOKS = 4
"""A rank whose beat has not changed for this many looks is silent."""

_STORE_S = 5.0
"""The longest wait for the store, whose host may be dead."""


class Watchdog:
    """Watches the thread that makes it, while the block lasts."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        deadline_s: float,
        tell: Callable[[Standstill], None],
    ) -> None:
        """Prepare to watch, before the first process group is made.

        ``tell`` is called on every rank before its process ends.
        """
        keep_few_calls()
        self.rank, self.world, self.deadline_s, self.tell = rank, world, deadline_s, tell
        self.pause_s = min(deadline_s / LOOKS, _MOST_PAUSE_S)
        # A connection of its own, since a wait may block the other one.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._looker = Looker(threading.get_ident(), world)
        self._phase = ""
        self._beat = self._make_beat(0, Standing(None))
        self._standing = Standing(None)
        self._since: tuple[object, float] = (None, 0.0)
        self._hung: tuple[Wait, float] | None = None
        """The wait of this rank beyond the deadline, and its length [s]."""
        self._spoke = time.monotonic()
        """When the store last answered."""
        self._heard: dict[int, tuple[int, int]] = {}
        """Each rank's last beat, and the number of looks without a change."""
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="watchdog", daemon=True)
            for target in (self._watch, self._speak)
        ]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the block does, for messages of ranks that wait for it."""
        before = "" if self._phase.startswith("after ") else self._phase
        self._phase = name
        try:
            yield
        finally:
            self._phase = before or f"after {name}"

    def __enter__(self) -> Self:
        if self.world > 1:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self.world > 1:
            for thread in self._threads:
                thread.join(_STORE_S)

    def _watch(self) -> None:
        """Look where the rank is, and for how long; end it if the store cannot be asked."""
        last = time.monotonic()
        while not self._ended.wait(self.pause_s):
            now = time.monotonic()
            if now - last > _SILENT_LOOKS * self.pause_s + 1.0:
                self._since = (None, now)
                self._heard = {}
            last = now
            self._standing = standing = self._looker.look()
            wait = standing.wait
            key = None if wait is None else (wait, self._phase, sorted(standing.calls.items()))
            if key != self._since[0]:
                self._since, self._hung = (key, now), None
            waited_s = now - self._since[1]
            if wait is not None and waited_s > self.deadline_s:
                self._hung = (wait, waited_s)
            is_deaf = now - self._spoke > self.pause_s + 2 * _STORE_S
            if self._hung is not None and is_deaf:
                self._end(judge_alone(self.rank, *self._hung, self._phase))

    def _speak(self) -> None:
        """Write beats, and end the rank by its own verdict or another's."""
        while not self._ended.wait(self.pause_s):
            with suppress(RuntimeError):  # losing the store does not end the watch
                self._leave_beat(self._standing)
                if self._store.check(["standstill"]):
                    self._end(Standstill.read(json.loads(self._store.get("standstill"))))
                if self._hung is not None:
                    self._end_all(*self._hung)
                elif self._is_waiting_long():
                    self._hear()
                self._spoke = time.monotonic()
        with suppress(RuntimeError):
            self._leave_beat(Standing(None), has_left=True)

    def _is_waiting_long(self) -> bool:
        is_late = time.monotonic() - self._since[1] > self.deadline_s / 2
        return self._standing.wait is not None and is_late

    def _make_beat(self, count: int, standing: Standing, *, has_left: bool = False) -> Beat:
        return Beat(count, self._phase, standing, socket.gethostname(), os.getpid(), has_left)

    def _leave_beat(self, standing: Standing, *, has_left: bool = False) -> None:
        self._beat = self._make_beat(self._beat.count + 1, standing, has_left=has_left)
        self._store.set(f"beat/{self.rank}", json.dumps(dataclasses.asdict(self._beat)))

    def _hear(self) -> dict[int, Beat]:
        """Every rank's last beat."""
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
        if self._store.add("judges", 1) > 1 and waited_s < 2 * self.deadline_s:
            return
        beats = self._hear() | {self.rank: self._beat}
        silent = {rank for rank, (_, looks) in self._heard.items() if looks >= _SILENT_LOOKS}
        verdict = judge(
            self.rank,
            wait,
            waited_s,
            beats,
            silent - {self.rank},
            deadline_s=self.deadline_s,
        )
        self._store.set("standstill", json.dumps(dataclasses.asdict(verdict)))
        self.tell(verdict)
        time.sleep(2 * self.pause_s)  # the others end by themselves, with the same words
        for rank in verdict.culprits:
            self._end_process(beats.get(rank))
        os._exit(FaultError.exit_code)

    @staticmethod
    def _end_process(beat: Beat | None) -> None:
        if beat is not None and not beat.has_left and beat.host == socket.gethostname():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.process, signal.SIGKILL)

    def _end(self, verdict: Standstill) -> None:
        self.tell(verdict)
        os._exit(FaultError.exit_code)
