"""The text of tokens while they arrive: what is shown is never taken back.

Why
    A token may end in the middle of a character, and some decoders let a token's text depend on
    the one before it. So text is held back until it can no longer change.

    Text that may be the beginning of a stop string is held back, too. What follows a stop string,
    and the string itself, is never shown.

Kept true (tests/unit/serve/test_text.py)
    The parts joined are the text of all tokens; no part ends within a character. However a text is
    cut into parts, it ends before the stop string that is complete first. What a token costs does
    not grow with the tokens before it.

Sources
    Decoding a window of tokens with and without the new one: Text Generation Inference,
    ``server/text_generation_server/models/model.py``.
"""

from collections.abc import Sequence

import tokenizers

_UNFINISHED = "�"
_BEFORE = 6
"""Tokens of the prompt that the first new one is decoded after."""
_MOST_HELD = 64
"""Tokens that are held back for a character that never ends, or that have no text: every further
one would cost as much as all of them."""


class TextStream:
    """Text of the tokens that follow a prompt, part by part."""

    def __init__(self, core: tokenizers.Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._core = core
        self._tokens = list(prompt[-_BEFORE:])
        self._begin, self._shown = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that is certain now that this token has come; often one word, maybe none."""
        self._tokens.append(token)
        before, whole = self._decode(self._shown), self._decode(len(self._tokens))
        is_open = len(whole) <= len(before) or whole.endswith(_UNFINISHED)
        if is_open and len(self._tokens) - self._shown < _MOST_HELD:
            return ""
        self._begin, self._shown = self._shown, len(self._tokens)
        return whole[len(before) :]

    def finish(self) -> str:
        """The rest: bytes that never became a character, shown as U+FFFD."""
        before, whole = self._decode(self._shown), self._decode(len(self._tokens))
        self._begin = self._shown = len(self._tokens)
        return whole[len(before) :]

    def _decode(self, stop: int) -> str:
        return str(self._core.decode(self._tokens[self._begin : stop], skip_special_tokens=True))


class StopStrings:
    """Ends a text before the string, of several, that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [each for each in stops if each]
        self._held = ""
        self.has_stopped = False

    def push(self, part: str) -> str:
        """The text that is certain now: no stop string begins in it."""
        text = self._held + part
        spans = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if spans:
            self._held, self.has_stopped = "", True
            return text[: min(spans)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back of a text that has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of ``text`` that a longer ``stop`` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)
