"""Score the requests that wait, together, on one thread.

Why
    A pass over a few candidates is mostly the fixed time of its calls. Requests that came while
    the last pass ran can share the next one.

What it decides
    Nobody waits for others to come: a pass takes what is there, oldest first, up to a number of
    candidates, and one request at least; those whose clients have left are dropped. A request whose
    columns are wrong fails alone, and so does one whose pass fails: the thread goes on.

Kept true (tests/unit/serve/ranking/test_server.py)
    Each request gets its own scores, in the order of its candidates, whatever came with it.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from equipoise.base.errors import EquipoiseError
from equipoise.serve.http.fault import HttpError, failed, invalid, overloaded

MOST_TOGETHER = 4_096
"""Candidates of one pass, unless one request alone has more."""
MOST_WAITING = 1_024
"""Requests that may wait."""
MOST_WAITING_BYTES = 256 << 20
"""Bytes of them as the model reads them; one alone may have more."""


class CodedRequest(Protocol):
    """A request as a model reads it."""

    @property
    def samples(self) -> int:
        """Candidates."""

    @property
    def unknown(self) -> int:
        """Values that training did not have."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory."""


class RankModel(Protocol):
    """What is served."""

    @property
    def name(self) -> str:
        """As requests name it."""

    @property
    def created(self) -> int:
        """When it was written, seconds since 1970."""

    @property
    def columns(self) -> Sequence[str]:
        """What a candidate has, with the context."""

    def code(self, context: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> Any:
        """A request as the model reads it; an ``EquipoiseError`` says what is wrong with it."""

    def score(self, requests: Sequence[Any]) -> list[list[float]]:
        """Logits of each request's candidates."""


@dataclass(slots=True, eq=False)
class RankedRequest:
    """What a request gets."""

    logits: list[float]
    unknown: int
    together: int
    """Requests of its pass."""


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    coded: CodedRequest
    answer: "asyncio.Future[RankedRequest]"
    loop: asyncio.AbstractEventLoop


@dataclass(slots=True)
class BatcherStats:
    """What the thread has done."""

    passes: int = 0
    requests: int = 0
    candidates: int = 0
    busy_s: float = 0.0


@dataclass(slots=True, eq=False)
class Batcher:
    """Takes requests on any loop; ``with`` starts and ends its thread."""

    model: RankModel
    most_together: int = MOST_TOGETHER
    most_waiting_bytes: int = MOST_WAITING_BYTES
    stats: BatcherStats = field(default_factory=BatcherStats)
    _queue: deque[_WaitingRequest] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting_bytes: int = 0
    _is_closed: bool = False
    _thread: threading.Thread | None = None

    async def score(
        self,
        context: Mapping[str, Any],
        candidates: Mapping[str, Sequence[Any]],
        *,
        is_long: bool = False,
    ) -> RankedRequest:
        """The logits of a request's candidates.

        Args:
            context: What they share.
            candidates: Their columns.
            is_long: Whether to read them on a thread of their own, beside other requests.

        Raises:
            HttpError: 400, what is wrong with its columns; 503, too many wait; 500, it failed.
        """
        try:
            if is_long:
                coded = await asyncio.to_thread(self.model.code, context, candidates)
            else:
                coded = self.model.code(context, candidates)
        except EquipoiseError as error:
            raise invalid(str(error), "candidates") from None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RankedRequest] = loop.create_future()
        with self._changed:
            if self._is_closed:
                raise overloaded("The server is shutting down.", 1.0)
            if len(self._queue) >= MOST_WAITING:
                raise overloaded(f"{len(self._queue):,} requests wait already.", 1.0)
            if self._queue and self._waiting_bytes + coded.held_bytes > self.most_waiting_bytes:
                raise overloaded(
                    f"Requests of {self._waiting_bytes:,} bytes wait already, and this one has "
                    f"{coded.held_bytes:,} ({self.most_waiting_bytes:,} at most).",
                    1.0,
                )
            self._waiting_bytes += coded.held_bytes
            self._queue.append(_WaitingRequest(coded, answer, loop))
            self._changed.notify()
        return await answer

    def __enter__(self) -> "Batcher":
        self._thread = threading.Thread(target=self._run, name="ranking", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while together := self._take():
            began = time.perf_counter()
            try:
                rows = self.model.score([each.coded for each in together])
            except Exception:
                sys.stderr.write(traceback.format_exc())
                for each in together:
                    _give(each, failed())
                continue
            self.stats.busy_s += time.perf_counter() - began
            self.stats.passes += 1
            self.stats.requests += len(together)
            self.stats.candidates += sum(map(len, rows))
            for each, logits in zip(together, rows, strict=True):
                _give(each, RankedRequest(logits, each.coded.unknown, len(together)))

    def _take(self) -> list[_WaitingRequest]:
        """The requests of the next pass; none once all is over."""
        together: list[_WaitingRequest] = []
        count = 0
        with self._changed:
            while not together and (self._queue or not self._is_closed):
                if not self._queue:
                    self._changed.wait()
                while self._queue:
                    size = self._queue[0].coded.samples
                    if together and count + size > self.most_together:
                        break
                    waiting = self._queue.popleft()
                    self._waiting_bytes -= waiting.coded.held_bytes
                    if not waiting.answer.cancelled():  # its client is there
                        count += size
                        together.append(waiting)
        return together


def _give(waiting: _WaitingRequest, outcome: RankedRequest | HttpError) -> None:
    """Answer on the loop that asked, unless its client or the loop is gone."""

    def answer() -> None:
        if waiting.answer.done():
            return
        if isinstance(outcome, HttpError):
            waiting.answer.set_exception(outcome)
        else:
            waiting.answer.set_result(outcome)

    if not waiting.loop.is_closed():
        waiting.loop.call_soon_threadsafe(answer)
