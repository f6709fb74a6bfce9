"""Replicas of a serving engine: the engine's schedulers, with predicted seconds as their clock.

Why
    A simulator with a scheduler of its own predicts another engine. Here the scheduler is the
    engine's, and only the forward pass is replaced by its price.

What it decides
    A replica without a pipeline runs one iteration after the other. Iterations that only continue
    the same decodes are decided once; each is still priced by itself, so that their sum is that of
    one by one.

    A pipeline of p stages keeps p batches in flight. Each has a scheduler of its own with a share
    of the pages, since a sequence's next token needs its last; a batch enters the first stage when
    that is free and its own last pass has come back. Passes never overtake each other::

        stage 0   A B C . A B C .
        stage 1     A B C . A B C       A's second pass begins when its first has left stage 2
        stage 2       A B C . A B C

Kept true (tests/unit/sim/serve/test_run.py, tests/unit/sim/serve/test_pipeline.py)
    Deciding many iterations at once gives the same times as one by one, to the last bit; a
    pipeline of one stage is a replica without; no stage runs two passes at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from equipoise.cost.serving import StagedPrice
from equipoise.schedule.batching.iteration import Iteration
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import ServingPrice
from equipoise.sim.serve.lane import Ended, Lane
from equipoise.sim.serve.record import ReplicaRecord, RequestRecord
from equipoise.spec.serving import IterationWork

_AT_ONCE = 64
"""Iterations that are priced at once, before the clock is looked at."""


class ClockPrice(ServingPrice, Protocol):
    """A price that also says what decodes in a row take."""

    def decodes_s(self, work: IterationWork, iterations: int) -> Sequence[float]:
        """This iteration and those after it, in which every sequence reads one token more [s].

        To the last bit as ``iteration_s`` of each.
        """


class Replica(Protocol):
    """What serves requests."""

    record: ReplicaRecord

    @property
    def backlog_s(self) -> float:
        """Predicted work of all requests here that is not done yet [s]."""

    def submit(self, request: ServeRequest, record: RequestRecord) -> None:
        """A request arrives, not before the time up to which this has run."""

    def run_until(self, until_s: float) -> None:
        """Run iterations that begin before this time."""

    def close(self) -> None:
        """All requests have ended."""


class WholeReplica:
    """One scheduler and its clock."""

    def __init__(self, lane: Lane, record: ReplicaRecord, price: ClockPrice) -> None:
        self.record = record
        self._lane = lane
        self._price = price

    @property
    def backlog_s(self) -> float:
        """Predicted work of all requests here that is not done yet [s]."""
        return self._lane.scheduler.backlog_s

    def submit(self, request: ServeRequest, record: RequestRecord) -> None:
        """A request arrives, not before the time up to which this has run."""
        self._lane.submit(request, record)

    def run_until(self, until_s: float) -> None:
        """Run iterations that begin before this time."""
        lane, record = self._lane, self.record
        scheduler = lane.scheduler
        while lane.last_s < until_s:
            decided = lane.decide(lane.last_s)
            if decided is None:
                return
            iteration, counted = decided
            record.most_pages = max(record.most_pages, scheduler.used_pages)
            ran, now_s = self._let_pass(iteration, counted, until_s)
            lane.finish(iteration, ran, now_s)

    def close(self) -> None:
        """All requests have ended."""
        self.record.hit_tokens = self._lane.scheduler.cache_tokens[0]

    def _let_pass(self, iteration: Iteration, counted: int, until_s: float) -> tuple[int, float]:
        """How many of the iteration's repeats run before anything arrives, and until when."""
        work, gaps = iteration.work, self.record.gaps
        begin_s = now_s = self._lane.last_s
        ran, left = 0, iteration.repeats
        self._lane.passed(begin_s + iteration.predicted_s)
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
            seconds = self._price.decodes_s(work.after(ran), min(left, _AT_ONCE))
        self.record.busy_s += now_s - begin_s
        return ran, now_s


@dataclass(slots=True)
class _Flight:
    """An iteration that a lane has begun."""

    iteration: Iteration
    counted: int
    ran: int = 0


class PipelineReplica:
    """As many schedulers as stages, whose iterations follow each other through the stages."""

    def __init__(self, lanes: Sequence[Lane], record: ReplicaRecord, price: StagedPrice) -> None:
        self.record = record
        self._lanes = tuple(lanes)
        self._price = price
        self._free_s = [0.0] * len(price.stages)
        """When each stage is free."""
        self._flights: dict[int, _Flight] = {}

    @property
    def backlog_s(self) -> float:
        """Predicted work of all requests here that is not done yet [s]."""
        return sum(each.scheduler.backlog_s for each in self._lanes)

    def submit(self, request: ServeRequest, record: RequestRecord) -> None:
        """A request arrives, not before the time up to which this has run."""
        lane = min(self._lanes, key=lambda each: each.scheduler.backlog_s)
        lane.submit(request, record)

    def run_until(self, until_s: float) -> None:
        """Run passes that enter the first stage before this time."""
        while True:
            ready = [
                (max(lane.last_s, self._free_s[0]), at)
                for at, lane in enumerate(self._lanes)
                if not lane.is_idle
            ]
            if not ready or min(ready)[0] >= until_s:
                break
            begin_s, at = min(ready)
            self._pass_once(at, begin_s)
        # What arrives changes the next decision.
        for at in list(self._flights):
            self._land(at)

    def close(self) -> None:
        """All requests have ended."""
        self.record.hit_tokens = sum(each.scheduler.cache_tokens[0] for each in self._lanes)

    def _pass_once(self, at: int, begin_s: float) -> None:
        lane, flight = self._lanes[at], self._flights.get(at)
        if flight is None:
            decided = lane.decide(begin_s)
            if decided is None:
                raise RuntimeError("requests wait, and their scheduler has nothing to do")
            flight = self._flights[at] = _Flight(*decided)
            held = sum(each.scheduler.used_pages for each in self._lanes)
            self.record.most_pages = max(self.record.most_pages, held)
        end_s = self._flow(flight.iteration.work.after(flight.ran), begin_s)
        if flight.counted:
            self.record.gaps.append((end_s - lane.last_s, flight.counted))
        if not flight.ran:
            lane.passed(end_s)
        lane.last_s = end_s
        flight.ran += 1
        if flight.ran == flight.iteration.repeats:
            self._land(at)

    def _flow(self, work: IterationWork, begin_s: float) -> float:
        """One pass through all stages; returns when its tokens are back at the first."""
        seconds = self._price.stages_s(work)
        hop_s = self._price.hop.seconds(work.tokens)
        at_s = begin_s
        for stage, each_s in enumerate(seconds):
            at_s = max(at_s + (hop_s if stage else 0.0), self._free_s[stage]) + each_s
            self._free_s[stage] = at_s
        self.record.busy_s += sum(seconds) / len(seconds)
        return at_s

    def _land(self, at: int) -> None:
        flight, lane = self._flights.pop(at), self._lanes[at]
        lane.finish(flight.iteration, flight.ran, lane.last_s)


def make_replica(
    make_scheduler: Callable[[], Scheduler],
    price: ClockPrice | StagedPrice,
    *,
    at_once: int,
    ended: Ended | None = None,
) -> Replica:
    """A replica that a price describes.

    Args:
        make_scheduler: An engine's scheduler, one for each batch in flight.
        price: What iterations take.
        at_once: Equal iterations that are decided at once, at most.
        ended: Called with each request that ends here.
    """
    count = len(price.stages) if isinstance(price, StagedPrice) else 1
    schedulers = [make_scheduler() for _ in range(count)]
    record = ReplicaRecord(pages=sum(each.settings.pages for each in schedulers))
    lanes = [Lane(each, record, at_once=at_once, ended=ended) for each in schedulers]
    if isinstance(price, StagedPrice):
        return PipelineReplica(lanes, record, price)
    return WholeReplica(lanes[0], record, price)
