"""Digests: equal bytes get equal names, on every rank and every day."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "dtype"):  # a NumPy value; this module does not import NumPy
        if value.shape:
            return [value.dtype.str, list(value.shape), digest_bytes(value.tobytes())]
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def digest(value: Any) -> str:
    """The 32-digit digest of plain data (dataclasses, dicts, lists, arrays, numbers, text).

    >>> digest({"b": 1, "a": [2, 3]}) == digest({"a": (2, 3), "b": 1})
    True
    """
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    return digest_bytes(text.encode())


def digest_bytes(data: bytes | memoryview) -> str:
    """The 32-digit BLAKE2b digest of some bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """The 32-digit BLAKE2b digest of a file, read in 4 MiB parts."""
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(4 << 20):
            state.update(part)
    return state.hexdigest()
