"""Refuse what no group plan can hold, in one sentence with the smallest change that fits."""

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError, FitError, LayoutError

_LONGEST = 2**31 - 1
"""Longest document [tokens]: its pairs are still an int64."""


def require_lengths(doc_tokens: npt.ArrayLike, ranks: int, cap_tokens: int) -> Ints:
    """The lengths as int64.

    Raises:
        DataError: a length is not a whole number of 1 or more.
        LayoutError: ranks or cap below 1.
    """
    if ranks < 1 or cap_tokens < 1:
        raise LayoutError(
            f"Groups need at least 1 rank and 1 token per rank; got {ranks} ranks and "
            f"{cap_tokens:,} tokens."
        )
    given = np.asarray(doc_tokens)
    if given.ndim != 1:
        raise DataError(
            f"Document lengths have shape {given.shape}. Give a list: one whole number of tokens "
            f"per document."
        )
    if not len(given):
        return np.zeros(0, dtype=np.int64)
    wrong = ~((given >= 1) & (given <= _LONGEST) & (given == np.floor(given)))
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(
            f"Document {at} has a length of {given[at]} tokens. Lengths are whole numbers from 1 "
            f"to {_LONGEST:,}."
        )
    lengths: Ints = given.astype(np.int64)
    return lengths


def require_fit(
    doc_tokens: Ints,
    widest: int,
    ranks: int,
    cap_tokens: int,
    policy: str,
    *,
    held: Ints | None = None,
) -> None:
    """Refuse a document that no group holds.

    Args:
        doc_tokens: Length of each document [tokens].
        widest: Most ranks that the policy gives one document.
        ranks: Ranks in all.
        cap_tokens: Most tokens that one rank holds at once.
        policy: Name of the policy.
        held: Tokens of each document that stay on the device; all unless given.

    Raises:
        FitError: names the largest document, and the smallest changes that fit it.
    """
    if not len(doc_tokens):
        return
    stays = doc_tokens if held is None else held
    largest = int(stays.argmax())
    tokens = int(stays[largest])
    if -(-tokens // widest) <= cap_tokens:
        return
    needed, note = -(-tokens // cap_tokens), ""
    if policy == "flexsp":
        needed = 1 << (needed - 1).bit_length()
        note = f" (flexsp gives a document a power of two, here at most {widest})"
    elif tokens < int(doc_tokens[largest]):
        note = f" (offloading leaves {tokens:,} of its tokens on the device)"
    raise FitError(
        f"Document {largest} of {int(doc_tokens[largest]):,} tokens needs {needed:,} ranks at "
        f"{cap_tokens:,} tokens a rank; there are {ranks}{note}. Smallest changes that fit: "
        f"{needed:,} ranks, or {-(-tokens // widest):,} tokens a rank."
    )
