"""What a client asks of the engine, and what it gets back, event by event."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from equipoise.base.errors import FaultError, SpecError
from equipoise.base.shown import shown
from equipoise.serve.sample import Sampling

Finish = Literal["stop", "length", "abort", "error"]
"""Why an answer ended: an end token or stop string came, it is as long as it may be, the client
gave it up, or it failed."""

MOST_TOP = 20
"""Most alternatives of a token whose log-probabilities can be asked for."""


class RanksLostError(FaultError):
    """Ranks died, and with them what they had of some requests; ask again in ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt that is to be continued.

    Raises:
        SpecError: a setting is out of range.
    """

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: Sampling = field(default_factory=Sampling)
    most_tokens: int | None = None
    """Most tokens of the answer; 0 only scores or embeds the prompt, None fills the model's
    context."""
    least_tokens: int = 0
    """Before this many tokens, no end token is chosen and no stop string ends the answer."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are left out of it."""
    stop_ids: frozenset[int] = frozenset()
    """Further end tokens."""
    ignores_end: bool = False
    """Whether the model's end tokens are tokens like others."""
    top: int | None = None
    """Score each token, and this many of the likeliest at its place; None for no scores."""
    scores_prompt: bool = False
    """Whether the prompt's tokens are scored, too."""
    embeds: bool = False
    """Whether the prompt's embedding is all that is asked for."""
    tenant: str = ""
    """Who pays; the prefix cache is never shared between tenants."""
    salt: str = ""
    """The prefix cache is shared only between a tenant's requests with the same salt."""
    job: str = ""
    """The job that this request is a stage of; empty for a job of its own."""

    def __post_init__(self) -> None:
        most = self.most_tokens
        for is_right, words in (
            (len(self.prompt) > 0, "The prompt has no token. Give it at least one."),
            (most is None or most >= 0, f"most_tokens must be 0 or more; it is {most}."),
            (
                self.least_tokens >= 0 and (most is None or self.least_tokens <= most),
                f"least_tokens must be from 0 to most_tokens; it is {self.least_tokens}.",
            ),
            (
                self.top is None or 0 <= self.top <= MOST_TOP,
                f"top must be from 0 to {MOST_TOP}; it is {self.top}.",
            ),
            (
                not isinstance(self.stop, str),
                f"stop must be a tuple of strings; it is the string {shown(self.stop)}.",
            ),
            (
                most != 0 or self.scores_prompt or self.embeds,
                "An answer of 0 tokens needs scores_prompt or embeds: there is nothing else to "
                "compute.",
            ),
            (
                not self.embeds or (most == 0 and not self.scores_prompt),
                "An embedding has no answer and no scores. Set most_tokens to 0 and leave "
                "scores_prompt out.",
            ),
        ):
            if not is_right:
                raise SpecError(words)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a token was at its place, before any filter."""

    token: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there with theirs, likeliest first."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Scores of a prompt's tokens but the first, which nothing comes before."""

    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class PromptEmbedded:
    """A prompt as a direction: the last token's hidden state after the last norm, of length 1."""

    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of an answer, its end, or both."""

    token: int | None = None
    """None if the answer ended without one."""
    text: str = ""
    """What of the text is certain now; a stop string is never in it."""
    score: Score | None = None
    finish: Finish | None = None
    """Why the answer ended; None if it goes on."""
    error: str = ""
    """What failed, if it did."""
    retry_after_s: float | None = None
    """When the same request may succeed [s], if the server failed and not the request."""


Event = PromptScored | PromptEmbedded | TokenEvent


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer."""

    text: str
    ids: tuple[int, ...]
    """Its tokens, an end token included."""
    finish: Finish
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()
    error: str = ""
    retry_after_s: float | None = None
    embedding: tuple[float, ...] = ()


class Handle:
    """A request inside the engine: iterate over it for its events.

    Its events go to ``deliver`` instead if that was given to ``submit``; it is called on the
    engine's thread and must return at once.
    """

    def __init__(
        self,
        name: str,
        prompt_tokens: int,
        abort: Callable[[str], None],
        deliver: Callable[[Event], None] | None = None,
    ) -> None:
        self.name = name
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        """Tokens of the prompt that the prefix cache had, once the first event has come."""
        self.waited_s = 0.0
        """From its arrival to the iteration that computed its first tokens, likewise [s]."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.deliver = deliver or self._events.put
        self._abort = abort

    def abort(self) -> None:
        """Give the request up. Its last event is an ``abort``, unless it has ended already."""
        self._abort(self.name)

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, TokenEvent) and event.finish is not None:
                return

    def result(self) -> Answered:
        """Wait for the end, and join all events."""
        prompt_scores: tuple[Score, ...] = ()
        embedding: tuple[float, ...] = ()
        tokens = list[TokenEvent]()
        for event in self:
            if isinstance(event, PromptScored):
                prompt_scores = event.scores
            elif isinstance(event, PromptEmbedded):
                embedding = event.vector
            else:
                tokens.append(event)
        last = tokens[-1]
        assert last.finish is not None  # noqa: S101 - events end with it
        return Answered(
            text="".join(each.text for each in tokens),
            ids=tuple(each.token for each in tokens if each.token is not None),
            finish=last.finish,
            scores=tuple(each.score for each in tokens if each.score is not None),
            prompt_scores=prompt_scores,
            error=last.error,
            retry_after_s=last.retry_after_s,
            embedding=embedding,
        )


def most_answer_tokens(request: GenerateRequest, vocab: int, context_tokens: int) -> int:
    """Most tokens of an answer, after checks that need the model.

    Args:
        request: What is asked.
        vocab: Tokens that the model knows.
        context_tokens: Most tokens of a prompt and its answer together.

    Raises:
        SpecError: a token is not in the vocabulary, or the text would exceed the context.
    """
    prompt = len(request.prompt)
    ids = *request.prompt, *request.sampling.logit_bias, *request.stop_ids
    for each in (min(ids), max(ids)):
        if not 0 <= each < vocab:
            raise SpecError(
                f"There is no token {each:,}: the model's vocabulary has {vocab:,}, counted from 0."
            )
    left = context_tokens - prompt
    asked = left if request.most_tokens is None else request.most_tokens
    if asked > left or (request.most_tokens is None and left < 1):
        answer = f" and an answer of {asked:,}" if request.most_tokens else ""
        raise SpecError(
            f"A prompt of {prompt:,} tokens{answer} exceeds the model's context of "
            f"{context_tokens:,} tokens. Shorten one of them."
        )
    return asked
