"""Items of a corpus that nobody encodes: places, rows and kinds."""

import numpy as np

from equipoise.spec.modality.encoder import KINDS
from equipoise.spec.modality.items import Items
from equipoise.spec.modality.sections import AudioSpec, VisionSpec

_MERGES = {"image": VisionSpec().encoder.merge, "audio": AudioSpec().encoder.merge}


def _none(item: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    raise AssertionError(item)


def make_items(documents: list[list[tuple[int, int, int]]]) -> Items:
    """Items of documents, each by its first token, its rows and the index of its kind."""
    flat = np.array([each for items in documents for each in items], dtype=np.int64).reshape(-1, 3)
    first = np.cumsum([0, *map(len, documents)])
    merged = np.array([_MERGES[KINDS[kind]] for kind in flat[:, 2].tolist()]).reshape(-1, 2)
    grid = np.stack((flat[:, 1] * merged[:, 0], merged[:, 1]), axis=1)
    return Items(first, flat[:, 0], flat[:, 1], flat[:, 2], grid, grid, _none)
