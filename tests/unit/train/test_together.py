"""Turns in which all parts of a document run, and the attention of each."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.pack import pack_step
from equipoise.balance.packing.turns import align_turns
from equipoise.base.errors import EquipoiseError, LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import PackSpec
from equipoise.train.together import plan_turn

MODEL = ModelSpec(layers=1, hidden=32, heads=4, kv_heads=2, ffn=32, vocab=99, head_width=8)


def rows_of(batch: MicroBatch) -> set[tuple[int, ...]]:
    begins = batch.begins
    return {
        (*row, begin) for row, begin in zip(batch.pieces.tolist(), begins.tolist(), strict=True)
    }


@settings(max_examples=20, deadline=None)
@given(
    policy=st.sampled_from([name for name, each in POLICIES.items() if each.runs_together]),
    lengths=st.lists(st.integers(1, 300), min_size=6, max_size=30),
    ranks=st.integers(1, 5),
    window=st.sampled_from([64, 128, 256]),
)
def test_turns_of_every_policy(policy, lengths, ranks: int, window: int) -> None:
    index = np.arange(len(lengths), dtype=np.int64)
    pieces = np.stack((index, np.zeros_like(index), np.array(lengths)), axis=1)
    pack = PackSpec(policy=policy, context_tokens=window)
    try:
        packed = pack_step(pieces, pack, ranks, counted_curve(MODEL))
    except EquipoiseError:  # over the cap of a micro-batch
        return
    aligned = align_turns(packed)
    assert len({len(rank) for rank in aligned.ranks}) == 1
    assert align_turns(aligned).digest == aligned.digest
    for rank, batches in enumerate(aligned.ranks):
        filled = [rows_of(batch) for batch in batches if len(batch.pieces)]
        assert filled == [rows_of(b) for b in packed.ranks[rank] if len(b.pieces)]
    turns_of = defaultdict(set)
    for batches in aligned.ranks:
        for turn, batch in enumerate(batches):
            for row in rows_of(batch):
                turns_of[row[0], row[3]].add(turn)
    assert {len(turns) for turns in turns_of.values()} == {1}
    assert len(turns_of) == len(lengths)

    pairs = 0
    for turn in range(aligned.micro_batches):
        plan = plan_turn(aligned, turn, MODEL)
        counts = count_attention(plan.schedule, Wire(MODEL.head_width))
        pairs += int(counts.pairs.sum()) // MODEL.heads
        holders = defaultdict(set)
        for rank, batches in enumerate(aligned.ranks):
            assert len(plan.shares.rows[rank]) == batches[turn].tokens
            for row in rows_of(batches[turn]):
                holders[row[0], row[3]].add(rank)
        meet = np.zeros((ranks, ranks), dtype=bool)
        for together in holders.values():
            meet[np.ix_(list(together), list(together))] = True
        assert not (counts.messages > 0)[~meet].any()
    assert pairs == sum(n * (n + 1) // 2 for n in lengths)


def test_positions_count_from_the_first_token_of_a_cut() -> None:
    late = [[3, 500, 506], [3, 506, 509]]
    first, second = (MicroBatch(np.array([row]), np.array([500])) for row in late)
    other = MicroBatch(np.array([[1, 0, 2]]))
    plan = plan_turn(align_turns(PackedStep("gangs", ((first,), (second,), (other,)))), 0, MODEL)
    assert [p.tolist() for p in plan.shares.positions] == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [0, 1]]


def test_parts_in_two_micro_batches_of_one_rank_are_refused() -> None:
    head = MicroBatch(np.array([[7, 0, 6]]), np.array([0]))
    tail = MicroBatch(np.array([[7, 6, 9]]), np.array([0]))
    with pytest.raises(LayoutError) as caught:
        align_turns(PackedStep("divided-in-time", ((head, tail), ())))
    assert str(caught.value) == (
        "Ranks [0] wait for parts of documents in later micro-batches of each other, 2 of them. "
        "Put all parts of a document into micro-batches that their ranks can run at the same time."
    )


def test_ranks_that_would_wait_in_a_circle_are_refused() -> None:
    def half(document: int, start: int) -> MicroBatch:
        return MicroBatch(np.array([[document, start, start + 2]]), np.array([0]))

    with pytest.raises(LayoutError) as caught:
        align_turns(PackedStep("gangs", ((half(1, 0), half(2, 0)), (half(2, 2), half(1, 2)))))
    assert str(caught.value).startswith("Ranks [0, 1] wait for parts of documents")
