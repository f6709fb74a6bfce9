"""Three steps at once: the input of step i + 2, the ids of step i + 1, the compute of step i.

Why
    Reading a batch and sending its ids take time in which a rank could compute, and both depend on
    samples alone, never on weights.

What it decides
    A thread makes the input of the batch after the next while the rank computes. The ids of the
    next batch travel in three exchanges that begin at fixed points of the step, so all ranks make
    all exchanges in one order, on one group. Rows are looked up after the update of the step
    before: nothing is ever stale, and nothing has to be patched. Without ``is_early``, a step
    makes its own input and exchanges its own ids, with the same numbers and bytes.

Kept true (tests/multi/recsys/test_ahead.py)
    Losses and weights equal those without ``is_early`` to the bit, also over epochs and when a run
    goes on; the ids of step i + 1 leave before the gradients of step i.

Sources
    Neo, arXiv:2104.05158, section 4.3: inter-batch pipelining. Ids alone travel early in torchrec's
    TrainPipelineSparseDist, too.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from equipoise.recsys.ahead.delivery import Delivery

POINTS = 3
"""Exchanges of a delivery, and points of a step at which the next one's begin."""


@dataclass(slots=True, eq=False)
class StepInput:
    """What a rank needs of its share of a batch."""

    samples: int
    """Samples of the whole batch, over all ranks."""
    delivery: Delivery
    numbers: Tensor
    """float32 [B, numbers]."""
    labels: Tensor
    """float32 [B]."""


@dataclass(slots=True)
class EarlySeconds:
    """What a step's input and ids took, and how much of it the rank waited for [s]."""

    input_s: float = 0.0
    input_waited_s: float = 0.0
    ids_s: float = 0.0
    ids_waited_s: float = 0.0


class StepsAhead:
    """Hands out the inputs of consecutive steps."""

    def __init__(self, make: Callable[[int], StepInput], *, is_early: bool = True) -> None:
        """Prepare to hand out inputs.

        Args:
            make: The input of a step, from samples alone; it is called in another thread.
            is_early: Whether a step works for those after it.
        """
        self._make, self._is_early = make, is_early
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="input")
        self._inputs: dict[int, Future[tuple[StepInput, float]]] = {}
        self._next: StepInput | None = None
        self._step = self._end = 0

    def take(self, step: int, end: int) -> tuple[StepInput, EarlySeconds]:
        """The input of a step, from 0; the steps up to ``end`` follow it.

        Returns:
            The input, whose delivery ``receive`` ends; and the seconds that are known so far.
        """
        spent = EarlySeconds()
        self._step, self._end = step, end
        taken = self._next if self._next is not None else self._await(step, spent)
        self._next = None
        self._inputs.pop(step, None)
        if self._is_early:
            for coming in range(step + 1, min(end, step + 3)):
                if coming not in self._inputs:
                    self._inputs[coming] = self._pool.submit(self._time, coming)
        return taken, spent

    def begin_next(self, spent: EarlySeconds) -> None:
        """The first point: the next batch's sizes leave, once its input is there."""
        if self._is_early and self._step + 1 < self._end:
            self._next = self._await(self._step + 1, spent)
            self._next.delivery.advance()

    def advance(self) -> None:
        """A further point: the next batch's lengths leave, then its ids."""
        if self._next is not None:
            self._next.delivery.advance()

    def stop(self) -> None:
        """Let what is under way end: the run ends before the steps that were prepared."""
        if self._next is not None:
            self._next.delivery.receive()
            self._next = None
        for each in self._inputs.values():
            each.cancel()
        self._inputs.clear()

    def _time(self, step: int) -> tuple[StepInput, float]:
        began = time.perf_counter()
        made = self._make(step)
        return made, time.perf_counter() - began

    def _await(self, step: int, spent: EarlySeconds) -> StepInput:
        began = time.perf_counter()
        under_way = self._inputs.get(step)
        made, took_s = self._time(step) if under_way is None else under_way.result()
        spent.input_s += took_s
        spent.input_waited_s += time.perf_counter() - began
        return made
