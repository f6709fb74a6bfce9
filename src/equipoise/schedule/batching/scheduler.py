"""Decide every iteration of a serving engine: who computes which tokens now, and in which pages.

Why
    One device serves many. Decodes must not wait for long prompts, nobody may starve, and memory
    for keys and values runs out. The engine obeys what is decided here; the simulator runs the same
    code with predicted seconds as its clock.

What it decides
    An iteration runs every sequence that decodes, but for those of tenants beyond their share,
    which take turns (``turns.py``); then prompts in the order of the policy, in chunks that fill
    the predicted time of an iteration up to a budget (``budget.py``). A request is admitted when
    its turn comes and there are pages for all tokens it has; if there are not, nobody overtakes
    it. When a decode needs a page and none is left, the least deserving request is preempted: its
    rows are moved to host memory, or computed again, whichever is predicted to be cheaper.

    Deciding costs as much as changes: decodes that merely go on are counted, not visited.
    ``decide`` may therefore stand for many equal iterations at once, which are exactly those that
    would be decided one by one.

Kept true (tests/unit/schedule/batching/test_scheduler.py, by Hypothesis)
    Every token of a request is computed exactly once, but for what preemption takes; pages and
    slots are all free or cached when all requests have ended; requests that arrive at the same time
    may be submitted in any order.

Sources
    Continuous batching: Orca (OSDI 2022). Chunked prefill: Sarathi, arXiv:2308.16369. Pages:
    vLLM, arXiv:2309.06180.
"""

from collections import Counter
from collections.abc import Iterable

from equipoise.base.errors import SpecError
from equipoise.schedule.batching.budget import PromptsBudget
from equipoise.schedule.batching.fair.policy import FairJob, MakePolicy
from equipoise.schedule.batching.iteration import (
    BatchSchedule,
    Iteration,
    ServeChunk,
    ServeOutcome,
    Swap,
)
from equipoise.schedule.batching.request import QueueFullError, ServeRequest
from equipoise.schedule.batching.residents import Residents
from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import (
    BatchSettings,
    ServingPrice,
    require_possible,
)
from equipoise.schedule.batching.totals import Totals
from equipoise.schedule.batching.turns import DecodeTurn


class Scheduler:
    """Requests in, iterations out; one thread calls it.

    ``submit`` and ``abort`` may be called at any time, ``decide`` (or ``plan``) and ``done`` in
    turns.
    """

    def __init__(
        self, settings: BatchSettings, price: ServingPrice, make_policy: MakePolicy
    ) -> None:
        self.settings = settings
        self._price = price
        self.policy = make_policy(settings.weights, settings.grace_s)
        self._residents = Residents(settings, price, self.policy)
        self._inbox: list[tuple[FairJob, Sequence]] = []
        self._sequences: dict[str, Sequence] = {}
        """All requests that are here."""
        self._tenants = Counter[str]()
        """How many of them each tenant has."""
        self._aborted: list[Sequence] = []
        """Those that were given up while an iteration runs."""
        self._number = 0
        self._current: Iteration | None = None
        self._is_draining = False

    # Requests come and go.

    def submit(self, request: ServeRequest) -> None:
        """Take a request.

        Raises:
            FitError: it could never run, however long it waited.
            QueueFullError: too many wait, or the scheduler drains; says when to try again.
            SpecError: a size is out of range, or the id is taken.
        """
        if request.id in self._sequences:
            raise SpecError(f'A request is called "{request.id}" already. Choose another id.')
        require_possible(request, self.settings)
        waiting = self.waiting_count
        if self._is_draining:
            raise QueueFullError("The server is shutting down.", self.retry_after_s())
        if waiting >= self.settings.queued_requests:
            retry_s = self.retry_after_s()
            raise QueueFullError(
                f"{waiting} requests wait already, as many as may. Try again in {retry_s:.0f} s.",
                retry_s,
            )
        sequence = Sequence(request)
        cached = len(self._residents.memory.hits(sequence)) * self.settings.page_tokens
        self._residents.accounts.open(sequence, max(cached, request.given_tokens))
        job = FairJob(request.id, request.tenant, request.arrival_s, sequence.left_s, request.job)
        self._inbox.append((job, sequence))
        self._sequences[request.id] = sequence
        self._tenants[request.tenant] += 1

    def abort(self, request_id: str, now_s: float) -> bool:
        """Give a request up, whatever its state; False if it is not here.

        One that runs at the moment keeps its pages until ``done``.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if self._current is not None and request_id in self._residents.running:
            self._aborted.append(sequence)
        else:
            self._end(sequence, now_s)
        return True

    def drain(self) -> None:
        """Take no further request; those that are here go on."""
        self._is_draining = True

    @property
    def waiting_count(self) -> int:
        """Requests without pages."""
        return len(self._sequences) - len(self._residents.running)

    @property
    def running_count(self) -> int:
        """Requests with pages."""
        return len(self._residents.running)

    @property
    def is_idle(self) -> bool:
        """Whether no request is here."""
        return not self._sequences

    @property
    def holders(self) -> list[str]:
        """Requests with tokens in pages or in slots of host memory."""
        running = self._residents.running
        return [name for name, each in self._sequences.items() if each.slots or name in running]

    def forget_cache(self) -> None:
        """Share no page that was computed so far and that nobody uses."""
        self._residents.memory.pool.evict_all()

    @property
    def used_pages(self) -> int:
        """Pages that requests hold."""
        return self._residents.memory.pool.used

    @property
    def idle_pages(self) -> int:
        """Pages that nobody uses, kept for prompts that begin like one before."""
        return self._residents.memory.pool.idle

    @property
    def available_pages(self) -> int:
        """Pages that a request could get: free ones, and cached ones that nobody uses."""
        return self._residents.memory.pool.available

    @property
    def preemptions(self) -> dict[str, int]:
        """How often a request lost its pages, by what became of their contents."""
        return dict(self._residents.preemptions)

    @property
    def cache_tokens(self) -> tuple[int, int]:
        """Tokens that were found in the cache, and tokens that were looked up."""
        return self._residents.hit_tokens, self._residents.asked_tokens

    @property
    def backlog_s(self) -> float:
        """Predicted work of all requests here that is not done yet [s]."""
        return self._residents.accounts.backlog_s

    def retry_after_s(self) -> float:
        """Predicted time until the next waiting request is taken, at least a second [s]."""
        return max(1.0, self.backlog_s / max(1, len(self._sequences)))

    # An iteration.

    def plan(self, now_s: float) -> BatchSchedule | None:
        """The next iteration with all its chunks; None if there is nothing to do."""
        iteration = self.decide(now_s)
        return None if iteration is None else self.write(iteration)

    def write(self, iteration: Iteration) -> BatchSchedule:
        """Write out the chunks of the iteration that was just decided."""
        chunks = [
            ServeChunk(each.request.id, each.computed, 1, each.page_runs(), samples=True, logits=1)
            for each in self._residents.decodes.sequences()
        ]
        return BatchSchedule(
            iteration.number,
            (*chunks, *iteration.prefills),
            iteration.work,
            iteration.predicted_s,
            iteration.swaps_out,
            iteration.swaps_in,
            iteration.preempted,
            iteration,
        )

    def decide(self, now_s: float, repeats: int = 1) -> Iteration | None:
        """Decide the next iteration, or up to ``repeats`` equal ones; None if there is none.

        The caller passes more than 1 only if no request ends within so few iterations.
        """
        if self._current is not None:
            raise RuntimeError("done() must follow before the next decision")
        self._receive(now_s)
        preempted: list[Sequence] = []
        swaps_out: list[Swap] = []
        turn = self._choose_decodes(preempted, swaps_out)
        totals = self._totals(turn)
        swaps_in: list[Swap] = []
        prefills = self._fill(totals, swaps_in, may_admit=not preempted)
        if not totals.work.sequences:
            return None
        if repeats > 1:
            changes = prefills or preempted or swaps_in or turn.rested or turn.resumed
            repeats = self._equal_iterations(repeats, bool(changes))
        self._number += 1
        self._current = Iteration(
            self._number,
            tuple(prefills),
            len(self._residents.decodes),
            totals.work,
            totals.predicted_s,
            repeats,
            tuple(swaps_out),
            tuple(swaps_in),
            tuple(each.request.id for each in preempted),
            turn.rested,
            turn.resumed,
        )
        return self._current

    def done(self, outcomes: Iterable[ServeOutcome], now_s: float, repeats: int = 1) -> None:
        """The iteration that was decided last has run, ``repeats`` times.

        Args:
            outcomes: Requests that ended, or have new page keys.
            now_s: Time.
            repeats: At most those of the iteration.
        """
        iteration = self._current
        if iteration is None:
            raise RuntimeError("decide() must come before done()")
        self._current = None
        self._residents.memory.end_iteration()
        outcomes = list(outcomes)
        for outcome in outcomes:
            if outcome.failed:
                self._sequences[outcome.request].keys = ()
        left = repeats - self._residents.decodes.advance(repeats)
        while left:
            self._residents.grow_decodes([])
            left -= self._residents.decodes.advance(left)
        for chunk in iteration.prefills:
            self._residents.advance(self._residents.running[chunk.request], chunk)
        ended = []
        for outcome in outcomes:
            sequence = self._sequences[outcome.request]
            if outcome.page_keys:
                sequence.keys = (*sequence.keys, *outcome.page_keys)
            if outcome.ended:
                ended.append(sequence)
        for sequence in sorted(ended, key=_canonical):
            self._end(sequence, now_s)
            self._residents.accounts.note(sequence)
        for sequence in sorted(self._aborted, key=_canonical):
            if self._sequences.get(sequence.request.id) is sequence:  # it did not end by itself
                self._end(sequence, now_s)
        self._aborted.clear()

    # Parts of a decision.

    def _totals(self, turn: DecodeTurn) -> Totals:
        """The decodes, and as much room for prompts as they leave."""
        decodes, limit = self._residents.decodes.work(), turn.limit
        if limit is not None and decodes.sequences:
            has_time = limit.holds
        else:
            count = len(self._sequences), len(self._tenants)
            has_time = PromptsBudget(self.settings, self._price, decodes, *count).holds
        is_shared = limit is not None
        return Totals(decodes, self.settings, self._price, has_time, is_shared=is_shared)

    def _choose_decodes(self, preempted: list[Sequence], swaps_out: list[Swap]) -> DecodeTurn:
        """Who decodes, with pages for the next token."""
        residents, turn = self._residents, DecodeTurn()
        while True:
            has_prompts = bool(
                residents.prefilling or (self.waiting_count and residents.has_place())
            )
            turn = turn.then(residents.turns.next(self._tenants, has_prompts=has_prompts))
            swaps_out += residents.grow_decodes(preempted)
            # All whose turn it was may have lost their pages.
            if len(residents.decodes) or not residents.decodes.resting:
                return turn

    def _receive(self, now_s: float) -> None:
        if not self._inbox:
            return
        self._inbox.sort(key=lambda pair: (pair[0].arrival_s, pair[0].id))
        for job, _ in self._inbox:
            self.policy.arrive(job, now_s)
        self._inbox.clear()

    def _fill(self, totals: Totals, swaps_in: list[Swap], *, may_admit: bool) -> list[ServeChunk]:
        """Add chunks of prompts, and admit requests, in the order of the policy."""
        chunks: list[ServeChunk] = []
        prefilling = self._residents.prefilling
        turns = [(self._residents.turn(each), name) for name, each in prefilling.items()]
        turns.sort(reverse=True)
        while True:
            head = self.policy.first() if may_admit and self._residents.has_place() else None
            if head is not None and (not turns or self.policy.key(head) < turns[-1][0]):
                sequence = self._sequences[head]
                if not totals.has_room():
                    break
                is_admitted = self._residents.admit(sequence, swaps_in)
                if is_admitted is None:
                    may_admit = False
                    continue
                if not is_admitted:  # it waits for a sibling
                    continue
                if sequence.is_decoding:
                    totals.add_decode(sequence.known)
                    continue
            elif turns:
                sequence = prefilling[turns.pop()[1]]
            else:
                break
            tokens = totals.chunk_tokens(sequence)
            if not tokens:
                break
            chunk = self._chunk(sequence, tokens)
            chunks.append(chunk)
            totals.add_chunk(chunk.start, tokens, chunk.logits)
        return chunks

    def _chunk(self, sequence: Sequence, tokens: int) -> ServeChunk:
        request = sequence.request
        is_last = sequence.computed + tokens == sequence.known
        samples = is_last and request.most_tokens > 0
        start, logits = sequence.computed, int(is_last)
        if request.scores_prompt:  # what was scored before a preemption is not scored again
            logits = max(int(samples), start + tokens - max(start, sequence.charged))
        runs = sequence.page_runs()
        return ServeChunk(request.id, start, tokens, runs, samples, logits)

    def _equal_iterations(self, repeats: int, changes: bool) -> int:
        if changes or (self.waiting_count and self._residents.has_place()):
            return 1
        repeats = self._residents.turns.repeats(repeats)
        available = self._residents.memory.pool.available
        while repeats > 1 and self._residents.decodes.pages_until(repeats - 1) > available:
            repeats //= 2
        return repeats

    # What happens to one sequence.

    def _end(self, sequence: Sequence, now_s: float) -> None:
        """Let a request go."""
        name = sequence.request.id
        inbox = [pair for pair in self._inbox if pair[1] is not sequence]
        has_arrived = len(inbox) == len(self._inbox)
        self._inbox = inbox
        if name in self._residents.running:
            # The token that was sampled last is known, but nobody computes it any more.
            self._residents.stop(sequence)
            self._residents.memory.register(sequence)
        else:
            self._residents.siblings.forget(sequence)
        if has_arrived:
            self.policy.finish(name, now_s)
        self._residents.memory.release(sequence)
        self._residents.accounts.close(sequence)
        del self._sequences[name]
        tenant = sequence.request.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]


def _canonical(sequence: Sequence) -> tuple[float, str]:
    return sequence.request.arrival_s, sequence.request.id
