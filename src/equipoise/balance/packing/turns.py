"""Turns of a step whose documents lie on several ranks: what runs at the same time.

Why
    Under ``divided``, ``gangs``, ``flexsp`` and ``bytescale`` each long document has ranks of its
    own, and these differ from document to document. They run its parts together::

        rank 0   [ A, first half  ] [ C ]            A on ranks 0 and 1, D on ranks 1 and 2
        rank 1   [ A, second half ] [ D, first half  ]
        rank 2   [ B              ] [ D, second half ]
                   turn 0             turn 1

What it decides
    Which layouts a policy that divides documents supports, for runs and for prices alike; and in
    which turn each micro-batch runs: as early as its rank and its partners are free. A rank
    without work in a turn gets an empty micro-batch, so that all ranks have equally many, and
    equally many of the collectives that ZeRO 2 and 3 put into each.

Kept true (tests/unit/train/test_together.py, by Hypothesis)
    Each rank runs its micro-batches in the packer's order; all parts of a document have one turn.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.spec.catalog import POLICIES
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces


def require_policy(policy: str, *, context: int, pipeline: int) -> None:
    """Refuse a policy that divides documents in a layout that cannot run it.

    Args:
        policy: Packing policy.
        context: Ranks that share each micro-batch.
        pipeline: Ranks that share layers.

    Raises:
        LayoutError: names the keys that do not match.
    """
    traits = POLICIES[policy]
    if traits.needs_pipeline and (pipeline == 1 or context > 1):
        raise LayoutError(
            f'pack.policy = "{policy}" lets parts of one document attend to each other from '
            f"different micro-batches, which only a pipeline of whole micro-batches runs; "
            f"layout.pp = {pipeline} and layout.cp = {context}. Set layout.pp = 2 "
            f'and layout.cp = 1, or pack.policy = "divided", "by-work" or "delayed".'
        )
    if pipeline > 1 and traits.runs_together:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over all ranks at once, and '
            f"layout.pp = {pipeline} has ranks that compute one after another. Set "
            f'layout.pp = 1, or pack.policy = "divided-in-time" or "by-work".'
        )
    if context > 1 and traits.runs_together:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over ranks itself, and layout.cp = '
            f"{context} would divide them again. Set layout.cp = 1, or pack.policy = "
            f'"by-work".'
        )


_Place = tuple[int, int]
"""A micro-batch: rank, and its number on that rank."""


def align_turns(packed: PackedStep) -> PackedStep:
    """Give all parts of a document one turn, and all ranks the same number of turns.

    Args:
        packed: Micro-batches of each rank, in its order.

    Returns:
        The same with empty micro-batches where ranks have no work; pieces are in order of
        document and start.

    Raises:
        LayoutError: a document has parts in two micro-batches of one rank, or ranks would wait
            for each other in a circle.

    Cost: O(pieces log pieces + ranks x micro-batches).

    >>> half, other = (MicroBatch(np.array([[7, *run]]), np.array([0])) for run in ((0, 5), (5, 9)))
    >>> short = MicroBatch(np.array([[8, 0, 3]]))
    >>> aligned = align_turns(PackedStep("gangs", ((short, half), (other,))))
    >>> [[batch.tokens for batch in rank] for rank in aligned.ranks]
    [[3, 5], [0, 4]]
    """
    partners = _partners(packed)
    heads, free = [0] * len(packed.ranks), [0] * len(packed.ranks)
    turn_of: dict[_Place, int] = {}
    waiting = sum(map(len, packed.ranks))
    while waiting:
        before = waiting
        for rank, batches in enumerate(packed.ranks):
            while heads[rank] < len(batches):
                together = partners[rank, heads[rank]]
                if any(heads[other] != number for other, number in together):
                    break
                turn = max(free[other] for other, _ in together)
                for other, number in together:
                    turn_of[other, number] = turn
                    heads[other], free[other] = number + 1, turn + 1
                waiting -= len(together)
        if waiting == before:
            stuck = [
                rank for rank, batches in enumerate(packed.ranks) if heads[rank] < len(batches)
            ]
            raise LayoutError(
                f"Ranks {stuck} wait for parts of documents in later micro-batches of each other, "
                f"{waiting} of them. Put all parts of a document into micro-batches that their "
                f"ranks can run at the same time."
            )
    rows = [[_NOTHING] * max(free) for _ in packed.ranks]
    for (rank, number), turn in turn_of.items():
        rows[rank][turn] = _in_order(packed.ranks[rank][number])
    return PackedStep(packed.policy, tuple(map(tuple, rows)))


_NOTHING = MicroBatch(np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64))


def _in_order(batch: MicroBatch) -> MicroBatch:
    order = np.lexsort((batch.pieces[:, 1], batch.pieces[:, 0]))
    return MicroBatch(batch.pieces[order], batch.begins[order])


def _partners(packed: PackedStep) -> dict[_Place, set[_Place]]:
    """The micro-batches that run together with each one, itself included."""
    partners_of: dict[_Place, set[_Place]] = {}
    of_document: dict[tuple[int, int], _Place] = {}
    for rank, batches in enumerate(packed.ranks):
        for number, batch in enumerate(batches):
            here = (rank, number)
            partners_of[here] = {here}
            keys = zip(batch.pieces[:, 0].tolist(), batch.begins.tolist(), strict=True)
            for key in keys:
                together = partners_of[of_document.setdefault(key, here)]
                if here not in together:
                    together |= partners_of[here]
                    for each in together:
                        partners_of[each] = together
    return partners_of


def place_turn(packed: PackedStep, turn: int) -> tuple[list[Pieces], Ints]:
    """Which rank holds which tokens of the documents of one turn.

    Args:
        packed: From ``align_turns``.
        turn: Index of the micro-batch on each rank.

    Returns:
        Each rank's pieces, int64 [n, 3]: document, start, stop, counted from the first token of
        its cut; and the length of each document. Documents are numbered by document and cut, as
        in the corpus.

    >>> half, other = (MicroBatch(np.array([[7, *run]]), np.array([0])) for run in ((0, 5), (5, 9)))
    >>> home, doc_tokens = place_turn(PackedStep("gangs", ((half,), (other,))), 0)
    >>> [rows.tolist() for rows in home], doc_tokens.tolist()
    ([[[0, 0, 5]], [[0, 5, 9]]], [9])
    """
    batches = [rank[turn] for rank in packed.ranks]
    keys = np.concatenate([np.stack((b.pieces[:, 0], b.begins), axis=1) for b in batches])
    names, which = np.unique(keys, axis=0, return_inverse=True)
    bounds = np.cumsum([0, *(len(batch.pieces) for batch in batches)])
    doc_tokens = np.zeros(len(names), dtype=np.int64)
    home = []
    for rank, batch in enumerate(batches):
        document = which.reshape(-1)[bounds[rank] : bounds[rank + 1]]
        runs = batch.pieces[:, 1:] - batch.begins[:, None]
        np.maximum.at(doc_tokens, document, runs[:, 1])
        home.append(np.column_stack((document, runs)))
    return home, doc_tokens
