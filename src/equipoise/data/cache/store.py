"""Tokenize a corpus once, on every core, into a folder that every rank reads.

Why
    Tokens are made once and read by each rank of each run. A run that is killed while they are
    made, or two runs that start together, must not leave half a cache that looks whole.

What it decides
    Where a cache is and when it is valid for a corpus: its name is the digest of the source's
    identity, of how rows become tokens, the tokenizer's bytes and the format. And how it is built::

        tokens-<digest>.lock             held by the one process that builds
        tokens-<digest>.parts/           one file per shard, renamed when it is whole
        tokens-<digest>.building-<pid>/  all shards put together, then renamed to
        tokens-<digest>/                 tokens.bin tokens.digests offsets.bin origins.bin
                                         names.json tokenizer.json meta.json (learned.bin)
        tokenizer-<digest>/              tokenizer.json digest; trained on the corpus
        mix-<digest>/                    mix.json: the caches of a mixture's sources

    Whatever lies beside a lock that nobody holds is left over from a kill: whole shards are
    reused, the rest is removed.

    A cache is used only as written: all files except the tokens are verified when it is opened,
    the tokens whenever they are read (``data.cache.verified``).

Kept true (tests/unit/data/cache/test_store.py, tests/unit/data/test_cache_damage.py)
    Any number of workers, and any number of earlier kills, give the same bytes; a folder
    without a suffix is whole; an existing cache is opened without reading the corpus.
"""

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from equipoise.base.digest import digest
from equipoise.base.errors import DataError, ModelError
from equipoise.base.read import reason, user_path
from equipoise.data.cache.build import FIRST_FORMAT, tokenize_once, train_once
from equipoise.data.cache.meta import (
    LEARNED,
    META,
    NAMES,
    OFFSETS,
    ORIGINS,
    TABLE,
    TOKENIZER,
    TOKENS,
    cache_name,
    read_meta,
    read_whole,
    require_whole,
)
from equipoise.data.cache.mixed import MIX, ManyTokens, read_mix, write_mix
from equipoise.data.cache.shard_tokens import token_dtype
from equipoise.data.cache.verified import VerifiedTokens, damaged, unreadable
from equipoise.data.chat.encode import Recipe
from equipoise.data.chat.rows import PARTS
from equipoise.data.learned import Learned
from equipoise.data.mixture import Mixture
from equipoise.data.modality.files import ITEM_FILES, ITEMS, open_items
from equipoise.data.modality.rules import ItemRules
from equipoise.data.progress import Progress
from equipoise.data.source import open_source
from equipoise.spec.modality.items import Items
from equipoise.spec.run.spec import DataSpec

_NAME = re.compile("tokens-[0-9a-f]{32}")


class Tokens(Protocol):
    """Tokens that are read in slices: an array or a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A corpus as tokens, in a whole cache folder.

    ``tokens`` uint16 or uint32[tokens], every document followed by ``end``; document d is
    ``tokens[offsets[d]:offsets[d + 1]]`` and ``doc_tokens[d]`` long, end token included.
    ``learned`` says which tokens are learned, where not all are.
    ``origins`` int64[documents, 2] holds the index of the file in ``names`` and the row in it.
    ``digest`` names the content; ``first_digest`` takes its place in checkpoints of format 1.
    """

    tokens: Tokens = field(repr=False)
    doc_tokens: NDArray[np.int64] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    origins: NDArray[np.int64] = field(repr=False)
    vocab: int
    end: int
    tokenizer_file: Path
    folder: Path
    digest: str
    first_digest: str
    source_name: str
    source_kind: str
    empty_documents: int
    undecodable_documents: int
    learned: Learned | None = None
    """Which tokens are learned; None if all are."""
    mixture: Mixture | None = None
    """How documents of several sources are mixed; None of a single one."""
    sources: tuple["TokenStore", ...] = field(default=(), repr=False)
    """The stores of a mixture's sources."""
    items: Items | None = None
    """Images and sound within documents, if rows may have such."""

    @classmethod
    def in_memory(
        cls,
        tokens: NDArray[Any],
        doc_tokens: NDArray[np.int64],
        vocab: int,
        learned: Learned | None = None,
        items: Items | None = None,
    ) -> Self:
        """Tokens that no disk has, of documents end to end."""
        return cls(
            tokens=tokens,
            doc_tokens=doc_tokens,
            offsets=np.concatenate(([0], np.cumsum(doc_tokens))),
            origins=np.zeros((len(doc_tokens), 2), np.int64),
            vocab=vocab,
            end=0,
            tokenizer_file=Path(),
            folder=Path(),
            digest="",
            first_digest="",
            source_name="drawn",
            source_kind="text",
            empty_documents=0,
            undecodable_documents=0,
            learned=learned,
            items=items,
        )

    def require_items(self) -> Items:
        """Images and sound within documents.

        Raises:
            DataError: it is a corpus of text alone.
        """
        if self.items is None:
            raise DataError(
                f"{self.source_name} has no images or sound, and the run has encoders for them. "
                'Set data.format = "parts", or set vision.layers and audio.layers to 0.'
            )
        return self.items

    @property
    def documents(self) -> int:
        """The number of documents that are neither empty nor undecodable."""
        return len(self.doc_tokens)

    @property
    def left_out(self) -> str:
        """A phrase that counts the documents left out; empty if there are none."""
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
        """The corpus' files, relative to its root; of a mixture, those of every source."""
        if self.sources:
            return [name for source in self.sources for name in source.names]
        return [str(name) for name in json.loads((self.folder / NAMES).read_text())]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of a document, verified.

        Raises:
            DataError: the cache is damaged, or holds a token that its tokenizer does not know.
        """
        first = int(self.offsets[document])
        tokens: NDArray[np.int64] = self.tokens[first + start : first + stop].astype(np.int64)
        if (highest := int(tokens.max(initial=0))) >= self.vocab:
            raise DataError(
                f"Document {document:,} ({self.name(document)}) has token {highest:,}, but its "
                f"tokenizer has only {self.vocab:,}. Delete the folder {self.folder}; the next run "
                "makes it again."
            )
        return tokens

    def verify(self) -> None:
        """Read every token once.

        Raises:
            DataError: as ``read``.
        """
        at_once = 1 << 20
        for at in range(0, len(self.tokens), at_once):
            tokens = self.tokens[at : at + at_once]
            if tokens.max() >= self.vocab:
                place = at + int(tokens.argmax())
                document = int(np.searchsorted(self.offsets, place, side="right")) - 1
                self.read(document, 0, int(self.doc_tokens[document]))

    def name(self, document: int) -> str:
        """Where a document came from, for people: ``test/test_os.py``, ``a.parquet row 17``."""
        for source in self.sources:
            if document < source.documents:
                return source.name(document)
            document -= source.documents
        file, row = int(self.origins[document, 0]), int(self.origins[document, 1])
        names: list[str] = self.names
        if self.source_kind == "jsonl":
            return f"{names[file]} at byte {row:,}"
        if self.source_kind == "python-functions":
            return f"{names[file]} line {row:,}"
        if self.source_kind in ("parquet", "datasets"):
            return f"{names[file]} row {row:,}"
        return names[file]


def prepare(
    spec: DataSpec,
    base: Path,
    *,
    progress: Progress,
    workers: int | None = None,
    rules: ItemRules | None = None,
) -> TokenStore:
    """Open the token cache of a corpus; if there is none, build it and its tokenizer first.

    Args:
        spec: The ``[data]`` table.
        base: Folder of run.toml, where relative paths start.
        progress: Shows the training of the tokenizer and the bytes tokenized.
        workers: Processes that tokenize; by default one for each core that this process may use.
            With 1, or a single shard, this process tokenizes.
        rules: Sizes of images and sound, where rows may have such.

    Raises:
        DataError: the corpus or the tokenizer is missing or wrong, the cache is damaged or
            cannot be made, or the disk is full.

    Cost: to open, one stat of each file (0.02 s for 1,800 files); to build, about 1 s of one
    core for 3 MB of text.
    """
    cache = base / user_path(spec.cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache {cache} cannot be created: {reason(error)}. Set data.cache to a writable "
            "folder."
        ) from None
    members = spec.members
    sources = [open_source(each, base) for each in members]
    if spec.tokenizer == "train":
        tokenizer = train_once(sources, spec.vocab, cache, progress)
    else:
        tokenizer = base / user_path(spec.tokenizer)
    recipes = [
        Recipe(tokenizer, each.format, each.loss, rules if each.format == PARTS else None)
        for each in members
    ]
    folders = [
        tokenize_once(source, recipe, cache, progress, workers or _cores())
        for source, recipe in zip(sources, recipes, strict=True)
    ]
    if not spec.is_mixed:
        return open_store(folders[0])
    return open_store(write_mix(cache, folders, [row.weight for row in spec.mix]))


def open_store(folder: Path) -> TokenStore:
    """Open a token cache that ``prepare`` made.

    Raises:
        DataError: the folder is missing, has another format, or changed since it was written.

    Cost: 1 s per GB of all files except the tokens, which have 24 bytes per document.
    """
    if (folder / MIX).is_file():
        return _open_mix(folder)
    meta = read_meta(folder)
    try:
        for name in (ORIGINS, NAMES, TOKENIZER):  # 16 bytes per document
            require_whole(folder, meta, name)
        digests = read_whole(folder, meta, TABLE)
        offsets = np.frombuffer(read_whole(folder, meta, OFFSETS), "<i8")
        learned = None
        if meta.masks:
            runs = np.frombuffer(read_whole(folder, meta, LEARNED), "<i8").reshape(-1, 2)
            learned = Learned(runs)
        items = None
        if meta.holds_items:
            table, said = (read_whole(folder, meta, name) for name in (ITEMS, ITEM_FILES))
            items = open_items(folder, table, said, meta.documents)
        origins = np.memmap(folder / ORIGINS, "<i8", mode="r", shape=(meta.documents, 2))
        dtype, doc_tokens = np.dtype(meta.dtype), np.diff(offsets)
        is_sound = len(doc_tokens) == meta.documents and doc_tokens.min() > 0
        is_sound = bool(is_sound and offsets[0] == 0 and offsets[-1] == meta.tokens)
        is_sound = is_sound and dtype == token_dtype(meta.vocab)
        content = meta.content
    except OSError as error:
        raise unreadable(folder, error) from None
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise damaged(folder / META, "it does not match the other files")
    name = f"tokens-{cache_name(meta.source_digest, meta.tokenizer_digest)}"
    if _NAME.fullmatch(folder.name) and folder.name != name:
        raise damaged(folder / META, f"it belongs to another corpus or tokenizer, {name}")
    return TokenStore(
        tokens=VerifiedTokens(folder / TOKENS, dtype, meta.tokens, digests),
        doc_tokens=doc_tokens,
        offsets=offsets,
        origins=origins,
        vocab=meta.vocab,
        end=meta.end,
        tokenizer_file=folder / TOKENIZER,
        folder=folder,
        digest=content,
        first_digest=cache_name(meta.source_digest, meta.tokenizer_digest, made_by=FIRST_FORMAT),
        source_name=meta.source_name,
        source_kind=meta.source_kind,
        empty_documents=meta.empty_documents,
        undecodable_documents=meta.undecodable_documents,
        learned=learned,
        items=items,
    )


def _open_mix(folder: Path) -> TokenStore:
    """The stores of a mixture as one."""
    folders, weights = read_mix(folder)
    stores = tuple(open_store(each) for each in folders)
    names = tuple(store.source_name for store in stores)
    mixture = Mixture(names, weights, tuple(store.documents for store in stores))
    doc_tokens = np.concatenate([store.doc_tokens for store in stores])
    files_before = np.cumsum([0, *(len(store.names) for store in stores[:-1])])
    shares = [str(share) for share in mixture.shares]
    learned = None
    if any(store.learned is not None for store in stores):
        learned = Learned.join([(store.learned, len(store.tokens)) for store in stores])
    content = digest([[store.digest for store in stores], shares])
    return dataclasses.replace(
        stores[0],
        tokens=ManyTokens([store.tokens for store in stores]),
        doc_tokens=doc_tokens,
        offsets=np.concatenate(([0], np.cumsum(doc_tokens))),
        origins=np.concatenate(
            [
                np.stack([store.origins[:, 0] + before, store.origins[:, 1]], axis=1)
                for store, before in zip(stores, files_before, strict=True)
            ]
        ),
        vocab=max(store.vocab for store in stores),
        folder=folder,
        digest=content,
        first_digest=content,
        source_name=" + ".join(names),
        source_kind="mix",
        empty_documents=sum(store.empty_documents for store in stores),
        undecodable_documents=sum(store.undecodable_documents for store in stores),
        mixture=mixture,
        sources=stores,
        learned=learned,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def check_vocabulary(store: TokenStore, vocab: int) -> None:
    """Refuse a tokenizer with more tokens than the model's vocabulary.

    Raises:
        ModelError: as above.
    """
    if store.vocab > vocab:
        raise ModelError(
            f"The tokenizer {store.tokenizer_file} has {store.vocab:,} tokens, but the model has "
            f"only {vocab:,}. Set model.vocab = {-(-store.vocab // 64) * 64}, or use the model's "
            f"own tokenizer."
        )
