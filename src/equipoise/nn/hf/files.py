"""The small files of a Hugging Face folder: its config, its tokenizer, how it generates.

Why
    A model is more than weights. Without its generation config it never stops, without its
    chat template nobody can talk to it, without its tokenizer's settings other programs split
    text another way. A run that began from a folder keeps these files as they were, so that what
    comes back is whole even if the folder has changed or gone.

What it decides
    Which files belong to a model: those in ``NAMES``, whatever else lies beside them.

Kept true (tests/unit/nn/hf/test_files.py, tests/oracle/test_round_trip.py)
    Kept files are byte for byte those of the folder; a changed one is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from equipoise.base.errors import ModelError
from equipoise.base.read import parse_json, read_bytes

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"

TOKENIZER_NAMES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "tokenization_*.py",
)
"""Patterns of the names of a tokenizer's files."""

NAMES = (
    CONFIG,
    GENERATION,
    *TOKENIZER_NAMES,
    "configuration_*.py",
    "modeling_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Patterns of the names of all files that belong to a model, besides its weights."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The small files of a folder, by name."""

    contents: Mapping[str, bytes]
    where: str
    """Where they were read, for messages."""

    def table(self, name: str) -> dict[str, Any]:
        """The table in a JSON file; empty if the file is absent.

        Raises:
            ModelError: the file does not hold a table.
        """
        if name not in self.contents:
            return {}
        try:
            value = parse_json(self.contents[name].decode())
            if not isinstance(value, dict):
                raise ValueError("it holds no table")
        except ValueError as error:
            raise ModelError(f"{self.where}/{name} cannot be read: {error}.") from None
        return value

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: those of the generation config, else of the config."""
        for name in (GENERATION, CONFIG):
            ids = self.table(name).get("eos_token_id")
            if ids is not None:
                listed = ids if isinstance(ids, list) else [ids]
                return tuple(each for each in listed if type(each) is int)
        return ()


def read_files(folder: Path) -> ModelFiles:
    """Read the small files of a Hugging Face folder.

    Raises:
        OSError: one cannot be read.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    inner = [each for each in NAMES if "/" in each]
    names += [str(path.relative_to(folder)) for pattern in inner for path in folder.glob(pattern)]
    return ModelFiles(
        {
            name: read_bytes(folder / name)
            for name in sorted(names)
            if any(fnmatchcase(name, pattern) for pattern in NAMES)
        },
        str(folder),
    )


def as_json(value: Mapping[str, Any]) -> bytes:
    """A table as the bytes of a JSON file, as transformers writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
