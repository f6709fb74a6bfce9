"""All answers of one request while they grow, from the engine's thread to the event loop.

What it decides
    A client that reads slower than the engine writes gets a bounded number of events ahead; then
    its answers are given up.

Kept true (tests/unit/serve/http/test_operations.py)
    Whoever goes away frees the engine; answers of a request begin all or none.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from equipoise.base.errors import FaultError, FitError, SpecError
from equipoise.schedule.batching.request import QueueFullError
from equipoise.serve.engine.request import (
    Event,
    Handle,
    PromptEmbedded,
    PromptScored,
    TokenEvent,
)
from equipoise.serve.http.asked import Asked, refusal
from equipoise.serve.http.choice import ChoicePart, StreamedChoice
from equipoise.serve.http.fault import HttpError, failed, overloaded
from equipoise.serve.http.metrics import Metrics
from equipoise.serve.http.served import ServedModel

MOST_EVENTS = 4_096
"""Events of one request that may wait for its client."""


class SlowReaderError(Exception):
    """The client reads too slowly; its answers were given up."""


class Answers:
    """The answers of one request."""

    def __init__(
        self,
        model: ServedModel,
        asked: Asked,
        metrics: Metrics,
        *,
        on_token: Callable[[int], None] = lambda _: None,
        on_slow: Callable[[], None] = lambda: None,
        most_events: int = MOST_EVENTS,
        until_s: float | None = None,
    ) -> None:
        """Submit every answer, or none.

        Args:
            model: What answers.
            asked: What to submit.
            metrics: Counts every token.
            on_token: Called with the number of tokens that came, for the tenant's limits.
            on_slow: Called once if too many events wait.
            most_events: See ``MOST_EVENTS``.
            until_s: When all of them must be whole, on the monotonic clock [s]; None for any time.

        Raises:
            HttpError: 503 if the queue is full, 400 if the engine refuses.
        """
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._news = asyncio.Event()
        self._arrived: deque[tuple[int, Event, float]] = deque()
        self._waking, self._is_woken = threading.Lock(), False
        self._most_events, self._is_slow = most_events, False
        self._metrics, self._asked = metrics, asked
        self._on_token, self._on_slow = on_token, on_slow
        self._began_s, self._until_s = time.monotonic(), until_s
        self._first_s, self._last_s = ([0.0] * len(asked.requests) for _ in range(2))
        self._tokens = [0] * len(asked.requests)
        self._is_taken = self._is_closed = self._is_answered = False
        self.choices = [
            StreamedChoice(model.vocabulary, self._end_rule(model, number))
            for number in range(len(asked.requests))
        ]
        self._handles: list[Handle] = []
        try:
            for number, request in enumerate(asked.requests):
                self._handles.append(model.engine.submit(request, deliver=self._deliver_to(number)))
        except QueueFullError as error:
            self.close(is_answered=False)
            metrics.count_refusal("queue_full")
            raise overloaded(str(error), error.retry_after_s) from None
        except (SpecError, FitError) as error:
            self.close(is_answered=False)
            raise refusal(error) from None
        except FaultError as error:
            self.close(is_answered=False)
            raise overloaded(str(error), 5.0) from None
        self._open = set(range(len(asked.requests)))
        self._is_taken = True

    def _end_rule(self, model: ServedModel, number: int) -> Callable[[int], bool]:
        request = self._asked.requests[number]
        ends = request.stop_ids | (frozenset() if request.ignores_end else model.end_ids)
        return ends.__contains__

    def _deliver_to(self, number: int) -> Callable[[Event], None]:
        """What the engine's thread calls: it wakes the event loop once for all that is new."""

        def deliver(event: Event) -> None:
            self._arrived.append((number, event, time.monotonic()))
            with self._waking:
                if self._is_woken:
                    return
                self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the event loop is closed: nobody listens any more
                return

        return deliver

    def _take(self) -> None:
        """On the event loop: keep what arrived, and count it."""
        with self._waking:
            self._is_woken = False
        # Before what is new: whoever sends them has had a turn for these, unless its client reads
        # slowly. All of them may have come at once, after something else that took long.
        waits = len(self._events) > self._most_events and not self._is_closed
        while self._arrived:
            number, event, now_s = self._arrived.popleft()
            if isinstance(event, TokenEvent) and self._is_taken:
                self._count(number, event, now_s)
            if not self._is_closed:
                self._events.append((number, event))
        if waits and not self._is_slow:
            self._is_slow = True
            self._abort()
            self._on_slow()
        self._news.set()

    def _count(self, number: int, event: TokenEvent, now_s: float) -> None:
        last_s = self._last_s[number]
        tenant = self._asked.requests[number].tenant
        if event.token is not None:
            if last_s:
                self._metrics.count_next(tenant, now_s - last_s)
            else:
                waited_s = self._handles[number].waited_s
                self._metrics.count_first(tenant, now_s - self._began_s, waited_s)
                self._first_s[number] = now_s
            self._last_s[number] = now_s
            self._tokens[number] += 1
            self._on_token(1)
            if self._is_closed and not self._is_answered:
                self._metrics.count_unanswered(tenant, 1)
        if event.finish is not None:
            self._metrics.count_answer(
                event.finish,
                self._tokens[number],
                now_s - self._began_s,
                self._last_s[number] - self._first_s[number],
            )

    def _abort(self) -> None:
        """Give up what has not ended."""
        for handle, choice in zip(self._handles, self.choices, strict=False):
            if choice.finish is None:
                handle.abort()

    def close(self, *, is_answered: bool) -> None:
        """Nobody asks for further parts.

        Args:
            is_answered: Whether the client got all of them.
        """
        self._is_closed, self._is_answered = True, is_answered
        if self._is_taken and not self._asked.requests[0].embeds:
            self._metrics.count_longest(max(self._tokens))
        if not is_answered:
            self._metrics.count_unanswered(self._asked.requests[0].tenant, sum(self._tokens))
        self._abort()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self._asked.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were not computed again."""
        return sum(handle.cached_tokens for handle in self._handles[:: self._asked.each])

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def best(self) -> list[int]:
        """Numbers of the answers that are sent: of each prompt the ``n`` likeliest by token."""
        asked, numbers = self._asked, list[int]()
        for first in range(0, len(asked.requests), asked.each):
            mine = [*range(first, first + asked.each)]
            if asked.each > asked.n:
                mine = sorted(mine, key=lambda at: -self.choices[at].mean_logprob)[: asked.n]
            numbers += mine
        return numbers

    def require_whole(self, number: int, part: ChoicePart) -> None:
        """Refuse an answer that did not end by itself.

        Raises:
            HttpError: it failed, or the server gave it up.
        """
        if part.finish == "error":
            choice = self.choices[number]
            if choice.retry_after_s is not None:
                raise overloaded(choice.error, choice.retry_after_s)
            raise failed(choice.error)
        if part.finish == "abort":
            raise overloaded("The server gave the answer up because it is shutting down.", 1.0)

    async def parts(
        self,
    ) -> AsyncIterator[tuple[int, ChoicePart | PromptScored | PromptEmbedded]]:
        """What becomes certain, answer by number.

        Raises:
            SlowReaderError: too many events wait.
            HttpError: 408, if they are not whole in time.
        """
        while self._open:
            await self._wait()
            self._news.clear()
            while self._events:
                if self._is_slow:
                    raise SlowReaderError
                number, event = self._events.popleft()
                if isinstance(event, (PromptScored, PromptEmbedded)):
                    yield number, event
                    continue
                part = self.choices[number].push(event)
                if event.finish is not None:
                    self._open.discard(number)
                yield number, part

    async def _wait(self) -> None:
        """Until there is something new."""
        left_s = None if self._until_s is None else self._until_s - time.monotonic()
        try:
            # A timeout that has passed already would not interrupt what need not wait.
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                await self._news.wait()
        except TimeoutError:
            raise HttpError(
                408,
                "The answer was not whole within the seconds that X-Request-Timeout gives.",
                code="request_timeout",
                headers={"x-should-retry": "false"},
            ) from None
