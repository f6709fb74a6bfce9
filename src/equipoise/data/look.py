"""See what is at a path: which kind of corpus, what its rows are, and how long they are.

What it decides
    The kind follows from names (``.jsonl``, ``.parquet``, the files of ``save_to_disk``), the
    format from the columns of the first row. Nothing is guessed where two answers fit: then the
    sentence says how to choose.

    A corpus of up to 64 MiB is tokenized whole, into the cache that a run of it will open; of a
    longer one, some of the shards say how long documents are.

Kept true (tests/unit/cli/test_init.py)
    What is seen is what a run reads.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError
from equipoise.base.read import parse_json, user_path
from equipoise.base.shown import listed
from equipoise.data.cache.store import prepare
from equipoise.data.chat.encode import Recipe
from equipoise.data.chat.rows import RowError
from equipoise.data.columns import ArrowFile, open_parquet
from equipoise.data.compressed import SUFFIXES, open_plain
from equipoise.data.progress import Progress
from equipoise.data.source import open_source
from equipoise.spec.run.spec import DataSpec, Format, Source

_WHOLE_BYTES = 64 << 20
_SAMPLED_SHARDS, _SAMPLED_DOCUMENTS = 32, 64
_KINDS: dict[str, Source] = {".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is at a path."""

    source: Source
    path: Path
    format: Format
    field: str = "text"
    """``data.field``."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the documents of a corpus are."""

    doc_tokens: Ints
    """Lengths of all documents, or of those that were sampled."""
    tokens: int
    """In all."""
    documents: int
    learned: float
    """Share of tokens that are learned."""
    is_whole: bool
    """Whether every document was tokenized."""


def look_at(path: Path) -> Corpus:
    """What a path holds.

    Raises:
        DataError: it does not exist, or what is there is not clear.
    """
    if not path.exists():
        raise DataError(f"No such file or folder: {path}. Give --from one that exists.")
    if path.is_dir() and (path / "dataset_dict.json").is_file():
        path /= "train"
    if path.is_dir() and any((path / n).is_file() for n in ("state.json", "dataset_info.json")):
        files = sorted(path.glob("*.arrow"))
        if files:
            with ArrowFile(files[0]) as arrow:
                return _by_columns("datasets", path, _columns(arrow.schema))
    kinds = {_KINDS.get(_suffix(path), "text"): path} if path.is_file() else _kinds_below(path)
    if "jsonl" in kinds and "parquet" in kinds:
        raise DataError(
            f"{path} has both *.jsonl and *.parquet files. Give --from the kind to read, jsonl or "
            f"parquet, and --path {path}."
        )
    for kind, file in kinds.items():
        if kind == "jsonl":
            return _by_columns("jsonl", path, {k: _is_text(v) for k, v in _first_row(file).items()})
        if kind == "parquet":
            with open_parquet(file) as parquet:
                return _by_columns("parquet", path, _columns(parquet.schema_arrow))
    return Corpus("text", path, "text")


def measure(spec: DataSpec, base: Path, progress: Progress) -> Lengths:
    """How long the documents of a corpus are, in the tokens that a run will read.

    Args:
        spec: The ``[data]`` table.
        base: Folder where relative paths start.
        progress: Shows how far tokenizing is.

    Raises:
        DataError: the corpus or its tokenizer is wrong.
    """
    source = open_source(spec, base)
    if source.size_bytes <= _WHOLE_BYTES:
        store = prepare(spec, base, progress=progress)
        tokens = int(store.offsets[-1])
        runs = store.learned
        learned = tokens if runs is None else int((runs.runs[:, 1] - runs.runs[:, 0]).sum())
        return Lengths(store.doc_tokens, tokens, store.documents, learned / tokens, True)
    encoder = Recipe(base / user_path(spec.tokenizer), spec.format, spec.loss).load()
    shards = source.shards()
    picked = shards[:: max(1, len(shards) // _SAMPLED_SHARDS)]
    lengths: list[int] = []
    learned, read_bytes = 0, 0
    progress.start(f"look at {source.name}", len(picked))
    try:
        for shard in picked:
            for place, document in zip(range(_SAMPLED_DOCUMENTS), shard.documents(), strict=False):
                del place
                if not document.text:
                    continue
                row = document.text if isinstance(document.text, dict) else None
                text = "" if row else next(document.blocks)
                try:
                    parts = list(encoder.encode(row or [text]))
                except RowError as error:
                    raise DataError(f"{shard.where(document)} {error}") from None
                lengths.append(sum(len(part.tokens) for part in parts))
                learned += sum(
                    len(each.tokens) if each.is_learned is None else int(each.is_learned.sum())
                    for each in parts
                )
                read_bytes += len((json.dumps(row, ensure_ascii=False) if row else text).encode())
            progress.advance(1)
    finally:
        progress.finish()
    if not lengths:
        raise DataError(f"data.path {source.root} holds no text in the parts that were looked at.")
    tokens = sum(lengths)
    share = source.size_bytes / read_bytes
    return Lengths(
        np.array(lengths, dtype=np.int64),
        max(1, round(tokens * share)),
        max(1, round(len(lengths) * share)),
        learned / tokens,
        False,
    )


def _suffix(path: Path) -> str:
    """The kind's ending of a file's name, whether the file is compressed or not."""
    return Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix


def _kinds_below(folder: Path) -> dict[str, Path]:
    """The kinds of files below a folder, each with its first file."""
    kinds: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(
            part.startswith(".") for part in file.relative_to(folder).parts
        ):
            kinds.setdefault(_KINDS.get(_suffix(file), "text"), file)
    if not kinds:
        raise DataError(f"{folder} is empty. Give --from a folder with files in it.")
    # Beside rows, other files are notes about them.
    return kinds if len(kinds) == 1 else {k: file for k, file in kinds.items() if k != "text"}


def _first_row(file: Path) -> dict[str, Any]:
    with open_plain(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
            except ValueError as error:
                raise DataError(
                    f"{file}:{number} cannot be read: {error}. Correct the line or remove it."
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f'{file}:{number} is not a JSON object. Write each line as {{"text": "..."}}.'
                )
            return row
    raise DataError(f"{file} is empty. Give --from a file with rows in it.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _columns(schema: Any) -> dict[str, bool]:
    """Names of columns, and whether each holds text."""
    return {
        name: str(schema.field(name).type) in ("string", "large_string", "string_view")
        for name in schema.names
    }


def _by_columns(source: Source, path: Path, columns: dict[str, bool]) -> Corpus:
    """The format of rows with these columns; texts are marked."""
    if any(name in columns and not columns[name] for name in ("messages", "conversations")):
        return Corpus(source, path, "messages")
    if {"prompt", "completion"} <= set(columns):
        return Corpus(source, path, "prompt-completion")
    texts = [name for name, is_text in columns.items() if is_text]
    for name in ("text", "content"):
        if name in texts:
            return Corpus(source, path, "text", name)
    if len(texts) == 1:
        return Corpus(source, path, "text", texts[0])
    raise DataError(
        f"{path} has rows with the columns {listed(columns) or 'none'}: no messages, no prompt "
        f"and completion, and {len(texts)} columns of text. Rename the columns, or give --from "
        f"{source} --path {path} and set data.field to the column that holds the text."
    )
