"""OpenAI's shapes: answers and chunks of both endpoints.

Sources
    OpenAI's API reference: objects ``text_completion``, ``chat.completion`` and
    ``chat.completion.chunk``; usage with ``prompt_tokens_details``.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from equipoise.serve.engine.request import PromptScored, Score
from equipoise.serve.http.asked import Asked, Prompt
from equipoise.serve.http.choice import ChoicePart, Offsets, Scored
from equipoise.serve.http.vocabulary import Vocabulary

Json = dict[str, Any]
_MINUS = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def usage(prompt_tokens: int, answer_tokens: int, cached_tokens: int) -> Json:
    """What a request cost."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer have alike."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


class Shape(Protocol):
    """How one endpoint writes answers."""

    def begin(self, number: int) -> list[Json]:
        """Choices that come before the first token of an answer."""

    def scored(self, number: int, event: PromptScored) -> list[int]:
        """Keep a prompt's scores; the answers that waited for them."""

    def begun(self, number: int) -> list[Json]:
        """Choices for all that came of an answer that waited."""

    def chunk(self, number: int, part: ChoicePart) -> list[Json]:
        """Choices for what became certain."""

    def whole(self, numbers: Sequence[int]) -> list[Json]:
        """Choices of the answers that are sent, from all their parts."""

    def envelope(self, choices: list[Json], *, is_chunk: bool) -> Json:
        """An answer or a chunk around its choices."""


class ChatShape:
    """``/v1/chat/completions``."""

    def __init__(self, head: AnswerHead, asked: Asked, vocabulary: Vocabulary) -> None:
        self._head, self._asked, self._vocabulary = head, asked, vocabulary
        self._parts: dict[int, list[ChoicePart]] = {}

    def begin(self, number: int) -> list[Json]:
        """The role comes first."""
        return [self._choice(number, {"delta": {"role": "assistant", "content": ""}}, None, None)]

    def scored(self, number: int, event: PromptScored) -> list[int]:  # noqa: ARG002
        """Prompts of a conversation are not shown."""
        return []

    def begun(self, number: int) -> list[Json]:  # noqa: ARG002
        """No answer waits."""
        return []

    def chunk(self, number: int, part: ChoicePart) -> list[Json]:
        """One choice, if there is anything to say."""
        self._parts.setdefault(number, []).append(part)
        if not (part.text or part.scored or part.finish):
            return []
        delta = {"content": part.text} if part.text or part.scored else {}
        return [self._choice(number, {"delta": delta}, self._scores(part.scored), part.finish)]

    def whole(self, numbers: Sequence[int]) -> list[Json]:
        """A message for each answer."""
        choices = []
        for index, number in enumerate(numbers):
            parts = self._parts[number]
            message = {
                "role": "assistant",
                "content": "".join(part.text for part in parts),
                "refusal": None,
            }
            scores = self._scores([each for part in parts for each in part.scored])
            choices.append(self._choice(index, {"message": message}, scores, parts[-1].finish))
        return choices

    def envelope(self, choices: list[Json], *, is_chunk: bool) -> Json:
        """The object around choices."""
        return {
            "id": f"chatcmpl-{self._head.id}",
            "object": "chat.completion.chunk" if is_chunk else "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }

    def _choice(self, index: int, what: Json, scores: Json | None, finish: str | None) -> Json:
        return {"index": index, **what, "logprobs": scores, "finish_reason": finish}

    def _scores(self, scored: Sequence[Scored]) -> Json | None:
        if self._asked.top is None:
            return None
        content = []
        for each in scored:
            if each.score is not None:
                best = [self._entry(*pair) for pair in each.score.top]
                own = self._entry(each.token, each.score.logprob)
                content.append({**own, "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._vocabulary.bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, _MINUS),
            "bytes": list(data),
        }


class CompletionShape:
    """``/v1/completions``."""

    def __init__(self, head: AnswerHead, asked: Asked, vocabulary: Vocabulary) -> None:
        self._head, self._asked, self._vocabulary = head, asked, vocabulary
        self._prompt_texts = [prompt_text(each, vocabulary) for each in asked.prompts]
        self._prompt_scores: dict[int, tuple[Score, ...]] = {}
        self._parts: dict[int, list[ChoicePart]] = {}
        self._has_begun: set[int] = set()

    def begin(self, number: int) -> list[Json]:  # noqa: ARG002
        """Nothing comes before the first part: an echo comes with its scores."""
        return []

    def scored(self, number: int, event: PromptScored) -> list[int]:
        """Keep a prompt's scores for all of its answers; those of them that have begun."""
        prompt, each = number // self._asked.each, self._asked.each
        self._prompt_scores[prompt] = event.scores
        return [at for at in range(prompt * each, prompt * each + each) if at in self._parts]

    def begun(self, number: int) -> list[Json]:
        """One choice of all parts, behind the prompt."""
        self._has_begun.add(number)
        return [self._choice(number, number, self._parts[number], echoes=True)]

    def chunk(self, number: int, part: ChoicePart) -> list[Json]:
        """One choice, if there is anything to say; an echo waits for its scores."""
        self._parts.setdefault(number, []).append(part)
        is_first = number not in self._has_begun
        echoes = is_first and self._asked.echo
        if not (part.text or part.scored or part.finish or echoes):
            return []
        has_scores = self._asked.top is None or number // self._asked.each in self._prompt_scores
        if echoes and not has_scores:
            return []
        self._has_begun.add(number)
        return [self._choice(number, number, [part], echoes=echoes)]

    def whole(self, numbers: Sequence[int]) -> list[Json]:
        """A text for each answer."""
        return [
            self._choice(index, number, self._parts[number], echoes=self._asked.echo)
            for index, number in enumerate(numbers)
        ]

    def envelope(self, choices: list[Json], *, is_chunk: bool) -> Json:  # noqa: ARG002
        """The object around choices; chunks have the same."""
        return {
            "id": f"cmpl-{self._head.id}",
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }

    def _choice(
        self, index: int, number: int, parts: Sequence[ChoicePart], *, echoes: bool
    ) -> Json:
        prompt = number // self._asked.each
        text = "".join(part.text for part in parts)
        before = self._prompt_texts[prompt] if self._asked.echo else ""
        logprobs = None
        if self._asked.top is not None:
            scored = [each for part in parts for each in part.scored]
            logprobs = self._scores(scored, len(before))
            if echoes:
                echoed = self._scores(self._prompt_entries(prompt), 0)
                logprobs = {name: echoed[name] + logprobs[name] for name in logprobs}
        return {
            "index": index,
            "text": before + text if echoes else text,
            "logprobs": logprobs,
            "finish_reason": parts[-1].finish,
        }

    def _prompt_entries(self, number: int) -> list[Scored]:
        prompt = self._asked.prompts[number]
        scores = (None, *self._prompt_scores.get(number, ()))
        return [
            Scored(score, token, at)
            for score, token, at in zip(
                scores, prompt.ids, prompt_offsets(prompt, self._vocabulary), strict=True
            )
        ]

    def _scores(self, scored: Sequence[Scored], before: int) -> Json:
        """Lists side by side, a token each; ``before`` characters precede all of them."""
        name = self._vocabulary.name
        return {
            "tokens": [name(each.token) for each in scored],
            "token_logprobs": [
                None if each.score is None else max(each.score.logprob, _MINUS) for each in scored
            ],
            "top_logprobs": [
                None if each.score is None else self._best(each.score) for each in scored
            ],
            "text_offset": [before + each.at for each in scored],
        }

    def _best(self, score: Score) -> Json:
        """The likeliest tokens by name, and the one that was taken."""
        best: Json = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            best.setdefault(self._vocabulary.name(token), max(logprob, _MINUS))
        return best


def prompt_text(prompt: Prompt, vocabulary: Vocabulary) -> str:
    """The text of a prompt that is echoed."""
    if prompt.text is not None:
        return prompt.text
    return b"".join(map(vocabulary.text_bytes, prompt.ids)).decode("utf-8", "replace")


def prompt_offsets(prompt: Prompt, vocabulary: Vocabulary) -> Sequence[int]:
    """Where each token of a prompt begins in its text [characters]."""
    if prompt.offsets is not None:
        return prompt.offsets
    offsets = Offsets(vocabulary)
    return [offsets.push(token) for token in prompt.ids]
