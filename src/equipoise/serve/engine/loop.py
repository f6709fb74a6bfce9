"""The engine at work: a thread that asks the scheduler, computes, samples and tells.

What it decides
    Nothing about who computes when: it obeys the scheduler's iterations. What fails in one
    request ends that request; where a whole iteration fails, its chunks are computed one by one
    to find out whose fault it is. ::

        submit -> [scheduler] -> iteration -> [decoder] -> logits -> [sample] -> text -> events
                       ^------------- who ended, what new pages hold --------------'

Kept true (tests/unit/serve/engine/test_loop.py)
    Answers are those of each request by itself; every request gets exactly one last event; pages
    are all free or cached when the last request has ended; a failing request fails alone.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from equipoise.base.errors import FaultError
from equipoise.cost.serving import PacedPrice
from equipoise.observe.journal import EventSink
from equipoise.schedule.batching.iteration import BatchSchedule, ServeChunk, ServeOutcome
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings, paced
from equipoise.serve.calibration import IdleCalibration
from equipoise.serve.engine.answer import LiveAnswer
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.read import (
    LogitsRow,
    describe_failure,
    read_embeddings,
    read_logits,
)
from equipoise.serve.engine.request import (
    Event,
    GenerateRequest,
    Handle,
    RanksLostError,
    most_answer_tokens,
)
from equipoise.serve.engine.stats import EngineStats, Tally
from equipoise.serve.engine.threads import SharedCores, release_threads
from equipoise.serve.nano.report import NanoReport
from equipoise.serve.prompt import PromptReader

_IDLE_S = 0.5
"""Longest wait for a request before looking again [s]."""


class EngineLoop:
    """A model that answers many requests at once, on a thread of its own.

    ``submit`` and ``abort`` may be called from any thread. As a context manager it starts, and
    closes at the end.
    """

    def __init__(
        self,
        decoder: PagedDecoder,
        prompts: PromptReader,
        scheduler: Scheduler,
        *,
        context_tokens: int,
        sink: EventSink | None = None,
        nano: NanoReport | None = None,
        price: PacedPrice | None = None,
        calibration: IdleCalibration | None = None,
        cores: SharedCores | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a model and its scheduler; nothing runs before ``start``.

        Args:
            decoder: With a pool of the scheduler's size.
            prompts: The model's tokenizer and end tokens.
            scheduler: Decides every iteration.
            context_tokens: Most tokens of a prompt and its answer together.
            sink: Where each iteration's predicted and measured seconds go.
            nano: What overlapping nano-batches was worth.
            price: The scheduler's, if it is to follow the measured seconds.
            calibration: What is to be measured while no request is here.
            cores: How many threads compute; None for all.
            clock: Seconds, as the scheduler counts them.
        """
        self.prompts, self.context_tokens = prompts, context_tokens
        self.nano = nano or NanoReport(reason="not measured")
        self._decoder, self._scheduler, self._clock = decoder, scheduler, clock
        self._tally = Tally(sink or EventSink())
        self._price, self._calibration, self._cores = price, calibration, cores
        self._page_tokens = decoder.pool.page_tokens
        self._answers = dict[str, LiveAnswer]()
        self._computing = frozenset[str]()
        """Requests of the iteration at hand."""
        self._numbers = count()
        self._changed = threading.Condition()
        self._is_draining = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Begin to answer."""
        release_threads()
        self._thread.start()

    def submit(
        self, request: GenerateRequest, *, deliver: Callable[[Event], None] | None = None
    ) -> Handle:
        """Take a request.

        Args:
            request: What to continue, and how.
            deliver: Called with each event on the engine's thread, instead of the handle's queue.

        Raises:
            SpecError: a token is not in the vocabulary, or the text would exceed the context.
            FitError: the pool is too small for it, however long it waited.
            QueueFullError: too many wait, or the engine drains; it says when to try again.
        """
        vocab = self._decoder.decoder.model.vocab
        most_tokens = most_answer_tokens(request, vocab, self.context_tokens)
        name = f"{next(self._numbers)}"
        handle = Handle(name, len(request.prompt), self.abort, deliver)
        now_s = self._clock()
        answer = LiveAnswer(
            request,
            handle,
            self.prompts.tokenizer.core,
            end_ids=self.prompts.end_ids,
            most_tokens=most_tokens,
            arrival_s=now_s,
        )
        keys = answer.new_keys(self._page_tokens)
        sizes = ServeRequest(
            name,
            request.tenant,
            now_s,
            len(request.prompt),
            most_tokens,
            keys,
            request.salt,
            request.scores_prompt,
            request.job,
        )
        with self._changed:
            if self._is_closed:
                raise FaultError("The engine is closed. Start another one.")
            self._scheduler.submit(sizes)
            self._answers[name] = answer
            self._changed.notify()
        return handle

    def abort(self, name: str) -> None:
        """Give a request up; one that is unknown or has ended stays as it is."""
        with self._changed:
            answer = self._answers.get(name)
            if answer is None:
                return
            self._scheduler.abort(name, self._clock())
            answer.is_aborted = True
            if name not in self._computing:
                self._close(answer)
            self._changed.notify()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no further request, and wait for those here; whether ``timeout_s`` was enough."""
        with self._changed:
            self._is_draining = True
            self._scheduler.drain()
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop after the iteration at hand; requests that are still here are aborted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        for name in list(self._answers):
            self.abort(name)
        if self._calibration is not None:
            self._calibration.close()
        self._decoder.close()

    def __enter__(self) -> "EngineLoop":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def limits(self) -> BatchSettings:
        """What its scheduler may use."""
        return self._scheduler.settings

    @property
    def pool(self) -> KvPool:
        """Where keys and values are kept."""
        return self._decoder.pool

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self._decoder.decoder.model.hidden

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def missing(self) -> RanksLostError | None:
        """Why it cannot compute until ranks that are gone are back; None if it can."""
        return self._decoder.missing

    def stats(self) -> EngineStats:
        """Counts of now and so far."""
        with self._changed:
            pages, moved_bytes = self._decoder.pool.pages, self._decoder.moved_bytes
            return self._tally.stats(self._scheduler, pages, moved_bytes)

    # On the engine's thread.

    def _work(self) -> None:
        try:
            self._iterate()
        except BaseException as error:  # nobody may wait for a thread that is gone
            with self._changed:
                self._is_closed = True
                for answer in self._answers.values():
                    answer.give_up(
                        "error", f"The engine has stopped ({type(error).__name__}). Start it again."
                    )
            raise

    def _iterate(self) -> None:
        while (work := self._next()) is not None:
            (schedule, answers), lost = work, None
            self._has_all_cores()
            begin = self._clock()
            try:
                failed = self._run(schedule, answers, begin)
            except RanksLostError as error:
                lost, failed = error, {chunk.request for chunk in schedule.chunks}
            end = self._clock()
            with self._changed:
                if lost is not None:
                    self._lose(lost, end)
                is_measured = self._price is None or self._price.is_measured
                self._tally.add(schedule, end - begin, is_measured)
                if self._price is not None and lost is None:
                    self._price.note(schedule.predicted_s, end - begin)
                self._scheduler.done(self._outcomes(answers, failed), end)
                if lost is not None:
                    self._scheduler.forget_cache()
                self._computing = frozenset()
                for answer in answers:
                    if answer.finish is not None or answer.is_aborted:
                        self._close(answer)

    def _lose(self, error: RanksLostError, now_s: float) -> None:
        """End every request whose keys and values are gone; those without any go on."""
        for name in self._scheduler.holders:
            answer = self._answers.get(name)  # None if it was given up in this iteration
            if answer is not None:
                answer.give_up("error", str(error), error.retry_after_s)
                self._scheduler.abort(name, now_s)
                if name not in self._computing:
                    self._close(answer)

    def _next(self) -> tuple[BatchSchedule, list[LiveAnswer]] | None:
        """The next iteration with its chunks' answers, when there is one; None at the end."""
        with self._changed:
            rest_s = 0.0
            while not self._is_closed:
                if (schedule := self._scheduler.plan(self._clock())) is not None:
                    names = [chunk.request for chunk in schedule.chunks]
                    self._computing = frozenset(names)
                    return schedule, [self._answers[name] for name in names]
                if self._is_draining and self._scheduler.is_idle:
                    return None
                if (missing := self._decoder.missing) is not None:
                    self._restore(missing)
                elif (later := self._calibration) is not None and self._rested(later, rest_s):
                    self._calibrate(later)
                else:
                    rest_s = 0.0 if self._changed.wait(_IDLE_S) else rest_s + _IDLE_S
            return None

    def _has_all_cores(self) -> bool:
        """Whether others leave all cores; else fewer threads compute from now on."""
        return self._cores is None or self._cores.follow()

    def _rested(self, later: IdleCalibration, rest_s: float) -> bool:
        return self._scheduler.is_idle and rest_s >= later.rest_s(self._scheduler.idle_pages)

    def _calibrate(self, calibration: IdleCalibration) -> None:
        """Measure a little; whoever asks meanwhile waits for no more than that."""
        if not self._has_all_cores():  # what is measured beside others is not true later
            self._changed.wait(_IDLE_S)
            return
        self._scheduler.forget_cache()  # pages are overwritten
        self._changed.release()
        try:
            calibration.step()
        finally:
            self._changed.acquire()
        if not self._scheduler.is_idle:
            return
        if calibration.apply() and self._price is not None:
            settings = self._scheduler.settings
            self._scheduler.settings = paced(settings, self._price, self._decoder.ranks)
        if calibration.is_done:
            self.nano, self._calibration = calibration.nano or self.nano, None

    def _restore(self, missing: RanksLostError) -> None:
        """Start ranks that are gone before a request needs them; nothing else is under way.

        Health checks keep requests away until they are back, so no request would start them.
        """
        self._lose(missing, self._clock())
        self._scheduler.forget_cache()
        self._changed.release()  # nobody else may wait for processes to start
        try:
            self._decoder.restore()
        except RanksLostError:
            time.sleep(_IDLE_S)
        finally:
            self._changed.acquire()

    def _run(
        self, schedule: BatchSchedule, answers: Sequence[LiveAnswer], now_s: float
    ) -> set[str]:
        """Compute an iteration and tell its clients; the requests that failed."""
        self._decoder.swap(schedule.swaps_out, schedule.swaps_in)
        for chunk, answer in zip(schedule.chunks, answers, strict=True):
            if not answer.has_begun:
                answer.has_begun, answer.handle.cached_tokens = True, chunk.start
                answer.handle.waited_s = now_s - answer.arrival_s
        return self._compute(schedule.chunks, answers)

    def _compute(self, chunks: Sequence[ServeChunk], answers: Sequence[LiveAnswer]) -> set[str]:
        """Compute chunks and choose tokens; the requests whose rows are not to be used again."""
        try:
            return self._forward(chunks, answers)
        except RanksLostError:
            raise
        except Exception as error:  # whatever it is, the other requests go on
            if len(chunks) == 1:
                answers[0].give_up("error", describe_failure(error))
                return {chunks[0].request}
        failed = set[str]()
        for chunk, answer in zip(chunks, answers, strict=True):
            failed |= self._compute([chunk], [answer])
        return failed

    def _forward(self, chunks: Sequence[ServeChunk], answers: Sequence[LiveAnswer]) -> set[str]:
        tokens = list[int]()
        rows, packed = list[LogitsRow](), list[int]()
        embedded, last = list[LiveAnswer](), list[int]()
        for chunk, answer in zip(chunks, answers, strict=True):
            stop = chunk.start + chunk.tokens
            tokens += answer.tokens[chunk.start : stop]
            if answer.request.embeds:
                embedded += [answer] * chunk.logits
                last += [len(tokens) - 1] * chunk.logits
                continue
            packed += range(len(tokens) - chunk.logits, len(tokens))
            rows += [LogitsRow(answer, at) for at in range(stop - chunk.logits, stop)]
        x_tD = self._decoder.run(chunks, tokens)
        failed, begin = set[str](), 0
        for logits_RV in self._decoder.logits(x_tD, packed):
            failed |= read_logits(logits_RV, rows[begin : begin + len(logits_RV)])
            begin += len(logits_RV)
        if embedded:
            failed |= read_embeddings(self._decoder.hidden(x_tD, last), embedded)
        return failed

    def _outcomes(self, answers: Iterable[LiveAnswer], failed: set[str]) -> list[ServeOutcome]:
        outcomes = list[ServeOutcome]()
        for answer in answers:
            name, keys = answer.handle.name, answer.new_keys(self._page_tokens)
            has_ended = answer.finish is not None
            if has_ended or keys:
                outcomes.append(ServeOutcome(name, has_ended, keys, name in failed))
        return outcomes

    def _close(self, answer: LiveAnswer) -> None:
        """Forget an answer that has ended or is given up."""
        answer.give_up("abort")
        self._tally.end(answer)
        del self._answers[answer.handle.name]
        self._decoder.forget(answer.handle.name)
