"""Prompts as token ids: texts, conversations, or ids that are checked."""

from collections.abc import Iterator, Sequence

from equipoise.base.errors import ModelError
from equipoise.data.chat.rows import Message
from equipoise.nn.hf.files import CONFIG, GENERATION, ModelFiles
from equipoise.serve.tokenizer import ModelTokenizer
from equipoise.spec.model.presets import ModelSpec

Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""


class PromptReader:
    """Turns prompts into token ids of a model's vocabulary."""

    def __init__(self, files: ModelFiles, model: ModelSpec) -> None:
        """Read the tokenizer.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
        """
        self.tokenizer = ModelTokenizer(files)
        self.end_ids = frozenset(each for each in self._ends(files) if 0 <= each < model.vocab)
        self._files, self._vocab = files, model.vocab

    def _ends(self, files: ModelFiles) -> Iterator[int]:
        """End tokens: those by which the model generates, and the tokenizer's where none are said.

        A model that was taught to talk often has the end of a turn in its tokenizer's files alone.
        """
        yield from files.end_ids
        end = self.tokenizer.end_id
        if end is not None and files.table(GENERATION).get("eos_token_id") is None:
            yield end

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or of a conversation; never empty.

        Raises:
            ModelError: a token is not in the model's vocabulary, or there is no chat template.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = self.tokenizer.encode_chat(prompt)
        if wrong := [each for each in ids if each >= self._vocab]:
            raise ModelError(
                f"The prompt has token {wrong[0]:,} of the tokenizer, and the model has only "
                f"{self._vocab:,}. Give the model's own tokenizer."
            )
        return ids or [self._first_id()]

    def _first_id(self) -> int:
        """What a text without tokens begins with: the token that begins texts, or ends them."""
        for name in (GENERATION, CONFIG):
            first = self._files.table(name).get("bos_token_id")
            if type(first) is int and 0 <= first < self._vocab:
                return first
        return min(self.end_ids, default=0)
