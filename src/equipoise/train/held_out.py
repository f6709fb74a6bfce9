"""What an evaluation reads: documents by bucket of length, their labels, and who runs which.

What it decides
    A micro-batch holds documents of one bucket, so the summed loss of a micro-batch, which every
    layout and every model has, is a part of that bucket's sum.

    Micro-batches are packed by the work of their forward, and divided over ranks where the run
    divides documents. Groups of them are packed one by one; the rank with the least so far takes
    the fullest row of the next, so that all finish together. A rank without documents has empty
    micro-batches, since ranks that meet in micro-batches must run equally many.

Kept true (tests/multi/train/test_evaluate.py, tests/unit/train/test_held_out.py)
    Every piece is in one micro-batch; all ranks have equally many; labels are counted in integers
    that no layout changes.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.balance.packing.pack import make_packer, rank_seconds
from equipoise.balance.packing.turns import align_turns
from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve
from equipoise.data.batch import make_batch
from equipoise.data.cache.store import TokenStore
from equipoise.data.held_out import bucket_of, cut_documents, draw_documents
from equipoise.data.text.tokenizer import read_token_bytes
from equipoise.nn.loss import IGNORED
from equipoise.schedule.attention.price import BACKWARD_OVER_FORWARD
from equipoise.spec.catalog import POLICIES
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import EvalSpec, PackSpec, RunSpec

_GROUP_WINDOWS = 8
"""Windows of each rank that are packed together: enough to be even, few enough to hold."""

_COUNTED_AT_ONCE = 64
"""Pieces that are read together to count their labels."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation reads: documents by bucket, and how their losses are averaged."""

    documents: Ints
    least_tokens: Ints
    """Shortest length of each bucket, a power of two [tokens]."""
    pieces: tuple[Pieces, ...]
    """Pieces of each bucket."""
    counts: Ints
    """Documents, tokens, labels and bytes of text of each bucket, int64 [4, buckets]; bytes are 0
    where the tokenizer does not say them."""
    has_bytes: bool

    @property
    def total(self) -> dict[str, int | None]:
        """Documents, tokens, labels and bytes of all buckets."""
        documents, tokens, labels, text_bytes = map(int, self.counts.sum(axis=1))
        return {
            "documents": documents,
            "tokens": tokens,
            "labels": labels,
            "text_bytes": text_bytes if self.has_bytes else None,
        }


def open_held_out(store: TokenStore, asked: EvalSpec, context_tokens: int, ranks: Ranks) -> HeldOut:
    """Choose the documents, cut them and count their labels, on all ranks together.

    Args:
        store: The held-out corpus.
        asked: The ``[eval]`` table.
        context_tokens: Longest piece.
        ranks: All of them; each calls this and reads its part.

    Raises:
        DataError: no document has a label.
    """
    documents = draw_documents(store.doc_tokens, asked.tokens)
    every = cut_documents(documents, store.doc_tokens, context_tokens)
    bucket = bucket_of(store.doc_tokens[every[:, 0]])
    powers, bucket = np.unique(bucket, return_inverse=True)
    per_token = read_token_bytes(store.tokenizer_file)
    buckets = len(powers)
    pieces = tuple(every[bucket == number] for number in range(buckets))
    mine = np.zeros((2, buckets), dtype=np.int64)
    for number, part in enumerate(pieces):
        for at in range(_COUNTED_AT_ONCE * ranks.rank, len(part), _COUNTED_AT_ONCE * ranks.world):
            some = MicroBatch(part[at : at + _COUNTED_AT_ONCE])
            labels_T = make_batch(store, some, torch.device("cpu")).labels_T
            labels = labels_T[labels_T != IGNORED].numpy()
            text_bytes = 0 if per_token is None else int(per_token[labels].sum())
            mine[:, number] += (len(labels), text_bytes)
    # Sums of integers far below 2**53 are exact in float64, whatever the number of ranks.
    rows = ranks.gather_floats(mine.reshape(-1).astype(np.float64).tolist())
    labelled = rows.sum(0).numpy().astype(np.int64).reshape(2, buckets)
    if not labelled[0].sum():
        raise DataError(
            f"None of the {len(documents):,} held-out documents of {store.source_name} has a "
            f"token to predict. Set eval.path to documents of two tokens or more."
        )
    whole = [np.bincount(bucket, each, buckets) for each in (every[:, 1] == 0, lengths_of(every))]
    counts = np.concatenate((np.array(whole).astype(np.int64), labelled))
    return HeldOut(documents, 2**powers, pieces, counts, per_token is not None)


def forward_curve(curve: LoadCurve) -> LoadCurve:
    """The forward's part of a curve: a third of the linear layers, less of attention.

    >>> from equipoise.cost.curve import break_even_curve
    >>> forward_curve(break_even_curve(float("inf"))).ns_per_token * 3
    1000000.0
    """
    share = 1 / (1 + BACKWARD_OVER_FORWARD)
    return dataclasses.replace(
        curve,
        fixed_ns=curve.fixed_ns / 3,
        ns_per_token=curve.ns_per_token / 3,
        doc_ns=tuple(each * share for each in curve.doc_ns),
    )


def pack_held_out(
    buckets: tuple[Pieces, ...], spec: RunSpec, ranks: int, curve: LoadCurve
) -> list[tuple[int, PackedStep]]:
    """Micro-batches of each bucket, in groups that are packed and run one after another.

    Args:
        buckets: Pieces of each bucket.
        spec: The run's keys.
        ranks: Data-parallel ranks.
        curve: Price of a piece's forward.

    Returns:
        The bucket of each group, and the group: equally many micro-batches on each rank, each
        piece once, in all ranks' groups together evenly.
    """
    divides = POLICIES[spec.pack.policy].runs_together
    policy = "divided" if divides else "by-work"
    pack = dataclasses.replace(spec.pack, policy=policy, cut="documents")
    meets = spec.layout.of_ranks(ranks * spec.layout.sharing).meets_each_turn
    group_tokens = _GROUP_WINDOWS * ranks * pack.context_tokens
    groups: list[tuple[int, PackedStep]] = []
    loads = np.zeros(ranks)
    for bucket, pieces in enumerate(buckets):
        edges = np.cumsum(lengths_of(pieces)) // group_tokens
        for group in np.split(pieces, np.flatnonzero(np.diff(edges)) + 1):
            packed = _pack_group(group, pack, ranks, curve, meets=meets)
            taken = np.array(rank_seconds(packed, curve))
            # The rank with the least so far takes the row with the most.
            row_of = np.empty(ranks, dtype=np.int64)
            row_of[np.argsort(loads, kind="stable")] = np.argsort(-taken, kind="stable")
            loads += taken[row_of]
            groups.append(
                (bucket, PackedStep(policy, tuple(packed.ranks[row] for row in row_of.tolist())))
            )
    return groups


def _pack_group(
    pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve, *, meets: bool
) -> PackedStep:
    packer = make_packer(pack, ranks, curve, meets_each_turn=meets, idles=True)
    packed = packer.step(pieces)
    return align_turns(packed) if pack.policy == "divided" else packed
