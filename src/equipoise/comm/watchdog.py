"""End a run whose ranks wait for one that does not come, and say who, where and since when.

Why
    gloo and NCCL wait ten minutes and then name an address. The user needs to know which rank to
    look at.

What it decides
    On every rank, one thread looks several times a second where the rank is, and another writes
    that to the store. How long a wait may last, ``comm.patience`` says. One that is long names who
    is missing, in the journal and to the launcher, and ends nothing. When it exceeds the deadline,
    the rank judges what the others wrote and stores the verdict, with which every rank ends. Then
    it kills culprits on its own host, since a stopped process cannot end itself.

    The looking thread never touches the store, whose host may be what has stopped. If the other
    thread is still blocked at the deadline, the rank ends with what it knows.

    Ranks whose collectives do not match (``comm.signature``), or that wait in collectives for each
    other in a circle, can only go wrong, so they end as soon as that is seen. Where gloo meets
    other sizes than it expects, it aborts the process; the abort is held up (``comm.abort``) until
    both sides have been named.

    A rank whose process was stopped and then continued starts over: it must not blame those who
    waited for it.

Kept true (tests/multi/comm/test_watchdog.py, tests/multi/comm/test_mismatch.py)
    A rank that is stopped, or sleeps, in any phase of a step ends the run within the deadline and
    a few looks; a slow rank within the deadline ends nothing, and is named once.
"""

import dataclasses
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from equipoise.base.errors import FaultError
from equipoise.comm.abort import delay_aborts, restore_aborts
from equipoise.comm.link_notes import LinkNotes
from equipoise.comm.meet import name_ranks
from equipoise.comm.patience import WaitLimits, takes_long
from equipoise.comm.progress import Looker, Standing, Wait, keep_few_calls
from equipoise.comm.signature import Trail, first_mismatch, odd_ranks, tell_mismatch
from equipoise.comm.standstill import Beat, Standstill, find_circle, judge, judge_alone, tell_circle
from equipoise.observe.links import Links

_LOOKS = 20
"""Looks per deadline, at least."""

_MOST_PAUSE_S, _RANK_PAUSE_S = 0.25, 0.001
"""Between looks [s]; longer with many ranks, whose beats one store takes."""

_SILENT_LOOKS = 4
"""A rank whose beat has not changed for this many looks is silent."""

_CIRCLE_S, _CIRCLE_LOOKS = 1.0, 2
"""Seconds and looks after which a circle of waits that has not changed will not end."""

_FEW_RANKS = 64
"""Most ranks whose waits are searched for circles before they are long: each look of each waiting
rank reads what all have written."""

_IDLE_S = 0.001
"""A thread that takes less processor time between looks is blocked [s]."""

_LEAVE_S = 3.0
"""The longest wait for the others' side of a mismatch [s]; aborts are held up for twice as long."""

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
        deadline_s: float | None,
        tell: Callable[[Standstill], None],
        tell_late: Callable[[Standstill], None] | None = None,
        hear_links: Callable[[Links], object] | None = None,
    ) -> None:
        """Prepare to watch, before the first process group is made.

        Args:
            store: That all ranks reach.
            rank: This rank.
            world: Number of ranks.
            deadline_s: The longest wait [s]; follows the steps unless given.
            tell: Called on every rank before its process ends.
            tell_late: Called on one rank when a wait is long, and when it has ended after all.
            hear_links: Called on rank 0 with what links have carried; none are read unless given.
        """
        keep_few_calls()
        self.rank, self.world, self.tell, self.tell_late = rank, world, tell, tell_late
        self.patience = WaitLimits(deadline_s)
        looks_s = math.inf if deadline_s is None else deadline_s / _LOOKS
        self.pause_s = min(looks_s, max(_MOST_PAUSE_S, _RANK_PAUSE_S * world))
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
        self._late: tuple[object, Standstill] | None = None
        """The wait that this rank has named, and what it said of it."""
        self._circle: dict[int, Beat] = {}
        """Ranks that wait for each other, as they were when that was first seen."""
        self._links = LinkNotes(rank, world, hear_links)
        self._left = ""
        """What this rank has last left of its calls."""
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
            delay_aborts()
            self._standing = self._looker.look()
            with suppress(RuntimeError):  # a rank that is stopped right now has been heard once
                self._leave_beat(self._standing)
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.world > 1:
            for thread in self._threads:
                thread.join(_STORE_S)
            restore_aborts()

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
            if wait is not None and waited_s > self.patience.end_s(self._phase):
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
                self._compare_calls()
                self._links.look(self._store)
                if self._hung is not None:
                    self._end_all(*self._hung)
                elif self._standing.wait is not None:
                    self._judge_wait(self._standing.wait)
                if self._late is not None and self._late[0] != self._since[0]:
                    self._take_back(self._late[1])
                self._spoke = time.monotonic()
        with suppress(RuntimeError):
            self._leave_beat(Standing(None), has_left=True)

    def _judge_wait(self, wait: Wait) -> None:
        """Hear the others where a wait grows long, and name who is missing once it is."""
        key, began = self._since
        waited_s, phase = time.monotonic() - began, self._phase
        name_s, end_s = self.patience.name_s(phase), self.patience.end_s(phase)
        soon_s = _CIRCLE_S if self.world <= _FEW_RANKS and wait.group else math.inf
        if waited_s < min(end_s, math.inf if name_s is None else name_s, soon_s) / 2:
            return
        beats = self._hear() | {self.rank: self._beat}
        if waited_s >= _CIRCLE_S and self._is_circle(beats):
            self._end_circle(beats)
        if self.tell_late is None or self._late is not None or name_s is None or waited_s < name_s:
            return
        end = f"If this lasts {end_s:g} s, the ranks are ended."
        verdict = judge(self.rank, wait, waited_s, beats, self._silent, advice=end)
        is_known = any(takes_long(beats[each].phase) for each in verdict.culprits if each in beats)
        if not verdict.culprits or is_known or key != self._since[0]:
            return
        if self._store.add(f"late/{phase}/{verdict.culprits}", 1) == 1:
            self._late = key, verdict
            self.tell_late(verdict)

    def _is_circle(self, beats: dict[int, Beat]) -> bool:
        """Whether this rank waits in a circle that cannot end: seen before, and nobody moves."""
        ranks = find_circle(self.rank, beats, self._silent)
        if not ranks or self._circle.keys() != set(ranks):
            self._circle = {each: beats[each] for each in ranks}
            return False
        pairs = [(self._circle[each], beats[each]) for each in ranks]
        for before, now in pairs:
            one, other = before.standing, now.standing
            is_same = (one.wait, one.calls) == (other.wait, other.calls)
            if not is_same or other.core_s - one.core_s > _IDLE_S:
                self._circle = {}
                return False
        return all(now.count - before.count >= _CIRCLE_LOOKS for before, now in pairs)

    def _compare_calls(self) -> None:
        """Leave what this rank's collectives were; end the ranks if another's do not match."""
        looker = self._looker
        with looker.lock:
            words = json.dumps(looker.trail.as_json())
            partners = looker.trail.partners(self.rank)
        if words != self._left:
            self._store.set(f"calls/{self.rank}", words)
            self._left = words
        for partner in partners:
            other = self._trail(partner)
            with looker.lock:
                place = first_mismatch(looker.trail, other)
            if place is not None:
                self._end_mismatch(*place)

    def _trail(self, rank: int) -> Trail:
        """What a rank has left of its collectives."""
        key = f"calls/{rank}"
        return Trail.read(json.loads(self._store.get(key))) if self._store.check([key]) else Trail()

    def _end_mismatch(self, group: str, number: int) -> None:
        """End every rank, and say what each called in a collective that does not match."""
        if self._store.add("judges", 1) > 1:
            return
        with self._looker.lock:
            members = self._looker.trail.members[group]
        until = time.monotonic() + _LEAVE_S
        time.sleep(2 * self.pause_s)  # by then the others have left where they are
        trails = {each: self._trail(each) for each in members}
        while any(number not in trail.calls[group] for trail in trails.values()):
            if time.monotonic() > until:
                break
            time.sleep(self.pause_s)  # a busy machine takes longer
            trails = {each: self._trail(each) for each in members}
        calls = {
            each: trail.calls[group][number]
            for each, trail in trails.items()
            if number in trail.calls[group]
        }
        beats = self._hear() | {self.rank: self._beat}
        phases = {each: beats[each].phase for each, call in calls.items() if call.place}
        self._publish(
            Standstill(
                self.rank,
                f"collective {number} of ranks {', '.join(map(str, members))}",
                self._phase,
                0.0,
                (),
                odd_ranks(calls),
                tell_mismatch(number, calls, phases, members),
                {str(each): [*beats[each].standing.stack] for each in phases},
                {str(each): call.words for each, call in calls.items()},
            ),
            beats,
        )

    def _end_circle(self, beats: dict[int, Beat]) -> None:
        """End every rank, and say in which collectives they wait for each other."""
        if self._store.add("judges", 1) > 1:
            return
        waits = {each: self._circle[each].standing.wait for each in sorted(self._circle)}
        calls: dict[str, str] = {}
        for each, wait in waits.items():
            if wait is not None:
                call = self._trail(each).calls[wait.group].get(wait.call)
                calls[str(each)] = wait.what if call is None else call.words
        self._publish(
            Standstill(
                self.rank,
                "collectives of several groups",
                self._phase,
                time.monotonic() - self._since[1],
                (),
                (),
                tell_circle(waits, calls, {each: beats[each].phase for each in waits}),
                {str(each): [*beats[each].standing.stack] for each in waits},
                calls,
            ),
            beats,
        )

    def _take_back(self, late: Standstill) -> None:
        """Say that a wait which was named has ended."""
        self._late = None
        if self.tell_late is not None:
            missing = name_ranks([*late.culprits])
            text = f"The wait for {missing} ({late.phase}) has ended, and the run goes on."
            self.tell_late(dataclasses.replace(late, text=text, missing=(), culprits=()))

    @property
    def _silent(self) -> set[int]:
        """Ranks whose beats have not changed for some looks."""
        silent = {rank for rank, (_, looks) in self._heard.items() if looks >= _SILENT_LOOKS}
        return silent - {self.rank}

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
        end_s, beats = self.patience.end_s(self._phase), self._hear() | {self.rank: self._beat}
        verdict = judge(self.rank, wait, waited_s, beats, self._silent, advice=self._advice(end_s))
        # A rank that is known to take long is given as much time as if this one waited in that.
        phases = [beats[each].phase for each in verdict.culprits if each in beats]
        if any(waited_s <= self.patience.end_s(phase) for phase in phases):
            return
        if self._store.add("judges", 1) > 1 and waited_s < 2 * end_s:
            return
        self._publish(verdict, beats)

    def _publish(self, verdict: Standstill, beats: dict[int, Beat]) -> None:
        """End every rank with a verdict, those that cannot end themselves as well."""
        self._store.set("standstill", json.dumps(dataclasses.asdict(verdict)))
        self.tell(verdict)
        time.sleep(2 * self.pause_s)  # the others end by themselves, with the same words
        for rank in verdict.culprits:
            self._end_process(beats.get(rank))
        os._exit(FaultError.exit_code)

    def _advice(self, end_s: float) -> str:
        slow = f"set layout.deadline_s to more than {end_s:g}"
        if self.patience.given_s is not None:
            slow = f"raise layout.deadline_s = {end_s:g}"
        return (
            f"Run the same command again to resume from the last checkpoint; if a rank was only "
            f"slow, {slow}."
        )

    @staticmethod
    def _end_process(beat: Beat | None) -> None:
        if beat is not None and not beat.has_left and beat.host == socket.gethostname():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.process, signal.SIGKILL)

    def _end(self, verdict: Standstill) -> None:
        self.tell(verdict)
        os._exit(FaultError.exit_code)
