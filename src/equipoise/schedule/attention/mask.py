"""Masks of packed documents as runs of queries that read alike.

Why
    Tiles, needed keys and the checker all ask which keys a query reads. Written as runs, the
    four masks are one case, and documents with different masks are one array.

What it decides
    A query reads at most two runs of keys: its ``own``, up to itself, and ``shared`` keys at the
    document's start::

        mask                  queries            own keys                    shared keys
        causal                [0, T)             [0, i]
        window w              [0, T)             [max(0, i - w + 1), i]
        full                  [0, T)                                         [0, T)
        prefix P, branches    [0, P)             [0, i]
                              branch [s, e)      [s, i]                      [0, P)

Kept true (tests/unit/schedule/attention/test_mask.py, by Hypothesis)
    Runs read exactly the pairs of the explicit mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.spec.mask import Mask
from equipoise.spec.pack import Pieces


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Which keys the queries of packed documents read; rows in order of (document, start)."""

    own: Pieces
    """int64 [n, 4]: document, start, stop, window. Query i of ``start:stop`` reads the last
    ``window`` keys up to itself, none before ``start``."""
    shared: Pieces
    """int64 [m, 4]: document, start, stop, keys. Queries ``start:stop`` read keys ``0:keys``."""


def masks_of(mask: Mask | Sequence[Mask], doc_tokens: Pieces) -> tuple[Mask, ...]:
    """The mask of each document, given one for all or one for each.

    Raises:
        SpecError: the number of masks is wrong, or a document's length is not that of its
            prefix and branches.

    >>> [str(mask) for mask in masks_of([Mask(), Mask("full")], np.array([3, 4]))]
    ['causal', 'full']
    """
    masks = (mask,) * len(doc_tokens) if isinstance(mask, Mask) else tuple(mask)
    if len(masks) != len(doc_tokens):
        raise SpecError(
            f"{len(masks)} masks for {len(doc_tokens)} documents. Give one mask per document, or "
            f"one for all."
        )
    for document, (each, tokens) in enumerate(zip(masks, doc_tokens.tolist(), strict=True)):
        total = each.prefix_tokens + sum(each.branch_tokens)
        if each.kind == "prefix" and tokens != total:
            raise SpecError(
                f"Document {document} has {tokens:,} tokens, but its mask has a prefix of "
                f"{each.prefix_tokens:,} and branches of {total - each.prefix_tokens:,}. Give it "
                f"a mask of {tokens:,} tokens."
            )
    return masks


def reads_of(masks: Sequence[Mask], doc_tokens: Pieces) -> Reads:
    """Write masks, one per document, as runs of queries that read alike.

    Cost: O(documents + branches).

    >>> reads = reads_of([Mask("prefix", 0, 2, (1, 2))], np.array([5]))
    >>> reads.own.tolist(), reads.shared.tolist()
    ([[0, 0, 2, 3], [0, 2, 3, 2], [0, 3, 5, 3]], [[0, 2, 5, 2]])
    """
    own: list[tuple[int, int, int, int]] = []
    shared: list[tuple[int, int, int, int]] = []
    for document, (mask, tokens) in enumerate(zip(masks, doc_tokens.tolist(), strict=True)):
        if mask.kind == "full":
            shared.append((document, 0, tokens, tokens))
        elif mask.kind == "prefix":
            shared.append((document, mask.prefix_tokens, tokens, mask.prefix_tokens))
            start = 0
            for size in (mask.prefix_tokens, *mask.branch_tokens):
                own.append((document, start, start + size, size + 1))
                start += size
        else:
            # One more than the keys, so that the window's lower edge cuts no tile.
            is_cut = mask.kind == "window" and mask.window_tokens < tokens
            window = mask.window_tokens if is_cut else tokens + 1
            own.append((document, 0, tokens, window))
    rows, wide = (np.array(each, dtype=np.int64).reshape(-1, 4) for each in (own, shared))
    is_some = (wide[:, 1] < wide[:, 2]) & (wide[:, 3] > 0)
    return Reads(rows[rows[:, 1] < rows[:, 2]], wide[is_some])


def write_masks(masks: Sequence[Mask]) -> str:
    """Masks as text, with equal neighbours joined.

    >>> write_masks([Mask(), Mask("window", 4), Mask("window", 4)])
    'documents 0:1 causal; documents 1:3 window 4'
    """
    parts, at = [], 0
    for mask, group in groupby(masks):
        stop = at + len(list(group))
        parts.append(f"documents {at}:{stop} {mask}")
        at = stop
    return "; ".join(parts)
