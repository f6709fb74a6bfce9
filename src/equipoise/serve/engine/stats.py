"""What the engine counts: requests, tokens, and iterations as predicted and as measured."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from equipoise.observe.journal import EventSink
from equipoise.schedule.batching.fair.watch import WatchedPolicy
from equipoise.schedule.batching.iteration import BatchSchedule
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.serve.engine.answer import LiveAnswer


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of now, and totals since the start."""

    running: int
    waiting: int
    pages: int
    used_pages: int
    cached_tokens: int
    """Tokens that the prefix cache had."""
    asked_tokens: int
    """Tokens that were looked up in it."""
    prompt_tokens: int
    """Prompt tokens of requests that have ended."""
    generated_tokens: int
    """Tokens that those requests were answered with."""
    preemptions: Mapping[str, int]
    """How often a request lost its pages: by ``swap`` or by ``recompute``."""
    finished: Mapping[str, int]
    """Requests that have ended, by reason."""
    iterations: int
    predicted_s: float
    """Sum over iterations."""
    measured_s: float
    """Sum over iterations."""
    error: float
    """Mean over iterations of |measured / predicted - 1|."""
    iteration_tokens: tuple[int, ...] = ()
    """Iterations by their new tokens: up to each of ``ITERATION_TOKENS``, and above all."""
    tokens: int = 0
    """New tokens of all iterations, what was computed again included."""
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that ranks have sent each other for attention, by what moved."""
    served_s: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of work that each tenant was served."""
    fairness_gap_s: float = 0.0
    """See ``schedule.batching.fair.watch``."""


ITERATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Bounds of ``EngineStats.iteration_tokens``."""


class Tally:
    """Counts what happens."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._finished = Counter[str]()
        self._prompt_tokens = self._generated_tokens = self._iterations = 0
        self._predicted_s = self._measured_s = self._errors = 0.0
        self._tokens, self._by_tokens = 0, [0] * (len(ITERATION_TOKENS) + 1)

    def add(self, schedule: BatchSchedule, measured_s: float, is_priced: bool = True) -> None:
        """Count an iteration, and journal it.

        Args:
            schedule: What ran.
            measured_s: What it took [s].
            is_priced: Whether it was predicted by a price that was measured, not an estimate.
        """
        self._iterations += 1
        self._predicted_s += schedule.predicted_s
        self._measured_s += measured_s
        self._errors += abs(measured_s / schedule.predicted_s - 1) if schedule.predicted_s else 0.0
        work = schedule.work
        self._tokens += work.tokens
        self._by_tokens[bisect_left(ITERATION_TOKENS, work.tokens)] += 1
        self._sink.write(
            "scalar",
            "iteration",
            number=schedule.number,
            predicted_s=schedule.predicted_s,
            measured_s=measured_s,
            is_price_measured=is_priced,
            tokens=work.tokens,
            pairs=work.pairs,
            kv_tokens=work.kv_tokens,
            sequences=work.sequences,
            logits=work.logits,
            chunks=work.chunks,
            chunk_kv_tokens=work.chunk_kv_tokens,
            preempted=len(schedule.preempted),
            swapped_out=len(schedule.swaps_out),
        )

    def end(self, answer: LiveAnswer) -> None:
        """Count a request that has ended."""
        self._finished[answer.finish or "abort"] += 1
        self._prompt_tokens += len(answer.request.prompt)
        self._generated_tokens += answer.generated

    def stats(
        self, scheduler: Scheduler, pages: int, moved_bytes: Mapping[str, int]
    ) -> EngineStats:
        """All counts."""
        cached_tokens, asked_tokens = scheduler.cache_tokens
        policy = scheduler.policy
        watched = policy if isinstance(policy, WatchedPolicy) else None
        return EngineStats(
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            pages=pages,
            used_pages=scheduler.used_pages,
            cached_tokens=cached_tokens,
            asked_tokens=asked_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=scheduler.preemptions,
            finished=dict(self._finished),
            iterations=self._iterations,
            predicted_s=self._predicted_s,
            measured_s=self._measured_s,
            error=self._errors / max(1, self._iterations),
            iteration_tokens=tuple(self._by_tokens),
            tokens=self._tokens,
            moved_bytes=dict(moved_bytes),
            served_s=dict(watched.served_s) if watched else {},
            fairness_gap_s=watched.gap_s if watched else 0.0,
        )
