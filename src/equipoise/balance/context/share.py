"""Each context rank's part of a packed micro-batch."""

import numpy as np

from equipoise.balance.context.sharding import split_context
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch


def share_micro_batch(batch: MicroBatch, ranks: int, curve: LoadCurve) -> tuple[MicroBatch, ...]:
    """Divide a micro-batch between context-parallel ranks.

    Documents that begin here are split by ``mixed``. A later slice of a document divided over
    time also reads the slices before it, so every rank gets a head and a tail of it: equal
    tokens, and equal pairs however long the history.

    Args:
        batch: The micro-batch; may be empty.
        ranks: Context-parallel degree, >= 1.
        curve: Price of a piece.

    Returns:
        The pieces of each rank, with the first token that each reads.
    """
    if ranks == 1:
        return (batch,)
    history = batch.history_tokens
    rows: list[list[np.ndarray]] = [[np.zeros((0, 4), dtype=np.int64)] for _ in range(ranks)]
    whole = batch.pieces[history == 0]
    if len(whole):
        split = split_context(whole[:, 2] - whole[:, 1], ranks, "mixed", curve=curve)
        for rank, part in enumerate(split.pieces):
            owner = whole[part[:, 0]]
            begin = owner[:, 1]
            cut = (owner[:, 0], begin + part[:, 1], begin + part[:, 2], begin)
            rows[rank].append(np.stack(cut, axis=1))
    for piece, before in zip(batch.pieces[history > 0], history[history > 0], strict=True):
        document, start, stop = piece.tolist()
        bounds = start + np.arange(2 * ranks + 1) * (stop - start) // (2 * ranks)
        for rank in range(ranks):
            for run in (rank, 2 * ranks - 1 - rank):
                if bounds[run] < bounds[run + 1]:
                    row = [document, bounds[run], bounds[run + 1], start - before]
                    rows[rank].append(np.array([row], dtype=np.int64))
    tables = [np.concatenate(each) for each in rows]
    return tuple(MicroBatch(table[:, :3], table[:, 3]) for table in tables)
