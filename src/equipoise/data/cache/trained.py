"""The tokenizer that a run trains on its own corpus: trained once, kept beside the token caches.

Kept true (tests/unit/data/cache/test_store.py)
    Two runs that start together train one tokenizer; one whose bytes have changed is refused.
"""

from pathlib import Path

from equipoise.base.digest import digest, digest_file
from equipoise.base.durable import sync
from equipoise.base.errors import DataError
from equipoise.data.cache.meta import FORMAT, TOKENIZER
from equipoise.data.cache.once import building_path, clean_if_full, leftovers, make_once, remove
from equipoise.data.cache.verified import damaged
from equipoise.data.progress import Progress
from equipoise.data.source import Source
from equipoise.data.tokenizer import train_tokenizer

_DIGEST = "digest"
"""File beside a tokenizer that equipoise trained."""


def no_text(source: Source) -> DataError:
    """The error for a corpus whose documents are all empty."""
    return DataError(
        f"data.path {source.root} holds no text: in its {len(source.names):,} files "
        f"({source.size_bytes:,} bytes) every document is empty. Set data.path to a corpus with "
        "text in it."
    )


def obtain_tokenizer(source: Source, vocab: int, cache: Path, progress: Progress) -> Path:
    """The tokenizer of a corpus, in a folder with its digest."""
    folder = cache / f"tokenizer-{digest([FORMAT, source.digest, vocab])}"
    with make_once(folder, progress) as is_wanted, clean_if_full(source, folder):
        if is_wanted:
            for path in leftovers(folder):
                remove(path)
            progress.start("train tokenizer", 1)
            building = building_path(folder)
            try:
                if next(source.sample(), None) is None:
                    raise no_text(source)
                building.mkdir()
                train_tokenizer(source.sample(), vocab, building / TOKENIZER)
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
