"""Images and sound among the documents of a check: drawn, of sizes that differ a hundredfold.

What it decides
    Every third document is text alone. The others have items one after another, with some tokens
    between them: one of a single row, one that fills most of what is left, and so on. So a window
    cuts some of them, ranks have none in some layouts, and one item may be most of a step's work.
"""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.base.arrays import Flags
from equipoise.nn.modality.insert import Inserted
from equipoise.spec.modality.encoder import KINDS, EncoderSpec
from equipoise.spec.modality.items import Items, Patches

_GAPS = (3, 1, 0)
"""Tokens before an item."""


def draw_items(doc_tokens: Sequence[int], specs: Sequence[EncoderSpec]) -> Items:
    """Items of documents of these lengths, the same on every rank."""
    first, drawn = [0], list[tuple[int, ...]]()
    for document, tokens in enumerate(doc_tokens):
        at = _GAPS[document % 3]
        while document % 3 != 2 and at + 2 < tokens:
            turn = len(drawn)
            left = tokens - at - 2
            rows = 1 if turn % 2 else max(1, left * 2 // 3)
            spec = specs[turn % len(specs)]
            across = next(each for each in (4, 3, 2, 1) if rows % each == 0)
            across = 1 if spec.kind == "audio" else across
            grid = rows // across * spec.merge[0], across * spec.merge[1]
            drawn.append((at, rows, KINDS.index(spec.kind), *grid, spec.values))
            at += rows + _GAPS[turn % 3]
        first.append(len(drawn))
    table = np.array(drawn, dtype=np.int64).reshape(-1, 6)
    values = tuple((number, *row) for number, row in enumerate(table[:, 3:].tolist()))
    return Items(
        np.array(first),
        table[:, 0],
        table[:, 1],
        table[:, 2],
        table[:, 3:5],
        np.stack((np.arange(len(table)),) * 2, axis=1),
        partial(_load, values),
    )


def _load(sizes: tuple[tuple[int, ...], ...], item: int) -> Patches:
    return _draw(*sizes[item])


@cache
def _draw(number: int, rows: int, columns: int, values: int) -> Patches:
    drawn = np.random.default_rng(number).standard_normal((rows * columns, values))
    patches: Patches = drawn.astype(np.float32)
    return patches


def stand_ins(items: Items, document: int, tokens: int) -> Flags:
    """Which tokens of a document stand in for rows of items, bool [tokens]."""
    stands = np.zeros(tokens, dtype=np.bool_)
    for item in items.within(document, 0, tokens).tolist():
        begin = int(items.begin[item])
        stands[begin : begin + int(items.rows[item])] = True
    return stands


def encode_alone(
    encoders: nn.ModuleDict, items: Items, document: int, start: int, stop: int
) -> Inserted | None:
    """Rows of one piece, each item encoded by itself: what every layout must equal."""
    places, rows = [], []
    like = next(encoders.parameters())
    for item in items.within(document, start, stop).tolist():
        grid: list[int] = items.grid[item].tolist()
        patches_PC = torch.from_numpy(items.load(item)).to(like.dtype)
        rows_ND: Tensor = encoders[KINDS[int(items.kind[item])]](patches_PC, [tuple(grid)])
        begin = int(items.begin[item])
        first, last = max(begin, start), min(begin + len(rows_ND), stop)
        rows.append(rows_ND[first - begin : last - begin])
        places.append(torch.arange(first - start, last - start))
    return Inserted(torch.cat(places), torch.cat(rows)) if rows else None
