"""One answer, put together from its events: the same whether it is streamed or sent at once.

What it decides
    A token's score is handed out with the text that the token begins in, so that no score comes
    of text that a stop string took away. Tokens that add no text come with the text after them,
    or at the end.

Kept true (tests/unit/serve/http/test_choice.py, by Hypothesis)
    However the tokens are cut, the parts joined are the whole answer, text and scores.
"""

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from equipoise.serve.engine.request import Finish, Score, TokenEvent
from equipoise.serve.http.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of an answer with its score."""

    score: Score | None
    """None for the first token of a prompt."""
    token: int
    at: int
    """Characters of the text before it."""


@dataclass(frozen=True, slots=True)
class ChoicePart:
    """What became certain at once."""

    text: str
    scored: tuple[Scored, ...]
    finish: Finish | None


class Offsets:
    """Where each token begins in the text that all of them are."""

    def __init__(self, vocabulary: Vocabulary, characters: int = 0) -> None:
        self._vocabulary, self._characters = vocabulary, characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> int:
        """Characters that are whole before this token."""
        at = self._characters
        self._characters += len(self._decoder.decode(self._vocabulary.text_bytes(token)))
        return at


class StreamedChoice:
    """One answer while it grows."""

    def __init__(self, vocabulary: Vocabulary, is_end: Callable[[int], bool]) -> None:
        """Begin an answer.

        Args:
            vocabulary: Bytes of tokens.
            is_end: Whether a token ends the answer.
        """
        self._is_end, self._offsets = is_end, Offsets(vocabulary)
        self._held: list[Scored] = []
        self._characters = 0
        self.tokens = 0
        """Tokens that were generated, an end token included."""
        self.finish: Finish | None = None
        self.error = ""
        self.retry_after_s: float | None = None
        self._logprobs = 0.0

    @property
    def mean_logprob(self) -> float:
        """Mean over its tokens; the higher, the better the answer."""
        return self._logprobs / max(1, self.tokens)

    def push(self, event: TokenEvent) -> ChoicePart:
        """What a further event makes certain."""
        self.finish, self.error = event.finish, event.error
        self.retry_after_s = event.retry_after_s
        if event.token is not None:
            self.tokens += 1
            at = self._offsets.push(event.token)
            self._logprobs += 0.0 if event.score is None else event.score.logprob
            is_end = event.finish == "stop" and self._is_end(event.token)
            if event.score is not None and not is_end:
                self._held.append(Scored(event.score, event.token, at))
        self._characters += len(event.text)
        ready = self._held
        was_cut = (
            event.finish == "stop" and event.token is not None and not self._is_end(event.token)
        )
        if event.finish is None or was_cut:
            ready = [each for each in self._held if each.at < self._characters]
        self._held = self._held[len(ready) :]
        return ChoicePart(event.text, tuple(ready), event.finish)
