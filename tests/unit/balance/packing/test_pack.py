"""Packing policies, by Hypothesis: what every pack keeps, and what each policy promises."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.packing.pack import make_packer, pack_step, rank_seconds, skew
from equipoise.balance.packing.whole import best_fit_decreasing, even_tokens
from equipoise.balance.packing.windows import cut_at_windows, fill_windows
from equipoise.balance.partition import partition
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec

MODEL = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=300, head_width=16)
CURVE = counted_curve(MODEL)
WHOLE = ("by-tokens", "by-work")
QUICK = [name for name, traits in POLICIES.items() if not (traits.is_slow or traits.lets_wait)]


@st.composite
def steps(draw) -> tuple[Pieces, PackSpec, int]:
    """A step as the stream cuts it, a window and enough documents for the ranks."""
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=30))
    context = draw(st.integers(2, 256))
    stream = DocumentStream(lengths, seed=draw(st.integers(0, 9)), context_tokens=context)
    pieces = stream.step(draw(st.integers(0, 1000)), draw(st.integers(1, 3000)))
    pack = PackSpec(context_tokens=context, cut=draw(st.sampled_from(("documents", "windows"))))
    return pieces, pack, draw(st.integers(1, min(6, len(pieces))))


def tokens_of(pieces: Pieces) -> list[tuple[int, int]]:
    """Every token, once for each time it is there: pieces of two epochs may hold the same."""
    return sorted((doc, at) for doc, start, stop in pieces.tolist() for at in range(start, stop))


def pieces_of(packed: PackedStep) -> Pieces:
    return np.concatenate([batch.pieces for batch in packed])


def as_set(pieces: Pieces) -> list[tuple[int, ...]]:
    return sorted(map(tuple, pieces.tolist()))


@pytest.mark.parametrize("policy", QUICK)
@given(step=steps())
def test_every_token_is_computed_once_under_the_cap_and_all_ranks_decide_alike(
    policy: str, step
) -> None:
    pieces, pack, ranks = step
    pack = dataclasses.replace(pack, policy=policy)
    packed, again = (pack_step(pieces.copy(), pack, ranks, CURVE) for _ in range(2))
    assert packed.digest == again.digest
    assert tokens_of(pieces_of(packed)) == tokens_of(pieces)
    assert len(packed.ranks) == ranks
    if policy not in ("gangs", "bytescale"):  # whose ranks run as many as they like
        assert {len(rank) for rank in packed.ranks} == {packed.micro_batches}
    assert max(batch.tokens for batch in packed) <= pack.most_tokens


@pytest.mark.parametrize("policy", WHOLE)
@given(step=steps())
def test_whole_pieces_stay_whole(policy: str, step) -> None:
    pieces, pack, ranks = step
    packed = pack_step(pieces, dataclasses.replace(pack, policy=policy), ranks, CURVE)
    given_ = cut_at_windows(pieces, pack.context_tokens) if pack.cut == "windows" else pieces
    assert as_set(pieces_of(packed)) == as_set(given_)


@given(step=steps())
def test_in_order_fills_windows_in_order(step) -> None:
    pieces, pack, ranks = step
    packed = pack_step(pieces, dataclasses.replace(pack, policy="in-order"), ranks, CURVE)
    turns = [packed.ranks[i % ranks][i // ranks] for i in range(ranks * packed.micro_batches)]
    total = int((pieces[:, 2] - pieces[:, 1]).sum())
    full, rest = divmod(total, pack.context_tokens)
    filled = [pack.context_tokens] * full + [rest] * bool(rest)
    assert [batch.tokens for batch in turns] == filled + [0] * (len(turns) - len(filled))
    one_by_one = [
        (doc, at)
        for batch in turns
        for doc, start, stop in batch.pieces.tolist()
        for at in range(start, stop)
    ]
    assert one_by_one == [
        (doc, at) for doc, start, stop in pieces.tolist() for at in range(start, stop)
    ]


@given(step=steps())
def test_cut_at_windows_gives_every_policy_the_pieces_of_in_order(step) -> None:
    pieces, pack, ranks = step
    cut = dataclasses.replace(pack, cut="windows")
    of = {
        policy: as_set(
            pieces_of(pack_step(pieces, dataclasses.replace(cut, policy=policy), ranks, CURVE))
        )
        for policy in ("in-order", *WHOLE)
    }
    assert of["by-work"] == of["by-tokens"] == of["in-order"]


def whole(*lengths: int) -> Pieces:
    return np.array([[index, 0, tokens] for index, tokens in enumerate(lengths)])


def test_by_work_beats_by_tokens_where_one_document_is_long() -> None:
    pieces = whole(2048, *[128] * 128)
    found = {}
    for policy in WHOLE:
        pack = PackSpec(policy=policy, context_tokens=8192)
        found[policy] = skew(rank_seconds(pack_step(pieces, pack, 2, CURVE), CURVE))
    assert found["by-tokens"] > 1.2
    assert found["by-work"] < 1.02


def test_a_step_that_does_not_fit_its_micro_batches_takes_more_of_them() -> None:
    pack = PackSpec(policy="by-tokens", context_tokens=100, max_tokens=100)
    packed = pack_step(whole(60, 60, 60), pack, 1, CURVE)  # 180 tokens, yet no two go together
    assert packed.micro_batches == 3


@pytest.mark.parametrize("policy", WHOLE)
def test_fewer_documents_than_ranks(policy: str) -> None:
    pack = PackSpec(policy=policy, context_tokens=1024)
    with pytest.raises(LayoutError) as caught:
        pack_step(whole(700, 324), pack, 3, CURVE)
    assert str(caught.value) == (
        f"A step of 1,024 tokens holds 2 documents for 3 ranks, and {policy} packs whole "
        "documents. Smallest changes that fit: layout.dp = 2, or a larger pack.step_tokens."
    )


@pytest.mark.parametrize("policy", WHOLE)
def test_in_a_run_ranks_without_a_document_are_idle(policy: str) -> None:
    """As in a step of long documents after a first one of short ones."""
    pack = PackSpec(policy=policy, context_tokens=1024)
    packer = make_packer(pack, 3, CURVE, idles=True)
    for given_, tokens in ((whole(700, 324), [0, 324, 700]), (whole(9, 8, 7, 1), [8, 8, 9])):
        packed = packer.step(given_)
        assert sorted(packed.rank_tokens) == tokens
        assert as_set(pieces_of(packed)) == as_set(given_)
        assert {len(rank) for rank in packed.ranks} == {packed.micro_batches}
    # Whole documents of a mixture may all begin in other steps.
    nothing = np.zeros((0, 3), dtype=np.int64)
    for each in (packer, make_packer(dataclasses.replace(pack, policy="in-order"), 3, CURVE)):
        assert [[batch.tokens for batch in rank] for rank in each.step(nothing).ranks] == [[0]] * 3
    with pytest.raises(LayoutError, match=r"holds 0 documents for 3 .* fit: a larger pack\."):
        pack_step(nothing, pack, 3, CURVE)


def test_a_document_over_the_cap() -> None:
    pack = PackSpec(policy="by-work", context_tokens=8192, max_tokens=4096)
    with pytest.raises(LayoutError) as caught:
        pack_step(whole(8000, 10), pack, 1, CURVE)
    assert str(caught.value) == (
        "A document of 8,000 tokens is over the 4,096 tokens that one micro-batch may hold. "
        "Set pack.max_tokens = 8000, or a smaller pack.context_tokens."
    )


def test_a_micro_batch_without_tokens_costs_its_fixed_time() -> None:
    curve = dataclasses.replace(CURVE, fixed_ns=5e9)
    packed = pack_step(whole(10), PackSpec(policy="in-order", context_tokens=10), 2, curve)
    assert packed.rank_tokens == [10, 0]
    assert rank_seconds(packed, curve)[1] == 5.0


@given(step=steps())
def test_fixed_windows_hold_whole_documents_while_there_is_room(step) -> None:
    pieces, pack, ranks = step
    pack = dataclasses.replace(pack, policy="fixed", cut="documents")
    packed = pack_step(pieces, pack, ranks, CURVE)
    cut = len(pieces_of(packed)) - len(pieces)
    # Each hole that a remainder fills cuts at most once.
    assert 0 <= cut <= ranks * packed.micro_batches


def test_fixed_cuts_what_fits_nowhere_into_the_holes() -> None:
    windows = fill_windows(whole(7, 7, 6), 10, 2, CURVE)
    assert [batch.tolist() for batch in windows] == [[[0, 0, 7], [2, 0, 3]], [[1, 0, 7], [2, 3, 6]]]


def test_best_fit_takes_the_fullest_bin_that_has_room() -> None:
    assert best_fit_decreasing(np.array([6, 5, 4, 3]), 2, 9).tolist() == [0, 1, 1, 0]
    assert best_fit_decreasing(np.array([6, 5, 4, 4]), 2, 9) is None


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30).map(np.array), st.integers(1, 6))
def test_even_tokens_keeps_the_cap_and_is_no_worse_than_longest_first(sizes, bins) -> None:
    cap = int(sizes.sum())
    bin_of = even_tokens(sizes, bins, cap)
    assert bin_of is not None
    found = int(np.bincount(bin_of, sizes, bins).max())
    longest_first = partition(sizes, bins)
    assert longest_first is not None
    assert found <= np.bincount(longest_first, sizes, bins).max()


def test_a_packer_of_one_step_alone_has_no_state_and_nothing_to_flush() -> None:
    packer = make_packer(PackSpec(context_tokens=128), 2, CURVE)
    packer.step(whole(100, 28, 64))
    assert packer.state_dict() == {}
    assert packer.flush() == []
    packer.load_state_dict({})


@given(lengths=st.lists(st.integers(12, 320), min_size=1, max_size=20), ranks=st.integers(3, 6))
def test_ranks_of_a_gang_hold_equally_many_tokens(lengths: list[int], ranks: int) -> None:
    pieces = np.array([(document, 0, tokens) for document, tokens in enumerate(lengths)])
    pack = PackSpec(policy="bytescale", context_tokens=96)
    held: dict[tuple[int, ...], list[int]] = {}
    for batch in pack_step(pieces, pack, ranks, CURVE):
        documents = tuple(sorted(set(batch.pieces[:, 0].tolist())))
        held.setdefault(documents, []).append(batch.tokens)
    for documents, tokens in held.items():
        whole = sum(lengths[document] for document in documents)
        assert max(tokens) == -(-whole // len(tokens))
