"""Checks of ``PackedBatchSampler``'s arguments before its first batch.

Why
    Another trainer does not go through run.toml's checks, and a wrong argument would only show
    on one rank in the middle of an epoch, while the others wait.

Kept true (tests/unit/data/test_sampler.py)
    The whole text of each message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.balance.batches.units import read_array
from equipoise.base.errors import CheckpointError, DataError, LayoutError, SpecError
from equipoise.base.fields import is_whole
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.cost.curve import LoadCurve, require_curve
from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.spec import PackSpec


def whole_tokens(doc_tokens: ArrayLike) -> NDArray[np.int64]:
    """Lengths as int64.

    Raises:
        DataError: there are none, they do not form a list, or one is not a whole number.
    """
    given = read_array("Document lengths", doc_tokens, "[412, 96, 2048]")
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


def require_numbers(**numbers: object) -> None:
    """Refuse what is not a whole number, such as 2.0; None is not given.

    Raises:
        SpecError: names it.
    """
    for name, number in numbers.items():
        if number is not None and not is_whole(number):
            raise SpecError(f"{name} is {shown(number)}. Give a whole number.")


def require_seed(seed: int) -> None:
    """Refuse a seed that the generator of orders does not take.

    Raises:
        SpecError: it is not a whole number from 0 to 2**64 - 1.
    """
    require_numbers(seed=seed)
    if not 0 <= seed < 1 << 64:
        raise SpecError(f"seed is {seed:,}. Give a whole number from 0 to 2**64 - 1.")


def require_state(state: object, mine: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a state that another sampler cannot go on from.

    Args:
        state: What was given.
        mine: What this sampler's own is now.
        names: Whose values must be equal.

    Raises:
        CheckpointError: it is not a state, or says what differs.
    """
    lacks = [name for name in mine if not isinstance(state, Mapping) or name not in state]
    if lacks or not isinstance(state, Mapping):
        raise CheckpointError(
            f"The sampler's state lacks {', '.join(lacks)}. Give what its state_dict returned."
        )
    for name in names:
        if state[name] != mine[name]:
            raise CheckpointError(
                f"The sampler's state was taken with {name} = {_count(state[name])}, but here it "
                f"is {_count(mine[name])}. Resume with the same value, or start anew."
            )


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else shown(value)


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
        SpecError: no such policy, one that a plain loop cannot run, no curve for it, or a number
            that is not whole.
        LayoutError: the rank is not one of the ranks, a step has no token, or a piece cannot
            fit a micro-batch.
    """
    if pack.policy not in POLICIES:
        raise SpecError(
            f'No such packing policy: "{pack.policy}". Nearest: '
            f"{nearest(pack.policy, POLICIES)}. All: {', '.join(POLICIES)}."
        )
    traits = POLICIES[pack.policy]
    require_numbers(
        ranks=ranks,
        rank=rank,
        context_tokens=pack.context_tokens,
        step_tokens=pack.step_tokens,
        max_tokens=pack.max_tokens,
    )
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
    if curve is not None:
        if not isinstance(curve, LoadCurve):
            raise SpecError(
                f"curve is {shown(curve)}. Give a LoadCurve, as counted_curve(preset("
                f'"llama3-8b")) makes one.'
            )
        require_curve(curve)
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
