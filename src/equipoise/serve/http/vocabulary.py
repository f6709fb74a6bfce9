r"""What a token is as bytes, and how it is written where only text may stand.

Why
    A token may be half a character. Its bytes are what a client puts together again; a decoder's
    text of it alone would be U+FFFD, and the character would be lost.

Kept true (tests/unit/serve/http/test_vocabulary.py)
    The bytes of a text's tokens, joined, are the text; no text has fewer tokens than the longest
    one allows.

Sources
    The table of bytes and characters: GPT-2, ``encoder.py``, ``bytes_to_unicode``. Byte fallback:
    SentencePiece. ``bytes:\x..``: OpenAI's completions.
"""

import json
import re
from functools import lru_cache
from typing import Any

import tokenizers

_IN_TEXTS = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 256)}
"""Bytes that UTF-8 has: RFC 3629, section 1."""
_LOSSLESS = {"ByteLevel", "Digits", "Sequence", "Split"}
"""Steps before a tokenizer's model that keep all of a text, unless they say "Removed"."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [each for each in range(256) if each not in printable]
    table = {chr(each): each for each in printable}
    return table | {chr(256 + at): each for at, each in enumerate(rest)}


class Vocabulary:
    """Bytes and names of tokens."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._special = {at for at, token in added.items() if token.special}
        self._added = {at: token.content for at, token in added.items()}
        written = json.loads(core.to_str())
        kinds = _kinds(written.get("decoder"), "decoders")
        self._is_byte_level = "ByteLevel" in kinds
        self._bytes = _byte_of_character()
        self.longest_bytes = self._find_longest(written)
        """The longest token, where tokens are exactly the bytes of a text; None where they may be
        fewer. A text has at least its size over this many tokens, which nobody needs to cut."""
        self.bytes = lru_cache(maxsize=65_536)(self._find_bytes)
        self.name = lru_cache(maxsize=65_536)(self._find_name)

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of texts."""
        return token in self._special

    def text_bytes(self, token: int) -> bytes:
        """What the token adds to a text; nothing if it is special."""
        return b"" if token in self._special else self.bytes(token)

    def _find_longest(self, written: dict[str, Any]) -> int | None:
        model, added = written["model"], written.get("added_tokens") or ()
        steps = _kinds(written.get("pre_tokenizer"), "pretokenizers")
        pieces = model["vocab"] if model.get("type") == "BPE" else {}
        is_whole = (
            "ByteLevel" in steps <= _LOSSLESS
            and "Removed" not in json.dumps(written["pre_tokenizer"])
            and written.get("normalizer") is None
            # A token that takes the blanks beside it stands for any number of them.
            and not any(each.get("lstrip") or each.get("rstrip") for each in added)
            # A byte that no token has is left out.
            and all(name in pieces for name, each in self._bytes.items() if each in _IN_TEXTS)
        )
        if not is_whole:
            return None
        return max(
            *map(len, pieces),
            *(len(each["content"].encode()) for each in added),
        )

    def _find_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for; of a special token its name's."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._core.id_to_token(token)
        if piece is None:  # a row of the model that the tokenizer has no word for
            return b""
        if self._is_byte_level:
            known = [self._bytes.get(each) for each in piece]
            if None not in known:
                return bytes(each for each in known if each is not None)
            return str(piece).encode()
        if as_byte := _BYTE.fullmatch(piece):
            return bytes([int(as_byte[1], 16)])
        return str(piece).replace("▁", " ").encode()

    def _find_name(self, token: int) -> str:
        r"""The token as text; ``bytes:\xf0\x9f`` if it is not whole characters."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in data)


def _kinds(step: object, inner: str) -> set[str]:
    """Names of a step of a tokenizer and of those in it."""
    if not isinstance(step, dict):
        return set()
    kinds = [_kinds(each, inner) for each in step.get(inner, ())]
    return {str(step.get("type")), *(kind for each in kinds for kind in each)}
