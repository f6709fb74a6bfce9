"""Checks of ``PackedBatchSampler``'s arguments before its first batch.

Why
    Another trainer does not go through run.toml's checks, and a wrong argument would only show
    on one rank in the middle of an epoch, while the others wait.

Kept true (tests/unit/data/test_sampler.py)
    The whole text of each message.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.base.errors import DataError, LayoutError, SpecError
from equipoise.base.nearest import nearest
from equipoise.cost.curve import LoadCurve
from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.spec import PackSpec


def whole_tokens(doc_tokens: ArrayLike) -> NDArray[np.int64]:
    """Lengths as int64.

    Raises:
        DataError: there are none, they do not form a list, or one is not a whole number.
    """
    given = np.asarray(doc_tokens)
    if given.ndim != 1:
        raise DataError(
            f"Document lengths have shape {given.shape}. Give one number per document, such as "
            '[len(each["input_ids"]) for each in dataset].'
        )
    if given.dtype.kind in "iu":
        return given.astype(np.int64)
    if not given.size:
        raise DataError(
            "There are 0 documents to pack. Give the lengths of the dataset's documents, such as "
            '[len(each["input_ids"]) for each in dataset].'
        )
    if given.dtype.kind != "f":
        raise DataError(
            f"Document lengths have type {given.dtype}. Give whole numbers of tokens, such "
            f'as [len(each["input_ids"]) for each in dataset].'
        )
    bad = np.flatnonzero(~(np.isfinite(given) & (given == np.floor(given))))
    if len(bad):
        raise DataError(
            f"Document {int(bad[0]):,} of {given.size:,} has {given.flat[bad[0]]} tokens, which "
            f"is not a whole number. Count its tokens again."
        )
    return given.astype(np.int64)


def require_runnable(
    pack: PackSpec, longest: int, ranks: int, rank: int, curve: LoadCurve | None
) -> None:
    """Refuse what a plain loop cannot run.

    Args:
        pack: The requested packing.
        longest: Longest document [tokens].
        ranks: Data-parallel ranks.
        rank: This rank.
        curve: Price of a document, if given.

    Raises:
        SpecError: no such policy, one that a plain loop cannot run, or no curve for it.
        LayoutError: the rank is not one of the ranks, a step has no token, or a piece cannot
            fit a micro-batch.
    """
    if pack.policy not in POLICIES:
        raise SpecError(
            f'No such packing policy: "{pack.policy}". Nearest: '
            f"{nearest(pack.policy, POLICIES)}. All: {', '.join(POLICIES)}."
        )
    traits = POLICIES[pack.policy]
    if traits.divides:
        raise SpecError(
            f'Under policy "{pack.policy}" pieces read keys of other micro-batches, which a '
            f'DataLoader does not send them. Use policy="by-work".'
        )
    if curve is None and traits.reads_prices:
        raise SpecError(
            f'Policy "{pack.policy}" balances work, so it needs the model\'s cost of a document. '
            f'Pass curve=counted_curve(preset("llama3-8b")), or the curve of your own model.'
        )
    if not 0 <= rank < ranks:
        raise LayoutError(
            f"rank = {rank} is not one of {ranks} ranks. Give a rank from 0 to ranks - 1, and at "
            f"least 1 rank."
        )
    if pack.step_tokens < 1:
        raise LayoutError(
            f"Steps of {pack.step_tokens:,} tokens train nothing. Set step_tokens to the tokens of "
            f"one optimizer step over all ranks."
        )
    piece = min(longest, pack.context_tokens)
    if piece > pack.most_tokens:
        raise LayoutError(
            f"Pieces of {piece:,} tokens do not fit micro-batches of {pack.most_tokens:,}. Set "
            f"max_tokens={piece}, or a smaller context_tokens."
        )
