"""Find the files of a corpus: below a folder, or as ``save_to_disk`` lists them.

What it decides
    Which files of a folder belong to a corpus of a kind. It reads names, sizes and times of
    change, but no contents.

Kept true (tests/unit/data/test_source.py)
    Files that are hidden or of another kind are left out; a folder without others is refused.
    A file and its compressed copy are one.

Sources
    save_to_disk folders: datasets 2.x/3.x, arrow_dataset.py (state.json, ``_data_files``).
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.base.errors import DataError
from equipoise.base.read import read_json
from equipoise.data.compressed import SUFFIXES, without_compression
from equipoise.data.functions import TESTS

_SUFFIX = {
    "python-stdlib": ".py",
    "python-functions": ".py",
    "text": "",
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "datasets": ".arrow",
}
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_LEFT_OUT = {"python-stdlib": _NOT_STDLIB, "python-functions": _NOT_STDLIB | TESTS}
"""Names that are not of the corpus; in corpora of other kinds, hidden ones."""


class CorpusFile(NamedTuple):
    """A file of a corpus, before it is read."""

    name: str
    """Its path relative to the corpus's root."""
    size_bytes: int
    changed_ns: int


def find_files(root: Path, kind: str) -> list[CorpusFile]:
    """The files of a kind below a folder, in any order; links to folders are not followed.

    Raises:
        DataError: there are none.
    """
    suffix = _SUFFIX[kind]
    suffixes = (suffix,) if kind in _LEFT_OUT else (suffix, *(suffix + s for s in SUFFIXES))
    files = []
    others = 0
    left_out = _LEFT_OUT.get(kind)
    folders = [("", root)]
    while folders:
        prefix, folder = folders.pop()
        try:
            entries = os.scandir(folder)
        except OSError as error:
            raise DataError(
                f"The folder {folder} of data.path cannot be read "
                f"({(error.strerror or str(error)).lower()}). Make it readable, or move it out "
                "of data.path."
            ) from None
        with entries:
            for entry in entries:
                if entry.name[0] == "." if left_out is None else entry.name in left_out:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append((f"{prefix}{entry.name}/", Path(entry.path)))
                elif _is_file(entry) and entry.name.endswith(suffixes):
                    state = entry.stat()
                    files.append(
                        CorpusFile(prefix + entry.name, state.st_size, state.st_mtime_ns),
                    )
                else:
                    others += 1
    if not files:
        missing = f"no *{suffix} files (other files: {others:,})"
        raise DataError(
            f"data.path {root} has {missing if suffix else 'no files, or only hidden ones'}. "
            f'Set data.path to the corpus, or data.source to its kind; now it is "{kind}".'
        )
    return files if kind in _LEFT_OUT else _without_copies(files)


def _is_file(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_file()
    except OSError:  # a loop of links
        return False


def _without_copies(files: list[CorpusFile]) -> list[CorpusFile]:
    """The files without compressed copies of others among them."""
    names = {file.name for file in files}
    kept: dict[str, CorpusFile] = {}
    for file in sorted(files):
        plain = without_compression(file.name)
        if plain == file.name or plain not in names:
            kept.setdefault(plain, file)
    return list(kept.values())


def _items_of(file: Path, key: str) -> list[Any]:
    """The list under a key in a file of ``save_to_disk``; empty if there is none."""
    try:
        items = read_json(file).get(key) or []
    except (OSError, ValueError, AttributeError) as error:
        words = getattr(error, "strerror", None) or error
        raise DataError(
            f"{file} cannot be read ({words}). Save the dataset again with save_to_disk."
        ) from None
    return items if isinstance(items, list) else []


def find_datasets(root: Path) -> list[CorpusFile]:
    """The arrow files of a folder that ``save_to_disk`` wrote.

    Raises:
        DataError: it is not such a folder, holds several datasets, or lacks files.
    """
    if (root / "dataset_dict.json").is_file():
        splits = [str(each) for each in _items_of(root / "dataset_dict.json", "splits")]
        if not splits:
            raise DataError(
                f"data.path {root} holds no dataset: its dataset_dict.json names none. Save the "
                "datasets again with save_to_disk."
            )
        raise DataError(
            f"data.path {root} holds {len(splits)} datasets ({', '.join(splits)}); a corpus is a "
            f"single one. Set data.path to {root / splits[0]}, for example."
        )
    if (root / "state.json").is_file():
        files = _items_of(root / "state.json", "_data_files")
        names = [str(each.get("filename")) for each in files if isinstance(each, dict)]
        if indices := _items_of(root / "state.json", "_indices_data_files"):
            raise DataError(
                f"data.path {root} keeps its row order in {len(indices)} files of indices, which "
                "equipoise does not read. Call flatten_indices() on the dataset and save it again."
            )
    elif (root / "dataset_info.json").is_file():
        # A folder of the datasets cache has the same files, but no state.json.
        names = [path.name for path in root.glob("*.arrow")]
    else:
        raise DataError(
            f"data.path {root} is not a save_to_disk folder: it has neither state.json nor "
            "dataset_info.json. Set data.path to the folder that save_to_disk wrote."
        )
    missing = [name for name in names if not (root / name).is_file()]
    if missing or not names:
        raise DataError(
            f"data.path {root} has {len(names) - len(missing)} of the {len(names)} arrow files "
            "that it should have"
            + (f"; the first missing one is {missing[0]}" if missing else "")
            + ". Save the dataset again with save_to_disk."
        )
    states = [(name, (root / name).stat()) for name in names]
    return [CorpusFile(name, state.st_size, state.st_mtime_ns) for name, state in states]
