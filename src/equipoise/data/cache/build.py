"""Build what a corpus lacks: its tokenizer and its tokens, once, on every core.

Kept true (tests/unit/data/cache/test_store.py)
    Any number of workers, and any number of earlier kills, give the same bytes; what exists is
    not built again.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from equipoise.base.digest import digest, digest_file
from equipoise.base.durable import sync
from equipoise.base.errors import DataError
from equipoise.data.cache.meta import FORMAT, TOKENIZER, cache_name
from equipoise.data.cache.once import (
    building_path,
    clean_if_full,
    leftovers,
    make_once,
    parts_folder,
    remove,
)
from equipoise.data.cache.shard_tokens import (
    assemble,
    is_whole,
    shard_sizes,
    token_dtype,
    tokenize_shard,
)
from equipoise.data.cache.verified import damaged
from equipoise.data.cache.workers import tokenize_parallel
from equipoise.data.chat.encode import Recipe
from equipoise.data.modality.files import read_table
from equipoise.data.progress import Progress
from equipoise.data.source import Source
from equipoise.data.text.tokenizer import tokenizer_file, train_tokenizer

FIRST_FORMAT = 1
"""The format without digests; its checkpoints identify a corpus by its cache's name."""

_DIGEST = "digest"
"""File beside a tokenizer that equipoise trained."""


def tokenize_once(
    source: Source, recipe: Recipe, cache: Path, progress: Progress, workers: int
) -> Path:
    """The cache of a source, which is built unless it is there.

    Raises:
        DataError: the tokenizer, or the chat template that rows need, is missing.
    """
    if recipe.digest:
        source = dataclasses.replace(source, digest=digest([source.digest, recipe.digest]))
    parts = source.digest, digest_file(tokenizer_file(recipe.tokenizer))
    folder = cache / f"tokens-{cache_name(*parts)}"
    label = f"tokenize {source.name}"
    if (cache / f"tokens-{cache_name(*parts, made_by=FIRST_FORMAT)}").is_dir():
        label += " again (the cache of an earlier version has no digests)"
    with make_once(folder, progress) as is_wanted:
        if is_wanted:
            _build(source, recipe, folder, progress, workers, label)
    return folder


def _no_text(source: Source) -> DataError:
    where, files = source.root, f"of its {len(source.names):,} files "
    if len(source.names) == 1:
        where, files = source.root / source.names[0], ""
    return DataError(
        f"data.path {where} holds no text: every document {files}is empty ({source.size_bytes:,} "
        "bytes). Set data.path to a corpus with text in it."
    )


def train_once(sources: Sequence[Source], vocab: int, cache: Path, progress: Progress) -> Path:
    """The tokenizer of a corpus, or of all sources of a mixture, in a folder with its digest."""
    texts = sources[0].digest if len(sources) == 1 else [source.digest for source in sources]
    folder = cache / f"tokenizer-{digest([FORMAT, texts, vocab])}"
    with make_once(folder, progress) as is_wanted, clean_if_full(sources[0], folder):
        if is_wanted:
            for path in leftovers(folder):
                remove(path)
            progress.start("train tokenizer", 1)
            building = building_path(folder)
            try:
                for source in sources:
                    if next(source.sample(), None) is None:
                        raise _no_text(source)
                building.mkdir()
                samples = chain.from_iterable(source.sample() for source in sources)
                train_tokenizer(samples, vocab, building / TOKENIZER)
                (building / _DIGEST).write_text(digest_file(building / TOKENIZER))
                for path in (building / _DIGEST, building):
                    sync(path)
                building.rename(folder)
                progress.advance(1)
            finally:
                remove(building)
                progress.finish()
    file = folder / TOKENIZER
    known = folder / _DIGEST
    if not (file.is_file() and known.is_file()) or digest_file(file).encode() != known.read_bytes():
        raise damaged(file, "its bytes have changed since it was written")
    return file


def _build(
    source: Source,
    recipe: Recipe,
    folder: Path,
    progress: Progress,
    workers: int,
    label: str,
) -> None:
    parts, encoder = parts_folder(folder), recipe.load()
    dtype, masks = token_dtype(encoder.tokenizer.vocab), recipe.masks
    with clean_if_full(source, folder):
        for path in leftovers(folder):
            if path != parts:
                remove(path)
        parts.mkdir(exist_ok=True)
        for path in parts.glob("*.building-*"):
            remove(path)
        shards = source.shards()
        files = [parts / f"shard-{index:06d}" for index in range(len(shards))]
        progress.start(label, sum(shard.size_bytes for shard in shards))
        try:
            todo = []
            for shard, file in zip(shards, files, strict=True):
                has_items = recipe.rules is None or read_table(file) is not None
                if has_items and is_whole(file, dtype, masks=masks):
                    progress.advance(shard.size_bytes)
                else:
                    todo.append((shard, file))
            if min(workers, len(todo)) > 1:
                tokenize_parallel(todo, recipe, progress, min(workers, len(todo)))
            else:
                for shard, file in todo:
                    tokenize_shard(shard, encoder, file)
                    progress.advance(shard.size_bytes)
        finally:
            progress.finish()
        made = [shard_sizes(file, dtype, masks=masks) for file in files]
        if not any(sizes.documents for sizes in made if sizes is not None):
            remove(parts)
            raise _no_text(source)
        building = building_path(folder)
        try:
            assemble(source, encoder, files, building)
            building.rename(folder)
            sync(folder.parent)
        except BaseException:
            remove(building)
            if not folder.exists():  # a process beyond the lock's reach may have been faster
                raise
        remove(parts)
