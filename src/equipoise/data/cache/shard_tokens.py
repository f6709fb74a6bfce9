"""Write the tokens of each shard to a file of its own, and assemble all shards into one cache.

What it decides
    A shard's file ends with a digest of its bytes and of its own place; a cache's meta.json has
    the digest of every file (of the table of chunks, for the tokens) and of itself. So a shard
    that was changed, swapped with another or left by another tokenizer is rebuilt.

Kept true (tests/unit/data/cache/test_store.py, tests/unit/data/test_cache_damage.py)
    Any order of shards gives the same bytes; a shard's file that is not whole is rebuilt.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.base.durable import sync
from equipoise.base.errors import DataError
from equipoise.data.cache.meta import (
    FORMAT,
    LEARNED,
    META,
    NAMES,
    OFFSETS,
    ORIGINS,
    TABLE,
    TOKENIZER,
    TOKENS,
    CacheMeta,
    describe,
    render,
)
from equipoise.data.cache.once import building_path
from equipoise.data.cache.shard import Shard
from equipoise.data.cache.verified import ChunkTable
from equipoise.data.chat.encode import Encoder
from equipoise.data.chat.rows import RowError
from equipoise.data.learned import LearnedRuns
from equipoise.data.modality.files import (
    EncodedItem,
    read_table,
    table_file,
    write_items,
    write_table,
)
from equipoise.data.source import Source


def token_dtype(vocab: int) -> "np.dtype[np.unsignedinteger[Any]]":
    """The narrowest dtype that holds every id."""
    return np.dtype("<u2" if vocab <= _UINT16_IDS else "<u4")


def tokenize_shard(shard: Shard, encoder: Encoder, file: Path) -> None:
    """Write one shard's file: header, lengths and origins of documents, tokens, digest.

    Tokens wait in a file beside it, because the header comes first: no document is too long. Where
    only some tokens are learned, a byte for each token says so, before the tokens.

    Raises:
        DataError: a document cannot be encoded; says where it is.
    """
    dtype = token_dtype(encoder.tokenizer.vocab)
    lengths, origins, learned = list[int](), list[tuple[int, int]](), bytearray()
    items: list[tuple[int, EncodedItem]] = []
    empty = undecodable = 0
    building, state = building_path(file), _digest_of(file)
    tokens_file = building.with_name(f"{building.name}.tokens")
    with tokens_file.open("wb") as out:
        for document in shard.documents():
            if not document.text:
                undecodable += document.text is None
                empty += document.text is not None
                continue
            tokens, row = 0, document.text if isinstance(document.text, Mapping) else None
            try:
                for run, is_learned, within in encoder.encode(row or document.blocks):
                    out.write(run.astype(dtype).tobytes())
                    items += [(len(lengths), item) for item in within]
                    tokens += len(run)
                    learned += b"" if is_learned is None else is_learned.tobytes()
            except RowError as error:
                raise DataError(f"{shard.where(document)} {error}") from None
            lengths.append(tokens)
            origins.append((document.file, document.row))
    if encoder.recipe.rules is not None:
        write_table(file, items)
    header = np.array([FORMAT, len(lengths), sum(lengths), empty, undecodable], dtype="<i8")
    with building.open("wb") as out, tokens_file.open("rb") as made:
        front = (np.array(each, dtype="<i8").tobytes() for each in (header, lengths, origins))
        for data in chain(front, [bytes(learned)], iter(lambda: made.read(1 << 20), b"")):
            state.update(data)
            out.write(data)
        out.write(state.digest())
        out.flush()
        os.fsync(out.fileno())
    tokens_file.unlink()
    building.replace(file)


_HEADER_BYTES, _DIGEST_BYTES = 5 * 8, 16


def _digest_of(file: Path) -> "hashlib.blake2b":
    """The hash of a shard's file, begun with its place among a cache's shards."""
    place = f"{file.parent.name}/{file.name}".encode()
    return hashlib.blake2b(place, digest_size=_DIGEST_BYTES)


class _ShardSizes(NamedTuple):
    documents: int
    tokens: int
    empty: int
    undecodable: int


def shard_sizes(
    file: Path, dtype: "np.dtype[np.unsignedinteger[Any]]", *, masks: bool = False
) -> _ShardSizes | None:
    """The counts in the header of a shard's file; None if the file's length does not match.

    Args:
        file: The shard's file.
        dtype: Of its tokens.
        masks: Whether it says of each token if it is learned.
    """
    if not file.is_file() or (size_bytes := file.stat().st_size) < _HEADER_BYTES:
        return None
    made, documents, tokens, empty, undecodable = np.fromfile(file, "<i8", count=5).tolist()
    per_token = dtype.itemsize + masks
    whole_bytes = _HEADER_BYTES + documents * 3 * 8 + tokens * per_token + _DIGEST_BYTES
    if made != FORMAT or size_bytes != whole_bytes:
        return None
    return _ShardSizes(documents, tokens, empty, undecodable)


def is_whole(
    file: Path, dtype: "np.dtype[np.unsignedinteger[Any]]", *, masks: bool = False
) -> bool:
    """Whether every byte of a shard's file is as written, and for this place."""
    try:
        for _ in _verified(file, dtype, masks=masks):
            pass
    except _TornError:
        return False
    return True


class _TornError(Exception):
    """A shard's file has changed since it was written."""


def _verified(
    file: Path, dtype: "np.dtype[np.unsignedinteger[Any]]", *, masks: bool
) -> Iterator[bytes]:
    """Lengths, origins, what is learned, then tokens in parts; raises at the end if a byte is off.

    What is learned is empty where it is all.
    """
    sizes = shard_sizes(file, dtype, masks=masks)
    if sizes is None:
        raise _TornError
    state = _digest_of(file)
    with file.open("rb") as part:
        state.update(part.read(_HEADER_BYTES))
        left = sizes.tokens * dtype.itemsize
        held = sizes.tokens if masks else 0
        for size in (sizes.documents * 8, sizes.documents * 16, held, *_cut(left)):
            data = part.read(size)
            state.update(data)
            yield data
        if part.read() != state.digest():
            raise _TornError


def _cut(size_bytes: int) -> Iterator[int]:
    """Sizes of at most 1 MiB that sum to ``size_bytes``."""
    for at in range(0, size_bytes, 1 << 20):
        yield min(1 << 20, size_bytes - at)


def assemble(source: Source, encoder: Encoder, files: list[Path], building: Path) -> None:
    """Assemble the shards in one folder; meta.json is written last.

    Raises:
        DataError: a shard's file or the tokenizer changed meanwhile.
    """
    tokenizer, masks = encoder.tokenizer, encoder.recipe.masks
    dtype = token_dtype(tokenizer.vocab)
    building.mkdir()
    lengths, origins, table, runs = [], [], ChunkTable(), LearnedRuns()
    empty = undecodable = 0
    with (building / TOKENS).open("wb") as out:
        for file in files:
            try:
                parts = _verified(file, dtype, masks=masks)
                lengths.append(np.frombuffer(next(parts), dtype="<i8"))
                origins.append(next(parts))
                runs.add(np.frombuffer(next(parts), dtype=np.bool_))
                for data in parts:
                    table.update(data)
                    out.write(data)
            except _TornError:
                raise _changed(file) from None
            sizes = shard_sizes(file, dtype, masks=masks)
            if sizes is None:
                raise _changed(file)
            empty += sizes.empty
            undecodable += sizes.undecodable
    if encoder.recipe.rules is not None:
        write_items(building, _tables(files, lengths), encoder.recipe.rules)
    doc_tokens = np.concatenate(lengths)
    offsets = np.concatenate([np.zeros(1, dtype="<i8"), np.cumsum(doc_tokens)]).astype("<i8")
    (building / TABLE).write_bytes(table.finish())
    (building / OFFSETS).write_bytes(offsets.tobytes())
    (building / ORIGINS).write_bytes(b"".join(origins))
    (building / NAMES).write_text(json.dumps(source.names))
    if masks:
        (building / LEARNED).write_bytes(runs.finish().tobytes())
    shutil.copyfile(tokenizer.file, building / TOKENIZER)
    described = describe(building)
    if described[TOKENIZER][1] != tokenizer.digest:
        raise _changed(tokenizer.file)
    meta = CacheMeta(
        format=FORMAT,
        source_name=source.name,
        source_kind=source.kind,
        source_digest=source.digest,
        tokenizer_digest=tokenizer.digest,
        vocab=tokenizer.vocab,
        end=tokenizer.end,
        dtype=dtype.str,
        documents=len(doc_tokens),
        tokens=int(offsets[-1]),
        empty_documents=empty,
        undecodable_documents=undecodable,
        files=described,
    )
    (building / META).write_text(render(meta))
    for path in (*sorted(building.iterdir()), building):
        sync(path)


def _tables(
    files: list[Path], lengths: list[NDArray[np.int64]]
) -> Iterator[tuple[int, list[tuple[int, EncodedItem]]]]:
    """Documents of each shard, and its items."""
    for file, each in zip(files, lengths, strict=True):
        table = read_table(file)
        if table is None:
            raise _changed(table_file(file))
        yield len(each), table


def _changed(file: Path) -> DataError:
    return DataError(f"{file} changed while the token cache was being built. Start the run again.")


_UINT16_IDS = 1 << 16
