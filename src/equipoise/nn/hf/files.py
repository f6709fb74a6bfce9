"""The small files of a Hugging Face folder: its config, its tokenizer, how it generates.

Why
    A model is more than weights. Without its generation config it never stops, without its
    chat template nobody can talk to it, without its tokenizer's settings other programs split
    text another way. A run that began from a folder keeps these files as they were, so that what
    comes back is whole even if the folder has changed or gone.

What it decides
    Which files belong to a model: those in ``NAMES``, whatever else lies beside them.

Kept true (tests/oracle/test_round_trip.py)
    Kept files are byte for byte those of the folder; a changed one is refused.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from equipoise.base.digest import digest, digest_bytes
from equipoise.base.errors import ModelError
from equipoise.base.read import parse_json, read_bytes, read_json, reason

KEPT = "kept.json"
"""What lies in the folder of kept files, with digests."""

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

TOKENIZER_NAMES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "chat_template.jinja",
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
            value = parse_json(self.contents[name])
            if not isinstance(value, dict):
                raise ValueError("it does not hold a JSON object")
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


def write_files(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write small files into a folder that exists.

    Raises:
        OSError: one cannot be written.
    """
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer."""
    return any(fnmatchcase(name, pattern) for pattern in TOKENIZER_NAMES)


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


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """What a run keeps of the model that it began from, or of its tokenizer alone."""

    files: ModelFiles
    source: str
    """The Hugging Face folder that the run began from; empty for random weights."""
    dtypes: Mapping[str, str]
    """The dtype of each weight in that folder, by its name there and torch's name."""
    remarks: tuple[str, ...]
    """How the files differ from the folder's, in sentences."""


def keep_files(kept: KeptFiles, folder: Path) -> None:
    """Write what is kept into a run, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_files(kept.files.contents, partial)
    described = {
        "source": kept.source,
        "files": {name: digest_bytes(content) for name, content in kept.files.contents.items()},
        "dtypes": {
            dtype: sorted(name for name, each in kept.dtypes.items() if each == dtype)
            for dtype in sorted(set(kept.dtypes.values()))
        },
        "remarks": list(kept.remarks),
    }
    (partial / KEPT).write_bytes(as_json(described | {"digest": digest(described)}))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read_kept(folder: Path) -> KeptFiles | None:
    """Read what a run keeps; None if it keeps nothing, as runs of earlier versions.

    Raises:
        ModelError: a file has changed, or cannot be read.
    """
    if not (folder / KEPT).exists():
        return None
    try:
        described = read_json(folder / KEPT)
        known = described.pop("digest", None)  # earlier versions wrote none
        is_whole = known is None or known == digest(described)
        contents = {name: read_bytes(folder / name) for name in described["files"]}
        changed = [] if is_whole else [KEPT]
        changed += [
            name
            for name, held in described["files"].items()
            if digest_bytes(contents[name]) != held
        ]
        dtypes = {name: dtype for dtype, names in described["dtypes"].items() for name in names}
        source, remarks = str(described["source"]), tuple(map(str, described["remarks"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder} cannot be read ({reason(error)}). Restore it "
            f"from a copy of the run, or delete it to convert by the sizes alone."
        ) from None
    if changed:
        raise ModelError(
            f"{folder / changed[0]} has changed since the run began. Restore it from a copy of the "
            f"run, or delete {folder} to convert by the sizes alone."
        )
    return KeptFiles(ModelFiles(contents, str(folder)), source, dtypes, remarks)


def tokenizer_files(tokenizer_json: bytes, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a tokenizer that is all in its tokenizer.json.

    Args:
        tokenizer_json: Its text.
        settings: ``eos_token``, ``chat_template`` and the like.
    """
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {TOKENIZER: tokenizer_json, TOKENIZER_CONFIG: as_json({**usual, **settings})}


def as_json(value: Mapping[str, Any]) -> bytes:
    """A table as the bytes of a JSON file, as transformers writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
