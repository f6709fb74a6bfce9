"""One of the engine's schedulers in a simulation: when its requests sample, pause and end.

What it decides
    When each request samples its last token, which the engine would see and the scheduler cannot
    know. Iterations that only continue the same decodes are decided once. It has no clock: who
    drives it says when an iteration begins, and when it has run.

    A request that brings its prompt's keys and values, and the token that was sampled there, goes
    on here: its first token has come already.

Kept true (tests/unit/sim/serve/test_run.py)
    Deciding many iterations at once gives the same times as one by one, to the last bit; all
    tokens in come out; no page stays in use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from equipoise.schedule.batching.iteration import Iteration, ServeOutcome
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.sim.serve.record import ReplicaRecord, RequestRecord

Ended = Callable[[RequestRecord], None]
"""Called with each request when its last token has come."""

MANY = 1 << 20
"""Iterations that are decided at once, at most."""


@dataclass(slots=True)
class _Paused:
    left: int
    """Tokens that it still generates."""
    last_s: float
    """When its last token came."""
    is_swapped: bool
    """Whether all that it had computed is in host memory."""


class Lane:
    """A scheduler, and what becomes of its requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        record: ReplicaRecord,
        *,
        at_once: int = MANY,
        ended: Ended | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.last_s = 0.0
        """When its last iteration ended, or its first request came after a pause."""
        self._record = record
        self._at_once = at_once
        self._ended = ended
        self._requests: dict[str, RequestRecord] = {}
        self._step = 0
        """Iterations so far, as decodes count them."""
        self._ends: list[tuple[int, str]] = []
        """(step after which it ends, request) of those that decode, and of some that did."""
        self._end_of: dict[str, int] = {}
        self._paused: dict[str, _Paused] = {}
        """Requests that decoded, and rest or were preempted."""
        self._resting: set[str] = set()
        """Those of them that rest: they have their pages."""
        self._resumed_s: list[float] = []
        """When those that decode again, from host memory or a rest, got their last token."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is here."""
        return not self._requests

    def submit(self, request: ServeRequest, record: RequestRecord) -> None:
        """A request arrives, not before ``last_s``."""
        self.scheduler.submit(request)
        if not self._requests:
            self.last_s = max(self.last_s, request.arrival_s)
        self._requests[request.id] = record

    def decide(self, now_s: float) -> tuple[Iteration, int] | None:
        """The next iteration, and how many of its decodes follow their last token directly."""
        repeats = self._steps_to_end() if self._at_once > 1 else 1
        iteration = self.scheduler.decide(now_s, min(repeats, self._at_once))
        if iteration is None:
            return None
        self._take_turns(iteration)
        self._pause(iteration)
        self._resume(iteration)
        return iteration, iteration.decodes - len(self._resumed_s)

    def passed(self, end_s: float) -> None:
        """The first of an iteration's repeats has ended."""
        if self._resumed_s:
            self._record.gaps += [(end_s - last_s, 1) for last_s in self._resumed_s]
            self._resumed_s.clear()

    def finish(self, iteration: Iteration, ran: int, now_s: float) -> None:
        """The iteration that was decided last has run, ``ran`` times."""
        record = self._record
        record.count(iteration, ran)
        self._step += ran
        self.last_s = now_s
        outcomes = self._prefilled(iteration)
        outcomes += self._decoded()
        self.scheduler.done(outcomes, now_s, ran)

    def _steps_to_end(self) -> int:
        """Iterations up to the first end of a request that decodes."""
        ends = self._ends
        while ends and self._end_of.get(ends[0][1]) != ends[0][0]:
            heappop(ends)
        return max(1, ends[0][0] - self._step) if ends else 1

    def _take_turns(self, iteration: Iteration) -> None:
        """Requests that leave this iteration to others, and those that are back."""
        for name in iteration.rested:
            self._paused[name] = _Paused(self._end_of.pop(name) - self._step, self.last_s, True)
            self._resting.add(name)
        for name in iteration.resumed:
            self._resting.remove(name)
            if name in iteration.preempted:  # its turn came, and its pages went
                continue
            paused = self._paused.pop(name)
            self._decode(name, paused.left)
            self._resumed_s.append(paused.last_s)

    def _pause(self, iteration: Iteration) -> None:
        if not iteration.preempted:
            return
        self._record.preemptions += len(iteration.preempted)
        moved = {each.request for each in iteration.swaps_out}
        for name in iteration.preempted:
            end = self._end_of.pop(name, None)
            if end is not None:
                self._paused[name] = _Paused(end - self._step, self.last_s, name in moved)
            elif name in self._paused:
                # While it was computed again, some of it is missing wherever the rest is.
                decoded = name in self._resting or name in iteration.resumed
                self._paused[name].is_swapped = decoded and name in moved
                self._resting.discard(name)

    def _resume(self, iteration: Iteration) -> None:
        """Requests whose rows come back from host memory decode in this iteration already."""
        for swap in iteration.swaps_in:
            paused = self._paused.get(swap.request)
            if paused is not None and paused.is_swapped:
                del self._paused[swap.request]
                self._decode(swap.request, paused.left)
                self._resumed_s.append(paused.last_s)

    def _decode(self, name: str, left: int) -> None:
        self._end_of[name] = self._step + left
        heappush(self._ends, (self._step + left, name))

    def _prefilled(self, iteration: Iteration) -> list[ServeOutcome]:
        outcomes = []
        for chunk in iteration.prefills:
            name = chunk.request
            if chunk.samples:
                left = self._sampled(name)
                if left:
                    self._decode(name, left)
                else:
                    outcomes.append(self._end(name))
                continue
            request = self._requests[name]
            computed = chunk.start + chunk.tokens
            if not request.traced.output_tokens and computed == request.traced.prompt_tokens:
                request.first_s = self.last_s
                outcomes.append(self._end(name))
        return outcomes

    def _sampled(self, name: str) -> int:
        """A request's prompt, or all that it had, was computed; returns what is left of it."""
        now_s, gaps = self.last_s, self._record.gaps
        self._record.output_tokens += 1
        paused = self._paused.pop(name, None)
        if paused is not None:
            gaps.append((now_s - paused.last_s, 1))
            return paused.left - 1
        request = self._requests[name]
        if request.first_s >= 0.0:  # its first token came from the devices that compute prompts
            self._record.prompt_tokens -= 1  # which is the one that was computed here
            gaps.append((now_s - request.first_s, 1))
            return request.traced.output_tokens - 2
        request.first_s = now_s
        return request.here_tokens - 1

    def _decoded(self) -> list[ServeOutcome]:
        outcomes = []
        ends = self._ends
        while ends and ends[0][0] <= self._step:
            end, name = heappop(ends)
            if self._end_of.get(name) == end:
                outcomes.append(self._end(name))
        return outcomes

    def _end(self, name: str) -> ServeOutcome:
        self._end_of.pop(name, None)
        request = self._requests.pop(name)
        request.end_s = self.last_s
        if self._ended is not None:
            self._ended(request)
        return ServeOutcome(name, ended=True)
