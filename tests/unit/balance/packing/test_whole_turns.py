"""Whole documents, even turn by turn: what is kept, and how much shorter turns are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.pack import batch_ns, pack_step, rank_seconds, skew, turns_seconds
from equipoise.balance.packing.whole_turns import even_turns, turns_ns
from equipoise.cost.curve import LoadCurve, break_even_curve, counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.model.presets import preset
from equipoise.spec.pack import PackedStep
from equipoise.spec.run.spec import PackSpec
from equipoise.spec.workload import distribution_names, draw_lengths

# Noise of measured points: a longer document may cost less.
NOISY = LoadCurve(10.0, 3.0, (1.0, 40.0, 50.0), (5.0, 900.0, 700.0), 1.0, measured=True)


@st.composite
def jobs(draw) -> tuple[np.ndarray, np.ndarray, int, int, int]:
    sizes = np.array(draw(st.lists(st.integers(1, 90), min_size=1, max_size=40)))
    curve = draw(st.sampled_from((break_even_curve(30), NOISY)))
    ranks, turns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    cap = draw(st.integers(int(sizes.max()), 2 * int(sizes.sum())))
    return curve.document_ns(sizes), sizes, ranks, turns, cap


@settings(deadline=None)
@given(job=jobs())
def test_each_document_has_a_micro_batch_that_is_within_its_cap(job) -> None:
    loads, sizes, ranks, turns, cap = job
    cell_of = even_turns(*job, known=None)
    if cell_of is None:
        return
    assert len(cell_of) == len(sizes)
    assert ((cell_of >= 0) & (cell_of < ranks * turns)).all()
    assert np.bincount(cell_of, sizes).max() <= cap
    assert np.array_equal(cell_of, even_turns(*(np.copy(x) for x in job), known=None))
    known = np.roll(cell_of, 1)  # any answer at all
    best = even_turns(*job, known=known)
    assert turns_ns(best, loads, ranks, turns) <= turns_ns(known, loads, ranks, turns)


def step_of(name: str, ranks: int, turns: int, context: int) -> tuple[np.ndarray, PackSpec]:
    size = ranks * turns * context
    documents = 4096
    while int(np.minimum(draw_lengths(name, documents), context).sum()) < size:
        documents *= 2
    stream = DocumentStream(draw_lengths(name, documents), seed=0, context_tokens=context)
    return stream.step(0, size), PackSpec(context_tokens=context, step_tokens=size)


def turn_skew(packed: PackedStep, curve: LoadCurve) -> float:
    return turns_seconds(packed, curve) * len(packed.ranks) / sum(rank_seconds(packed, curve))


def documents_of(packed: PackedStep) -> list[list[int]]:
    return sorted(row for batch in packed for row in batch.pieces.tolist())


@pytest.mark.parametrize("name", distribution_names())
@pytest.mark.parametrize(("ranks", "turns"), [(2, 4), (8, 4), (16, 2), (4, 8)])
@pytest.mark.parametrize("context", [8192, 131_072])
def test_turns_are_shorter_and_the_step_holds_the_same_documents(
    name: str, ranks: int, turns: int, context: int
) -> None:
    curve = counted_curve(preset("llama3-8b"))
    pieces, pack = step_of(name, ranks, turns, context)
    plain = pack_step(pieces, pack, ranks, curve)
    even = pack_step(pieces, pack, ranks, curve, meets_each_turn=True)
    assert documents_of(even) == documents_of(plain) == sorted(pieces.tolist())
    assert even.micro_batches == plain.micro_batches
    assert max(batch.tokens for batch in even) <= pack.most_tokens
    assert turn_skew(even, curve) <= turn_skew(plain, curve)
    assert skew(rank_seconds(even, curve)) <= turn_skew(even, curve) + 1e-9
    # What stays uneven is the token cap's: no short documents make up for one of a window.
    if context == 8192:
        assert turn_skew(even, curve) <= 1.03
    elif turn_skew(plain, curve) > 1.01:
        assert turn_skew(even, curve) - 1 <= 0.8 * (turn_skew(plain, curve) - 1)


def test_eight_ranks_of_four_micro_batches() -> None:
    curve = counted_curve(preset("llama3-8b"))
    pieces, pack = step_of("pretrain-128k", 8, 4, 131_072)
    plain = pack_step(pieces, pack, 8, curve)
    even = pack_step(pieces, pack, 8, curve, meets_each_turn=True)
    assert skew(rank_seconds(plain, curve)) <= 1.001
    assert turn_skew(plain, curve) >= 1.2
    assert turn_skew(even, curve) <= 1.14


def test_ranks_that_do_not_meet_and_other_policies_pack_as_they_did() -> None:
    curve = break_even_curve(28_000)
    pieces, pack = step_of("wikipedia", 4, 4, 8192)
    plain = pack_step(pieces, pack, 4, curve)
    assert plain.digest == pack_step(pieces, pack, 4, curve, meets_each_turn=False).digest
    assert plain.digest != pack_step(pieces, pack, 4, curve, meets_each_turn=True).digest
    for policy in ("by-tokens", "fixed", "delayed", "bytescale"):
        other = PackSpec(policy=policy, context_tokens=8192, step_tokens=pack.step_tokens)
        digests = {
            pack_step(pieces, other, 4, curve, meets_each_turn=meets).digest
            for meets in (False, True)
        }
        assert len(digests) == 1


def test_a_heavy_document_has_the_next_heaviest_beside_it() -> None:
    pieces = np.array([[n, 0, tokens] for n, tokens in enumerate((90, 10, 10, 80, 5, 5, 10, 10))])
    pack = PackSpec(context_tokens=100, step_tokens=220, max_tokens=100)
    curve = break_even_curve(float("inf"))
    packed = pack_step(pieces, pack, 2, curve, meets_each_turn=True)
    first, *rest = (
        [batch_ns(batch, curve) for batch in turn] for turn in zip(*packed.ranks, strict=True)
    )
    assert first[0] == first[1]
    assert all(turn[0] == turn[1] for turn in rest)
