"""What a model's folder says of its tokenizer, beside tokenizer.json: special tokens, templates.

What it decides
    The end token is the ``eos_token`` of tokenizer_config.json, or of special_tokens_map.json;
    without one, the first ``eos_token_id`` of generation_config.json or config.json. Templates are
    ``chat_template.jinja`` and ``additional_chat_templates/``, or else ``chat_template`` in
    tokenizer_config.json: one, or several with names. ``tool_use`` then writes conversations with
    tools, and ``default`` all others. Tokens that these files add are added as ``transformers``
    does it.

Kept true (tests/unit/data/test_tokenizer_folder.py, tests/oracle/test_chat_template.py)
    Named tokens and templates are those of ``AutoTokenizer``.

Sources
    transformers 5.23, ``tokenization_utils_base.py``, ``_from_pretrained``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from equipoise.base.errors import DataError
from equipoise.base.read import read_json, read_text, reason
from equipoise.spec.names import TOKENIZER_FILE

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The files beside a tokenizer.json, read."""

    folder: Path
    special_tokens: dict[str, str]
    """By name, such as ``eos_token``."""
    end_name: str | None
    """The end token's text."""
    templates: dict[str, str]
    """Chat templates by name; a single one is ``default``."""
    end_ids: tuple[int, ...]
    """Ids that end an answer, as generation_config.json or config.json lists them."""
    added: dict[int, dict[str, Any]]
    """Tokens that tokenizer_config.json adds to tokenizer.json, by id."""
    extra: tuple[str, ...]
    """Other tokens that are special."""

    def complete(self, core: tokenizers.Tokenizer) -> None:
        """Add the tokens that tokenizer.json lacks, and make special what the folder says is.

        Raises:
            DataError: a token would get another id than the folder gives it.
        """
        known = {repr(token) for token in core.get_added_tokens_decoder().values()}
        for number, fields in sorted(self.added.items()):
            token = tokenizers.AddedToken(**fields)
            if repr(token) not in known:
                core.add_tokens([token])
            held = core.token_to_id(token.content)
            if held != number:
                raise DataError(
                    f"{self.folder / _CONFIG} gives {token.content!r} the id {number:,}, but in "
                    f"{TOKENIZER_FILE} it has {'none' if held is None else f'{held:,}'}. Save the "
                    "tokenizer again with save_pretrained."
                )
        added = {token.content for token in core.get_added_tokens_decoder().values()}
        for name in (*self.special_tokens.values(), *self.extra):
            if name not in added and core.token_to_id(name) is not None:
                core.add_tokens([tokenizers.AddedToken(name, special=True)])

    def end(self, core: tokenizers.Tokenizer) -> int | None:
        """The id of the end token; None if no file names one that the tokenizer has."""
        number = None if self.end_name is None else core.token_to_id(self.end_name)
        if number is not None:
            return int(number)
        return next((each for each in self.end_ids if core.id_to_token(each) is not None), None)

    def template(self, *, with_tools: bool) -> str:
        """The chat template for conversations with tools, or without.

        Raises:
            DataError: there is none, or several of which none is the default.
        """
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if _DEFAULT in self.templates:
            return self.templates[_DEFAULT]
        if self.templates:
            raise DataError(
                f"{self.folder} has the chat templates {', '.join(sorted(self.templates))}, but "
                f"none is the default. Write the one to use to {_TEMPLATE}."
            )
        raise DataError(
            f'data.format = "messages" needs a chat template, and {self.folder} has none: no '
            f'{_TEMPLATE}, and no "chat_template" in {_CONFIG}. Copy the chat model\'s '
            f"{_TEMPLATE} there, or set data.tokenizer to a folder that has one."
        )


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """Read what a folder says of its tokenizer; files that it lacks say nothing.

    Raises:
        DataError: a file is there but cannot be read.
    """
    config, legacy = _read_table(folder / _CONFIG), _read_table(folder / _MAP)
    if "added_tokens_decoder" not in config:  # else transformers does not read the map
        config |= legacy
    special = {
        f"{name}_token": text
        for name in _NAMED
        if (text := _content(config.get(f"{name}_token"))) is not None
    }
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    return TokenizerFolder(
        folder=folder,
        special_tokens=special,
        end_name=special.get("eos_token") or _content(legacy.get("eos_token")),
        templates=_read_templates(folder, config),
        end_ids=_end_ids(folder),
        added=_added(folder, config),
        extra=tuple(text for each in extra if (text := _content(each)) is not None),
    )


def _read_table(file: Path) -> dict[str, Any]:
    try:
        value = read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read: {reason(error)}. Correct it, or remove it."
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{file} does not hold a JSON object. Correct it, or remove it.")
    return value


def _content(value: Any) -> str | None:
    """The text of a token, written as text or with its flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {_DEFAULT: folder / _TEMPLATE} if (folder / _TEMPLATE).is_file() else {}
    files |= {file.stem: file for file in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    try:
        templates = {name: read_text(file) for name, file in files.items()}
    except (OSError, ValueError) as error:
        raise DataError(f"A chat template of {folder} cannot be read: {reason(error)}.") from None
    if templates:
        return templates
    given = config.get("chat_template")
    if isinstance(given, str):
        return {_DEFAULT: given}
    if isinstance(given, list):
        rows = [each for each in given if isinstance(each, dict)]
        given = {each.get("name"): each.get("template") for each in rows}
    if isinstance(given, dict):
        return {str(name): text for name, text in given.items() if isinstance(text, str)}
    return {}


def _end_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        given = _read_table(folder / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        numbers = tuple(each for each in ids if type(each) is int)
        if numbers:
            return numbers
    return ()


def _added(folder: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    given = config.get("added_tokens_decoder") or {}
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        added = {
            int(number): {name: fields[name] for name in names if name in fields}
            for number, fields in given.items()
        }
        for fields in added.values():
            tokenizers.AddedToken(**fields)
        return added
    except (TypeError, ValueError, AttributeError):
        raise DataError(
            f'{folder / _CONFIG} has an "added_tokens_decoder" that cannot be read. Save the '
            "tokenizer again with save_pretrained."
        ) from None
