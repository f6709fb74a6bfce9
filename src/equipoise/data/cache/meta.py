"""A token cache's description of itself: meta.json, the last of its files to be written.

What it decides
    meta.json has the size and digest of every other file, except tokens.bin, whose chunks are
    digested in tokens.digests; it ends with a digest of itself. The digest of a cache's *content*
    covers only what a run trains on (tokens, where documents end, the tokenizer), not where or
    when the cache was made.

Kept true (tests/unit/data/test_cache_damage.py)
    A changed bit in any file of a cache is detected when it is opened, or, in tokens.bin, when it
    is read.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.digest import digest, digest_bytes, digest_file
from equipoise.base.errors import DataError
from equipoise.data.cache.verified import damaged, unreadable
from equipoise.data.modality.files import ITEM_FILES, ITEMS

# Part of every cache's name. Increase it when the layout of files, the division into shards or
# the sampling of texts changes: a build may resume from the shards of an older version.
FORMAT = 2

META, TOKENS, TABLE = "meta.json", "tokens.bin", "tokens.digests"
OFFSETS, ORIGINS, NAMES, TOKENIZER = "offsets.bin", "origins.bin", "names.json", "tokenizer.json"
LEARNED = "learned.bin"
"""Only in caches of conversations, some of whose tokens are not learned."""


@dataclass(frozen=True, slots=True)
class CacheMeta:
    """The fields of meta.json except its digest. ``files`` has sizes [bytes] and digests."""

    format: int
    source_name: str
    source_kind: str
    source_digest: str
    tokenizer_digest: str
    vocab: int
    end: int
    dtype: str
    documents: int
    tokens: int
    empty_documents: int
    undecodable_documents: int
    files: dict[str, tuple[int, str]]

    @property
    def masks(self) -> bool:
        """Whether only some tokens are learned."""
        return LEARNED in self.files

    @property
    def holds_items(self) -> bool:
        """Whether documents may have images and sound."""
        return ITEMS in self.files

    @property
    def content(self) -> str:
        """The digest of what a run trains on."""
        names = [TABLE, OFFSETS, TOKENIZER]
        names += [name for name in (LEARNED, ITEMS) if name in self.files]
        parts = (self.files[name][1] for name in names)
        return digest([self.dtype, self.vocab, self.end, *parts])


def cache_name(source_digest: str, tokenizer_digest: str, *, made_by: int = FORMAT) -> str:
    """The digest in a cache's name: of its inputs and of the format."""
    return digest([made_by, source_digest, tokenizer_digest])


def describe(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of each file that is verified as a whole."""
    names = [TABLE, OFFSETS, ORIGINS, NAMES, TOKENIZER]
    names += [name for name in (LEARNED, ITEMS, ITEM_FILES) if (folder / name).exists()]
    return {name: ((folder / name).stat().st_size, digest_file(folder / name)) for name in names}


def render(meta: CacheMeta) -> str:
    """The canonical text of meta.json; any other text counts as damaged."""
    data = dataclasses.asdict(meta)
    return json.dumps(data | {"digest": digest(data)}, indent=1) + "\n"


def read_meta(folder: Path) -> CacheMeta:
    """Read a cache's meta.json.

    Raises:
        DataError: it is missing, has another format, or was changed.
    """
    file = folder / META
    try:
        data_bytes = file.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(
            f"{folder} is not a token cache: it has no {META}. Delete the folder; the next run "
            "makes it again."
        ) from None
    except OSError as error:
        raise unreadable(folder, error) from None
    try:
        text = data_bytes.decode()
        data = json.loads(text)
        layout = data["format"]
        if isinstance(layout, int) and layout != FORMAT:
            raise DataError(
                f"{folder} is a token cache of format {layout}; this version reads {FORMAT}. "
                "Delete the folder; the next run makes it again."
            )
        files = {name: (int(size), str(known)) for name, (size, known) in data["files"].items()}
        fields = {each.name: data[each.name] for each in dataclasses.fields(CacheMeta)}
        meta = CacheMeta(**{**fields, "files": files})
        is_same = text == render(meta)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_same = False
    if not is_same:
        raise _changed(file)
    return meta


def require_whole(folder: Path, meta: CacheMeta, name: str) -> None:
    """Verify a file of a cache.

    Raises:
        DataError: it has changed since it was written.
    """
    file = folder / name
    size_bytes, known = meta.files[name]
    held_bytes = file.stat().st_size if file.is_file() else 0
    if held_bytes != size_bytes:
        raise damaged(file, f"it has {held_bytes:,} bytes where {META} says {size_bytes:,}")
    if digest_file(file) != known:
        raise _changed(file)


def read_whole(folder: Path, meta: CacheMeta, name: str) -> bytes:
    """The bytes of one file of a cache, verified.

    Raises:
        DataError: as ``require_whole``.
    """
    file = folder / name
    if not file.is_file() or file.stat().st_size != meta.files[name][0]:
        require_whole(folder, meta, name)
    data = file.read_bytes()
    if digest_bytes(data) != meta.files[name][1]:
        raise _changed(file)
    return data


def _changed(file: Path) -> DataError:
    return damaged(file, "its bytes have changed since it was written")
