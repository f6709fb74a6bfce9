"""Text to tokens and back by a model's own files, and conversations by its chat template.

What it decides
    Special tokens and templates are read as ``AutoTokenizer`` reads them. Special tokens that
    stand in a text or in a rendered conversation become those tokens; a template begins the
    text itself, so nothing is added before it.

Kept true (tests/oracle/test_generate.py)
    Token ids of texts and of conversations are those of ``AutoTokenizer``.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

from equipoise.base.errors import DataError, ModelError
from equipoise.base.read import reason
from equipoise.data.chat.rows import Message
from equipoise.data.chat.template import ChatTemplate, RenderError
from equipoise.data.text.folder import TokenizerFolder, read_tokenizer_folder
from equipoise.nn.hf.files import CONFIG, TOKENIZER, ModelFiles, write_files


def read_settings(files: ModelFiles) -> TokenizerFolder:
    """What the files beside a tokenizer.json say.

    Raises:
        DataError: one of them cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        contents = {name: each for name, each in files.contents.items() if name != TOKENIZER}
        write_files(contents, Path(folder))
        try:
            settings = read_tokenizer_folder(Path(folder))
        except DataError as error:
            raise DataError(str(error).replace(folder, files.where)) from None
    return dataclasses.replace(settings, folder=Path(files.where))


class ModelTokenizer:
    """The tokenizer among a model's files."""

    def __init__(self, files: ModelFiles) -> None:
        """Read it.

        Raises:
            ModelError: there is none, or it cannot be read.
            DataError: a file beside it cannot be read.
        """
        if TOKENIZER not in files.contents:
            fix = (
                "Write the model's there: AutoTokenizer.from_pretrained(...).save_pretrained(...) "
                "does."
            )
            if CONFIG not in files.contents:  # a file or a run, which nothing can be put into
                fix = (
                    f"Write a folder with both: equipoise convert {files.where} FOLDER --tokenizer "
                    f"{TOKENIZER}"
                )
            raise ModelError(
                f"{files.where} has no {TOKENIZER}, which turns text into tokens. {fix}"
            )
        try:
            self.core = tokenizers.Tokenizer.from_str(files.contents[TOKENIZER].decode())
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"{files.where}/{TOKENIZER} is not a tokenizer.json: {reason(error)}."
            ) from None
        self.core.no_padding()
        self.core.no_truncation()
        self._where, self._settings = files.where, read_settings(files)
        self._settings.complete(self.core)
        self._template: ChatTemplate | None = None

    @property
    def end_id(self) -> int | None:
        """The token that its own files say ends a text; None if they name none."""
        name = self._settings.end_name
        return None if name is None else self.core.token_to_id(name)

    def knows_role(self, role: str) -> bool:
        """Whether a chat template names a role; another one it may write out as it stands."""
        return any(role in template for template in self._settings.templates.values())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer's own rules add."""
        return self._ids(text, special=True)

    def encode_chat(
        self, messages: Sequence[Message], check: Callable[[str], None] = lambda _: None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers.

        Args:
            messages: The conversation.
            check: Called with its text before that is cut into tokens; may refuse it.

        Raises:
            ModelError: there is no chat template, or it refuses the conversation.
            DataError: the template is not valid.
        """
        if self._template is None:
            if not self._settings.templates:
                raise ModelError(
                    f"{self._where} has no chat template, so nobody knows how it was taught to "
                    "talk. Continue plain text instead, without --chat."
                )
            source = self._settings.template(with_tools=False)
            self._template = ChatTemplate(source, self._settings.special_tokens)
        try:
            text = self._template.render(messages, add_generation_prompt=True)
        except RenderError as error:
            raise ModelError(f"The conversation cannot be written: {error}.") from None
        check(text)
        return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # A batch of one: only for batches other threads go on meanwhile.
        (encoding,) = self.core.encode_batch([text], add_special_tokens=special)
        return list(encoding.ids)


def has_template(files: ModelFiles) -> bool:
    """Whether the files hold a chat template."""
    try:
        return bool(read_settings(files).templates)
    except DataError:
        return False
