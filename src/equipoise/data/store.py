"""Tokenize a corpus once, on every core, into a folder that every rank maps.

Why
    Tokens are read by each rank of each run, and made once. A run that is killed while they
    are made, or two runs that start together, must not leave half a cache that looks whole.

What it decides
    Where a cache lies and when it is good for a corpus: its name is the digest of the
    source's identity, the tokenizer's bytes and the format. And how it is built::

        tokens-<digest>.lock             held by the one process that builds
        tokens-<digest>.parts/           one file per shard, renamed when it is whole
        tokens-<digest>.building-<pid>/  all shards put together, then renamed to
        tokens-<digest>/                 tokens.bin offsets.npy origins.npy names.json
                                         tokenizer.json meta.json

    Whatever lies beside a lock that nobody holds was left by a kill: whole shards are used
    again, the rest is removed.

Kept true (tests/unit/data/test_store.py)
    Any number of workers, and any number of kills before, give the same bytes; a folder
    without a suffix is whole; a cache that is there is opened without reading the corpus.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.digest import digest, digest_file
from equipoise.base.durable import sync
from equipoise.base.errors import DataError
from equipoise.data.once import (
    building_path,
    clean_if_full,
    leftovers,
    make_once,
    parts_folder,
    remove,
)
from equipoise.data.progress import Progress
from equipoise.data.shard_tokens import FORMAT, assemble, shard_sizes, token_dtype, tokenize_shard
from equipoise.data.source import Source, open_source
from equipoise.data.tokenizer import load_tokenizer, train_tokenizer
from equipoise.data.workers import tokenize_parallel
from equipoise.spec.run import DataSpec


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A corpus as tokens, mapped from a whole cache folder.

    ``tokens`` uint16 or uint32[tokens], every document followed by ``end``; document d is
    ``tokens[offsets[d]:offsets[d + 1]]`` and ``doc_tokens[d]`` long, end token included.
    ``origins`` int64[documents, 2] says the file of ``names`` and the row in it.
    """

    tokens: np.memmap[Any, np.dtype[np.unsignedinteger[Any]]] = field(repr=False)
    doc_tokens: NDArray[np.int64] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    origins: NDArray[np.int64] = field(repr=False)
    vocab: int
    end: int
    tokenizer_file: Path
    folder: Path
    digest: str
    source_name: str
    source_kind: str
    empty_documents: int
    undecodable_documents: int

    @property
    def documents(self) -> int:
        """Documents that count: not empty, and decodable."""
        return len(self.doc_tokens)

    @property
    def left_out(self) -> str:
        """What the corpus has that is no document, in words; nothing where it has none."""
        kinds = (
            (self.empty_documents, "empty document", "empty documents"),
            (
                self.undecodable_documents,
                "document that is not UTF-8",
                "documents that are not UTF-8",
            ),
        )
        parts = [f"{n:,} {one if n == 1 else many}" for n, one, many in kinds if n]
        was = "was" if sum(n for n, *_ in kinds) == 1 else "were"
        return f"{' and '.join(parts)} {was} left out" if parts else ""

    @cached_property
    def names(self) -> list[str]:
        """The corpus' files, relative to its root."""
        return [str(name) for name in json.loads((self.folder / "names.json").read_text())]

    def name(self, document: int) -> str:
        """Where a document came from, for people: ``test/test_os.py``, ``a.parquet row 17``."""
        file, row = int(self.origins[document, 0]), int(self.origins[document, 1])
        names: list[str] = self.names
        if self.source_kind == "jsonl":
            return f"{names[file]} at byte {row:,}"
        if self.source_kind in ("parquet", "datasets"):
            return f"{names[file]} row {row:,}"
        return names[file]


def prepare(
    spec: DataSpec, base: Path, *, progress: Progress, workers: int | None = None
) -> TokenStore:
    """Open the token cache of a corpus; make it first, and its tokenizer, if there is none.

    Args:
        spec: The ``[data]`` table.
        base: Folder of run.toml, where relative paths start.
        progress: Is told of the training of the tokenizer and of the bytes tokenized.
        workers: Processes that tokenize; one for each core that this process may use unless
            given. With 1, or a single shard, it is done in this process.

    Raises:
        DataError: the corpus or the tokenizer is missing or wrong, the cache is damaged or
            cannot be made, or the disk is full.

    Cost: a cache that is there, a look at each file's size and time (0.02 s for 1,800
    files); else about 1 s of one core for 3 MB of text.
    """
    cache = base / Path(spec.cache).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache {cache} cannot be made: {error.strerror}. Set data.cache to a folder that "
            "may be written."
        ) from None
    source = open_source(spec, base)
    if spec.tokenizer == "train":
        tokenizer_file = _trained(source, spec.vocab, cache, progress)
    else:
        tokenizer_file = base / Path(spec.tokenizer).expanduser()
        if not tokenizer_file.is_file():
            load_tokenizer(tokenizer_file)  # says what is wrong
    name = digest([FORMAT, source.digest, digest_file(tokenizer_file)])
    folder = cache / f"tokens-{name}"
    with make_once(folder, progress) as is_wanted:
        if is_wanted:
            _build(source, tokenizer_file, folder, progress, workers or _cores())
    return open_store(folder)


def open_store(folder: Path) -> TokenStore:
    """Map a token cache that ``prepare`` made.

    Raises:
        DataError: the folder is missing, of another format, or its files are not as long as
            meta.json says.
    """
    meta_file = folder / "meta.json"
    if not meta_file.is_file():
        raise DataError(
            f"{folder} is no token cache: it has no meta.json. Delete the folder; the next run "
            "makes it again."
        )
    meta = json.loads(meta_file.read_text())
    if meta["format"] != FORMAT:
        raise DataError(
            f"{folder} is a token cache of format {meta['format']}, and this version reads "
            f"{FORMAT}. Delete the folder; the next run makes it again."
        )
    documents, tokens, dtype = meta["documents"], meta["tokens"], np.dtype(meta["dtype"])
    for name, size_bytes in meta["sizes_bytes"].items():
        path = folder / name
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != size_bytes:
            raise DataError(
                f"{path} has {found_bytes:,} bytes where meta.json says {size_bytes:,}. Delete "
                f"the folder {folder}; the next run makes it again."
            )
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    return TokenStore(
        tokens=np.memmap(folder / "tokens.bin", dtype=dtype, mode="r", shape=(tokens,)),
        doc_tokens=np.diff(offsets),
        offsets=offsets,
        origins=np.load(folder / "origins.npy", mmap_mode="r").reshape(documents, 2),
        vocab=meta["vocab"],
        end=meta["end"],
        tokenizer_file=folder / "tokenizer.json",
        folder=folder,
        digest=meta["digest"],
        source_name=meta["source_name"],
        source_kind=meta["source_kind"],
        empty_documents=meta["empty_documents"],
        undecodable_documents=meta["undecodable_documents"],
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _no_text(source: Source) -> DataError:
    return DataError(
        f"data.path {source.root} holds no text: its {len(source.names):,} files have "
        f"{source.size_bytes:,} bytes and no document that is not empty. Set data.path to a corpus "
        "with text in it."
    )


def _trained(source: Source, vocab: int, cache: Path, progress: Progress) -> Path:
    file = cache / f"tokenizer-{digest([FORMAT, source.digest, vocab])}.json"
    with make_once(file, progress) as is_wanted, clean_if_full(source, file):
        if is_wanted:
            for path in leftovers(file):
                remove(path)
            progress.start("train tokenizer", 1)
            try:
                if next(source.sample(), None) is None:
                    raise _no_text(source)
                train_tokenizer(source.sample(), vocab, file)
                progress.advance(1)
            finally:
                progress.finish()
    return file


def _build(
    source: Source, tokenizer_file: Path, folder: Path, progress: Progress, workers: int
) -> None:
    parts = parts_folder(folder)
    tokenizer = load_tokenizer(tokenizer_file)
    with clean_if_full(source, folder):
        for path in leftovers(folder):
            if path != parts:
                remove(path)
        parts.mkdir(exist_ok=True)
        for path in parts.glob("*.building-*"):
            remove(path)
        shards = source.shards()
        files = [parts / f"shard-{index:06d}" for index in range(len(shards))]
        progress.start(f"tokenize {source.name}", sum(shard.size_bytes for shard in shards))
        try:
            todo = []
            for shard, file in zip(shards, files, strict=True):
                if shard_sizes(file, token_dtype(tokenizer.vocab)) is None:
                    todo.append((shard, file))
                else:
                    progress.advance(shard.size_bytes)
            if min(workers, len(todo)) > 1:
                tokenize_parallel(todo, tokenizer_file, progress, min(workers, len(todo)))
            else:
                for shard, file in todo:
                    tokenize_shard(shard, tokenizer, file)
                    progress.advance(shard.size_bytes)
        finally:
            progress.finish()
        made = [shard_sizes(file, token_dtype(tokenizer.vocab)) for file in files]
        if not any(sizes.documents for sizes in made if sizes is not None):
            remove(parts)
            raise _no_text(source)
        building = building_path(folder)
        try:
            assemble(source, tokenizer, files, building, folder.name.removeprefix("tokens-"))
            building.rename(folder)
            sync(folder.parent)
        except BaseException:
            remove(building)
            if not folder.exists():  # else a process that the lock does not reach was faster
                raise
        remove(parts)
