"""A small serving loop for tests: a price, and the engine's side of the scheduler, with checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from equipoise.schedule.batching.iteration import BatchSchedule, ServeOutcome
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.spec.serving import IterationWork, chunk_pairs


@dataclass(frozen=True)
class LinearPrice:
    """Seconds that are linear in every size."""

    iteration: float = 1e-3
    token: float = 1e-4
    pair: float = 1e-8
    swap: float = 1e-5

    def iteration_s(self, work: IterationWork) -> float:
        return self.iteration + self.token * work.tokens + self.pair * work.pairs

    def prompt_s(self, start: int, tokens: int) -> float:
        return self.token * tokens + self.pair * chunk_pairs(start, tokens)

    def output_s(self, start: int, tokens: int) -> float:
        return self.prompt_s(start, tokens)

    def swap_s(self, tokens: int) -> float:
        return self.swap * tokens


@dataclass
class Served:
    """What became of one request."""

    computed: int = 0
    sampled: int = 0
    recomputed: int = 0
    """Tokens that preemption took away."""
    hits: int = 0
    first_s: float | None = None
    end_s: float | None = None
    pages: list[int] = field(default_factory=list)


class Loop:
    """The engine's side: obeys schedules, and checks that each can be obeyed.

    ``outputs`` says how many tokens each request generates.
    """

    def __init__(self, scheduler: Scheduler, outputs: dict[str, int]) -> None:
        self.scheduler = scheduler
        self.outputs = outputs
        self.requests: dict[str, ServeRequest] = {}
        self.served: dict[str, Served] = {}
        self.now_s = 0.0
        self.schedules: list[BatchSchedule] = []
        self.rows: dict[int, tuple[object, ...]] = {}
        """What each page holds: tenant and, token by token, what was written."""
        self.swapped: dict[str, tuple[int, int]] = {}

    def submit(self, request: ServeRequest) -> None:
        self.scheduler.submit(request)
        self.requests[request.id] = request
        self.served[request.id] = Served()

    def step(self) -> bool:
        """One iteration; False if there was nothing to do."""
        schedule = self.scheduler.plan(self.now_s)
        if schedule is None:
            return False
        self.schedules.append(schedule)
        self._obey_swaps(schedule)
        outcomes = []
        page_tokens = self.scheduler.settings.page_tokens
        holders: dict[int, list[str]] = {}
        for chunk in schedule.chunks:
            mine = self.served[chunk.request]
            request = self.requests[chunk.request]
            assert chunk.tokens >= 1
            if mine.computed == 0 and chunk.start and chunk.request not in self.swapped:
                assert chunk.start % page_tokens == 0, "only whole pages come from the cache"
                mine.hits += chunk.start
            else:
                assert chunk.start == mine.computed
            mine.computed = chunk.start + chunk.tokens
            known = request.prompt_tokens + mine.sampled
            assert mine.computed <= known
            assert len(chunk.pages) * page_tokens >= mine.computed
            assert len(set(chunk.pages)) == len(chunk.pages)
            first_written = chunk.start // page_tokens
            for page in chunk.pages[first_written:]:
                holders.setdefault(page, []).append(chunk.request)
            assert chunk.samples == (mine.computed == known and request.most_tokens > 0)
            if chunk.samples:
                mine.sampled += 1
                if mine.first_s is None:
                    mine.first_s = self.now_s + schedule.predicted_s
            goal = self.outputs[chunk.request]
            if (chunk.samples and mine.sampled == goal) or (not goal and mine.computed == known):
                outcomes.append(ServeOutcome(chunk.request, ended=True))
                mine.end_s = self.now_s + schedule.predicted_s
        assert all(len(each) == 1 for each in holders.values()), "a written page has one writer"
        work = schedule.work
        assert work.tokens == sum(each.tokens for each in schedule.chunks)
        assert work.sequences == len(schedule.chunks)
        assert work.logits == sum(each.logits for each in schedule.chunks)
        assert work.pairs == sum(chunk_pairs(c.start, c.tokens) for c in schedule.chunks)
        assert work.kv_tokens == sum(c.start + c.tokens for c in schedule.chunks)
        self.now_s += schedule.predicted_s
        self.scheduler.done(outcomes, self.now_s)
        return True

    def _obey_swaps(self, schedule: BatchSchedule) -> None:
        out = {each.request for each in schedule.swaps_out}
        for name in schedule.preempted:
            mine = self.served[name]
            if name not in out:
                mine.recomputed += mine.computed
                mine.computed = 0
                self.swapped.pop(name, None)
        for each in schedule.swaps_out:
            assert len(each.pages) == len(each.slots)
            self.swapped[each.request] = each.slots
        for each in schedule.swaps_in:
            assert self.swapped[each.request] == each.slots

    def run(self, arrivals: Sequence[ServeRequest] = ()) -> None:
        """Submit each request when it arrives, and run until all have ended."""
        waiting = sorted(arrivals, key=lambda each: each.arrival_s)
        while waiting or not self.scheduler.is_idle:
            while waiting and waiting[0].arrival_s <= self.now_s:
                self.submit(waiting.pop(0))
            if not self.step():
                assert waiting, "requests are here, but nothing is decided"
                self.now_s = max(self.now_s, waiting[0].arrival_s)
