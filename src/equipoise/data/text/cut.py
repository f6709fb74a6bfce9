r"""Cut a long text where its tokens are cut anyway, so that the parts have the tokens of the whole.

Why
    The tokenizers library holds some 18 bytes for each byte that it encodes: one document of
    500 MB took 9 GB. Most tokenizers first split a text into words, and no token crosses two of
    them. Wherever a split is certain, each side can be encoded alone.

What it decides
    Which tokenizers allow it, from a list of steps whose splits are known, and where: after a
    visible character that a single space follows, or after a letter or digit that a line break,
    a tab or a space follows. In each pattern of ``_PATTERNS`` white space after such a character
    begins a new match, and no match looks further back than its own beginning. Tokenizers with
    other steps (SentencePiece's, which may join words) encode every document whole.

Kept true (tests/unit/data/test_cut_text.py, by Hypothesis)
    Under every tokenizer that may be cut, parts have the tokens of the whole text.

Sources
    GPT-2's pattern: openai/gpt-2, encoder.py; the others: tiktoken, openai_public.py
    (cl100k_base, o200k_base), and the tokenizer.json of Llama 3 and of Qwen 2.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

_PART_CHARS = 1 << 20
"""Shorter texts are never cut; longer ones into parts of about this length."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = frozenset(
    {
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # cl100k_base and Llama 3
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
        # Qwen 2 and 3
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
        # o200k_base
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_AT_WHITE_SPACE = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_WITHIN_WORDS = frozenset({"Digits", "Punctuation"})
"""Steps that split more, by each character and its neighbour alone."""


def can_be_cut(core: tokenizers.Tokenizer) -> bool:
    """Whether parts of a text that is cut have the tokens of the whole under a tokenizer."""
    normalizers = _steps(core.normalizer, "normalizers")
    steps = _steps(core.pre_tokenizer, "pretokenizers")
    if any(each["type"] not in _NORMALIZERS for each in normalizers):
        return False
    if getattr(core.model, "dropout", None):
        return False
    # White space beside an added token may belong to it, and so may white space within it.
    for token in core.get_added_tokens_decoder().values():
        is_text = core.encode_special_tokens and token.special
        if not is_text and (token.lstrip or token.rstrip or re.search(r"\S\s", token.content)):
            return False
    kinds = [_kind(each, is_last=each is steps[-1]) for each in steps]
    return "unknown" not in kinds and "splits" in kinds


def _steps(part: Any, below: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, in order."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return _flatten(state, below)


def _flatten(state: dict[str, Any], below: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for each in state[below] for step in _flatten(each, below)]


def _kind(step: dict[str, Any], *, is_last: bool) -> str:
    match step:
        case {"type": kind} if kind in _AT_WHITE_SPACE:
            return "splits"
        case {"type": kind} if kind in _WITHIN_WORDS:
            return "keeps"
        case {"type": "ByteLevel", "add_prefix_space": False} if is_last:
            return "splits" if step.get("use_regex", True) else "keeps"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return "splits" if pattern in _PATTERNS and not step.get("invert") else "unknown"
    return "unknown"


def cut(blocks: Iterable[str], part_chars: int = _PART_CHARS) -> Iterator[str]:
    """Parts of a text, given in blocks, each at least ``part_chars`` characters but the last.

    A text without any certain split stays whole, however long.

    >>> list(cut(["one two", " three four"], part_chars=5))
    ['one two', ' three', ' four']
    """
    held, searched = "", 0
    for block in blocks:
        text, start = held + block, 0
        while (at := _find_cut(text, max(start + part_chars, searched))) is not None:
            yield text[start:at]
            start = at
        held = text[start:]
        # Whether its last character ends a part depends on the next block.
        searched = len(held)
    if held:
        yield held


_WHITE_SPACE = re.compile(r"[ \n\r\t]")


def _find_cut(text: str, start: int) -> int | None:
    """The first place from ``start`` on at which every pattern splits."""
    for match in _WHITE_SPACE.finditer(text, start):
        if match.start() and _is_split(text[match.start() - 1], match[0]):
            return match.start()
    return None


def _is_split(before: str, after: str) -> bool:
    category = _category(before)
    if after == " ":
        return category in "LNPS"
    # A letter that decomposes may end in a mark, which line breaks may belong to.
    return category in "LN" and unicodedata.normalize("NFKD", before) == before


def _category(character: str) -> str:
    """Its class of characters; "C" where versions of Unicode differ: the library has its own."""
    old, new = unicodedata.ucd_3_2_0.category(character), unicodedata.category(character)
    return new[0] if old[0] == new[0] else "C"
