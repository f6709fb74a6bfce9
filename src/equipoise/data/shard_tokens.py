"""Tokens of one shard in a file of its own, and the files of all shards as one cache.

Kept true (tests/unit/data/test_store.py)
    Any order of shards gives the same bytes; a shard's file that is not whole is made again.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.base.durable import sync
from equipoise.base.errors import DataError
from equipoise.data.once import building_path
from equipoise.data.shard import Shard
from equipoise.data.source import Source
from equipoise.data.tokenizer import Tokenizer

# Part of every cache's name. Count it up when files are laid out, corpora divided into shards,
# or texts sampled in another way: a build may go on with the shards of an older version.
FORMAT = 1


def token_dtype(vocab: int) -> "np.dtype[np.unsignedinteger[Any]]":
    """The narrowest that holds every id."""
    return np.dtype("<u2" if vocab <= _UINT16_IDS else "<u4")


def tokenize_shard(shard: Shard, tokenizer: Tokenizer, file: Path) -> None:
    """Write one shard's file: a header, lengths and origins of documents, all tokens."""
    dtype = token_dtype(tokenizer.vocab)
    runs, origins = [], []
    empty = undecodable = 0
    for document in shard.documents():
        if document.text:
            tokens = tokenizer.encode(document.text)
            runs.append(np.append(tokens, tokenizer.end).astype(dtype))
            origins.append((document.file, document.row))
        elif document.text is None:
            undecodable += 1
        else:
            empty += 1
    doc_tokens = np.array([len(run) for run in runs], dtype="<i8")
    header = np.array([FORMAT, len(runs), doc_tokens.sum(), empty, undecodable], dtype="<i8")
    building = building_path(file)
    with building.open("wb") as out:
        out.write(header.tobytes())
        out.write(doc_tokens.tobytes())
        out.write(np.array(origins, dtype="<i8").tobytes())
        for run in runs:
            out.write(run.tobytes())
        out.flush()
        os.fsync(out.fileno())
    building.replace(file)


_HEADER_BYTES = 5 * 8


class _ShardSizes(NamedTuple):
    documents: int
    tokens: int
    empty: int
    undecodable: int


def shard_sizes(file: Path, dtype: "np.dtype[np.unsignedinteger[Any]]") -> _ShardSizes | None:
    """What the header of a shard's file counts; None if the file is not whole."""
    if not file.is_file() or (size_bytes := file.stat().st_size) < _HEADER_BYTES:
        return None
    made, documents, tokens, empty, undecodable = np.fromfile(file, "<i8", count=5).tolist()
    whole_bytes = _HEADER_BYTES + documents * 3 * 8 + tokens * dtype.itemsize
    if made != FORMAT or size_bytes != whole_bytes:
        return None
    return _ShardSizes(documents, tokens, empty, undecodable)


def assemble(
    source: Source, tokenizer: Tokenizer, files: list[Path], building: Path, name: str
) -> None:
    """Put the shards together into one folder, and its meta.json last."""
    dtype = token_dtype(tokenizer.vocab)
    building.mkdir()
    lengths, origins = [], []
    empty = undecodable = 0
    with (building / "tokens.bin").open("wb") as out:
        for file in files:
            sizes = shard_sizes(file, dtype)
            if sizes is None:
                raise DataError(
                    f"{file} was changed while the token cache was built. Start the run again."
                )
            with file.open("rb") as part:
                part.seek(_HEADER_BYTES)
                lengths.append(_read_int64(part, sizes.documents))
                origins.append(_read_int64(part, 2 * sizes.documents).reshape(-1, 2))
                shutil.copyfileobj(part, out, 1 << 20)
            empty += sizes.empty
            undecodable += sizes.undecodable
    doc_tokens = np.concatenate(lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(doc_tokens)])
    np.save(building / "offsets.npy", offsets)
    np.save(building / "origins.npy", np.concatenate(origins))
    (building / "names.json").write_text(json.dumps(source.names))
    shutil.copyfile(tokenizer.file, building / "tokenizer.json")
    written = sorted(building.iterdir())
    meta = {
        "format": FORMAT,
        "digest": name,
        "source_name": source.name,
        "source_kind": source.kind,
        "source_digest": source.digest,
        "tokenizer_digest": tokenizer.digest,
        "vocab": tokenizer.vocab,
        "end": tokenizer.end,
        "dtype": dtype.str,
        "documents": len(doc_tokens),
        "tokens": int(offsets[-1]),
        "empty_documents": empty,
        "undecodable_documents": undecodable,
        "sizes_bytes": {path.name: path.stat().st_size for path in written},
    }
    (building / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for path in (*written, building / "meta.json", building):
        sync(path)


def _read_int64(file: BinaryIO, count: int) -> NDArray[np.int64]:
    return np.frombuffer(file.read(count * 8), dtype="<i8")


_UINT16_IDS = 1 << 16
