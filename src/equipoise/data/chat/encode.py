"""Documents as tokens, with the tokens that are learned: how a run reads each row.

What it decides
    ``Recipe`` says how rows become tokens and has a digest, which is part of a cache's name;
    a cache of texts keeps the name that it has without one. ``Encoder`` does it.

    A text is its tokens and the end token. A conversation is what the chat template writes, in
    which the names of special tokens become these tokens, as everywhere outside this package. A
    prompt and its completion are tokenized as one text, between the special tokens that the
    tokenizer itself puts around a text, with the end token after the completion.

    A token is learned if any of its characters is: one that begins before an answer and reaches
    into it is part of what the model has to write.

Kept true (tests/unit/data/chat/test_encode.py, tests/oracle/test_chat_template.py)
    Tokens and masks equal those of ``apply_chat_template``, and of TRL for prompts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from equipoise.base.digest import digest
from equipoise.data.chat.answers import write_conversation
from equipoise.data.chat.rows import PARTS, Conversation, Pair, Row, RowError, read_row
from equipoise.data.chat.template import ChatTemplate, Span
from equipoise.data.modality.files import EncodedItem, measure_item
from equipoise.data.modality.rules import ItemRules
from equipoise.data.text.folder import read_tokenizer_folder
from equipoise.data.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from equipoise.spec.modality.encoder import ItemKind

_FORM = 1
"""Increase it when a row gets other tokens, or another mask."""


_Masked = tuple[NDArray[np.int64], NDArray[np.bool_]]


class Encoded(NamedTuple):
    """A document's tokens, int64[tokens]; and which are learned, bool[tokens], unless all are."""

    tokens: NDArray[np.int64]
    is_learned: NDArray[np.bool_] | None
    items: tuple[EncodedItem, ...] = ()
    """Images and sound, for whose rows some of the tokens stand in."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of a corpus become tokens."""

    tokenizer: Path
    """A tokenizer.json, or the folder that has it."""
    kind: str = "text"
    """``data.format``."""
    loss: str = "all"
    """``data.loss``."""
    rules: ItemRules | None = None
    """Sizes of images and sound, where rows may have such."""

    @property
    def masks(self) -> bool:
        """Whether only some tokens are learned."""
        return self.kind == PARTS or (self.kind != "text" and self.loss != "all")

    @property
    def digest(self) -> str:
        """Digest of all but tokenizer.json; empty if that file alone decides.

        Raises:
            DataError: the tokenizer, or the chat template that it needs, is missing.

        Cost: some small files; no tokenizer is loaded.
        """
        file = tokenizer_file(self.tokenizer)
        if self.rules is not None and self.kind == PARTS:
            beside = self.tokenizer.is_dir() and read_tokenizer_folder(file.parent).end_name
            return digest([_FORM, self.kind, self.rules.digest, beside])
        if self.kind == "text" and not self.tokenizer.is_dir():
            return ""
        folder = read_tokenizer_folder(file.parent)
        tokens = [folder.end_name, folder.end_ids, folder.added, folder.extra]
        if self.kind == "text":
            return digest(tokens) if any(tokens) else ""
        if self.kind == "messages":
            folder.template(with_tools=False)
        return digest(
            [_FORM, self.kind, self.loss, folder.templates, folder.special_tokens, *tokens]
        )

    def load(self) -> "Encoder":
        """What encodes by it.

        Raises:
            DataError: the tokenizer or its chat template is missing or wrong.
        """
        return Encoder(self)


class Encoder:
    """Encodes the documents of a corpus by a recipe.

    Raises:
        DataError: the tokenizer or its chat template is missing or wrong.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        holds_rows = recipe.kind not in ("text", PARTS)
        self.tokenizer: Tokenizer = load_tokenizer(recipe.tokenizer, asks_folder=holds_rows)
        self._core, self._templates = self.tokenizer.core, dict[str, ChatTemplate]()
        self._before: list[int] = []
        self._after: list[int] = []
        if holds_rows:
            self._core.encode_special_tokens = False
            self._before, self._after = _special_around(self._core)
            # Some post-processors trim a token's blanks from the characters that it stands for.
            self._core.post_processor = processors.Sequence([])
        if recipe.kind == "messages":
            self._template(with_tools=False)

    def encode(self, document: Row | Iterable[str]) -> Iterator[Encoded]:
        """Tokens of a document, a part at a time.

        Args:
            document: The blocks of a text, or a row as ``rows.pick_columns`` returns it.

        Raises:
            RowError: as ``encode_row``.
        """
        if isinstance(document, Mapping):
            yield self.encode_row(document)
            return
        for tokens in self.tokenizer.encode_blocks(document):
            yield Encoded(tokens, None)
        yield Encoded(np.array([self.tokenizer.end]), None)

    def encode_row(self, row: Row) -> Encoded:
        """Tokens of a conversation, or of a prompt and its completion.

        Raises:
            RowError: the row is malformed, or has nothing to learn.
        """
        if self.recipe.rules is not None and PARTS in row:
            return self._encode_parts(row[PARTS], self.recipe.rules)
        read = read_row(row)
        if isinstance(read, Pair):
            tokens, is_learned = self._encode_pair(read)
        else:
            tokens, is_learned = self._encode_talk(read)
        if not self.recipe.masks:
            return Encoded(tokens, None)
        if not is_learned[1:].any():
            raise RowError(
                "has no token to learn: the chat template writes none of its answers. Correct the "
                'row, remove it, or set data.loss = "all".'
            )
        return Encoded(tokens, is_learned)

    def _encode_parts(self, parts: Sequence[Mapping[str, str]], rules: ItemRules) -> Encoded:
        """Texts as they are; tokens that stand in for items are not learned."""
        tokens, learned, items, at = [], [], [], 0
        for part in parts:
            ((key, value),) = part.items()
            if key == "text":
                run, is_learned = self._encode_text(value, [(0, len(value))])
            else:
                kind: ItemKind = "image" if key == "image" else "audio"
                item = measure_item(kind, value, at, rules)
                items.append(item)
                run = np.full(item.rows, self.tokenizer.end)
                is_learned = np.zeros(item.rows, dtype=np.bool_)
            tokens.append(run)
            learned.append(is_learned)
            at += len(run)
        tokens.append(np.array([self.tokenizer.end]))
        learned.append(np.array([True]))
        return Encoded(np.concatenate(tokens), np.concatenate(learned), tuple(items))

    def _encode_pair(self, pair: Pair) -> _Masked:
        end = str(self._core.id_to_token(self.tokenizer.end))
        text = pair.prompt + pair.completion
        text += "" if pair.completion.endswith(end) else end
        tokens, is_learned = self._encode_text(text, [(len(pair.prompt), len(text))])
        around = len(self._before), len(self._after)
        tokens = np.concatenate((self._before, tokens, self._after)).astype(np.int64)
        return tokens, np.pad(is_learned, around)

    def _encode_talk(self, talk: Conversation) -> _Masked:
        template = self._template(with_tools=talk.tools is not None)
        return self._encode_text(*write_conversation(talk, template, self.recipe.loss))

    def _encode_text(self, text: str, spans: Sequence[Span]) -> _Masked:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowError(
                "has half of a surrogate pair, an escape such as \\ud83d without the other half. "
                "Correct the row, or remove it."
            ) from None
        encoding = self._core.encode(text, add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype=np.int64)
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        is_learned = np.zeros(len(tokens), dtype=np.bool_)
        for start, stop in spans:
            is_learned |= (begins < stop) & (np.maximum(ends, begins + 1) > start)
        return tokens, is_learned

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        folder = self.tokenizer.folder
        assert folder is not None  # noqa: S101 - of every recipe but that of texts
        source = folder.template(with_tools=with_tools)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, folder.special_tokens)
        return self._templates[source]


def _special_around(core: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text, and after it."""
    bare = core.encode("a", add_special_tokens=False).ids
    whole = core.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []
