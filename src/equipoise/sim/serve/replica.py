"""One replica of a serving engine: the engine's scheduler, with predicted seconds as its clock.

Why
    A simulator with a scheduler of its own predicts another engine. Here the scheduler is the
    engine's, and only the forward pass is replaced by its price.

What it decides
    When each request samples its last token, which the engine would see and the scheduler cannot
    know. Iterations that only continue the same decodes are decided once; each is still priced by
    itself, so that their sum is that of one by one.

Kept true (tests/unit/sim/serve/test_replica.py)
    Deciding many iterations at once gives the same times as one by one, to the last bit; all
    tokens in come out; no page stays in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from equipoise.schedule.batching.iteration import Iteration, ServeOutcome
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import ServingPrice
from equipoise.sim.serve.record import ReplicaRecord, RequestRecord
from equipoise.spec.serving import IterationWork

_MANY = 1 << 20
"""Iterations that are decided at once, at most."""
_AT_ONCE = 64
"""Iterations that are priced at once, before the clock is looked at."""


class ClockPrice(ServingPrice, Protocol):
    """A price that also says what decodes in a row take."""

    def decodes_s(self, work: IterationWork, iterations: int) -> Sequence[float]:
        """This iteration and those after it, in which every sequence reads one token more [s].

        To the last bit as ``iteration_s`` of each.
        """


@dataclass(slots=True)
class _Paused:
    left: int
    """Tokens that it still generates."""
    last_s: float
    """When its last token came."""
    is_swapped: bool
    """Whether all that it had computed is in host memory."""


class Replica:
    """A scheduler and its clock."""

    def __init__(self, scheduler: Scheduler, price: ClockPrice, *, at_once: int = _MANY) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.record = ReplicaRecord(pages=scheduler.settings.pages)
        self._price = price
        self._at_once = at_once
        self._requests: dict[str, RequestRecord] = {}
        self._step = 0
        """Iterations so far, as decodes count them."""
        self._ends: list[tuple[int, str]] = []
        """(step after which it ends, request) of those that decode, and of some that did."""
        self._end_of: dict[str, int] = {}
        self._paused: dict[str, _Paused] = {}
        """Requests that decoded and were preempted."""

    def submit(self, request: ServeRequest, record: RequestRecord) -> None:
        """A request arrives, not before ``now_s``."""
        self.scheduler.submit(request)
        if not self._requests:
            self.now_s = max(self.now_s, request.arrival_s)
        self._requests[request.id] = record

    def run_until(self, until_s: float) -> None:
        """Run iterations that begin before this time."""
        while self.now_s < until_s:
            if not self._run_one(until_s):
                return

    def _run_one(self, until_s: float) -> bool:
        repeats = self._steps_to_end() if self._at_once > 1 else 1
        scheduler = self.scheduler
        iteration = scheduler.decide(self.now_s, min(repeats, self._at_once))
        if iteration is None:
            return False
        record = self.record
        self._pause(iteration)
        resumed = self._resume(iteration)
        record.most_pages = max(record.most_pages, scheduler.used_pages)
        ran = self._let_pass(iteration, resumed, until_s)
        record.iterations += ran
        record.output_tokens += ran * iteration.decodes
        self._step += ran
        outcomes = self._prefilled(iteration)
        outcomes += self._decoded()
        scheduler.done(outcomes, self.now_s, ran)
        return True

    def _steps_to_end(self) -> int:
        """Iterations up to the first end of a request that decodes."""
        ends = self._ends
        while ends and self._end_of.get(ends[0][1]) != ends[0][0]:
            heappop(ends)
        return max(1, ends[0][0] - self._step) if ends else 1

    def _let_pass(self, iteration: Iteration, resumed: int, until_s: float) -> int:
        """Move the clock on by the iteration's repeats, as long as nothing arrives."""
        work, gaps = iteration.work, self.record.gaps
        counted = iteration.decodes - resumed
        begin_s = now_s = self.now_s
        ran, left = 0, iteration.repeats
        seconds: Sequence[float] = [iteration.predicted_s]
        while True:
            for each_s in seconds:
                if counted:
                    gaps.append((each_s, counted))
                now_s += each_s
                ran += 1
                if now_s >= until_s:
                    break
            left -= len(seconds)
            if now_s >= until_s or not left:
                break
            # Further iterations decode only: every sequence reads one token more in each.
            grown = ran * work.sequences
            seconds = self._price.decodes_s(
                IterationWork(
                    work.tokens,
                    work.pairs + grown,
                    work.kv_tokens + grown,
                    work.sequences,
                    work.logits,
                ),
                min(left, _AT_ONCE),
            )
        self.now_s = now_s
        self.record.busy_s += now_s - begin_s
        return ran

    def _pause(self, iteration: Iteration) -> None:
        self.record.preemptions += len(iteration.preempted)
        moved = {each.request for each in iteration.swaps_out}
        for name in iteration.preempted:
            end = self._end_of.pop(name, None)
            if end is not None:
                self._paused[name] = _Paused(end - self._step, self.now_s, name in moved)
            elif name in self._paused:  # preempted while it was computed again
                self._paused[name].is_swapped = False

    def _resume(self, iteration: Iteration) -> int:
        """Requests whose rows come back from host memory decode in this iteration already."""
        resumed = 0
        for swap in iteration.swaps_in:
            paused = self._paused.get(swap.request)
            if paused is not None and paused.is_swapped:
                del self._paused[swap.request]
                self._decode(swap.request, paused.left)
                self.record.gaps.append((self.now_s + iteration.predicted_s - paused.last_s, 1))
                resumed += 1
        return resumed

    def _decode(self, name: str, left: int) -> None:
        self._end_of[name] = self._step + left
        heappush(self._ends, (self._step + left, name))

    def _prefilled(self, iteration: Iteration) -> list[ServeOutcome]:
        outcomes = []
        for chunk in iteration.prefills:
            self.record.prompt_tokens += chunk.tokens
            name = chunk.request
            if chunk.samples:
                paused = self._paused.pop(name, None)
                self.record.output_tokens += 1
                if paused is None:
                    request = self._requests[name]
                    request.first_s = self.now_s
                    left = request.traced.output_tokens - 1
                else:
                    left = paused.left - 1
                    self.record.gaps.append((self.now_s - paused.last_s, 1))
                if left:
                    self._decode(name, left)
                else:
                    outcomes.append(self._end(name))
                continue
            request = self._requests[name]
            computed = chunk.start + chunk.tokens
            if not request.traced.output_tokens and computed == request.traced.prompt_tokens:
                request.first_s = self.now_s
                outcomes.append(self._end(name))
        return outcomes

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
        self._requests.pop(name).end_s = self.now_s
        return ServeOutcome(name, ended=True)
