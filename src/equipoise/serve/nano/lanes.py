"""Two lanes: the calling thread and one beside it, each with half of the cores.

Why
    An operator divides its work over all cores and waits for the slowest. Two operators, each on
    its own half, do not wait for each other: torch's operators and the attention kernel run
    without Python's lock.

What it decides
    Nothing: steps run where and when the schedule says. A step on both lanes runs on the calling
    thread with all cores. If a step fails, no further one begins, and its error is raised.

Kept true (tests/unit/serve/nano/test_lanes.py)
    No step begins before those that it waits for; errors of either lane are raised; threads of the
    caller are as before.

Trap
    torch keeps the number of threads by thread, but one that has not computed yet takes the number
    that any thread set last.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from equipoise.schedule.nano.graph import NanoGraph
from equipoise.schedule.nano.schedule import NanoStep
from equipoise.serve.engine.jit import use_threads

LANES = 2

_Job = Callable[[], None]


class Lanes:
    """A thread that waits for work beside the caller's."""

    def __init__(self, threads: int) -> None:
        """Start the second lane.

        Args:
            threads: Of the caller; each lane has half of them, at least one.
        """
        self.threads, self.lane_threads = threads, max(1, threads // LANES)
        self._jobs, self._ended = SimpleQueue[_Job | None](), SimpleQueue[BaseException | None]()
        self._thread = threading.Thread(target=self._serve, name="nano lane", daemon=True)
        self._thread.start()
        self._ended.get()
        _set_threads(threads)

    def close(self) -> None:
        """End the second lane."""
        self._jobs.put(None)
        self._thread.join()

    def together(self, first: _Job, second: _Job) -> None:
        """Run one function on each lane, and wait for both.

        Raises:
            BaseException: whatever one of them raised, the caller's first.
        """
        self._jobs.put(second)
        try:
            self.use(1)
            first()
        finally:
            error = self._ended.get()
            self.use(LANES)
        if error is not None:
            raise error

    def use(self, lanes: int) -> None:
        """Let the calling thread compute on the cores of this many lanes."""
        _set_threads(self.threads if lanes > 1 else self.lane_threads)

    def run(self, graph: NanoGraph, steps: Sequence[NanoStep], calls: Sequence[_Job]) -> None:
        """Run a schedule's operations.

        Args:
            graph: On two lanes.
            steps: In an order in which each waits only for earlier ones.
            calls: What each operation of the graph does.
        """
        ended = [threading.Event() for _ in calls]
        failed = threading.Event()

        def work(lane: int) -> None:
            for step in steps:
                lanes = graph.operations[step.operation].ways[step.way].lanes
                if lanes[0] != lane:
                    continue
                for each in step.after:
                    ended[each].wait()
                if failed.is_set():
                    return
                if lane == 0:
                    self.use(len(lanes))
                calls[step.operation]()
                ended[step.operation].set()

        def guard(lane: int) -> None:
            try:
                work(lane)
            except BaseException:
                failed.set()
                for each in ended:  # nobody waits for what will not run
                    each.set()
                raise

        self.together(lambda: guard(0), lambda: guard(1))

    def _serve(self) -> None:
        _set_threads(self.lane_threads)
        self._ended.put(None)
        with torch.no_grad():  # by thread, too
            while (job := self._jobs.get()) is not None:
                error: BaseException | None = None
                try:
                    job()
                except BaseException as raised:
                    error = raised
                self._ended.put(error)


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # a thread that never asked takes the number that was set last
    use_threads(threads)
