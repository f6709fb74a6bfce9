"""Items of a corpus on disk: a table in its token cache, and files that are read when needed.

Why
    Pixels would make a token cache as large as the images. So a cache has where each item lies,
    how large it is and the digest of its file, and the rank that encodes an item reads it.

What it decides
    While shards are tokenized, each has a table of its own beside it, written first, so that a
    whole shard has a whole table. The cache has ``items.bin``, part of what a run trains on, and
    ``items.json`` with paths, which may change without another corpus.

Kept true (tests/unit/data/modality/test_items.py)
    A file that has changed since it was tokenized is refused, by name; so is a table.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.digest import digest, digest_bytes
from equipoise.base.errors import DataError
from equipoise.base.grid import Grid
from equipoise.base.read import parse_json
from equipoise.data.chat.rows import RowError
from equipoise.data.modality.audio import audio_grid, read_audio
from equipoise.data.modality.image import ItemError, fit_image, image_size, item_file, read_image
from equipoise.data.modality.rules import ItemRules
from equipoise.spec.modality.encoder import KINDS, ItemKind
from equipoise.spec.modality.items import Items, Patches
from equipoise.spec.modality.sections import VisionSpec

ITEMS, ITEM_FILES = "items.bin", "items.json"
_COLUMNS = 9
"""Document, first token, rows, kind, grid rows, grid columns, bytes, digest in two halves."""


class EncodedItem(NamedTuple):
    """An item of a document while it is tokenized."""

    begin: int
    rows: int
    kind: int
    grid: Grid
    size_bytes: int
    digest: str
    path: str


def measure_item(kind: ItemKind, path: str, begin: int, rules: ItemRules) -> EncodedItem:
    """An item that begins at this token of its document; reads the file.

    Raises:
        RowError: the run has no encoder for it, or the file cannot be read.
    """
    spec = rules.encoder(kind)
    if spec is None:
        what, key = ("an image", "vision") if kind == KINDS[0] else ("sound", "audio")
        raise RowError(
            f"has {what} ({path}), and the run has no encoder for it. Set {key}.layers, or remove "
            "the row."
        )
    try:
        data = item_file(Path(path))
        is_image = kind == KINDS[0]
        grid = fit_image(*image_size(data), rules.vision) if is_image else audio_grid(data)
    except ItemError as error:
        raise RowError(f"names {path}, which {error}") from None
    rows = grid[0] * grid[1] // spec.merged
    return EncodedItem(begin, rows, KINDS.index(kind), grid, len(data), digest_bytes(data), path)


def table_file(shard: Path) -> Path:
    """Where the items of a shard's documents are."""
    return shard.with_name(f"{shard.name}.items")


def write_table(shard: Path, items: Sequence[tuple[int, EncodedItem]]) -> None:
    """Write the items of a shard, each with its document's number in the shard."""
    rows = [[document, *item] for document, item in items]
    file = table_file(shard)
    building = file.with_name(f"{file.name}.building-{os.getpid()}")
    text = json.dumps({"place": shard.name, "items": rows, "digest": digest([shard.name, rows])})
    with building.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    building.replace(file)


def read_table(shard: Path) -> list[tuple[int, EncodedItem]] | None:
    """The items of a shard; None if the table is not as it was written."""
    try:
        data = parse_json(table_file(shard).read_text())
        rows, known = data["items"], data["digest"]
        if known != digest([shard.name, rows]):
            return None
        items = [
            (row[0], EncodedItem(row[1], row[2], row[3], (row[4][0], row[4][1]), *row[5:]))
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return items


def write_items(
    folder: Path,
    tables: Iterable[tuple[int, list[tuple[int, EncodedItem]]]],
    rules: ItemRules,
) -> None:
    """Write the items of all shards into a cache's folder.

    Args:
        folder: The cache.
        tables: Documents of each shard, and its items.
        rules: By which they were measured.
    """
    rows, paths, before = [], [], 0
    for documents, table in tables:
        for document, item in table:
            halves = np.frombuffer(bytes.fromhex(item.digest), "<i8").tolist()
            sizes = [item.begin, item.rows, item.kind, *item.grid, item.size_bytes]
            rows.append([before + document, *sizes, *halves])
            paths.append(item.path)
        before += documents
    table_of_all = np.array(rows, dtype="<i8").reshape(-1, _COLUMNS)
    (folder / ITEMS).write_bytes(table_of_all.tobytes())
    said = {
        "vision": astuple(rules.vision),
        "audio": astuple(rules.audio),
        "paths": paths,
    }
    (folder / ITEM_FILES).write_text(json.dumps(said))


@dataclass(frozen=True, slots=True, eq=False)
class ItemFiles:
    """Reads items from their files."""

    table: Ints
    paths: tuple[str, ...]
    vision: VisionSpec
    folder: Path
    """The token cache, for an error."""

    def load(self, item: int) -> Patches:
        """The patches of an item.

        Raises:
            DataError: its file is missing, or has changed since it was tokenized.
        """
        row, path = self.table[item], self.paths[item]
        try:
            data = item_file(Path(path))
            if digest_bytes(data) != row[7:].astype("<i8").tobytes().hex():
                raise ItemError(
                    f"has changed since its corpus was tokenized. Restore it, or delete the folder "
                    f"{self.folder}; the next run makes it again."
                )
            if KINDS[int(row[3])] == "audio":
                return read_audio(data)
            return read_image(data, (int(row[4]), int(row[5])), self.vision)
        except ItemError as error:
            raise DataError(f"{path} {error}") from None


def open_items(folder: Path, table: bytes, said: bytes, documents: int) -> Items:
    """The items of a cache, from its verified files.

    Args:
        folder: The cache.
        table: Its ``items.bin``.
        said: Its ``items.json``.
        documents: Documents of the cache.

    Raises:
        ValueError: they do not match.
    """
    rows = np.frombuffer(table, "<i8").reshape(-1, _COLUMNS).astype(np.int64)
    data: Any = json.loads(said)
    paths = tuple(str(path) for path in data["paths"])
    if len(paths) != len(rows):
        raise ValueError(f"{len(paths)} paths of {len(rows)} items")
    files = ItemFiles(rows, paths, VisionSpec(*data["vision"]), folder)
    first = np.searchsorted(rows[:, 0], np.arange(documents + 1))
    return Items(
        first=first.astype(np.int64),
        begin=rows[:, 1],
        rows=rows[:, 2],
        kind=rows[:, 3],
        grid=rows[:, 4:6],
        content=rows[:, 7:9],
        load=files.load,
    )
